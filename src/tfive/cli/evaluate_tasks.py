"""What `tfive eval tasks` shows; reading declarations needs neither torch nor a model, so it answers at once."""

from __future__ import annotations

import json
from pathlib import Path

from tfive.errors import UserError
from tfive.evaluate.tasks import SUITES, TASKS, Task, load_items, local_file


def tasks_command(data: Path | None, *, as_json: bool) -> str:
    """What `tfive eval tasks` prints: every task with its count and the state of its manifest and file."""
    if data is not None and not data.is_dir():
        raise UserError(f"--data {data}: there is no such folder")
    rows = []
    for name, task in TASKS.items():
        suites = [suite for suite, members in SUITES.items() if name in members]
        rows.append(
            {
                "task": name,
                "title": task.title,
                "kind": task.kind,
                "items": task.count or "",
                "suite": suites[0] if suites else "",
                "manifest": task.state,
                "data": _data_state(task, data),
                "needs": task.needs,
            }
        )
    if as_json:
        return json.dumps(rows, ensure_ascii=False)
    heads = ("task", "kind", "items", "suite", "manifest", "data")
    width = {head: max(len(head), *(len(str(row[head])) for row in rows)) for head in heads}
    lines = ["  ".join(head.ljust(width[head]) for head in heads)]
    lines += ["  ".join(str(row[head]).ljust(width[head]) for head in heads) for row in rows]
    lines += [
        f"{row['task']} needs {row['needs']}"
        for row in rows
        if row["data"] in ("local file only", "no file") and row["needs"]
    ]
    return "\n".join(line.rstrip() for line in lines)


def _data_state(task: Task, data: Path | None) -> str:
    if data is None:
        return "hub" if task.hub is not None else "local file only"
    try:
        local_file(task, data)
    except UserError:
        return "no file"
    try:
        found = load_items(task, data)
        return f"{found.state}, {len(found)} items"
    except UserError as error:
        return f"wrong: {error}"

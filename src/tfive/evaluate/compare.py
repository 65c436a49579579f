"""Evaluations after the fact: two of them compared item by item, or one item with the steps of its verdict."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tfive.errors import UserError
from tfive.evaluate.metrics import mcnemar, paired_bootstrap
from tfive.evaluate.records import GENERATED, OPTIONS, answers_file, read_answers, read_run
from tfive.evaluate.suite import generated_values, option_values
from tfive.evaluate.tasks import LETTERS


def answers_of(folder: Path, task: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Generated answers and compared options of a task; either may be empty."""
    paths = (answers_file(folder, task, kind) for kind in (GENERATED, OPTIONS))
    generated, compared = ([*read_answers(path)] if path.is_file() else [] for path in paths)
    return generated, compared


def _values(folder: Path, task: str) -> dict[str, dict[str, float]]:
    generated, compared = answers_of(folder, task)
    found = {"pass@1": generated_values(generated)["pass@1"]} if generated else {}
    if compared:
        options = option_values(compared)
        found |= {f"log-likelihood {way}": options[way] for way in ("raw", "per_character")}
    return found


def compare_runs(first: Path, second: Path) -> dict[str, Any]:
    """Two runs on the items both have answered: difference with its interval, and McNemar's test.

    McNemar's test needs one verdict per item: where there are several samples it takes whether most are right.
    """
    runs = read_run(first), read_run(second)
    shared = [task for task in runs[0]["tasks"] if task in runs[1]["tasks"]]
    if not shared:
        raise UserError(f"{first} and {second} have no task in common; compare runs of the same tasks")
    found: dict[str, Any] = {"a": str(first), "b": str(second), "differ_in": list(_differences(*runs)), "tasks": {}}
    for task in shared:
        facts = [run["tasks"][task] for run in runs]
        if facts[0]["sha256"] != facts[1]["sha256"]:
            raise UserError(f"{task}: the two runs asked different items; compare runs on the same frozen items")
        values = _values(first, task), _values(second, task)
        measures = {name: _compared(values[0][name], values[1][name]) for name in values[0] if name in values[1]}
        found["tasks"][task] = {name: one for name, one in measures.items() if one["items"]}
    return found


def _compared(a: dict[str, float], b: dict[str, float]) -> dict[str, Any]:
    names = [name for name in a if name in b]
    if not names:
        return {"items": 0}
    left, right = [a[name] for name in names], [b[name] for name in names]
    difference = paired_bootstrap(left, right)
    test = mcnemar([value > 0.5 for value in left], [value > 0.5 for value in right])
    means = {"a": sum(left) / len(left), "b": sum(right) / len(right)}
    interval = {"difference": difference.mean, "low": difference.low, "high": difference.high}
    return {"items": len(names), **means, **interval, **asdict(test)}


def _differences(a: Any, b: Any, key: str = "") -> Iterator[str]:
    """Keys of `run.json`, the model aside, in which two runs differ."""
    if isinstance(a, dict) and isinstance(b, dict):
        for name in {**a, **b}:
            if key or name != "model":
                yield from _differences(a.get(name), b.get(name), f"{key}.{name}" if key else name)
    elif a != b:
        yield key


def comparison_table(found: dict[str, Any]) -> str:
    """A comparison as Markdown."""
    rows = ["| task | measure | items | A | B | A − B (95 %) | only A right | only B right | p |", "|" + "---|" * 9]
    for task, measures in found["tasks"].items():
        for name, one in measures.items():
            spread = f"{100 * one['difference']:+.2f} ({100 * one['low']:+.2f} … {100 * one['high']:+.2f})"
            scores = f"{100 * one['a']:.2f} | {100 * one['b']:.2f} | {spread}"
            rows.append(
                f"| {task} | {name} | {one['items']} | {scores} | {one['only_a']} | {one['only_b']} "
                f"| {one['p_value']:.3g} |"
            )
    notes = [f"asked differently in: {', '.join(found['differ_in'])}"] if found["differ_in"] else []
    return "\n".join([f"A = {found['a']}, B = {found['b']}", *notes, "", *rows])


def find_item(folder: Path, item: str) -> dict[str, Any]:
    """Everything a run holds about one item; `task/id` where several tasks have the id."""
    run, found = read_run(folder), {}
    for task in run["tasks"]:
        names = {item, item.removeprefix(f"{task}/")}
        generated, compared = ([r for r in records if r["id"] in names] for records in answers_of(folder, task))
        if generated or compared:
            found[task] = {"task": task, "generated": generated, "options": compared}
    if not found:
        raise UserError(f"{folder}: no answer to item {item!r}; ids stand in its .jsonl files")
    if len(found) > 1:
        raise UserError(f"item {item!r} is in {', '.join(found)}; write TASK/{item}")
    return next(iter(found.values()))


def explained(found: dict[str, Any]) -> str:
    """One item as readable text: the question, every answer, and the steps of its verdict."""
    records = [*found["generated"], *found["options"]]
    first = records[0]
    lines = [f"{found['task']} {first['id']}", "", first["question"]]
    lines += [f"{letter}. {choice}" for letter, choice in zip(LETTERS, first["choices"])]
    lines += ["", f"gold: {first['gold']}"]
    for record in found["options"]:
        totals = zip(LETTERS, record["log_likelihood"], record["characters"])
        lines.append("log-likelihood (per character):")
        lines += [f"  {letter} {total:10.3f} ({total / max(1, size):.4f})" for letter, total, size in totals]
        taken = ", ".join(f"{way} {letter}" for way, letter in record["taken"].items())
        lines.append(f"  taken: {taken}")
    for record in found["generated"]:
        verdict = "right" if record["correct"] else "wrong" if record["extracted"] is not None else "no answer found"
        ended = f"{record['tokens']} tokens, ended by {record['ended']}"
        thoughts = record["thoughts"] if isinstance(record["thoughts"], list) else []
        count = len(thoughts) or record["thoughts"] or 0
        lines += ["", f"--- sample {record['sample']}: {verdict} ({ended}, {count} thoughts)"]
        lines += [f"  thought before token {one['before'] + 1}: {one['text']!r}" for one in thoughts]
        lines += [record["output"], ""]
        lines += [f"  {step}" for step in record["steps"]]
        if record["equivalent"] is not None:
            lines.append(f"  math-verify: {'equivalent' if record['equivalent'] else 'not equivalent'}")
    return "\n".join(lines)

"""Open reading on prose after hindsight: run folders, ended or not, into JSON, and the page's table.

`prose.py --open FOLDER` calls it: FOLDER holds the run that learned to read, `reader`, and those that went on from it,
`t5` and `anchor-only`; docs/studies/smollm2-study.md has the commands.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tfive.errors import UserError
from tfive.report.runs import read_json
from tfive.training.warmstart_kept import SPENT
from tfive_lab.study_tables import drawn

RESULTS = "smollm2-prose-open.json"
RUNS = {"reader": "after one round and 200 updates of reading", "t5": "T⁵", "anchor-only": "anchors alone"}
GAINS = {"thought_gain": "thought gain", "content_gain": "content gain", "empty_gain": "empty"}
LOSS = "no_thought_loss"
Found = dict[str, Any]


def collected(runs: Path, code: str) -> Found:
    """What the runs measured on development texts, and their warm starts."""
    found: Found = {"model": "SmolLM2-135M-Instruct (Q4_1, de-quantised)", "code": code}
    for name in RUNS:
        if not (runs / name / "metrics.jsonl").is_file():
            raise UserError(f"--open {runs}: no run {name} in it; docs/studies/smollm2-study.md has the commands")
        try:
            found[name] = _run(runs / name)
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{runs / name}: is cut off or no run ({error!r:.80}); run it again") from error
    return found


def _run(folder: Path) -> Found:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
    measured = {int(line["step"]): line for line in lines if "development.content_gain" in line}
    windows = [line for line in lines if "r2.1" in line]
    return {
        "warmstart": {key: one for key, one in read_json(folder / "warmstart.json").items() if key != SPENT},
        "measured": [{"window": window, **_gains(line)} for window, line in measured.items()],
        "r2": [[round(line["r2.1"], 4), round(line["r2.2"], 4)] for line in windows],
        "admitted": sum(bool(line.get("actor_updates.qualified")) for line in windows),
        "actor_thoughts": read_json(folder / "status.json")["account"]["roles"]["actor"]["trajectories"],
    }


def _gains(line: Found) -> Found:
    keys = {name: [f"development.{name}", *(f"development.{name}_interval.{end}" for end in (1, 2))] for name in GAINS}
    loss = round(line[f"development.{LOSS}"], 5)
    return {**{name: [round(line[key], 5) for key in names] for name, names in keys.items()}, LOSS: loss}


def course(found: Found) -> str:
    """Development texts as the model comes, after its starts, and on the way."""
    before = found["reader"]["warmstart"]["before"]
    loss = before[LOSS]
    told = (_signed(before["thought_gain"]), _signed(before["content_gain"]), "–")
    rows: list[Sequence[str]] = [
        ("as it comes", "–", "–", *told, f"{loss:.3f}", f"{loss - before['thought_gain']:.3f}")
    ]
    rows.append(_row(RUNS["reader"], found["reader"], found["reader"]["measured"][0]))
    rows.append(_row("after three rounds and 100 updates more", found["t5"], found["t5"]["measured"][0]))
    for name in ("t5", "anchor-only"):
        rows += [_row(RUNS[name], found[name], one) for one in found[name]["measured"] if one["window"]]
    head = (
        "model",
        "window",
        "thoughts learned in each round",
        *GAINS.values(),
        "loss without",
        "after the own thought",
    )
    return drawn(head, rows)


def _row(title: str, run: Found, one: Found) -> Sequence[str]:
    kept = ", ".join(f"{part['kept']:.0f}" for part in run["warmstart"]["rounds"] if "kept" in part)
    gains = (f"{_signed(one[key][0])} ({_signed(one[key][1])} … {_signed(one[key][2])})" for key in GAINS)
    after = one[LOSS] - one["thought_gain"][0]
    when = (str(one["window"]), "–") if one["window"] else ("–", kept)
    return title, *when, *gains, f"{one[LOSS]:.3f}", f"{after:.3f}"


def _signed(value: float) -> str:
    return f"{value:+.3f}".replace("-", "−")

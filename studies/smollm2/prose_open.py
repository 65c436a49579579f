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
from tfive_lab.study_tables import drawn

RESULTS = "smollm2-prose-open.json"
RUNS = {"reader": "anchors alone, to read", "t5": "T⁵", "anchor-only": "anchors alone"}
SHOWN = {"thought_gain": "thought gain", "content_gain": "content gain", "no_thought_loss": "loss without"}
Found = dict[str, Any]


def collected(runs: Path, code: str) -> Found:
    """What the runs measured on development texts, and their warm starts."""
    found: Found = {"model": "SmolLM2-135M-Instruct (Q4_1, de-quantised)", "code": code}
    for name in RUNS:
        if not (runs / name / "metrics.jsonl").is_file():
            raise UserError(f"--open {runs}: no run {name} in it; docs/studies/smollm2-study.md has the commands")
        lines = [json.loads(line) for line in (runs / name / "metrics.jsonl").read_text("utf-8").splitlines()]
        measured = {int(line["step"]): line for line in lines if "development.content_gain" in line}
        critics = [[line["r2.1"], line["r2.2"]] for line in lines if "r2.1" in line]
        found[name] = {
            "warmstart": read_json(runs / name / "warmstart.json"),
            "measured": [{"window": window, **_gains(line)} for window, line in measured.items()],
            "r2": [[round(value, 4) for value in pair] for pair in critics],
            "actor_thoughts": read_json(runs / name / "status.json")["account"]["roles"]["actor"]["trajectories"],
        }
    return found


def _gains(line: Found) -> Found:
    keys = {name: [f"development.{name}", *(f"development.{name}_interval.{end}" for end in (1, 2))] for name in SHOWN}
    return {name: [round(line[key], 5) for key in names] for name, names in keys.items()}


def course(found: Found) -> str:
    """Development texts as the model comes, after its start, and on the way."""
    rows: list[Sequence[str]] = []
    before = found["reader"]["warmstart"]["before"]
    rows.append(("as it comes", "–", "–", *(_signed(before[name], name) for name in SHOWN)))
    for name, title in RUNS.items():
        run = found[name]
        kept = [f"{one['kept']:.0f}" for one in run["warmstart"]["rounds"] if "kept" in one]
        for one in run["measured"] if name != "reader" else run["measured"][:1]:
            told = title if one["window"] else f"{title}: the start"
            gains = (_signed(one[key][0], key) + _ends(one[key], key) for key in SHOWN)
            rows.append((told, str(one["window"]), "–" if one["window"] else ", ".join(kept), *gains))
    return drawn(("model", "window", "thoughts learned in each round", *SHOWN.values()), rows)


def _signed(value: float, name: str) -> str:
    return f"{value:.3f}" if name == "no_thought_loss" else f"{value:+.3f}".replace("-", "−")


def _ends(value: Sequence[float], name: str) -> str:
    return "" if name == "no_thought_loss" else f" ({_signed(value[1], name)} … {_signed(value[2], name)})"

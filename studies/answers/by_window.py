"""What runs did window by window, ended or not, as one small JSON: settings, gains, measurements, what critics foresee
by the step of a thought, and seconds by phase.

    python studies/answers/by_window.py runs/answers-study --code COMMIT --out results/answers-credit.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import tomllib
from pathlib import Path
from typing import Any

from collect import ACCURACY, MACHINE, benchmarks, cell_of

from tfive.cli.options import script
from tfive.errors import UserError
from tfive.training.status_files import COSTS
from tfive_lab.study_files import write_json

STEPS = ((1, 10), (11, 30), (31, 50), (51, 70), (71, 100), (101, 128))
"""Tokens of a thought whose scores are taken together."""
PILOT = "pilot_deviation"
"""What T⁵ divides a window's advantages by."""
SETTLED = 2
"""First windows that are left out of the seconds of a window: critics are fitted longer, and graphs captured."""


def foreseen(lines: list[dict[str, Any]]) -> dict[str, float]:
    """Median R² of both critics over windows and steps, by range of steps."""
    found = {}
    for first, last in STEPS:
        keys = [f"r2_per_step.{critic}.{step}" for critic in (1, 2) for step in range(first, last + 1)]
        scores = [line[key] for line in lines for key in keys if line.get(key) is not None]
        if scores:
            found[f"{first}-{last}"] = round(statistics.median(scores), 3)
    return found


def seconds_of_a_window(path: Path) -> dict[str, float]:
    """Mean seconds by phase of the windows after the first ones, phases inside others left out."""
    costs = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    if len(costs) <= SETTLED + 1:
        return {}
    first, last = costs[SETTLED], costs[-1]
    count = last["window"] - first["window"]
    spent = {phase: (end - first["seconds"].get(phase, 0.0)) / count for phase, end in last["seconds"].items()}
    return {phase: round(taken, 2) for phase, taken in spent.items() if "/" not in phase and taken >= 0.005}


def course(folder: Path) -> dict[str, Any]:
    """One run."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
    config = tomllib.loads((folder / "config.toml").read_text("utf-8"))
    kept = folder.with_name(f"cell-{folder.name}.json")  # of one that has ended, what it was measured by may be gone
    told = json.loads(kept.read_text("utf-8")) if kept.is_file() else cell_of(folder)
    return {
        **{name: value for name, value in told.items() if name != "by_text"},
        "gae.alpha": config["gae"]["alpha"],
        "texts_per_pass": config["run"]["texts_per_pass"],
        "r2_by_step": foreseen(lines),
        "pilot_deviations": [round(line[PILOT], 3) for line in lines if line.get(PILOT) is not None],
        "seconds_of_a_window": seconds_of_a_window(folder / COSTS),
    }


def answers(runs: Path) -> dict[str, Any]:
    """Right answers of the models that the runs began with: means and intervals, without single verdicts."""
    told = {path.stem: json.loads(path.read_text("utf-8")) for path in sorted(runs.glob("accuracy-*.json"))}
    told |= {f"{name} {model}": one for name, models in benchmarks(runs).items() for model, one in models.items()}
    return {name: {key: row["accuracy"] for key, row in one["results"].items()} for name, one in told.items()}


def main(given: list[str] | None = None) -> int:
    """Read all run folders below one and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--code", required=True, help="the commit that ran")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args(given)
    folders = sorted(path.parent for path in asked.runs.glob("*/metrics.jsonl"))
    if not folders:
        raise UserError(f"{asked.runs}: no run in it (no */metrics.jsonl)")
    if not (asked.runs / MACHINE).is_file():
        raise UserError(f"{asked.runs}: no {MACHINE}, which run.py cell writes; give the folder of its --runs")
    machine = json.loads((asked.runs / MACHINE).read_text("utf-8"))
    found = [course(folder) for folder in folders]
    for one in found:
        one.pop(ACCURACY.removesuffix(".json"), None)
    write_json(asked.out, {"code": asked.code, "machine": machine, "starts": answers(asked.runs), "runs": found})
    return 0


if __name__ == "__main__":
    script(main)

"""`tfive train nano` over several seeds: `python studies/nano/seeds.py --seeds 5 --out results/nano-seeds.json`.

Runs one seed after another in `--runs` (finished ones are kept), then writes every summary and prints the table of
docs/studies/nano.md. All seeds are listed, none is selected. `--set KEY=VALUE` changes a setting of all.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tfive.report.runs import read_json
from tfive_lab.study_files import write_json

SHOWN = (
    ("thought gain, start", "test_thought_gain_start", None),
    ("end", "test_thought_gain_end", None),
    ("content gain", "test_content_gain_end", "test_content_gain_interval"),
    ("vs base", "test_gain_vs_base_end", None),
    ("empty", "test_empty_gain_end", None),
    ("random", "test_random_gain_end", None),
    ("no-thought loss, start", "test_no_thought_loss_start", None),
    ("end", "test_no_thought_loss_end", None),
    ("mixed gain", "test_mixed_gain_end", "test_mixed_gain_interval"),
    ("constant gate", "test_mixed_gain_constant", None),
    ("gate mean", "test_mean_gate", None),
    ("gate sd", "test_gate_deviation", None),
    ("length", "test_mean_thought_length", None),
    ("seconds", "seconds", None),
)
"""Columns, all of test texts: title, the key in a run's summary, and the key of its interval where it has one."""


def run(seed: int, folder: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The summary of one seed, which is trained first unless its folder holds one."""
    done = folder / "summary.json"
    if not done.exists():
        sets = (word for one in (f"run.seed={seed}", *overrides) for word in ("--set", one))
        subprocess.run([sys.executable, "-m", "tfive", "train", "nano", *sets, "--out", str(folder)], check=True)
    return read_json(done)


def row(summary: dict[str, Any]) -> str:
    """One seed's line of the table."""
    cells = [str(summary["seed"])]
    for _, key, interval in SHOWN:
        value = summary[key]
        cell = f"{value:+.3f}" if isinstance(value, float) and key != "seconds" else f"{value}"
        if interval is not None:
            low, high = summary[interval]
            cell += f" ({low:+.3f} … {high:+.3f})"
        cells.append(cell)
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Train the seeds, write the results file, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--runs", type=Path, default=Path("runs/nano-seeds"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    arguments = parser.parse_args()
    seeds, overrides = range(arguments.seeds), arguments.overrides
    summaries = [run(seed, arguments.runs / f"s{seed}", overrides) for seed in seeds]
    command = " ".join(["python studies/nano/seeds.py", *(f"--set {one}" for one in overrides)])
    content = {"command": command, "cores": os.cpu_count(), "seeds": summaries}
    write_json(arguments.out, content)
    print("| seed | " + " | ".join(title for title, _, _ in SHOWN) + " |")
    print("|---" * (len(SHOWN) + 1) + "|")
    for summary in summaries:
        print(row(summary))


if __name__ == "__main__":
    main()

"""All methods on SmolLM2-135M-Instruct (Q4_1, de-quantised) and real text, in cells that can run on several machines.

    python studies/smollm2/study.py list search           # cells that have no result yet
    python studies/smollm2/study.py all search            # run them, one after another, on a device of their own
    python studies/smollm2/study.py cell t5 0             # one run with its benchmarks; prints JSON
    python studies/smollm2/study.py table                 # results/smollm2-study.json and its page in docs/studies

A cell's folder under `--runs` holds all that `table` reads, and no weights: copy the folders of several machines
together before tabulating. README.md beside this file lists the studies and the commands in order.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from page import blocks_of
from plan import STUDIES, WRITTEN
from results import results_of
from run_cells import run_all, run_cell, to_do

from tfive.cli.options import script
from tfive.errors import UserError
from tfive.report.blocks import markdown
from tfive.report.runs import read_json
from tfive_lab.study_files import write_json

ROOT = Path(__file__).resolve().parents[2]


def arguments(given: list[str] | None) -> argparse.Namespace:
    """What was typed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("cell", help="run one cell and its benchmarks; prints JSON")
    one.add_argument("label", help="a method, with +preset or +key=value behind it")
    one.add_argument("seed", type=int)
    one.add_argument("--study", choices=STUDIES, default="main")
    one.add_argument("--shared", action="store_true", help="others compute on the device: seconds say little")
    some = commands.add_parser("list", help="cells that have no result yet")
    every = commands.add_parser("all", help="run them one after another, in one process")
    for command in (some, every):
        command.add_argument("study", choices=STUDIES)
        command.add_argument("--seeds", type=int, default=3)
    for command in (one, every):
        command.add_argument("--no-scores", action="store_false", dest="scores", help="no benchmarks")
        command.add_argument("--written", action="store_true", help=f"written answers too: {', '.join(WRITTEN)}")
        command.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    last = commands.add_parser("table", help="tabulate all cells and draw the page")
    last.add_argument("--render", action="store_true", help="only draw the page from the results")
    last.add_argument("--out", type=Path, default=ROOT / "results" / "smollm2-study.json")
    last.add_argument("--page", type=Path, default=ROOT / "docs" / "studies" / "smollm2-results.md")
    for command in (one, some, every, last):
        command.add_argument("--runs", type=Path, default=Path("runs/smollm2-study"))
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> int:
    """One cell, the list of those to do, or the table of those done."""
    asked = arguments(given)
    if asked.command == "list":
        for label, seed in to_do(asked.study, asked.seeds, asked.runs):
            print(label, seed)
        return 0
    if asked.command == "table":
        return tabulate(asked)
    if asked.command == "all":
        return run_all(asked)
    result = run_cell(asked)
    print(json.dumps(result, ensure_ascii=False))
    return 1 if "failure" in result else 0


def tabulate(asked: argparse.Namespace) -> int:
    """Write the results file (unless it is only rendered) and draw the page from it."""
    if not asked.render and not asked.runs.is_dir():
        raise UserError(f"--runs {asked.runs}: there is no such folder; name the one the cells were written to")
    found = read_json(asked.out) if asked.render else results_of(asked.runs)
    if not asked.render:
        write_json(asked.out, found)
    folder = asked.page.parent / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    asked.page.write_text(markdown("SmolLM2 study: results", blocks_of(found, folder)), "utf-8")
    print(asked.page)
    return 0


if __name__ == "__main__":
    script(main)

"""The study of thoughts before answers: headroom, cells, and the tables of docs/studies/answers.md.

    python studies/answers/run.py headroom warm           # what thoughts are worth before training
    python studies/answers/run.py cell t5 --seed 1        # one run; --set KEY=VALUE changes a setting
    python studies/answers/run.py cell t5 anchor-only rlp+window.items=192 --seed 1 --seed 2 --problems test
    python studies/answers/run.py table                   # results/answers-study.json and the page's tables

README.md beside this file has all commands in order.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from cells import PRESET, Cell, Measuring, run_cells, run_one
from collect import MACHINE, collect
from headroom import measure
from tables import draw

from tfive.cli.options import script
from tfive.config.config import Config
from tfive.errors import UserError
from tfive_lab.study_files import software_versions, write_json

ROOT = Path(__file__).resolve().parents[2]


def arguments(given: list[str] | None) -> argparse.Namespace:
    """What was typed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="command", required=True)
    before = commands.add_parser("headroom", help="what thoughts are worth before training")
    before.add_argument("name", help="what the model is called in the results: base or warm")
    before.add_argument("--model", help="another model than the preset's")
    before.add_argument("--items", type=int, default=512)
    one = commands.add_parser("cell", help="train methods, several side by side, and measure their accuracy")
    one.add_argument("cells", nargs="+", metavar="METHOD[+KEY=VALUE…]")
    one.add_argument("--seed", type=int, action="append", default=[], help="may be repeated; 0 unless given")
    one.add_argument("--jobs", type=int, default=4, help="most runs at once on the device")
    one.add_argument("--problems", choices=("none", "development", "test"), default="none", help="whose accuracy")
    one.add_argument("--benchmark", default="", help="a benchmark's questions as well, say gsm8k.jsonl.gz")
    one.add_argument("--limit", type=int, default=0, help="only the first answers; 0: all")
    one.add_argument("--samples", type=int, default=1, help="sampled thoughts an answer")
    one.add_argument("--alone", action="store_true", help="leave the result to the command that started this one")
    one.add_argument("--models", action="store_true", help="keep the trained models as folders")
    for command in (before, one):
        command.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    last = commands.add_parser("table", help="tabulate all runs and fill the page's tables")
    last.add_argument("--render", action="store_true", help="only fill the tables from the results")
    last.add_argument("--out", type=Path, default=ROOT / "results" / "answers-study.json")
    last.add_argument("--page", type=Path, default=ROOT / "docs" / "studies" / "answers.md")
    for command in (before, one, last):
        command.add_argument("--runs", type=Path, default=Path("runs/answers-study"))
    return parser.parse_args(given)


def note_machine(runs: Path) -> None:
    """Keep what the numbers of this folder were computed with."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    write_json(runs / MACHINE, {"device": device, "versions": software_versions()})


def headroom(asked: argparse.Namespace) -> None:
    """Measure one model and keep its items."""
    overrides = [*([f"model.name={asked.model}"] if asked.model else []), *asked.overrides]
    items = measure(Config.load(str(PRESET), overrides=overrides), asked.items)
    note_machine(asked.runs)
    (asked.runs / f"headroom-{asked.name}.json").write_text(json.dumps(items) + "\n", "utf-8")


def cell(asked: argparse.Namespace) -> None:
    """Train every cell that has no result yet, side by side, and measure what was asked for."""
    if asked.jobs < 1 or asked.limit < 0 or asked.samples < 1:
        raise UserError(f"--jobs {asked.jobs} --limit {asked.limit} --samples {asked.samples}: give 1, 0 and 1 or more")
    cells = [Cell(label, seed, tuple(asked.overrides)) for seed in asked.seed or [0] for label in asked.cells]
    for one in cells:
        one.config()  # a mistake in one of them is told before any begins
    measuring = Measuring(asked.problems, asked.limit, asked.samples, asked.models, asked.benchmark)
    if asked.alone:
        for one in cells:
            run_one(one, asked.runs, measuring)
        return
    note_machine(asked.runs)
    run_cells(cells, asked.runs, asked.jobs, measuring)


def table(asked: argparse.Namespace) -> None:
    """The results as JSON, unless they are there, and the page's tables from them."""
    if not asked.render:
        write_json(asked.out, collect(asked.runs))
    found = json.loads(asked.out.read_text("utf-8"))
    asked.page.write_text(draw(asked.page.read_text("utf-8"), found), "utf-8")


def main(given: list[str] | None = None) -> int:
    """One measurement, one run, or the tables."""
    asked = arguments(given)
    {"headroom": headroom, "cell": cell, "table": table}[asked.command](asked)
    return 0


if __name__ == "__main__":
    script(main)

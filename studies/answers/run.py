"""The study of thoughts before answers: headroom, cells, and the tables of docs/studies/answers.md and what is older.

    python studies/answers/run.py headroom warm           # what thoughts are worth before training
    python studies/answers/run.py cell t5 --seed 1        # one run; --set KEY=VALUE changes a setting
    python studies/answers/run.py cell t5 anchor-only rlp+window.items=192 --seed 1 --seed 2 --problems test
    python studies/answers/run.py rate                    # which rate the cells of seed 0 speak for
    python studies/answers/run.py table                   # results/answers-study.json and the pages' tables

README.md beside this file has all commands in order.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path

import torch
from cells import PRESET, Cell, Measuring, run_cells, run_one
from collect import MACHINE, collect, merged
from headroom import measure
from questions import BENCHMARKS, benchmark_rows, different
from seed_tables import begun_careful, best_rate
from tables import draw

from tfive.cli.options import script
from tfive.config.config import Config
from tfive.errors import UserError
from tfive_lab.study_files import software_versions, write_json

ROOT = Path(__file__).resolve().parents[2]
PAGES = tuple(ROOT / name for name in ("docs/studies/answers.md", "docs/studies/answers-earlier.md", "README.md"))
"""What holds the tables: how things stand, the runs that led there, and what a visitor sees first."""
MANY_WINDOWS = 1000
"""The plan of a cell that the clock ends."""


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
    one.add_argument("--together", choices=("all", "seeds"), default="all",
                     help="seeds: those of one method side by side, the next method when all have ended")  # fmt: skip
    one.add_argument("--seconds", type=float, help="every cell ends with the window that reaches them (run.seconds)")
    one.add_argument("--code", default="", help="the commit that runs, where this is no repository")
    one.add_argument("--jobs", type=int, default=4, help="most runs at once on the device")
    one.add_argument("--problems", choices=("none", "development", "test"), default="none", help="whose accuracy")
    one.add_argument("--benchmark", action="append", default=[], help=f"as well: {BENCHMARKS}")
    one.add_argument("--limit", type=int, default=0, help="only the first answers; 0: all")
    one.add_argument("--samples", type=int, default=1, help="sampled thoughts an answer")
    one.add_argument("--alone", action="store_true", help="leave the result to the command that started this one")
    one.add_argument("--share", type=float, default=1.0, help="of the device's memory, the most that a cell may have")
    one.add_argument("--models", action="store_true", help="keep the trained models as folders")
    one.add_argument("--archive", type=Path, help="a .tgz of all small files of --runs, made anew every minute")
    for command in (before, one):
        command.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    rate = commands.add_parser("rate", help="print the rate with the largest content gain in the search, seed 0")
    rate.add_argument("--method", action="append", default=[], help="of these methods alone; may be repeated")
    last = commands.add_parser("table", help="tabulate all runs and fill the pages' tables")
    last.add_argument("--render", action="store_true", help="only fill the tables from the results")
    last.add_argument("--add", action="store_true", help="beside the results that --out already holds")
    last.add_argument("--out", type=Path, default=ROOT / "results" / "answers-study.json")
    last.add_argument("--page", type=Path, action="append", help="fill this one instead; may be repeated")
    for command in (before, one, rate, last):
        command.add_argument("--runs", type=Path, default=Path("runs/answers-study"))
    return parser.parse_args(given)


def commit() -> str:
    """The commit of this folder, `+` behind it where files have changed since; nothing where it is no repository."""
    asked = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--exclude=*"]
    found = subprocess.run(asked, capture_output=True, text=True, check=False)
    return found.stdout.strip() if found.returncode == 0 else ""


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
    if not 0 < asked.share <= 1:
        raise UserError(f"--share {asked.share:g}: give a part of the device's memory, above 0 and at most 1")
    timed = [] if asked.seconds is None else [f"window.windows={MANY_WINDOWS}", f"run.seconds={asked.seconds:g}"]
    overrides, seeds = (*timed, *asked.overrides), asked.seed or [0]
    if asked.together == "seeds":
        batches = [[Cell(label, seed, overrides) for seed in seeds] for label in asked.cells]
    else:
        batches = [[Cell(label, seed, overrides) for seed in seeds for label in asked.cells]]
    cells = [one for batch in batches for one in batch]
    for one in cells:
        one.config()  # a mistake in one of them is told before any begins
    if asked.benchmark and asked.problems == "none":
        raise UserError("--benchmark: asked after the problems alone; give --problems test or development, too")
    for path in different([Path(path) for path in asked.benchmark]).values():
        benchmark_rows(path)
    if asked.archive is not None and not asked.archive.absolute().parent.is_dir():
        raise UserError(f"--archive {asked.archive}: there is no folder {asked.archive.parent}; make it first")
    code = asked.code or commit()
    measuring = Measuring(asked.problems, asked.limit, asked.samples, asked.models, tuple(asked.benchmark), code)
    if asked.alone:
        if torch.cuda.is_available():
            torch.cuda.set_per_process_memory_fraction(asked.share)
        for one in cells:
            run_one(one, asked.runs, measuring)
        return
    note_machine(asked.runs)
    run_cells(batches, asked.runs, asked.jobs, measuring, asked.archive and asked.archive.absolute())


def rate(asked: argparse.Namespace) -> None:
    """The rate that the search found, for the command that comes next; no eye between the two."""
    searched = begun_careful(collect(asked.runs), search=True)
    cells = [one for one in searched if not asked.method or one["method"] in asked.method]
    if not cells:
        raise UserError(f"{asked.runs}: no cell of seed 0 from models/careful; run the search first")
    print(f"{best_rate(cells):g}")


def table(asked: argparse.Namespace) -> None:
    """The results as JSON, unless they are there, and the pages' tables from them."""
    if not asked.render:
        now = collect(asked.runs)
        write_json(asked.out, merged(json.loads(asked.out.read_text("utf-8")), now) if asked.add else now)
    found = json.loads(asked.out.read_text("utf-8"))
    for page in asked.page or PAGES:
        page.write_text(draw(page.read_text("utf-8"), found), "utf-8")


def main(given: list[str] | None = None) -> int:
    """One measurement, one run, or the tables."""
    asked = arguments(given)
    {"headroom": headroom, "cell": cell, "rate": rate, "table": table}[asked.command](asked)
    return 0


if __name__ == "__main__":
    script(main)

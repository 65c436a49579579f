"""The study of thoughts before answers: headroom, cells, and the tables of docs/studies/answers.md.

    python studies/answers/run.py headroom warm           # what thoughts are worth before training
    python studies/answers/run.py cell t5                 # one run; --set KEY=VALUE changes a setting
    python studies/answers/run.py table                   # results/answers-study.json and the page's tables

README.md beside this file has all commands in order.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from pathlib import Path

import torch
from collect import FAILURE, MACHINE, collect
from headroom import measure
from tables import draw

from tfive.cli.options import script
from tfive.config.config import Config
from tfive.errors import RunFailed
from tfive.training.start import train
from tfive_lab.study_files import software_versions, write_json

ROOT = Path(__file__).resolve().parents[2]
PRESET = Path(__file__).with_name("answers.toml")


def arguments(given: list[str] | None) -> argparse.Namespace:
    """What was typed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="command", required=True)
    before = commands.add_parser("headroom", help="what thoughts are worth before training")
    before.add_argument("name", help="what the model is called in the results: base or warm")
    before.add_argument("--model", help="another model than the preset's")
    before.add_argument("--items", type=int, default=512)
    one = commands.add_parser("cell", help="train one method")
    one.add_argument("method")
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


def folder_name(label: str) -> str:
    """A label as the name of a folder; a long one is cut and told apart by its digest."""
    name = re.sub(r"[^A-Za-z0-9._=-]", "_", label)
    return name if len(name) <= 120 else f"{name[:100]}-{hashlib.sha256(label.encode()).hexdigest()[:8]}"


def cell(asked: argparse.Namespace) -> None:
    """Train one method in a folder named after it and its settings; why it failed is kept too."""
    name = folder_name("+".join([asked.method, *asked.overrides]))
    config = Config.load(str(PRESET), overrides=[f"method={asked.method}", *asked.overrides])
    note_machine(asked.runs)
    try:
        train(config, asked.runs / name)
    except RunFailed as error:
        (asked.runs / name / FAILURE).write_text(f"{error}\n", "utf-8")
        raise


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

"""Starts from hindsight alone, and runs from them: their files into JSON, and the page's tables.

    python studies/answers/from_hindsight.py --runs runs/answers-study --start wide=own.json --start bare=bare.json
    python studies/answers/from_hindsight.py      # only the tables, from results/answers-hindsight.json

A start is what `start.py` printed last. Runs of one seed belong together and take the place of those of that seed; its
starts stay where none is given. The page, which has all commands, is docs/studies/answers-hindsight.md.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

from answer_tables import GSM8K
from collect import collect
from hindsight_tables import (
    AGAIN,
    BARE,
    BRIEF,
    COLD,
    FIRST,
    FORMS,
    LARGE,
    LARGE_COLD,
    LARGER,
    LOTS,
    NAMES,
    SECOND,
    START,
    TABLES,
    Found,
)

from tfive.cli.options import script
from tfive.errors import UserError
from tfive_lab.study_files import write_json
from tfive_lab.study_tables import filled

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "studies" / "answers-hindsight.md"
README = ROOT / "README.md"
RESULTS = ROOT / "results" / "answers-hindsight.json"
NEEDED = {
    FIRST: (("noted", "own"), (START,), [f"{method} from {START}" for method in NAMES] + [f"t5 from {COLD}"]),
    SECOND: (
        ("wide", "bare", "lots"),
        (START, BARE, LOTS, COLD),
        [f"{method} from {start}" for start in (START, BARE) for method in ("t5", "anchor-only")],
    ),
    **{seed: (("bare",), (BARE,), [f"{method} from {BARE}" for method in ("t5", "quiet-star-grpo")]) for seed in AGAIN},
    LARGER: (("larger",), (LARGE, LARGE_COLD), [f"{method} from {LARGE}" for method in ("t5", "anchor-only")]),
}
"""Of each seed the starts, the models that were asked by themselves, and the runs that the tables show."""
EXAMPLES = 6
"""Learned thoughts of each round that the results keep."""


def collected(runs: Path, starts: Mapping[str, Path]) -> Found:
    """What the runs and starts say, as plain data under the seed of the runs."""
    found = collect(runs)
    seeds = {str(cell["settings"]["run.seed"]) for cell in found["cells"]}
    if len(seeds) != 1:
        raise UserError(f"{runs}: runs of {len(seeds)} seeds; give a folder with runs of one")
    kept = {name: found[name] for name in ("machine", "accuracy", "benchmarks", "clusters", "cells")}
    told = [
        one for one in (*kept["accuracy"].values(), *(cell["accuracy"] for cell in kept["cells"])) if "missing" in one
    ]
    if told:
        kept["missing"] = told[0]["missing"]  # the same questions all, whose order is that of `clusters`
    for one in told:
        if one.pop("missing") != kept["missing"]:
            raise UserError(f"{runs}: models were asked different questions; collect them apart")
    kept["starts"] = {name: _start(path) for name, path in starts.items()}
    return {seeds.pop(): kept}


def _start(path: Path) -> Found:
    try:
        told = json.loads(path.read_text("utf-8"))
        rounds = [{**one, "learned": one["learned"][:EXAMPLES]} for one in told["rounds"]]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: is not what start.py prints last ({error}); make the start again") from error
    return {**told, "rounds": rounds}


def require(found: Found, out: Path) -> None:
    """Refuse results in which a table would find nothing."""
    for seed, (forms, asked, cells) in NEEDED.items():
        some = found.get(seed, {})
        have = {
            "start": set(some.get("starts", {})),
            "model": set(some.get("accuracy", {})) & set(some.get("benchmarks", {}).get(GSM8K, {})),
            "run": {f"{cell['method']} from {cell['start']}" for cell in some.get("cells", ())},
        }
        for what, names in zip(have, (forms, asked, cells), strict=True):
            if lacking := [name for name in names if name not in have[what]]:
                raise UserError(f"{out}: seed {seed} has no {what} {lacking[0]}; nothing was written")


def main(given: list[str] | None = None) -> int:
    """Collect where runs are given, and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=Path, help="the folder with the runs' results")
    parser.add_argument("--start", action="append", default=[], metavar="NAME=FILE", help=", ".join(FORMS))
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    asked = parser.parse_args(given)
    found = json.loads(asked.out.read_text("utf-8")) if asked.out.is_file() else {}
    if asked.start and asked.runs is None:
        raise UserError("--start: needs --runs, the folder of the runs that began there")
    if asked.runs is not None:
        named = dict(one.partition("=")[::2] for one in asked.start)
        for name, file in named.items():
            if name not in FORMS or not Path(file).is_file():
                raise UserError(f"--start {name}={file}: give one of {', '.join(FORMS)}, and a file that is there")
        ((seed, now),) = collected(asked.runs, {name: Path(file) for name, file in named.items()}).items()
        now["starts"] = {**found.get(seed, {}).get("starts", {}), **now["starts"]}
        found[seed] = now
    require(found, asked.out)
    page = filled(asked.page.read_text("utf-8"), TABLES, found)
    if asked.runs is not None:
        write_json(asked.out, found)
    asked.page.write_text(page, "utf-8")
    if asked.page == PAGE:
        README.write_text(filled(README.read_text("utf-8"), BRIEF, found), "utf-8")
    return 0


if __name__ == "__main__":
    script(main)

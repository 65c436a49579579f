"""The start from hindsight alone, and runs from it: their files into JSON, and the page's tables.

    python studies/answers/from_hindsight.py --runs runs/answers-study --start noted=noted.json --start own=own.json
    python studies/answers/from_hindsight.py      # only the tables, from results/answers-hindsight.json

A start is what `start.py` printed last. The page, which has all commands, is docs/studies/answers-hindsight.md.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from answer_tables import GSM8K
from collect import collect
from forms import percent, points, signed, with_interval

from tfive.cli.options import script
from tfive.errors import UserError
from tfive.rl.clusters import clustered_mean
from tfive_lab.study_files import write_json
from tfive_lab.study_tables import drawn, filled

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "studies" / "answers-hindsight.md"
RESULTS = ROOT / "results" / "answers-hindsight.json"
START, COLD = "own-128", "qwen2.5-coder-0.5b"
"""What runs began with: the model after hindsight, and as it comes."""
NAMES = {"anchor-only": "anchors alone", "t5": "T⁵", "quiet-star-grpo": "GRPO"}
FORMS = {"noted": "half of the thoughts drawn with a note of what follows", "own": "all drawn as always"}
EXAMPLES = 6
"""Learned thoughts of each round that the results keep."""
Found = dict[str, Any]


def collected(runs: Path, starts: Mapping[str, Path]) -> Found:
    """What the runs and starts say, as plain data."""
    found = collect(runs)
    kept = {name: found[name] for name in ("machine", "accuracy", "benchmarks", "clusters", "cells")}
    return {**kept, "starts": {name: _start(json.loads(path.read_text("utf-8"))) for name, path in starts.items()}}


def _start(told: Found) -> Found:
    rounds = [{**one, "learned": one["learned"][:EXAMPLES]} for one in told["rounds"]]
    return {**told, "rounds": rounds}


def starts(found: Found) -> str:
    """What each form of hindsight came to on development texts."""
    head = ("drawn", "measured", "thought gain", "content gain", "loss without", "tokens of a thought", "learned of")
    told, rows = found["starts"], []
    for place, one in enumerate(told.values()):
        for when in ("before", "after")[place > 0 :]:
            shown = one[when]
            counts = ", ".join(f"{each['kept']:.0f} of {each['thoughts']:,.0f}" for each in one["rounds"])
            named = ("–", "as it comes", "–") if when == "before" else (FORMS[list(told)[place]], "after", counts)
            gains = (signed(shown["thought_gain"]), signed(shown["content_gain"]))
            numbers = (f"{shown['no_thought_loss']:.3f}", f"{shown['mean_thought_length']:.0f}")
            rows.append((named[0], named[1], *gains, *numbers, named[2]))
    return drawn(head, rows)


def answers(found: Found) -> str:
    """Right answers in per cent, and what each model has won over the start, answer by answer."""
    head = ("model", "updates", "actor thoughts", "content gain", "asked", "no thought", "empty", "random tokens",
            "another's", "own, sampled", "own, greedy", "minus the start's, greedy")  # fmt: skip
    rows = []
    begun = {"fresh problems": found["accuracy"][START], "GSM8K's test": found["benchmarks"][GSM8K][START]}
    cold = found["benchmarks"][GSM8K].get(COLD)
    if cold is not None:
        less = _apart(cold, begun["GSM8K's test"], found)
        rows.append(("as it comes", "–", "–", "–", "GSM8K's test", *_shares(cold), less))
    for asked, model in begun.items():
        rows.append(("the start", "–", "–", "–", asked, *_shares(model), "–"))
    for cell in ordered(found):
        last = cell["measured"][-1]
        told = (f"{last['steps']}", f"{last['actor_thoughts']:,}", with_interval(cell["test"]["content_gain"]))
        models = {"fresh problems": cell["accuracy"], "GSM8K's test": cell["accuracy"]["benchmarks"][GSM8K]}
        for asked, model in models.items():
            rows.append((title(cell), *told, asked, *_shares(model), _apart(model, begun[asked], found)))
            told = ("", "", "")
    return drawn(head, rows)


def apart(found: Found) -> str:
    """The rewarded runs from the start minus others, answer by answer, in points."""
    cells = {title(cell): cell["accuracy"] for cell in ordered(found)}
    own, group, control = (NAMES[method] for method in ("t5", "quiet-star-grpo", "anchor-only"))
    cold = next(name for name in cells if name not in NAMES.values())
    rows = []
    for one, other in ((own, control), (group, control), (own, group), (own, cold)):
        first, second = (cells[name]["benchmarks"][GSM8K] for name in (one, other))
        rows.append((f"{one} minus {other}", _apart(cells[one], cells[other], found), _apart(first, second, found)))
    return drawn(("greedy own thought, points", "fresh problems", "GSM8K's test"), rows)


def ordered(found: Found) -> list[Found]:
    """The runs from the start in the order of `NAMES`, then those from the model as it comes."""
    order = list(NAMES)
    return sorted(found["cells"], key=lambda one: (one["start"] != START, order.index(one["method"])))


def title(cell: Found) -> str:
    """What a run is called."""
    return NAMES[cell["method"]] + ("" if cell["start"] == START else ", no warm start at all")


def _shares(model: Found) -> list[str]:
    shares = model["results"]["every"]["accuracy"]
    return [percent(shares[name][0]) for name in ("none", "empty", "random", "other", "sampled", "own")]


def _apart(first: Found, second: Found, found: Found) -> str:
    """Right answers after the own greedy thought, one model's minus another's: points with a 95 % interval over
    problems."""
    one, two = ([int(verdict) for verdict in model["verdicts"]["own"]] for model in (first, second))
    if first["problems"] != second["problems"] or len(one) != len(two):
        raise UserError(f"{first['problems']} and {second['problems']}: other questions cannot be paired")
    clusters = found["clusters"].get(first["problems"]) or first["clusters"]
    problem_N = torch.tensor([int(number) for number in clusters.split()])
    told = clustered_mean(torch.tensor([a - b for a, b in zip(one, two, strict=True)]), problem_N)
    return points([told.mean, *told.interval()])


TABLES = {"starts": starts, "answers": answers, "apart": apart}


def main(given: list[str] | None = None) -> int:
    """Collect where runs are given, and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=Path, help="the folder with the runs' results")
    parser.add_argument("--start", action="append", default=[], metavar="NAME=FILE", help=", ".join(FORMS))
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    asked = parser.parse_args(given)
    if asked.runs is not None:
        named = dict(one.partition("=")[::2] for one in asked.start)
        for name, file in named.items():
            if name not in FORMS or not Path(file).is_file():
                raise UserError(f"--start {name}={file}: give one of {', '.join(FORMS)}, and a file that is there")
        write_json(asked.out, collected(asked.runs, {name: Path(file) for name, file in named.items()}))
    found = json.loads(asked.out.read_text("utf-8"))
    asked.page.write_text(filled(asked.page.read_text("utf-8"), TABLES, found), "utf-8")
    return 0


if __name__ == "__main__":
    script(main)

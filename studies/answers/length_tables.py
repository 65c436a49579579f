"""What longer thoughts are worth: right answers of models that may think for 128 tokens beside those that have 64.

The starts of both lengths were made by the same two scripts, those of 64 tokens several times. Trained models of 64
tokens are those with eight thoughts on one reading; their seeds and their clock are others.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from answer_tables import GSM8K, Model, answered, asked_starts, benchmark, verdict
from estimates import Cell, over_problems
from forms import HISTORY, NAMES, estimate, parts, percent, points_of, seed_of, signed, told
from long_tables import CLOCKS, of_clock
from seed_tables import begun_careful

from tfive_lab.study_tables import drawn

SHORT, LONG, CREDIT = "groups", "length", "credit"
"""The kinds of runs that are compared; the last are of 128 tokens, too, under another clock."""


class Asked(NamedTuple):
    """What some models answered of the test problems, and of the benchmark's questions."""

    problems: Sequence[Model]
    questions: Sequence[Model]


def starts_asked(found: dict[str, Any]) -> tuple[Asked, Asked]:
    """The starts of 64 tokens that were asked as many questions as those of 128 tokens, and these."""
    own = _names(CLOCKS[LONG])
    long = Asked(*([known[name] for name in dict.fromkeys(own) if name in known] for known in _answers(found)))
    names = {name for clock in CLOCKS.values() if clock.model == CLOCKS[SHORT].model for name in _names(clock)}
    short = [
        [known[name] for name in sorted(names & known.keys()) if one and _size(known[name]) == _size(one[0])]
        for known, one in zip(_answers(found), long, strict=True)
    ]
    return Asked(*short), long


def _answers(found: dict[str, Any]) -> tuple[dict[str, Model], dict[str, Model]]:
    known = {name: one for name, one in found.get("accuracy", {}).items() if one.get("problems") == "test"}
    return known, asked_starts(found, GSM8K)


def _names(clock: Any) -> tuple[str, ...]:
    return (clock.start, *clock.again.values())


def _size(model: Model) -> int:
    return int(model["results"]["every"]["items"])


def cells_asked(found: dict[str, Any], kind: str, method: str, has: tuple[str, ...] = ()) -> Asked:
    """The models of a method's cells under one kind of clock, with its usual parts or those that it `has` instead."""
    begun = begun_careful(of_clock(found, kind))
    cells: list[Cell] = answered([one for one in begun if (one["method"], parts(one)) == (method, has)])
    return Asked([cell["accuracy"] for cell in cells], benchmark(cells, GSM8K))


def lengths(found: dict[str, Any]) -> str:
    """Right answers in per cent with 64 tokens and with 128, means over seeds or makings, and their differences in
    points, paired by question."""
    head = ("model", "tokens of a thought", "of", "own", "sampled", "own, all of it left out")
    pairs = {"the start": starts_asked(found)}
    pairs |= {name: (cells_asked(found, SHORT, key), cells_asked(found, LONG, key)) for key, name in NAMES.items()}
    again = cells_asked(found, LONG, "t5", (HISTORY,))
    pairs[f"T⁵, {HISTORY}, beside T⁵"] = cells_asked(found, SHORT, "t5"), again
    rows = []
    for name, (short, long) in pairs.items():
        if not (short.problems and long.problems):
            continue
        what = "makings" if name == "the start" else "seeds"
        rows += [_row(name, size, what, asked) for size, asked in (("64", short), ("128", long))]
        rows.append([name, "128 minus 64", "–", *_less(found, short, long)])
    return drawn((*head, "GSM8K, own", "sampled"), rows)


def against_grpo(found: dict[str, Any]) -> str:
    """T⁵ minus GRPO on every seed with 128 tokens, and the mean over seeds: gains on test texts, and right answers in
    points. T⁵ with the paper's trace; of a seed with both forms the one whose critics are fitted to history."""
    head = ("seed", "critics fitted to", "gain against the start", "content gain", "own, points", "sampled")
    cells = [cell for kind in (LONG, CREDIT) for cell in answered(begun_careful(of_clock(found, kind)))]
    of_grpo = {seed_of(cell): cell for cell in cells if cell["method"] == "quiet-star-grpo"}
    own: dict[str, Cell] = {}
    for cell in cells:
        if cell["method"] == "t5" and parts(cell) in ((), (HISTORY,)) and seed_of(cell) in of_grpo:
            held = own.setdefault(seed_of(cell), cell)
            own[seed_of(cell)] = cell if HISTORY in parts(cell) else held
    rows, each = [], []
    for seed in sorted(own, key=int):
        first, second = (_numbers(one[seed]) for one in (own, of_grpo))
        each.append([a - b for a, b in zip(first, second, strict=True)])
        kind = "the actor's last thoughts" if HISTORY in parts(own[seed]) else "thoughts of their own"
        rows.append([seed, kind, *(form(one) for form, one in zip(_FORMS, each[-1], strict=True))])
    if each:
        means = (told(some, form) for form, some in zip(_FORMS, zip(*each, strict=True), strict=True))
        rows.append(["mean", "–", *means])
    return drawn((*head, "GSM8K, own, points", "sampled"), rows)


_FORMS = (signed, signed, points_of, points_of, points_of, points_of)


def _numbers(cell: Cell) -> list[float]:
    """What `against_grpo` compares."""
    gains = [float(cell["test"][key][0]) for key in ("gain_vs_base", "content_gain")]
    models = (cell["accuracy"], *benchmark([cell], GSM8K))
    right = [one["results"]["every"]["accuracy"][key][0] for one in models for key in ("own", "sampled")]
    return [*gains, *map(float, right)]


def _row(name: str, size: str, what: str, asked: Asked) -> list[str]:
    count = len(asked.problems)
    said = f"{count} {what}" if count > 1 else f"1 {what.removesuffix('s')}"
    said += f" ({len(asked.questions)} of GSM8K)" * (len(asked.questions) != count)
    right = [_share(asked.problems, "every", key) for key in ("own", "sampled")]
    right.append(_share(asked.problems, "all", "own"))
    right += [_share(asked.questions, "every", key) for key in ("own", "sampled")]
    return [name, size, said, *right]


def _share(models: Sequence[Model], kind: str, condition: str) -> str:
    known = [one["results"][kind]["accuracy"][condition][0] for one in models if kind in one["results"]]
    return percent(statistics.fmean(known)) if known else "–"


def _less(found: dict[str, Any], short: Asked, long: Asked) -> list[str]:
    """The mean of the longer ones minus that of the shorter, answer by answer, with the interval over problems."""
    clusters = found.get("clusters", {}).get("test", "")
    questions = next((one["clusters"] for one in long.questions), "")
    sides = ((short.problems, long.problems, clusters), (short.questions, long.questions, questions))
    first, second = ([_apart(*side, one) for one in ("own", "sampled")] for side in sides)
    return [*first, "–", *second]


def _apart(short: Sequence[Model], long: Sequence[Model], clusters: str, condition: str) -> str:
    first, second = ([verdict(one, condition) for one in side] for side in (long, short))
    less = over_problems(first, second, clusters)
    return "–" if less is None else estimate(less, points_of)

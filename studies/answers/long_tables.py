"""Tables of the runs from careful reading by their clock (some minutes, a thousand seconds, or the one between), and of
those of a larger model.

The tables over seeds are drawn of the runs under the shortest clock, those here of the others, which have a start of
their own each. A long run is a row of its own; differences are of the mean over the seeds that both have, with
intervals over texts or problems.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from forms import CAREFUL, LARGER, drawn, larger, paired, percent, points, seed_of, signed, with_interval
from seed_tables import (
    SEED_TABLES,
    Cell,
    answered,
    begun_careful,
    common,
    estimate,
    methods,
    over_problems,
    over_texts,
    points_of,
    seeds_answers,
    seeds_course,
    seeds_lazy,
    shared_texts,
    verdicts,
)


class Clock(NamedTuple):
    """Runs whose clock lies in a range, and their start in the results: made anew, no other's weights to the bit."""

    least: float
    below: float
    start: str
    model: str = CAREFUL
    """The folder that the runs began with."""


CLOCKS = {
    "short": Clock(0.0, 300.0, CAREFUL),
    "groups": Clock(300.0, 600.0, f"{CAREFUL}-groups"),
    "second": Clock(600.0, 1000.0, f"{CAREFUL}-second"),
    "long": Clock(1000.0, float("inf"), f"{CAREFUL}-long"),
    "larger": Clock(0.0, float("inf"), LARGER, LARGER),
}

WARM = "warm"
"""The model after the warm start alone; it answered all test problems, of which a run may have answered the first."""

Table = Callable[[dict[str, Any]], str]


def of_clock(found: dict[str, Any], kind: str) -> dict[str, Any]:
    """The results with the cells of one kind alone, and the right answers of the start that they began with; of other
    models only where they are of the same size."""
    clock, known = CLOCKS[kind], found.get("accuracy", {})
    alone = clock.model != CAREFUL
    cells = [
        {**cell, "start": CAREFUL} if alone and cell.get("start") == clock.model else cell
        for cell in found["cells"]
        if larger(cell) == alone and clock.least <= clock_of(cell) < clock.below
    ]
    starts = {other.start for other in CLOCKS.values()}
    begun = {name: model for name, model in known.items() if name not in starts and not alone}
    if clock.start in known:
        begun[CAREFUL] = known[clock.start]
    asked = found.get("benchmark", {})
    start = {CAREFUL: asked[clock.start]} if clock.start in asked else {}
    return {**found, "cells": cells, "accuracy": begun, "benchmark": start}


def clock_of(cell: Cell) -> float:
    """Seconds of training after which a cell ends; 0 where no clock ends it."""
    return float(cell.get("settings", {}).get("run.seconds") or 0.0)


def ended(found: dict[str, Any]) -> dict[str, list[Cell]]:
    """The cells that were measured on test texts, by method."""
    return methods([cell for cell in begun_careful(found) if "test" in cell and "test_start" in cell])


def long_ends(found: dict[str, Any]) -> str:
    """What each run did, and its test texts: a row of the start (the mean of what the runs found), then one a run."""
    head = ("method, positions × thoughts", "seed", "updates", "actor thoughts", "of every role", "seconds")
    groups = ended(found)
    rows = []
    begun = [cell["test_start"] for cells in groups.values() for cell in cells]
    if begun:
        means = {name: statistics.fmean(one[name] for one in begun) for name in begun[0]}
        shown = (signed(means["thought_gain"]), "–", signed(means["content_gain"]), f"{means['no_thought_loss']:.3f}")
        rows.append(["the start", *["–"] * 5, *shown, "–"])
    for name, cells in groups.items():
        for cell in cells:
            last, test = cell["measured"][-1], cell["test"]
            spent = (f"{last.get(key, 0):,.0f}" for key in ("steps", "actor_thoughts", "thoughts", "training_seconds"))
            gains = (with_interval(test[key]) for key in ("thought_gain", "gain_vs_base", "content_gain"))
            tail = (f"{test['no_thought_loss'][0]:.3f}", f"{test['mean_thought_length']:.0f}")
            rows.append([name, seed_of(cell), *spent, *gains, *tail])
    columns = ("thought gain", "gain against the start", "content gain", "loss without", "tokens of a thought")
    return drawn((*head, *columns), rows)


def long_apart(found: dict[str, Any]) -> str:
    """The first method minus each other one: gains on the test texts of which both measured the same positions, paired
    by text, and right answers in points, paired by problem. Then each method's right answers minus those of the
    warm-started model to the same questions."""
    head = ("method, positions × thoughts", "minus", "seeds", "texts", "gain against the start", "content gain")
    clusters = found.get("clusters", {}).get("test", "")
    groups = list(ended(found).items())
    rows = []
    for name, cells in groups[1:]:
        own, other = common(groups[0][1], cells)
        if not own:
            continue
        row = [groups[0][0], name, str(len(own)), str(len(shared_texts(own[0], other[0])))]
        for measure in ("gain_vs_base", "content_gain"):
            over = over_texts(own, measure, other)
            row.append("–" if over is None else estimate(over))
        for condition in ("own", "sampled"):
            both = len(answered(own)) == len(answered(other)) == len(own)
            over = over_problems(verdicts(own, condition), verdicts(other, condition), clusters) if both else None
            row.append("–" if over is None else estimate(over, points_of))
        rows.append(row)
    warm = found.get("accuracy", {}).get(WARM, {})
    for name, cells in groups if warm.get("problems") == "test" else ():
        known = verdicts(answered(cells), "own")
        over = over_problems(known, [warm["verdicts"]["own"][: len(known[0])]], clusters) if known else None
        if over is not None:
            row = [name, "after the warm start", str(len(known)), "–", "–", "–", estimate(over, points_of), "–"]
            rows.append(row)
    return drawn((*head, "right after own, points", "right after a sampled one, points"), rows)


def long_critics(found: dict[str, Any]) -> str:
    """How often the critics were admitted, and how much the weaker of them foresaw of fresh thoughts."""
    rows = []
    for name, cells in methods(begun_careful(found)).items():
        for cell in cells:
            known = [one for one in cell["windows"] if "r2.1" in one]
            if known:
                weaker = [min(one["r2.1"], one.get("r2.2", one["r2.1"])) for one in known]
                tested = [one["credit"] for one in known if "credit" in one]
                admitted = f"{tested.count('qualified')} of {len(tested)}" if tested else "not tested"
                half = len(weaker) // 2
                halves = [signed(statistics.median(part)) if part else "–" for part in (weaker[:half], weaker[half:])]
                enough = f"{sum(one >= 0.1 for one in weaker)} of {len(weaker)}"
                rows.append((name, seed_of(cell), admitted, enough, " / ".join(halves)))
    head = ("method, positions × thoughts", "seed", "windows admitted", "R² of 0.1 or more")
    return drawn((*head, "median R², first half / second"), rows)


def text_again(found: dict[str, Any]) -> str:
    """Thought gain on the sheets that are trained on, each window's before its updates, beside that on development
    texts: by the same weights before any update, and in the end, there the mean of the last third of the windows. RLP
    is left out: its gain on trained texts is of one token."""
    left = ("method, positions × thoughts", "seed", "sheets read by the actor, about", "before: trained on")
    head = (*left, "development", "last third: trained on", "development", "apart", "apart, less what it was before")
    rows = []
    for name, cells in ended(found).items():
        for cell in [one for one in cells if one["method"] != "rlp" and one["windows"]]:
            trained, last = [one["actor_gain"] for one in cell["windows"]], cell["measured"][-1]
            sheets = cell["settings"]["window.items"] * len(trained) * last["texts"] / last["items"]
            before, after = cell["measured"][0]["thought_gain"][0], last["thought_gain"][0]
            end = statistics.fmean(trained[-max(1, len(trained) // 3) :])
            shown = (trained[0], before, end, after, end - after, (end - after) - (trained[0] - before))
            rows.append([name, seed_of(cell), f"{round(sheets, -2):,.0f}", *map(signed, shown)])
    return drawn(head, rows)


def long_benchmark(found: dict[str, Any]) -> str:
    """Right answers to the benchmark's questions: the start, then each run, and their difference question by
    question."""
    conditions = {"own": "own", "sampled": "sampled", "none": "without", "empty": "nothing", "random": "random tokens"}
    head = ("model", "seed", "questions", *conditions.values(), "another's", "own − without")
    start = found["benchmark"].get(CAREFUL)
    runs = [("the start", "–", start)] if start else []
    for name, cells in ended(found).items():
        runs += [(name, seed_of(cell), cell.get("accuracy", {}).get("benchmark")) for cell in cells]
    names, first = [name for name, *_ in runs if name != "the start"], runs[1][2] if len(runs) > 1 else None
    rows = []
    for name, seed, model in runs:
        if model is None:
            continue
        every = model["results"]["every"]
        shares = (percent(every["accuracy"][one][0]) for one in (*conditions, "other"))
        row = [name, seed, f"{every['items']:,}", *shares, points(every["difference"]["own - none"])]
        for one in ("own", "sampled"):
            known = [_verdict(each, one) for each in (model, start or {})]
            row.append(points(paired(*known)) if all(known) and model is not start else "–")
        for one in ("own", "sampled"):
            known = [_verdict(each, one) for each in (first or {}, model)]
            row.append(points(paired(*known)) if all(known) and model is not first else "–")
        rows.append(row)
    told = (f"{one} of {names[0] if names else '–'}, minus this one's" for one in ("own", "sampled"))
    return drawn((*head, "own, minus the start's", "sampled, minus the start's", *told), rows)


def _verdict(model: dict[str, Any], condition: str) -> str:
    """Right or wrong, question by question; of several sampled thoughts the first."""
    known = model.get("verdicts", {}).get(condition, "")
    return known if isinstance(known, str) else known[0]


def of_kind(table: Table, kind: str) -> Table:
    """A table of the runs under one kind of clock."""
    return partial(_of_kind, table, kind)


def _of_kind(table: Table, kind: str, found: dict[str, Any]) -> str:
    return table(of_clock(found, kind))


_LONG: dict[str, Table] = {
    "ends": long_ends, "apart": long_apart, "answers": seeds_answers, "lazy": seeds_lazy, "course": seeds_course,
    "critics": long_critics, "again": text_again,
}  # fmt: skip
_LONGER = ("long", "second", "groups", "larger")
CLOCKED_TABLES: dict[str, Table] = {
    **{name: of_kind(table, "short") for name, table in SEED_TABLES.items()},
    **{f"{kind}_{name}": of_kind(table, kind) for kind in _LONGER for name, table in _LONG.items()},
    "groups_benchmark": of_kind(long_benchmark, "groups"),
}

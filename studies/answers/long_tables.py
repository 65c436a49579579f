"""Tables of the runs from careful reading by their clock (some minutes, a thousand seconds, or the one between), and of
those of a larger model or of longer thoughts.

The tables over seeds are drawn of the runs under the shortest clock, those here of the others, which have a start of
their own each, or several that seeds began with. A long run is a row of its own; differences are of the mean over the
seeds that both have, each seed's by itself, with intervals over texts or problems and, of several seeds, over seeds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from answer_tables import answered, long_benchmark, long_benchmarks, problems_apart, seeds_answers, seeds_lazy, verdicts
from estimates import Cell, common, each_texts, over_texts, shared_texts
from forms import (
    CAREFUL,
    HISTORY,
    LARGER,
    LARGER_LONGER,
    LONGER,
    LONGER_BOTH,
    ending,
    over_both,
    seed_of,
    signed,
    with_interval,
)
from needed_seeds import seeds_needed
from seed_tables import (
    BEGUN,
    SEED_TABLES,
    begun_careful,
    ended,
    methods,
    seeds_course,
    start_of,
    starts,
    which_seeds,
)

from tfive_lab.estimates import ratio
from tfive_lab.study_tables import drawn


class Clock(NamedTuple):
    """Runs whose clock lies in a range, and their start in the results: made anew, no other's weights to the bit."""

    least: float
    below: float
    start: str
    model: str = CAREFUL
    """The folder that the runs began with."""
    again: Mapping[int, str] = MappingProxyType({})
    """By their number the seeds whose start was made once more, and what that one is called in the results."""
    also: tuple[tuple[float, float], ...] = ()
    """Further such ranges, of runs of the same recipe that shared the device with fewer others or had less time."""

    def holds(self, cell: Cell) -> bool:
        """Whether a cell is one of these."""
        seconds, ranges = clock_of(cell), ((self.least, self.below), *self.also)
        alike = ending(str(cell.get("start", ""))) == ending(self.model)
        return alike and any(least <= seconds < below for least, below in ranges)


_AGAIN = f"{CAREFUL}-groups-again"
_SIXTH, _SEVENTH, _EIGHTH = (f"{LONGER}-{time}" for time in ("sixth", "seventh", "eighth"))
_LATER = {17: _SIXTH, 18: _SIXTH} | dict.fromkeys((19, 20, 21, 22), _SEVENTH) | {31: _EIGHTH}
CLOCKS = {
    "short": Clock(0.0, 200.0, CAREFUL),
    "rates": Clock(200.0, 245.0, f"{CAREFUL}-rates"),
    "units": Clock(245.0, 300.0, f"{CAREFUL}-groups-third"),
    "groups": Clock(300.0, 500.0, f"{CAREFUL}-groups", again={4: _AGAIN, 5: _AGAIN}),
    "parts": Clock(500.0, 600.0, f"{CAREFUL}-parts", again={7: f"{CAREFUL}-parts-again"}),
    "second": Clock(600.0, 1000.0, f"{CAREFUL}-second"),
    "long": Clock(1000.0, float("inf"), f"{CAREFUL}-long"),
    "larger": Clock(0.0, float("inf"), LARGER, LARGER),
    "larger_way": Clock(0.0, float("inf"), LARGER_LONGER, LARGER_LONGER),
    "length": Clock(310.0, 345.0, LONGER, LONGER, {11: f"{LONGER}-again", 12: f"{LONGER}-again"}),
    "credit": Clock(350.0, 385.0, f"{LONGER}-fourth", LONGER),
    "both": Clock(0.0, float("inf"), LONGER_BOTH, LONGER_BOTH),
    "way": Clock(385.0, float("inf"), f"{LONGER}-fifth", LONGER, _LATER, ((300.0, 310.0), (345.0, 350.0))),
}

WARM = "warm"
"""The model after the warm start alone; it answered all test problems, of which a run may have answered the first."""

Table = Callable[[dict[str, Any]], str]


def of_clock(found: dict[str, Any], kind: str) -> dict[str, Any]:
    """The results with the cells of one kind alone, and the right answers of the starts that they began with: the usual
    one under the name of careful reading, others under their own. Of other models only beside those of the usual size
    and length."""
    clock, known = CLOCKS[kind], found.get("accuracy", {})
    alone = clock.model != CAREFUL
    cells = [begun_with(cell, clock) for cell in found["cells"] if clock.holds(cell)]
    every = {name for other in CLOCKS.values() for name in (other.start, *other.again.values())}
    models = {name: model for name, model in known.items() if name not in every and not alone}
    return {**found, "cells": cells, "accuracy": models | starts_in(known, clock),
            "benchmark": starts_in(found.get("benchmark", {}), clock),
            "benchmarks": {name: starts_in(own, clock) for name, own in found.get("benchmarks", {}).items()},
            }  # fmt: skip


def begun_with(cell: Cell, clock: Clock) -> Cell:
    """A cell that says which of the clock's starts it began with."""
    more = {"start": CAREFUL} if cell.get("start") == clock.model else {}
    seed = cell.get("settings", {}).get("run.seed")
    return {**cell, **more} | ({BEGUN: clock.again[seed]} if seed in clock.again else {})


def starts_in(models: dict[str, Any], clock: Clock) -> dict[str, Any]:
    """The clock's starts among some models, by the names that cells have for them."""
    names = {clock.start: CAREFUL, **{name: name for name in clock.again.values()}}
    return {own: models[name] for name, own in names.items() if name in models}


def clock_of(cell: Cell) -> float:
    """Seconds of training after which a cell ends; 0 where no clock ends it."""
    return float(cell.get("settings", {}).get("run.seconds") or 0.0)


def long_ends(found: dict[str, Any]) -> str:
    """What each run did, and its test texts: a row of each start (the mean of what its runs found), then one a run."""
    head = ("method, positions × thoughts", "seed", "updates", "actor thoughts", "of every role", "seconds")
    groups = ended(found)
    everything = [cell for cells in groups.values() for cell in cells]
    rows = []
    for start in starts(everything) if everything else ():
        begun = [cell["test_start"] for cell in everything if start_of(cell) == start.name]
        means = {name: statistics.fmean(one[name] for one in begun) for name in begun[0]}
        shown = (*[signed(means["thought_gain"])] * 2, signed(means["content_gain"]), f"{means['no_thought_loss']:.3f}")
        rows.append(["the start", start.seeds or "–", *["–"] * 4, *shown, "–"])
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
    """The first method minus each other one, variants minus those with more of its parts replaced or with a higher
    rate, and one whose critics are fitted to history minus each other method, seed by seed:
    gains on the test texts of which both measured the same positions, paired by text, and right answers in points,
    paired by problem; with the interval over seeds, too, where there are several. Then each method's right answers
    minus those of the warm-started model to the same questions."""
    head = ("method, positions × thoughts", "minus", "seeds", "texts", "gain against the start", "content gain")
    clusters = found.get("clusters", {}).get("test", "")
    groups = ended(found)
    names, rows = list(groups), []
    further = [
        (name, other)
        for number, name in enumerate(names[1:], 2)
        for other in names
        if other.startswith(f"{name}, ")
        or (other in names[number:] and _but_rate(name) == _but_rate(other))
        or (HISTORY in name and other != name and not other.startswith(names[0]))
    ]
    for first, name in (*((names[0], other) for other in names[1:]), *further):
        own, other = common(groups[first], groups[name])
        if own:
            row = [first, name, which_seeds(own, groups.values()), texts_told(own, other)]
            row += [texts_apart(own, other, measure) for measure in ("gain_vs_base", "content_gain")]
            both = len(answered(own)) == len(answered(other)) == len(own)
            for condition in ("own", "sampled"):
                less = problems_apart(verdicts(own, condition), verdicts(other, condition), clusters) if both else "–"
                row.append(less)
            rows.append(row)
    warm = found.get("accuracy", {}).get(WARM, {})
    for name, cells in groups.items() if warm.get("problems") == "test" else ():
        known = verdicts(answered(cells), "own")
        less = problems_apart(known, [warm["verdicts"]["own"][: len(one)] for one in known], clusters)
        if less != "–":
            seeds = which_seeds(answered(cells), groups.values())
            rows.append([name, "after the warm start", seeds, *["–"] * 3, less, "–"])
    return drawn((*head, "right after own, points", "right after a sampled one, points"), rows)


def _but_rate(name: str) -> str:
    """What a row is called without its rate."""
    return name.partition(", rate ")[0]


def texts_told(first: Sequence[Cell], second: Sequence[Cell]) -> str:
    """How many test texts the pairs share: one number where it is the same for all seeds."""
    shared = [str(len(shared_texts(*pair))) for pair in zip(first, second, strict=True)]
    return shared[0] if len(set(shared)) == 1 else ", ".join(shared)


def texts_apart(first: Sequence[Cell], second: Sequence[Cell], measure: str) -> str:
    """A measure of the test texts, minus the other's of the same seed, with its intervals."""
    each = each_texts(first, measure, second)
    return over_both(over_texts(first, measure, second), [ratio(one) for one in each])


def long_critics(found: dict[str, Any]) -> str:
    """How often the critics were admitted, how much the weaker of them foresaw of fresh thoughts, and, where a run has
    kept it, what the mean of a position's other thoughts foresees and what became of the learned weight."""
    rows, more = [], []
    for name, cells in methods(begun_careful(found)).items():
        for cell in cells:
            known = [one for one in cell["windows"] if "r2.1" in one]
            if known:
                foreseen = [weaker(one) for one in known]
                tested = [one["credit"] for one in known if "credit" in one]
                admitted = f"{tested.count('qualified')} of {len(tested)}" if tested else "not tested"
                enough = f"{sum(one >= 0.1 for one in foreseen)} of {len(foreseen)}"
                rows.append([name, seed_of(cell), admitted, enough, halves(foreseen)])
                more.append([*beside_others(known), *learned_weight(known)])
    head = ["method, positions × thoughts", "seed", "windows admitted", "R² of 0.1 or more"]
    head.append("median R², first half / second")
    if any(set(one) != {"–"} for one in more):
        head += ["median R² of the others' mean, first half / second", "windows with the weaker critic above it"]
        head += ["largest Ĉ/Q̂", "learned weight accepted", "median correlation of the two advantages"]
        rows = [[*row, *one] for row, one in zip(rows, more, strict=True)]
    return drawn(head, rows)


def weaker(window: dict[str, Any]) -> float:
    """R² of the critic that foresaw less in a window, of the only one where there is one."""
    return float(min(window["r2.1"], window.get("r2.2", window["r2.1"])))


def halves(values: Sequence[float]) -> str:
    """Medians of the first half of the windows and of the second; a dash for what there is none of."""
    half = len(values) // 2
    return " / ".join(signed(statistics.median(part)) if part else "–" for part in (values[:half], values[half:]))


def beside_others(windows: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """What the mean of a position's other thoughts foresees by itself, and in how many windows the weaker critic
    foresaw more."""
    known = [one for one in windows if "r2_of_others" in one]
    if not known:
        return "–", "–"
    above = sum(weaker(one) > one["r2_of_others"] for one in known)
    return halves([one["r2_of_others"] for one in known]), f"{above} of {len(known)}"


def learned_weight(windows: Sequence[dict[str, Any]]) -> tuple[str, str, str]:
    """The most that the learned weight changed of the advantages (Ĉ/Q̂), in how many windows it was accepted (one of two
    crossed halves is half a window), and how alike the advantages were that it mixes."""
    kept, accepted, alike = (
        [one[key] for one in windows if math.isfinite(one.get(key, math.nan))]
        for key in ("retention", "accepted", "twin_correlation")
    )
    return (
        f"{max(kept):.4f}" if kept else "–",
        f"{sum(accepted):g} of {len(accepted)}" if accepted else "–",
        signed(statistics.median(alike)) if alike else "–",
    )


def long_offsets(found: dict[str, Any]) -> str:
    """Window by window what the learned weight had to mend and what it did, in units of the advantages' variance: the
    cross-fitted offset of their average, a lower bound of which chance makes less than zero, what the weight changed of
    it, and the most it may have moved the advantages by. Then the median of the windows."""
    head = (
        "method, positions × thoughts",
        "seed",
        "window",
        "R of the average, from below",
        "of the weight, less that",
        "± s.e.",
    )
    keys = ("cross_fit_average", "cross_fit_change", "cross_fit_change_error")
    rows = []
    for name, cells in methods(begun_careful(found)).items():
        for cell in cells:
            known = [one for one in cell["windows"] if keys[0] in one]
            shown = [[str(one["window"]), *(_fourth(one[key]) for key in keys), taken(one)] for one in known]
            if known:
                middle = (_fourth(statistics.median(one[key] for one in known)) for key in keys)
                kept = f"{sum(one['accepted'] > 0 for one in known)} of {len(known)} accepted"
                shown.append(["median", *middle, kept])
            rows += [[name, seed_of(cell), *row] for row in shown]
    return drawn((*head, "Ĉ/Q̂"), rows)


def _fourth(value: float) -> str:
    return f"{value:+.4f}".replace("-", "−")


def taken(window: dict[str, Any]) -> str:
    """How far the weight leaves the average in a window where it was accepted."""
    return f"{window['retention']:.4f}" if window["accepted"] else "not accepted"


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


def ended_course(found: dict[str, Any]) -> str:
    """The course of runs that came to their end: one that was cut off has another start's seed beside it. All updates
    are of as many thoughts, so that equal thoughts are equal steps, and the control has two of the seeds."""
    cells = [cell for cell in found["cells"] if "test" in cell]
    return seeds_course({**found, "cells": cells}, left_out=("steps",), control=False)


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
    "seeds_answers": of_kind(seeds_answers, "short"),
    "seeds_lazy": of_kind(seeds_lazy, "short"),
    **{f"{kind}_{name}": of_kind(table, kind) for kind in _LONGER for name, table in _LONG.items()},
    "groups_benchmark": of_kind(long_benchmark, "groups"),
    "length_benchmark": of_kind(long_benchmark, "length"),
    **{f"parts_{name}": of_kind(_LONG[name], "parts") for name in ("ends", "apart", "answers", "critics")},
    **{
        f"{kind}_{name}": of_kind(_LONG[name], kind)
        for kind in ("units", "rates", "length", "credit", "way", "larger_way", "both")
        for name in ("ends", "apart", "answers", "critics")
    },
    **{f"{kind}_lazy": of_kind(seeds_lazy, kind) for kind in ("length", "credit", "way", "larger_way", "both")},
    "way_course": of_kind(ended_course, "way"),
    "way_needed": of_kind(seeds_needed, "way"),
    **{
        f"{kind}_benchmark": of_kind(long_benchmark, kind)
        for kind in ("credit", "way", "larger_way", "units", "rates", "both")
    },
    "parts_offsets": of_kind(long_offsets, "parts"),
    "parts_benchmark": of_kind(long_benchmark, "parts"),
    **{f"{kind}_benchmarks": of_kind(long_benchmarks, kind) for kind in ("parts", "both")},
}

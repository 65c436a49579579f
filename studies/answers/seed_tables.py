"""Tables of the methods over several seeds, all from careful reading: gains on test texts, right answers to the test
problems, the course at equal seconds, thoughts and steps, and what the critics knew.

Cells of seed 0 searched the rate and are told by themselves. Every row says how many seeds it has; methods and seeds
that are missing are left out. Intervals over seeds are Student's with n − 1 degrees of freedom; those over texts or
problems are of the mean over the seeds there are.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from forms import CAREFUL, NAMES, PILOT, anchor_rate, drawn, percent, seed_of, signed, title
from scipy.special import stdtrit

from tfive.errors import UserError

CONTROL = "anchor-only"
GAINS = {"thought_gain": "thought gain", "gain_vs_base": "gain against the start", "content_gain": "content gain",
         "no_thought_loss": "loss without"}  # fmt: skip
CUTS = {"training_seconds": "seconds", "actor_thoughts": "actor thoughts", "steps": "steps"}
CREDITS = {"qualified": "admitted", "slipped": "slipped through", "untested": "untested", "baseline": "batch baseline"}
Cell = dict[str, Any]
Estimate = tuple[float, float | None]
"""A mean, and half of its 95 % interval where there is one."""


def begun_careful(found: dict[str, Any], *, search: bool = False) -> list[Cell]:
    """The cells from careful reading: those of seeds 1 and up, or those of seed 0 that searched the rate."""
    return [
        cell
        for cell in found["cells"]
        if cell.get("start") == CAREFUL
        and cell.get("code") != PILOT
        and (cell["settings"]["run.seed"] == 0) == search
        and cell["measured"]
    ]


def methods(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    """Cells of one method, positions, thoughts and rates together, each seed once, in the order of names."""
    groups: dict[tuple[Any, ...], dict[int, Cell]] = {}
    for cell in sorted(cells, key=lambda one: (*_rank(one), one["settings"]["run.seed"])):
        groups.setdefault(_rank(cell), {})[cell["settings"]["run.seed"]] = cell
    titles = [title(next(iter(group.values()))) for group in groups.values()]
    found = {}
    for name, group in zip(titles, groups.values()):
        cells_of = list(group.values())
        rate = f", rate {cells_of[0]['settings']['optimizer.lr']:g}" if titles.count(name) > 1 else ""
        found[name + rate] = cells_of
    return found


def _rank(cell: Cell) -> tuple[int, int, int, float, float]:
    settings = cell["settings"]
    place = list(NAMES).index(cell["method"])
    return place, -settings["window.items"], settings["group"], settings["optimizer.lr"], anchor_rate(cell)


def control_of(cells: Sequence[Cell], groups: dict[str, list[Cell]]) -> list[Cell]:
    """The control of a method: that with the same positions where there is one, else the first; none of itself."""
    if cells[0]["method"] == CONTROL:
        return []
    controls = [group for group in groups.values() if group[0]["method"] == CONTROL]
    items = cells[0]["settings"]["window.items"]
    same = [group for group in controls if group[0]["settings"]["window.items"] == items]
    return (same or controls or [[]])[0]


def over_seeds(values: Sequence[float]) -> Estimate:
    """Mean and Student's interval; one seed has none."""
    if len(values) < 2:
        return statistics.fmean(values), None
    error = statistics.stdev(values) / len(values) ** 0.5
    return statistics.fmean(values), float(stdtrit(len(values) - 1, 0.975)) * error


def over_clusters(totals: Sequence[float], masses: Sequence[float]) -> Estimate:
    """The ratio of sums over clusters and its normal interval, clusters independent, as `tfive.rl.clusters` has it."""
    mean, count = sum(totals) / sum(masses), len(totals)
    if count < 2:
        return mean, None
    residuals = sum((total - mean * mass) ** 2 for total, mass in zip(totals, masses, strict=True))
    return mean, 1.96 * (residuals * count / (count - 1)) ** 0.5 / sum(masses)


def by_seed(cells: Sequence[Cell], where: str, measure: str) -> dict[int, float]:
    """A measure of each cell, of its test texts or of the measurement that it stands `at`, by the cell's seed."""
    return {cell["settings"]["run.seed"]: cell[where][measure][0] for cell in cells}


def apart(first: dict[int, float], second: dict[int, float]) -> list[float]:
    """Differences on the seeds that both have."""
    return [first[seed] - second[seed] for seed in first if seed in second]


def common(first: Sequence[Cell], second: Sequence[Cell]) -> tuple[list[Cell], list[Cell]]:
    """The cells of both whose seed the other has, too."""
    seeds_of = [{cell["settings"]["run.seed"] for cell in group} for group in (first, second)]
    both = seeds_of[0] & seeds_of[1]
    own, other = ([cell for cell in group if cell["settings"]["run.seed"] in both] for group in (first, second))
    return own, other


def _half(estimate: Estimate, form: Callable[[float], str] = signed) -> str:
    mean, half = estimate
    return "–" if half is None else f"{form(mean - half)} … {form(mean + half)}"


def _told(values: Sequence[float], form: Callable[[float], str] = signed) -> str:
    """Mean and interval over seeds of some differences, or a dash where there are none."""
    if not values:
        return "–"
    return estimate(over_seeds(values), form)


def estimate(found: Estimate, form: Callable[[float], str] = signed) -> str:
    """A mean, and its interval where there is one."""
    return form(found[0]) if found[1] is None else f"{form(found[0])} ({_half(found, form)})"


def _plain(value: float) -> str:
    return f"{value:.3f}"


def points_of(value: float) -> str:
    """A difference of shares in percentage points."""
    return f"{100 * value:+.1f}".replace("-", "−")


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split()]


def text_sums(cells: Sequence[Cell], measure: str) -> tuple[list[float], list[int]] | None:
    """Sums of a measure over the items of each test text, mean over the cells, and the items; None where a cell has
    none or other texts."""
    kept = [cell.get("by_text", {}) for cell in cells]
    if not kept or any(measure not in one or one["digest"] != kept[0]["digest"] for one in kept):
        return None
    rows = [_numbers(one[measure]) for one in kept]
    return [statistics.fmean(row) / 1e4 for row in zip(*rows, strict=True)], _numbers(kept[0]["items"])


_START = {"gain_vs_base": 1, "thought_gain": -1, "no_thought_loss": 1}
"""How the start's loss without a thought follows from what is kept."""
SAME = 0.002
"""Nats a token by which the losses of one position by the same weights may differ, computed in other company."""


def shared_texts(first: Cell, second: Cell) -> list[int]:
    """The numbers of the test texts of which both have measured the same positions: all where the digest says so, else
    those where the start loses the same without a thought. (How many texts other roles have can move positions.)"""
    one, two = first["by_text"], second["by_text"]
    items = _numbers(one["items"])
    if one["digest"] == two["digest"]:
        return list(range(len(items)))
    if one["items"] != two["items"] or not all(name in kept for kept in (one, two) for name in _START):
        return []
    lost = []
    for kept in (one, two):
        rows = zip(*(_numbers(kept[name]) for name in _START), strict=True)
        lost.append([sum(sign * value for sign, value in zip(_START.values(), row)) / 1e4 for row in rows])
    return [text for text, (a, b) in enumerate(zip(*lost, strict=True)) if abs(a - b) <= SAME * items[text]]


def over_texts(cells: Sequence[Cell], measure: str, others: Sequence[Cell] = ()) -> Estimate | None:
    """Mean over seeds with its interval over texts; minus the `others`, text by text, where they are given."""
    own, other = text_sums(cells, measure), text_sums(others, measure) if others else None
    if own is None or (others and other is None):
        return None
    if other is None:
        return over_clusters(*own)
    both = shared_texts(cells[0], others[0])
    return over_clusters([own[0][n] - other[0][n] for n in both], [own[1][n] for n in both]) if both else None


def seeds(found: dict[str, Any]) -> str:
    """Test texts: each measure of each method over its seeds, and its difference to the control, seed by seed and text
    by text."""
    head = ("measure", "method, positions × thoughts", "seeds", "mean", "95 % over seeds", "95 % over texts")
    groups = methods([cell for cell in begun_careful(found) if "test" in cell])
    rows = []
    for measure, words in GAINS.items():
        form = _plain if measure == "no_thought_loss" else signed
        begun = [cell["test_start"] for group in groups.values() for cell in group if "test_start" in cell]
        if begun:
            at = "thought_gain" if measure == "gain_vs_base" else measure
            rows.append((words, "the start", "–", form(statistics.fmean(one[at] for one in begun)), *["–"] * 4))
        for name, cells in groups.items():
            values = by_seed(cells, "test", measure)
            mean, half = over_seeds(list(values.values()))
            control = control_of(cells, groups)
            less = apart(values, by_seed(control, "test", measure))
            texts, both = over_texts(cells, measure), common(cells, control)
            paired = over_texts(both[0], measure, both[1]) if both[0] else None
            shown = (form(mean), _half((mean, half), form), "–" if texts is None else _half(texts, form))
            rows.append((words, name, str(len(cells)), *shown, _told(less), "–" if paired is None else _half(paired)))
    return drawn((*head, "minus the control (95 % over seeds)", "95 % over texts"), rows)


def seeds_apart(found: dict[str, Any]) -> str:
    """What training changed of the start that each seed measured itself, on test texts and on development texts; and
    every rewarded method minus the next one, on test texts."""
    groups = methods([cell for cell in begun_careful(found) if "test_start" in cell])
    rows = []
    for measure in ("gain_vs_base", "content_gain"):
        words, at = GAINS[measure], "thought_gain" if measure == "gain_vs_base" else measure
        for name, cells in groups.items():
            tested = [cell["test"][measure][0] - cell["test_start"][at] for cell in cells]
            grown = [cell["measured"][-1][measure][0] - cell["measured"][0][measure][0] for cell in cells]
            rows.append((words, name, "the start", str(len(cells)), _told(tested), "–", _told(grown)))
        rewarded = [(name, cells) for name, cells in groups.items() if cells[0]["method"] != CONTROL]
        for (name, cells), (other, others) in pairwise(rewarded):
            less = apart(by_seed(cells, "test", measure), by_seed(others, "test", measure))
            both = common(cells, others)
            paired = over_texts(both[0], measure, both[1]) if both[0] else None
            rows.append(
                (words, name, other, str(len(less)), _told(less), "–" if paired is None else _half(paired), "–")
            )
    head = ("measure", "method, positions × thoughts", "minus", "seeds")
    tail = ("test texts (95 % over seeds)", "95 % over texts", "development texts (95 % over seeds)")
    return drawn((*head, *tail), rows)


def seeds_cost(found: dict[str, Any]) -> str:
    """What each method did: means over its seeds at the end of training."""
    head = ("method, positions × thoughts", "seeds", "rate", "ended", "windows", "steps", "actor thoughts")
    rows = []
    for name, cells in methods(begun_careful(found)).items():
        last = [cell["measured"][-1] for cell in cells]
        spent = [f"{statistics.fmean(one.get(key, 0) for one in last):,.0f}" for key in
                 ("window", "steps", "actor_thoughts", "thoughts", "generated_tokens", "training_seconds")]  # fmt: skip
        ended = f"{sum('test' in cell for cell in cells)} of {len(cells)}"
        which = ", ".join(seed_of(cell) for cell in cells)
        rows.append((name, which, f"{cells[0]['settings']['optimizer.lr']:g}", ended, *spent))
    return drawn((*head, "thoughts of every role", "their tokens", "seconds of training"), rows)


def seeds_lazy(found: dict[str, Any]) -> str:
    """What a program that writes no working would score in the trained models' hands: gains on test texts, and right
    answers to the test problems in per cent; means over seeds. Before them the start's, where it was asked."""
    head = ("method, positions × thoughts", "seeds", "own", "nothing", "random tokens", "another's")
    shares = ("own", "none", "empty", "random", "other")
    begun, rows = found.get("accuracy", {}).get(CAREFUL, {}), []
    if begun.get("problems") == "test":
        asked = begun["results"]["every"]["accuracy"]
        rows.append(("the start", *["–"] * 5, *(percent(asked[key][0]) for key in shares)))
    for name, cells in methods([cell for cell in begun_careful(found) if "test" in cell]).items():
        gains = [signed(statistics.fmean(cell["test"][key][0] for cell in cells)) for key in
                 ("thought_gain", "empty_gain", "random_gain")]  # fmt: skip
        other = statistics.fmean(cell["test"]["thought_gain"][0] - cell["test"]["content_gain"][0] for cell in cells)
        known = [cell["accuracy"]["results"]["every"]["accuracy"] for cell in answered(cells)]
        right = [percent(statistics.fmean(one[key][0] for one in known)) if known else "–" for key in shares]
        rows.append((name, str(len(cells)), *gains, signed(other), *right))
    return drawn((*head, "right after own, %", "without", "nothing", "random tokens", "another's"), rows)


def answered(cells: Sequence[Cell]) -> list[Cell]:
    """The cells whose model answered the test problems."""
    return [cell for cell in cells if cell.get("accuracy", {}).get("problems") == "test"]


def over_problems(first: Sequence[str], second: Sequence[str], clusters: str) -> Estimate | None:
    """Right answers, mean over the verdicts of `first`, minus the mean over those of `second`, answer by answer, with
    the interval over problems; None where they are not of the same answers."""
    lengths = {len(one) for one in (*first, *second)}
    numbers = _numbers(clusters)[: min(lengths, default=0)]  # of a model that answered the first of them alone
    if not numbers or lengths != {len(numbers)}:
        return None
    totals, masses = [0.0] * (max(numbers) + 1), [0] * (max(numbers) + 1)
    for place, number in enumerate(numbers):
        own, other = (statistics.fmean(int(one[place]) for one in side) for side in (first, second))
        totals[number] += own - other
        masses[number] += 1
    return over_clusters(totals, masses)


def verdicts(cells: Sequence[Cell], condition: str) -> list[str]:
    """Which answers of each cell were right after such a thought."""
    return [cell["accuracy"]["verdicts"][condition] for cell in cells]


def seeds_answers(found: dict[str, Any]) -> str:
    """Right answers to the test problems in per cent, and paired with the start's."""
    head = ("model", "seeds", "own", "95 % over seeds", "sampled", "without", "true working", "own − without")
    tail = ("own, minus the start's (95 % over seeds)", "95 % over problems", "sampled, minus the start's", "95 %")
    start, clusters = found.get("accuracy", {}).get(CAREFUL), found.get("clusters", {}).get("test", "")
    if start is not None and start.get("problems") != "test":
        start = None
    rows = []
    if start is not None:
        every = start["results"]["every"]["accuracy"]
        own, *others = (every[name][0] for name in ("own", "sampled", "none", "true"))
        known = (percent(own), "–", *map(percent, others), points_of(own - every["none"][0]))
        rows.append(("after careful reading", "–", *known, *["–"] * len(tail)))
    groups = methods(answered(begun_careful(found)))
    for name, cells in groups.items():
        every = [cell["accuracy"]["results"]["every"]["accuracy"] for cell in cells]
        values = {key: [one[key][0] for one in every] for key in ("own", "sampled", "none", "true")}
        means = [percent(statistics.fmean(values[key])) for key in values]
        row = [name, str(len(cells)), means[0], _half(over_seeds(values["own"]), percent), *means[1:]]
        row.append(_told([a - b for a, b in zip(values["own"], values["none"])], points_of))
        for key in ("own", "sampled"):
            begun = None if start is None else start["results"]["every"]["accuracy"][key][0]
            row.append("–" if begun is None else _told([one - begun for one in values[key]], points_of))
            begun_with = [] if start is None else [start["verdicts"][key]]
            over = over_problems(verdicts(cells, key), begun_with, clusters) if begun_with else None
            row.append("–" if over is None else _half(over, points_of))
        rows.append(tuple(row))
    return drawn((*head, *tail), rows)


def at_or_before(cell: Cell, key: str, most: float) -> dict[str, Any]:
    """The last measurement whose cost is within the budget; the first one costs nothing."""
    return [one for one in cell["measured"] if one.get(key, 0) <= most][-1]


def budget(cells: Sequence[Cell], key: str) -> float:
    """What every rewarded cell has spent at its last measurement; the control's cells where there is no other."""
    rewarded = [cell for cell in cells if cell["method"] != CONTROL] or cells
    return min(float(cell["measured"][-1].get(key, 0)) for cell in rewarded)


LEEWAY = 1.05
"""Cells end with the window that reaches the clock, so that none has spent just as much as another."""


def seeds_course(found: dict[str, Any]) -> str:
    """Development texts at equal seconds, actor thoughts and steps: each cell's last measurement within what every
    rewarded cell has spent and a twentieth more. Methods that were not measured so early are left out."""
    head = ("equal", "method, positions × thoughts", "seeds", "windows", "seconds", "actor thoughts", "steps")
    groups = methods([cell for cell in begun_careful(found) if cell["measured"][-1]["window"]])
    everything = [cell for cells in groups.values() for cell in cells]
    rows = []
    for key, words in CUTS.items() if everything else ():
        most = budget(everything, key)
        at = {
            name: [{**cell, "at": at_or_before(cell, key, LEEWAY * most)} for cell in cells]
            for name, cells in groups.items()
        }
        at = {name: cells for name, cells in at.items() if all(cell["at"]["window"] for cell in cells)}
        for name, cells in at.items() if len(at) > 1 else ():
            spent = [f"{statistics.fmean(cell['at'].get(one, 0) for cell in cells):,.0f}" for one in
                     ("window", "training_seconds", "actor_thoughts", "steps")]  # fmt: skip
            shown = [f"{words}, {most:,.0f}", name, str(len(cells)), *spent]
            for measure in ("thought_gain", "gain_vs_base", "content_gain"):
                values = by_seed(cells, "at", measure)
                shown.append(_told(list(values.values())))
                if measure == "gain_vs_base":
                    other = by_seed(control_of(cells, at), "at", measure)
                    shown.append(_told(apart(values, other)))
            rows.append(shown)
    return drawn((*head, "thought gain", "gain against the start", "minus the control", "content gain"), rows)


def seeds_critics(found: dict[str, Any]) -> str:
    """Held-out R² of the critics window by window, and where the window's advantages came from."""
    groups = {
        name: [cell for cell in cells if any("r2.1" in one for one in cell["windows"])]
        for name, cells in methods(begun_careful(found)).items()
    }
    numbers = sorted({cell["settings"]["run.seed"] for cells in groups.values() for cell in cells})
    rows = []
    for name, cells in groups.items():
        for window in sorted({one["window"] for cell in cells for one in cell["windows"]}):
            row = [name, str(window)]
            for seed in numbers:
                (*_, one) = ({}, *(one for cell in cells if cell["settings"]["run.seed"] == seed
                                   for one in cell["windows"] if one["window"] == window))  # fmt: skip
                known = [signed(one[key]) for key in ("r2.1", "r2.2") if key in one]
                credit = [CREDITS[one["credit"]]] if "credit" in one else []
                row.append(", ".join([" / ".join(known), *credit]) if known else "–")
            rows.append(row)
    return drawn(("method, positions × thoughts", "window", *(f"R², seed {seed}" for seed in numbers)), rows)


def best_rate(cells: Sequence[Cell]) -> float:
    """The rate whose cells of the search gain most against the start, mean over methods; only rates that every method
    was run with, to its end, are weighed."""
    found: dict[float, dict[str, float]] = {}
    for cell in cells:
        if "test" in cell and cell["measured"][-1]["window"]:
            rate = float(cell["settings"]["optimizer.lr"])
            found.setdefault(rate, {})[cell["method"]] = cell["measured"][-1]["gain_vs_base"][0]
    asked = {cell["method"] for cell in cells}
    whole = {rate: statistics.fmean(gains.values()) for rate, gains in found.items() if set(gains) == asked}
    if not whole:
        raise UserError(f"no rate was run to its end with all of {', '.join(sorted(asked))}; run the search again")
    return max(whole, key=lambda rate: whole[rate])


SEED_TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "seeds": seeds, "seeds_apart": seeds_apart, "seeds_cost": seeds_cost, "seeds_lazy": seeds_lazy,
    "seeds_answers": seeds_answers, "seeds_course": seeds_course,
    "seeds_critics": seeds_critics,
}  # fmt: skip

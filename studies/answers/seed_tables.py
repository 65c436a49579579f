"""Tables of the methods over several seeds, all from careful reading: gains on test texts, the course at equal seconds,
thoughts and steps, and what the critics knew.

Cells of seed 0 searched the rate and are told by themselves. Every row says how many seeds it has, and which where
methods have different ones; methods and seeds that are missing are left out.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from estimates import Cell, apart, by_seed, common, over_texts
from forms import CAREFUL, NAMES, PILOT, anchor_rate, interval, parts, plain, seed_of, signed, title, told

from tfive.errors import UserError
from tfive_lab.estimates import over_seeds
from tfive_lab.study_tables import drawn

CONTROL = "anchor-only"
GAINS = {"thought_gain": "thought gain", "gain_vs_base": "gain against the start", "content_gain": "content gain",
         "no_thought_loss": "loss without"}  # fmt: skip
CUTS = {"training_seconds": "seconds", "actor_thoughts": "actor thoughts", "steps": "steps"}
CREDITS = {"qualified": "admitted", "slipped": "slipped through", "untested": "untested", "baseline": "batch baseline"}
BEGUN = "begun"
"""In a cell: what its start is called in the results, where it is not the one that most cells of the table have."""


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


class Start(NamedTuple):
    """A model that cells began with."""

    name: str
    """What it is called in the results."""
    seeds: str
    """Of which seeds the cells are; nothing where there is no other start."""


def start_of(cell: Cell) -> str:
    """What the start of a cell is called in the results."""
    return str(cell.get(BEGUN, CAREFUL))


def starts(cells: Sequence[Cell]) -> list[Start]:
    """The starts of some cells in the order of seeds; the usual one where there are no cells."""
    found: dict[str, list[str]] = {}
    for cell in sorted(cells, key=lambda one: one["settings"]["run.seed"]):
        numbers = found.setdefault(start_of(cell), [])
        numbers += [seed_of(cell)] if seed_of(cell) not in numbers else []
    if len(found) < 2:
        return [Start(name, "") for name in found or (CAREFUL,)]
    return [Start(name, ", ".join(numbers)) for name, numbers in found.items()]


def ended(found: dict[str, Any]) -> dict[str, list[Cell]]:
    """The cells that were measured on test texts, by method."""
    return methods([cell for cell in begun_careful(found) if "test" in cell and "test_start" in cell])


def which_seeds(cells: Sequence[Cell], groups: Iterable[Sequence[Cell]]) -> str:
    """How many seeds a row has, and which where the methods of the table have different ones."""
    if len({tuple(seed_of(cell) for cell in group) for group in groups}) < 2:
        return str(len(cells))
    return f"{len(cells)} ({', '.join(seed_of(cell) for cell in cells)})"


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


def _rank(cell: Cell) -> tuple[Any, ...]:
    settings = cell["settings"]
    place = list(NAMES).index(cell["method"])
    return (place, -settings["window.items"], settings["group"], parts(cell), settings["optimizer.lr"],
            anchor_rate(cell))  # fmt: skip


def control_of(cells: Sequence[Cell], groups: dict[str, list[Cell]]) -> list[Cell]:
    """The control of a method: that with the same positions where there is one, else the first; none of itself."""
    if cells[0]["method"] == CONTROL:
        return []
    controls = [group for group in groups.values() if group[0]["method"] == CONTROL]
    items = cells[0]["settings"]["window.items"]
    same = [group for group in controls if group[0]["settings"]["window.items"] == items]
    return (same or controls or [[]])[0]


def seeds(found: dict[str, Any]) -> str:
    """Test texts: each measure of each method over its seeds, and its difference to the control, seed by seed and text
    by text."""
    head = ("measure", "method, positions × thoughts", "seeds", "mean", "95 % over seeds", "95 % over texts")
    groups = methods([cell for cell in begun_careful(found) if "test" in cell])
    rows = []
    for measure, words in GAINS.items():
        form = plain if measure == "no_thought_loss" else signed
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
            shown = (form(mean), interval((mean, half), form), "–" if texts is None else interval(texts, form))
            rows.append((words, name, str(len(cells)), *shown, told(less), "–" if paired is None else interval(paired)))
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
            rows.append((words, name, "the start", str(len(cells)), told(tested), "–", told(grown)))
        rewarded = [(name, cells) for name, cells in groups.items() if cells[0]["method"] != CONTROL]
        for (name, cells), (other, others) in pairwise(rewarded):
            less = apart(by_seed(cells, "test", measure), by_seed(others, "test", measure))
            both = common(cells, others)
            paired = over_texts(both[0], measure, both[1]) if both[0] else None
            rows.append(
                (words, name, other, str(len(less)), told(less), "–" if paired is None else interval(paired), "–")
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
        finished = f"{sum('test' in cell for cell in cells)} of {len(cells)}"
        which = ", ".join(seed_of(cell) for cell in cells)
        rows.append((name, which, f"{cells[0]['settings']['optimizer.lr']:g}", finished, *spent))
    return drawn((*head, "thoughts of every role", "their tokens", "seconds of training"), rows)


def at_or_before(cell: Cell, key: str, most: float) -> dict[str, Any]:
    """The last measurement whose cost is within the budget; the first one costs nothing."""
    return [one for one in cell["measured"] if one.get(key, 0) <= most][-1]


def budget(cells: Sequence[Cell], key: str) -> float:
    """What every rewarded cell has spent at its last measurement; the control's cells where there is no other."""
    rewarded = [cell for cell in cells if cell["method"] != CONTROL] or cells
    return min(float(cell["measured"][-1].get(key, 0)) for cell in rewarded)


def budgets(cells: Sequence[Cell], key: str) -> dict[int, float]:
    """The budget of each seed by itself: a slower seed, or one under a shorter clock, cuts no other one short."""
    found: dict[int, list[Cell]] = {}
    for cell in cells:
        found.setdefault(cell["settings"]["run.seed"], []).append(cell)
    return {seed: budget(own, key) for seed, own in found.items()}


def budget_told(cells: Sequence[Cell], most: dict[int, float]) -> str:
    """The least budget of the seeds; where cells have several starts that of each one's seeds, unless they agree."""
    least: dict[str, float] = {}
    for cell in sorted(cells, key=lambda one: one["settings"]["run.seed"]):
        own = most[cell["settings"]["run.seed"]]
        least[start_of(cell)] = min(own, least.get(start_of(cell), own))
    return " / ".join(dict.fromkeys(f"{one:,.0f}" for one in least.values()))


LEEWAY = 1.05
"""Cells end with the window that reaches the clock, so that none has spent just as much as another."""


def cut(cell: Cell, key: str, most: dict[int, float]) -> Cell:
    """A cell that stands `at` its last measurement within the budget of its seed."""
    return {**cell, "at": at_or_before(cell, key, LEEWAY * most[cell["settings"]["run.seed"]])}


def seeds_course(found: dict[str, Any], *, left_out: tuple[str, ...] = (), control: bool = True) -> str:
    """Development texts at equal seconds, actor thoughts and steps: each cell's last measurement within what every
    rewarded cell of its seed has spent and a twentieth more. Methods that were not measured so early are left out, and
    so are the cuts of `left_out` and, without `control`, the differences to the control, where it has few seeds."""
    head = ("equal", "method, positions × thoughts", "seeds", "windows", "seconds", "actor thoughts", "steps")
    groups = methods([cell for cell in begun_careful(found) if cell["measured"][-1]["window"]])
    everything = [cell for cells in groups.values() for cell in cells]
    rows = []
    for key, words in CUTS.items() if everything else ():
        if key in left_out:
            continue
        most = budgets(everything, key)
        equal = f"{words}, {budget_told(everything, most)}"
        at = {name: [cut(cell, key, most) for cell in cells] for name, cells in groups.items()}
        at = {name: cells for name, cells in at.items() if all(cell["at"]["window"] for cell in cells)}
        for name, cells in at.items() if len(at) > 1 else ():
            spent = [f"{statistics.fmean(cell['at'].get(one, 0) for cell in cells):,.0f}" for one in
                     ("window", "training_seconds", "actor_thoughts", "steps")]  # fmt: skip
            shown = [equal, name, which_seeds(cells, at.values()), *spent]
            for measure in ("thought_gain", "gain_vs_base", "content_gain"):
                values = by_seed(cells, "at", measure)
                shown.append(told(list(values.values())))
                if measure == "gain_vs_base" and control:
                    other = by_seed(control_of(cells, at), "at", measure)
                    shown.append(told(apart(values, other)))
            rows.append(shown)
    beside = ("minus the control",) if control else ()
    return drawn((*head, "thought gain", "gain against the start", *beside, "content gain"), rows)


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
    """The rate whose cells of the search have the largest content gain, mean over methods; only rates that every method
    was run with, to its end, are weighed. (Gains against no thought also grow by reading, without better thoughts.)"""
    found: dict[float, dict[str, float]] = {}
    for cell in cells:
        if "test" in cell and cell["measured"][-1]["window"]:
            rate = float(cell["settings"]["optimizer.lr"])
            found.setdefault(rate, {})[cell["method"]] = cell["measured"][-1]["content_gain"][0]
    asked = {cell["method"] for cell in cells}
    whole = {rate: statistics.fmean(gains.values()) for rate, gains in found.items() if set(gains) == asked}
    if not whole:
        raise UserError(f"no rate was run to its end with all of {', '.join(sorted(asked))}; run the search again")
    return max(whole, key=lambda rate: whole[rate])


SEED_TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "seeds": seeds, "seeds_apart": seeds_apart, "seeds_cost": seeds_cost, "seeds_course": seeds_course,
    "seeds_critics": seeds_critics,
}  # fmt: skip

"""The study in one table, for those who read no other: right answers of every method beside what it began with."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from answer_tables import Model, answered, asked, asked_of, asked_starts, right_answers
from estimates import Cell
from forms import HISTORY, NAMES, PARTS, parts, percent, points_of
from long_tables import of_clock
from seed_tables import ended, start_of

from tfive_lab.study_tables import drawn

CROSSED = PARTS["window.crossed"][True]
T5 = "t5"


class Setting(NamedTuple):
    """Runs that differ by their method alone: what they are called, their clock, their seeds, and what T⁵ has in place
    of its usual parts."""

    name: str
    clock: str
    seeds: Sequence[int]
    t5: tuple[str, ...] = ()


SETTINGS = (
    Setting("64 tokens", "groups", range(3, 6)),
    Setting("128 tokens", "credit", range(13, 15), (HISTORY,)),
    Setting("128 tokens, paid on the way", "way", range(15, 19), (HISTORY,)),
    Setting("the same, T⁵ with `window.crossed`", "way", (*range(19, 23), 31), (HISTORY, CROSSED)),
    Setting("the same, 1.5B", "larger_way", range(23, 24), (HISTORY, CROSSED)),
    Setting("128 tokens, T⁵ with `window.crossed`, sheets of MATH as well", "both", range(30, 31), (HISTORY, CROSSED)),
    Setting("1.5B, 64 tokens", "larger", range(1, 2)),
)
BRIEF = tuple(
    next(one for one in SETTINGS if one.name == name)._replace(name=told)
    for name, told in (
        ("128 tokens, paid on the way", "0.5B"),
        ("the same, T⁵ with `window.crossed`", "0.5B, T⁵ with `window.crossed`"),
        ("the same, 1.5B", "1.5B, T⁵ with `window.crossed`"),
    )
)
"""What a visitor sees first: thoughts of 128 tokens, paid on the way."""
COLUMNS = ("anchor-only", "rlp", "quiet-star-grpo", "quiet-star-ppo", T5)


class Questions(NamedTuple):
    """What was asked: its name, the cells that were asked it, what one of them answered, and what a start did."""

    name: str
    cells: Callable[[Sequence[Cell]], list[Cell]]
    of_cell: Callable[[Cell], Model | None]
    of_start: Callable[[dict[str, Any], str], Model | None]


QUESTIONS = (
    Questions("fresh problems", answered, lambda cell: cell["accuracy"], right_answers),
    Questions(
        "GSM8K's test",
        lambda cells: asked(cells, "gsm8k"),
        asked_of,
        lambda found, start: asked_starts(found, "gsm8k").get(start),
    ),
)


def in_short(found: dict[str, Any], settings: Sequence[Setting] = SETTINGS) -> str:
    """Right answers in per cent after the model's own greedy thought, means over seeds; in brackets the rise above what
    these runs began with, and how many seeds, where a method has fewer than T⁵. Without a thought and with an empty one
    T⁵'s runs, before rewards their starts."""
    kind = "model" if settings is BRIEF else "thoughts"
    head = ("asked", kind, "seeds", "no thought", "empty thought", "before rewards")
    rows = []
    for questions in QUESTIONS:
        for setting in settings:
            known = of_clock(found, setting.clock)
            cells = of_setting(known, setting, questions)
            own = cells[T5]
            if own:
                ends, begun = models(questions, known, own)
                shown = [percent(share(ends, one)) for one in ("none", "empty")] + [percent(share(begun, "own"))]
                shown += [risen(*models(questions, known, cells[name]), usual=len(own)) for name in COLUMNS]
                rows.append((questions.name, setting.name, in_runs(setting.seeds), *shown))
    return drawn((*head, *(NAMES[name] for name in COLUMNS)), rows)


def in_runs(seeds: Sequence[int]) -> str:
    """Seeds in words, those that follow each other by the first and the last of them."""
    found: list[list[int]] = []
    for seed in seeds:
        if found and seed == found[-1][-1] + 1:
            found[-1].append(seed)
        else:
            found.append([seed])
    return ", ".join(f"{one[0]} to {one[-1]}" if len(one) > 1 else str(one[0]) for one in found)


def of_setting(known: dict[str, Any], setting: Setting, questions: Questions) -> dict[str, list[Cell]]:
    """By method the cells of a setting that were asked."""
    cells = [cell for group in ended(known).values() for cell in group if cell["settings"]["run.seed"] in setting.seeds]
    found: dict[str, list[Cell]] = {name: [] for name in COLUMNS}
    for cell in questions.cells(cells):
        if parts(cell) == setting.t5 or (cell["method"] != T5 and parts(cell) in ((), (HISTORY,))):
            found[cell["method"]].append(cell)
    return found


def models(questions: Questions, known: dict[str, Any], cells: Sequence[Cell]) -> tuple[list[Model], list[Model]]:
    """What cells answered, and what the starts did that each began with."""
    ends = [questions.of_cell(cell) for cell in cells]
    begun = [questions.of_start(known, start_of(cell)) for cell in cells]
    return [one for one in ends if one is not None], [one for one in begun if one is not None]


def share(answers: Sequence[Model], condition: str) -> float:
    """The mean share of right answers after such a thought."""
    return statistics.fmean(one["results"]["every"]["accuracy"][condition][0] for one in answers)


def right(answers: Sequence[Model]) -> float:
    """The mean share of right answers after the own thought, counted: stored shares are rounded, and differences of
    rounded shares would not be those of the other tables."""
    return statistics.fmean(one["verdicts"]["own"].count("1") / len(one["verdicts"]["own"]) for one in answers)


def risen(ends: Sequence[Model], begun: Sequence[Model], usual: int) -> str:
    """A method's share, how far it rose above that of its own starts, and its seeds where they are fewer than usual."""
    if not ends:
        return "–"
    rise = points_of(right(ends) - right(begun)) if len(begun) == len(ends) else "–"
    fewer = f"; {len(ends)} {'seeds' if len(ends) > 1 else 'seed'}" if len(ends) < usual else ""
    return f"{percent(share(ends, 'own'))} ({rise}{fewer})"

"""What the study's tables estimate of cells: what pairs of them differ by, text by text or answer by answer.

What is paired is always of one seed: seeds may have other starts, and cells other positions.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from tfive_lab.estimates import Estimate, Sums, over_clusters

Cell = dict[str, Any]


def by_seed(cells: Sequence[Cell], where: str, measure: str) -> dict[int, float]:
    """A measure of each cell, of its test texts or of the measurement that it stands `at`, by the cell's seed."""
    return {cell["settings"]["run.seed"]: cell[where][measure][0] for cell in cells}


def apart(first: Mapping[int, float], second: Mapping[int, float]) -> list[float]:
    """Differences on the seeds that both have."""
    return [first[seed] - second[seed] for seed in first if seed in second]


def common(first: Sequence[Cell], second: Sequence[Cell]) -> tuple[list[Cell], list[Cell]]:
    """The cells of both whose seed the other has, too, in the order of seeds: those at one place are a pair."""
    one, two = ({cell["settings"]["run.seed"]: cell for cell in group} for group in (first, second))
    both = sorted(one.keys() & two.keys())
    return [one[seed] for seed in both], [two[seed] for seed in both]


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split()]


_START = {"gain_vs_base": 1, "thought_gain": -1, "no_thought_loss": 1}
"""How the start's loss without a thought follows from what is kept."""
SAME = 0.002
"""Nats a token by which the losses of one position by the same weights may differ, computed in other company."""


def shared_texts(first: Cell, second: Cell) -> list[int]:
    """The numbers of the test texts of which both have measured the same positions: all where the digest says so, else
    those where the start, one for both, loses the same without a thought. (How many texts other roles have can move
    positions.)"""
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


def text_sums(cell: Cell, measure: str, other: Cell | None = None) -> Sums:
    """A measure of each test text; minus the `other`'s of the same seed, of the texts that they share, where one is
    given. Nothing where it was not kept."""
    pair = [cell] if other is None else [cell, other]
    if not all(measure in one.get("by_text", {}) for one in pair):
        return {}
    items = _numbers(cell["by_text"]["items"])
    texts = list(range(len(items))) if other is None else shared_texts(cell, other)
    own, *others = (_numbers(one["by_text"][measure]) for one in pair)
    return {text: ((own[text] - sum(one[text] for one in others)) / 1e4, items[text]) for text in texts}


def each_texts(cells: Sequence[Cell], measure: str, others: Sequence[Cell] = ()) -> list[Sums]:
    """Seed by seed the sums of `text_sums`; nothing where a seed has none. `others` are in the order of `cells`."""
    if others:
        each = [text_sums(cell, measure, other) for cell, other in zip(cells, others, strict=True)]
    else:
        each = [text_sums(cell, measure) for cell in cells]
    return each if all(each) else []


def over_texts(cells: Sequence[Cell], measure: str, others: Sequence[Cell] = ()) -> Estimate | None:
    """Mean over seeds with its interval over texts; minus the `others`, seed by seed and text by text, where they are
    given."""
    each = each_texts(cells, measure, others)
    return over_clusters(each) if each else None


def over_problems(first: Sequence[str], second: Sequence[str], clusters: str) -> Estimate | None:
    """Right answers, mean over the verdicts of `first`, minus the mean over those of `second`, answer by answer, with
    the interval over problems; None where they are not of the same answers."""
    lengths = {len(one) for one in (*first, *second)}
    numbers = _numbers(clusters)[: min(lengths, default=0)]  # of a model that answered the first of them alone
    if not numbers or lengths != {len(numbers)}:
        return None
    sums: Sums = {}
    for place, number in enumerate(numbers):
        own, other = (statistics.fmean(int(one[place]) for one in side) for side in (first, second))
        total, mass = sums.get(number, (0.0, 0))
        sums[number] = (total + own - other, mass + 1)
    return over_clusters([sums])


def verdicts_apart(first: Sequence[str], second: Sequence[str]) -> list[float]:
    """Seed by seed the share of right answers, minus that of the other of the pair."""
    shares = [[statistics.fmean(map(int, one)) for one in side] for side in (first, second)]
    return [own - other for own, other in zip(*shares, strict=True)]

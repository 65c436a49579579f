"""How far pairs of cells lie apart from seed to seed, and how many pairs it takes to show a difference of some size."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from answer_tables import answered, verdicts
from estimates import Cell, common, each_texts, verdicts_apart
from forms import interval, points_of, signed
from scipy.special import stdtrit
from seed_tables import ended

from tfive_lab.estimates import over_seeds, ratio
from tfive_lab.study_tables import drawn

POWER = 0.8
"""How often a difference of the size asked for is to be told apart from none, at 95 %."""
MOST = 10_000


def pairs_needed(deviation: float, difference: float) -> int:
    """Pairs of seeds after which a true `difference` is told apart from none with `POWER`, where pairs scatter by
    `deviation`: the usual approximation with Student's quantiles."""
    for pairs in range(2, MOST):
        quantiles = stdtrit(pairs - 1, 0.975) + stdtrit(pairs - 1, POWER)
        if difference >= quantiles * deviation / pairs**0.5:
            return pairs
    raise ValueError(f"more than {MOST} pairs")


def seeds_needed(found: dict[str, Any]) -> str:
    """T⁵ minus GRPO over all seeds of one kind of clock, whatever the form of T⁵: mean, scatter, and how many
    pairs it would take to show a difference of 0.01 nats a token, or of one point."""
    groups = ended(found)
    ours = [cell for cells in groups.values() for cell in cells if cell["method"] == "t5"]
    theirs = [cell for cells in groups.values() for cell in cells if cell["method"] == "quiet-star-grpo"]
    own, other = common(ours, theirs)

    def texts(measure: str) -> Sequence[float]:
        return [ratio(one) for one in each_texts(own, measure, other)]

    def right(condition: str) -> Sequence[float]:
        both: tuple[list[Cell], list[Cell]] = answered(own), answered(other)
        return verdicts_apart(verdicts(both[0], condition), verdicts(both[1], condition))

    asked: Sequence[tuple[str, Sequence[float], float, Callable[[float], str]]] = (
        ("gain against the start", texts("gain_vs_base"), 0.01, signed),
        ("content gain", texts("content_gain"), 0.01, signed),
        ("right after own, points", right("own"), 0.01, points_of),
        ("right after a sampled one, points", right("sampled"), 0.01, points_of),
    )
    rows = []
    for words, values, size, form in (one for one in asked if len(one[1]) > 1):
        mean, deviation = over_seeds(values), statistics.stdev(values)
        shown = form(deviation).removeprefix("+")
        needed = str(pairs_needed(deviation, size))
        rows.append([words, str(len(values)), form(mean[0]), interval(mean, form), shown, needed])
    head = ("T⁵ minus GRPO", "pairs of seeds", "mean", "95 % over seeds", "standard deviation of a pair")
    return drawn((*head, "pairs that would show 0.01, or one point"), rows)

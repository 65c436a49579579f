"""Scores with their uncertainty: pass@k, means with item-level bootstrap intervals, and two runs compared item by item.

Items are the units that are resampled; the samples of one item stay together, since they share its difficulty. A
bootstrap resample of a mean depends only on how often each distinct value occurs, so resamples are drawn as multinomial
counts: the same distribution as drawing items, far cheaper. Draws depend on `seed` alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri, stdtrit

RESAMPLES = 10_000


@dataclass(frozen=True)
class ScoreInterval:
    """A mean over items and its confidence interval."""

    mean: float
    low: float
    high: float
    items: int
    confidence: float = 0.95


@dataclass(frozen=True)
class McNemar:
    """Items on which exactly one of two runs is right, and the exact two-sided probability of so uneven a split."""

    only_a: int
    only_b: int
    p_value: float


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that k of n outputs drawn without replacement hold one of the c right ones: 1 − C(n−c, k)/C(n, k)."""
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@{k} of {c} right among {n}: needs 0 ≤ right ≤ n and 1 ≤ k ≤ n")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


Bounds = tuple[float, float] | None
"""What an item's value can be: a score lies in SCORE, a difference of two in DIFFERENCE, a length anywhere (None)."""
SCORE: Bounds = (0.0, 1.0)
DIFFERENCE: Bounds = (-1.0, 1.0)


def mean_with_interval(
    values: Sequence[float],
    *,
    bounds: Bounds = SCORE,
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> ScoreInterval:
    """Mean of one value per item with its bootstrap interval over items."""
    array = _checked(values)
    mean, least, most = float(array.mean()), float(array.min()), float(array.max())
    low, high = _percentiles(_resampled_means(array, resamples, seed, confidence), confidence)
    if bounds is not None:
        if not bounds[0] <= least <= most <= bounds[1]:
            raise ValueError(f"values between {least:g} and {most:g}; they should lie in {bounds[0]:g} … {bounds[1]:g}")
        low, high = max(low, bounds[0]), min(high, bounds[1])
        if least == most:
            # Resampling items that all agree shows no spread; the exact binomial bound on how many others there are
            # does, and those may lie as far away as the bounds.
            reach = 1 - ((1 - confidence) / 2) ** (1 / len(array))
            low, high = mean - reach * (mean - bounds[0]), mean + reach * (bounds[1] - mean)
    return ScoreInterval(mean, low, high, len(array), confidence)


def paired_bootstrap(
    a: Sequence[float],
    b: Sequence[float],
    *,
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> ScoreInterval:
    """Mean difference a − b of two scores over the items both runs answered, with its bootstrap interval.

    Items are resampled in pairs.
    """
    if len(a) != len(b):
        raise ValueError(f"{len(a)} and {len(b)} values; a paired comparison needs the same items")
    difference = np.asarray(a, np.float64) - np.asarray(b, np.float64)
    return mean_with_interval(
        difference.tolist(), bounds=DIFFERENCE, confidence=confidence, resamples=resamples, seed=seed
    )


def mcnemar(a: Sequence[bool], b: Sequence[bool]) -> McNemar:
    """The exact McNemar test of two runs on the same items."""
    if len(a) != len(b):
        raise ValueError(f"{len(a)} and {len(b)} verdicts; a paired comparison needs the same items")
    only_a = sum(bool(x) and not y for x, y in zip(a, b))
    only_b = sum(bool(y) and not x for x, y in zip(a, b))
    trials, fewer = only_a + only_b, min(only_a, only_b)
    tail = sum(math.comb(trials, count) for count in range(fewer + 1))
    # Whole numbers are divided, so thousands of items neither overflow nor lose digits.
    return McNemar(only_a, only_b, min(1.0, 2 * tail / 2**trials))


def suite_mean(
    tasks: Mapping[str, Sequence[float]], *, confidence: float = 0.95, resamples: int = RESAMPLES, seed: int = 0
) -> ScoreInterval:
    """Unweighted mean of the tasks' means; every task's items are resampled by themselves.

    Items that all agree show no spread; their task then draws what none (or all) of n leaves open, 1 − U^(1/n), whose
    upper quantile is the exact bound that the task has by itself. It moves only the end of the interval it lies on.
    """
    if not tasks:
        raise ValueError("no tasks to average")
    arrays = [_checked(values) for values in tasks.values()]
    below, above = np.zeros(resamples), np.zeros(resamples)
    for number, array in enumerate(arrays):
        draws = _resampled_means(array, resamples, seed + number, confidence)
        generator = np.random.Generator(np.random.Philox(key=seed + number))
        unseen = 1 - generator.random(resamples) ** (1 / len(array))
        below += draws - (unseen if array.min() == 1 else 0)
        above += draws + (unseen if array.max() == 0 else 0)
    low, high = _percentiles(below / len(arrays), confidence)[0], _percentiles(above / len(arrays), confidence)[1]
    mean = float(np.mean([array.mean() for array in arrays]))
    return ScoreInterval(mean, max(low, 0.0), min(high, 1.0), sum(map(len, arrays)), confidence)


def _checked(values: Sequence[float]) -> npt.NDArray[np.float64]:
    array = np.asarray(values, np.float64)
    if array.ndim != 1 or not len(array) or not np.isfinite(array).all():
        raise ValueError("one finite number per item, and at least one item")
    return array


def _resampled_means(
    array: npt.NDArray[np.float64], resamples: int, seed: int, confidence: float
) -> npt.NDArray[np.float64]:
    """Means of resamples, their spread widened by the small-sample factor."""
    distinct, counts = np.unique(array, return_counts=True)
    generator = np.random.Generator(np.random.Philox(key=seed))
    drawn = generator.multinomial(len(array), counts / len(array), size=resamples)
    means = drawn @ distinct / len(array)
    widened: npt.NDArray[np.float64] = array.mean() + (means - array.mean()) * _small_sample(len(array), confidence)
    return widened


def _small_sample(items: int, confidence: float) -> float:
    """Factor by which a bootstrap interval of n items is too narrow: √(n/(n−1)) · t(n−1)/z, 1.06 for 30 items.

    The root corrects the variance of resamples, which is (n−1)/n of the sample variance; Student's quantile t stands in
    for the normal one z. A single item shows no spread to widen.
    """
    if items < 2:
        return 1.0
    quantile = (1 + confidence) / 2
    return math.sqrt(items / (items - 1)) * float(stdtrit(items - 1, quantile) / ndtri(quantile))


def _percentiles(draws: npt.NDArray[np.float64], confidence: float) -> tuple[float, float]:
    tail = 100 * (1 - confidence) / 2
    low, high = np.percentile(draws, [tail, 100 - tail])
    return float(low), float(high)

"""Intervals for numbers that vary with the seed and with the text: a bootstrap over both at once.

All runs of a study are measured on the same items of the same texts, so seeds and texts are crossed: each replicate
draws seeds with replacement and, independently, texts with replacement, and takes every chosen seed on every chosen
text. A difference of two methods is taken item by item and seed by seed first, so what they share cancels.

A bootstrap over three seeds underestimates how seeds vary: its 95 % interval covers the truth about 75 % of the time.
So each replicate's deviation due to seeds is widened by Student's factor for few samples; texts are many and need none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri, stdtrit

from tfive.rng import uniforms

REPLICATES = 2000
CONFIDENCE = 0.95
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class SeedInterval:
    """A mean over seeds and items with its 95 % bootstrap interval."""

    mean: float
    low: float
    high: float
    seeds: int
    texts: int

    def rounded(self) -> dict[str, float | int]:
        """As plain data, to six decimals."""
        ends = {name: round(float(getattr(self, name)), 6) for name in ("mean", "low", "high")}
        return {**ends, "seeds": self.seeds, "texts": self.texts}


def _weights(count: int, what: str, replicates: int) -> Floats:
    """How often each of `count` units is drawn in each replicate, `[replicates, count]`."""
    numbers = uniforms(0, f"bootstrap/{what}", 0, np.arange(replicates)[:, None], np.arange(count)[None, :])
    drawn = np.minimum((numbers * count).astype(np.int64), count - 1)
    weights = np.zeros((replicates, count))
    np.add.at(weights, (np.arange(replicates)[:, None], drawn), 1.0)
    return weights


def _seed_weights(seeds: int, replicates: int) -> Floats:
    """Weight of each seed in each replicate `[replicates, seeds]`: its draws, their spread around 1 widened."""
    return 1 + student_widening(seeds) * (_weights(seeds, "seeds", replicates) - 1)


def student_widening(seeds: int) -> float:
    """√(n/(n−1)) times Student's quantile over the normal one; 1 for a single seed, which shows no spread to widen."""
    if seeds < 2:
        return 1.0
    quantile = (1 + CONFIDENCE) / 2
    return math.sqrt(seeds / (seeds - 1)) * float(stdtrit(seeds - 1, quantile) / ndtri(quantile))


def mean_interval(value_SI: Floats, text_I: npt.NDArray[np.integer], replicates: int = REPLICATES) -> SeedInterval:
    """The mean of one number per seed and item, e.g. a gain, an indicator, or a paired difference of gains."""
    texts, index_I = np.unique(text_I, return_inverse=True)
    seeds = len(value_SI)
    sums_SJ = np.zeros((seeds, len(texts)))
    for seed, value_I in enumerate(value_SI):
        np.add.at(sums_SJ[seed], index_I, value_I)
    count_J = np.bincount(index_I, minlength=len(texts)).astype(np.float64)
    by_seed, by_text = _seed_weights(seeds, replicates), _weights(len(texts), "texts", replicates)
    total = np.einsum("bs,sj,bj->b", by_seed, sums_SJ, by_text)
    return _interval(float(value_SI.mean()), total / (seeds * (by_text @ count_J)), seeds, len(texts))


def worst_interval(
    value_SI: Floats, text_I: npt.NDArray[np.integer], share: float = 0.01, replicates: int = REPLICATES
) -> SeedInterval:
    """The mean of the worst `share` of items (one at least) of each seed, averaged over seeds."""
    texts, index_I = np.unique(text_I, return_inverse=True)
    by_text = np.concatenate([np.ones((1, len(texts))), _weights(len(texts), "texts", replicates)])
    worst_SB = np.stack([_worst(value_I, by_text[:, index_I], share) for value_I in value_SI])
    by_seed = _seed_weights(len(value_SI), replicates)
    found_B = np.einsum("bs,sb->b", by_seed, worst_SB[:, 1:]) / len(value_SI)
    return _interval(float(worst_SB[:, 0].mean()), found_B, len(value_SI), len(texts))


def _worst(value_I: Floats, weight_BI: Floats, share: float) -> Floats:
    """Weighted mean of the lowest items, whose weights add up to the share of all (rounded down, one at least)."""
    order_I = np.argsort(value_I, kind="stable")
    weight_BI = weight_BI[:, order_I]
    wanted_B = np.maximum(1.0, np.floor(weight_BI.sum(1) * share))
    before_BI = weight_BI.cumsum(1) - weight_BI
    taken_BI = np.clip(wanted_B[:, None] - before_BI, 0.0, weight_BI)
    worst: Floats = (taken_BI * value_I[order_I]).sum(1) / wanted_B
    return worst


def _interval(mean: float, found_B: Floats, seeds: int, texts: int) -> SeedInterval:
    low, high = np.quantile(found_B, ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2))
    return SeedInterval(mean, float(low), float(high), seeds, texts)


def rolling_median(values: list[float], width: int = 15) -> list[float]:
    """The median of each value and up to `width − 1` before it."""
    return [float(np.median(values[max(0, end - width) : end])) for end in range(1, len(values) + 1)]

"""Means over seeds and over clusters (texts, problems) with their 95 % intervals, as the studies' tables have them.

Intervals over seeds are Student's with n − 1 degrees of freedom; those over clusters are of the mean over the seeds
there are.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from scipy.special import stdtrit

Estimate = tuple[float, float | None]
"""A mean, and half of its 95 % interval where there is one."""
Sums = dict[int, tuple[float, float]]
"""By the number of a cluster the sum of a measure over its items, and how many items it has."""


def over_seeds(values: Sequence[float]) -> Estimate:
    """Mean and Student's interval; one seed has none."""
    if len(values) < 2:
        return statistics.fmean(values), None
    error = statistics.stdev(values) / len(values) ** 0.5
    return statistics.fmean(values), float(stdtrit(len(values) - 1, 0.975)) * error


def over_clusters(each: Sequence[Sums]) -> Estimate:
    """The mean over seeds of each one's ratio of sums, and its normal interval, clusters independent: for one seed as
    `tfive.rl.clusters` has it. What a cluster does in several seeds is added up before it is squared."""
    means = [ratio(sums) for sums in each]
    moved: dict[int, float] = {}
    for sums, mean in zip(each, means):
        whole = sum(mass for _, mass in sums.values()) * len(each)
        for number, (total, mass) in sums.items():
            moved[number] = moved.get(number, 0.0) + (total - mean * mass) / whole
    count = len(moved)
    half = None if count < 2 else 1.96 * (sum(one**2 for one in moved.values()) * count / (count - 1)) ** 0.5
    return statistics.fmean(means), half


def ratio(sums: Sums) -> float:
    """The mean over the items of all clusters."""
    totals, masses = zip(*sums.values())
    return float(sum(totals) / sum(masses))

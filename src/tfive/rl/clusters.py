"""Means with standard errors that are clustered by text: positions of one text are not independent."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Estimate:
    """A mean, its text-clustered standard error and the number of texts behind it."""

    mean: float
    error: float
    units: int

    def interval(self, z: float = 1.959963984540054) -> tuple[float, float]:
        """The normal interval mean ± z·error (95 % by default)."""
        return self.mean - z * self.error, self.mean + z * self.error


def cluster_sums(value_N: Tensor, weight_N: Tensor, cluster_N: Tensor) -> tuple[Tensor, Tensor]:
    """Per cluster: Σ weight·value and Σ weight, in float64, in the order of the sorted cluster numbers."""
    _, index = torch.unique(cluster_N, return_inverse=True)
    count = int(index.max()) + 1 if index.numel() else 0
    total = torch.zeros(count, dtype=torch.float64, device=value_N.device)
    mass = torch.zeros_like(total)
    weight = weight_N.double()
    total.index_add_(0, index, weight * value_N.double())
    mass.index_add_(0, index, weight)
    return total, mass


def clustered_mean(value_N: Tensor, cluster_N: Tensor, weight_N: Tensor | None = None) -> Estimate:
    """The weighted mean over all rows and its standard error with clusters as the independent units.

    A ratio estimator: residuals ``Σ weight·(value − mean)`` per cluster, with the J/(J−1) correction for J clusters.
    Equal clusters reduce it to the standard error of the cluster means. With one cluster
    the error is infinite. Paired differences are this function on the differences.
    """
    weight_N = torch.ones_like(value_N, dtype=torch.float64) if weight_N is None else weight_N
    total, mass = cluster_sums(value_N, weight_N, cluster_N)
    all_mass = float(mass.sum())
    if all_mass <= 0:
        raise ValueError("a clustered mean needs rows with positive weight")
    mean = float(total.sum()) / all_mass
    units = int((mass > 0).sum())
    if units < 2:
        return Estimate(mean, math.inf, units)
    residual = total - mean * mass
    error = math.sqrt(float(residual.square().sum()) * units / (units - 1)) / all_mass
    return Estimate(mean, error, units)

"""Estimators of the offset R and of the drift it causes: the covariance and mean-induced parts of the clipped PPO
update (eq:ppo-drift-decomposition) on probe contexts.

A probe context is one prefix with M ≥ 2 independent continuations, each with its advantage and its update factor
v = ρ·I·∇log π (with respect to D numbers: some parameters, or a projection of them). A product of two *sample means* is
biased by the noise they share, so every product below pairs different continuations: the average over all ways to split
the continuations in halves.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tfive.rl.clusters import Estimate, clustered_mean
from tfive.rl.losses import active_mask


def update_factor(ratio: Tensor, advantage: Tensor, score_D: Tensor, low: float, high: float) -> Tensor:
    """v = ρ·I·u of eq:clipped-token-gradient, [..., D], with the mask of this very advantage (eq:ppo-active-mask)."""
    active = active_mask(ratio, advantage, low, high).to(ratio.dtype)
    return (ratio * active).unsqueeze(-1) * score_D


@dataclass(frozen=True)
class DriftParts:
    """Per context, [N, D]: the whole update, its mean-induced part μ_Ã·μ_v and its covariance part, each unbiased."""

    total_ND: Tensor
    mean_induced_ND: Tensor
    covariance_ND: Tensor


def drift_parts(advantage_NM: Tensor, factor_NMD: Tensor) -> DriftParts:
    """Unbiased split of E[Ãv | s] (eq:ppo-drift-decomposition) from M continuations of each context."""
    count = _at_least(advantage_NM.shape[-1], 2)
    products = torch.einsum("nm,nmd->nd", advantage_NM, factor_NMD)
    crossed = advantage_NM.sum(-1, keepdim=True) * factor_NMD.sum(-2) - products
    total = products / count
    mean_induced = crossed / (count * (count - 1))
    return DriftParts(total, mean_induced, total - mean_induced)


def mean_induced_square(advantage_NM: Tensor, factor_NMD: Tensor) -> Tensor:
    """Unbiased ‖Δ_μ(s)‖² per context, [N]: the dot product of two estimates from disjoint halves (M ≥ 4)."""
    half = _at_least(advantage_NM.shape[-1], 4) // 2
    left = drift_parts(advantage_NM[:, :half], factor_NMD[:, :half]).mean_induced_ND
    right = drift_parts(advantage_NM[:, half:], factor_NMD[:, half:]).mean_induced_ND
    return (left * right).sum(-1)


def offset_products(mixed_NM: Tensor) -> Tensor:
    """Unbiased μ_Ã(s)² per context, [N]: the mean product of the mixed advantages of two different continuations."""
    count = _at_least(mixed_NM.shape[-1], 2)
    return (mixed_NM.sum(-1).square() - mixed_NM.square().sum(-1)) / (count * (count - 1))


def offset(mixed_NM: Tensor, text_N: Tensor) -> Estimate:
    """Unbiased estimate of R = E[μ_Ã(s)²] from independent continuations, with its text-clustered standard error."""
    return clustered_mean(offset_products(mixed_NM), text_N)


def offset_difference(left_NM: Tensor, right_NM: Tensor, text_N: Tensor) -> Estimate:
    """R(left) − R(right) of two mixtures on the same probe continuations, paired and clustered by text."""
    return clustered_mean(offset_products(left_NM) - offset_products(right_NM), text_N)


@dataclass(frozen=True)
class DriftReport:
    """Aggregates over probe contexts. By context: `mean_induced`, its square, the offset and both bounds. Of the
    average vectors, in which opposite contexts cancel: the three others."""

    covariance_norm: float
    net_norm: float
    """‖E_d Δ_μ‖."""
    alignment: float
    """Cosine between these two parts: negative means that the offset opposes the signal."""
    mean_induced: Estimate | None
    """E_d‖Δ_μ‖, the left-hand side of eq:main-drift-budget; None with fewer than four continuations."""
    mean_induced_square: Estimate | None
    """E_d‖Δ_μ‖², unbiased; None with fewer than four continuations."""
    offset: Estimate
    factor_bound: float
    """B estimated as √E_d‖μ_v‖² (unbiased inside the root, at least 0)."""
    drift_bound: float
    """B√R̂ (eq:main-drift-budget): an estimate, not a certificate."""
    clip_fraction: float
    """Of the contexts that were reached."""


def drift_report(
    advantage_NM: Tensor,
    ratio_NM: Tensor,
    score_NMD: Tensor,
    text_N: Tensor,
    low: float,
    high: float,
    reached_N: Tensor | None = None,
) -> DriftReport:
    """The diagnostics of one probe set: the parts of the actual clipped update, the offset R̂, and B√R̂.

    Contexts that were not reached (advantage and score 0) count in every mean, so that these are E_d of
    eq:trajectory-occupation.
    """
    factor = update_factor(ratio_NM, advantage_NM, score_NMD, low, high).double()
    advantage = advantage_NM.double()
    parts = drift_parts(advantage, factor)
    covariance, induced = parts.covariance_ND.mean(0), parts.mean_induced_ND.mean(0)
    scale = float(covariance.norm() * induced.norm())
    count = advantage.shape[-1]
    factor_square = (factor.sum(-2).square().sum(-1) - factor.square().sum((-2, -1))) / (count * (count - 1))
    bound = float(factor_square.mean().clamp(min=0).sqrt())
    risk = offset(advantage, text_N)
    square_N = mean_induced_square(advantage, factor) if count >= 4 else None
    clipped = ~active_mask(ratio_NM, advantage_NM, low, high)
    return DriftReport(
        covariance_norm=float(covariance.norm()),
        net_norm=float(induced.norm()),
        alignment=float(covariance @ induced) / scale if scale > 0 else 0.0,
        mean_induced=None if square_N is None else clustered_mean(signed_root(square_N), text_N),
        mean_induced_square=None if square_N is None else clustered_mean(square_N, text_N),
        offset=risk,
        factor_bound=bound,
        drift_bound=bound * max(risk.mean, 0.0) ** 0.5,
        clip_fraction=float((clipped if reached_N is None else clipped[reached_N]).double().mean()),
    )


def signed_root(square: Tensor) -> Tensor:
    """√x of an unbiased estimate of a square, −√−x where noise made it negative: so that noise around a drift of zero
    averages to zero, which norms of noisy vectors never do."""
    return square.sign() * square.abs().sqrt()


@dataclass(frozen=True)
class OffsetSplit:
    """R split into the part that visible inputs explain and the part that only the hidden scoring text can."""

    total: Estimate
    visible: Estimate
    hidden: Estimate


def offset_split(total_N: Tensor, visible_N: Tensor, text_N: Tensor) -> OffsetSplit:
    """Both parts from per-trajectory observations on the same trajectories; the hidden part is the paired
    difference."""
    return OffsetSplit(
        clustered_mean(total_N, text_N), clustered_mean(visible_N, text_N), clustered_mean(total_N - visible_N, text_N)
    )


def _at_least(count: int, needed: int) -> int:
    if count < needed:
        raise ValueError(f"this estimate needs at least {needed} continuations of a context, got {count}")
    return count

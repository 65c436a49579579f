"""The conditional-moment saddle as pure functions, averaged over the fixed-horizon occupation measure of complete
trajectories (eq:trajectory-occupation)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from tfive.rl.calibration.mixture import MeanInputs, WeightInputs, mix
from tfive.rl.clusters import Estimate, clustered_mean


@dataclass(frozen=True)
class Occupation:
    """The measure (d, q) of eq:trajectory-occupation on N trajectories: sums over valid steps divided by the fixed
    T_max.

    `importance_N` weights trajectories (mean 1); finite examples that enumerate all trajectories put their exact
    probabilities here.
    """

    mask_NT: Tensor
    text_N: Tensor
    horizon: int
    importance_N: Tensor | None = None

    def __post_init__(self) -> None:
        if self.horizon < self.mask_NT.shape[-1] and bool(self.mask_NT[..., self.horizon :].any()):
            raise ValueError(f"a trajectory is longer than the horizon T_max = {self.horizon}")

    @cached_property
    def host_text_N(self) -> Tensor:
        """`text_N` on the host, fetched once: splits by text are made there, without waiting for the device again."""
        return self.text_N.cpu()

    def per_trajectory(self, value_NT: Tensor) -> Tensor:
        """(1/T_max) Σ_t m_t f_t for every trajectory, [N]: the independent observation of E_{d,q}[f]."""
        return torch.where(self.mask_NT, value_NT, torch.zeros_like(value_NT)).sum(-1) / self.horizon

    def mean(self, value_NT: Tensor) -> Tensor:
        """The estimate of E_{d,q}[f], differentiable in f."""
        each = self.per_trajectory(value_NT)
        return each.mean() if self.importance_N is None else (each * self.importance_N.to(each.dtype)).mean()

    def estimate(self, value_NT: Tensor) -> Estimate:
        """The same mean with a standard error that clusters by text."""
        return clustered_mean(self.per_trajectory(value_NT).detach(), self.text_N, self.importance_N)

    def rows(self, index: Tensor) -> Occupation:
        importance = None if self.importance_N is None else self.importance_N[index]
        return Occupation(self.mask_NT[index], self.text_N[index], self.horizon, importance)

    @property
    def count(self) -> int:
        return self.mask_NT.shape[0]


class Paired(Protocol):
    """Both normalised advantages of some trajectories and the measure on them."""

    @property
    def first_NT(self) -> Tensor: ...
    @property
    def second_NT(self) -> Tensor: ...
    @property
    def occupation(self) -> Occupation: ...


def shared(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """`change`, made once of every tensor: one that is given again gets the same result."""
    changed: dict[int, Tensor] = {}

    def once(tensor: Tensor) -> Tensor:
        if id(tensor) not in changed:
            changed[id(tensor)] = change(tensor)
        return changed[id(tensor)]

    return once


@dataclass(frozen=True)
class CalibrationData:
    """All that head learning and validation read: inputs of both heads, both normalised advantages, the measure."""

    weight_inputs: WeightInputs
    mean_inputs: MeanInputs
    first_NT: Tensor
    second_NT: Tensor
    occupation: Occupation

    def rows(self, index: Tensor) -> CalibrationData:
        """The same for some trajectories."""
        return self._changed(lambda tensor: tensor[index], self.occupation.rows(index))

    def anchored(self, step_N: Tensor, continuations: int) -> CalibrationData:
        """Only step `step_N` of each trajectory, the M = `continuations` trajectories of one prefix in a row: `[N/M,
        M, …]`.

        The continuations take the axis of the steps; the measure is their mean, over prefixes that reached the step.
        """
        mask_NT, text_N = self.occupation.mask_NT, self.occupation.text_N
        row_N = torch.arange(len(step_N), device=step_N.device)
        if not bool(mask_NT[row_N, step_N].all()):
            raise ValueError("a continuation ends before the step its prefix was kept up to")

        def pick(tensor: Tensor) -> Tensor:
            return tensor[row_N, step_N].unflatten(0, (-1, continuations))

        occupation = Occupation(pick(mask_NT), text_N.view(-1, continuations)[:, 0], continuations)
        return self._changed(pick, occupation)

    def _changed(self, change: Callable[[Tensor], Tensor], occupation: Occupation) -> CalibrationData:
        """`change` applied to every tensor; one that both heads read is changed once and stays shared."""
        once = shared(change)
        return CalibrationData(
            self.weight_inputs.map(once),
            self.mean_inputs.map(once),
            change(self.first_NT),
            change(self.second_NT),
            occupation,
        )


def moment(mean: Tensor, mixed: Tensor) -> Tensor:
    """ℓ_mom = 2hÃ − h² per token (eq:moment-objective); its average over contexts is R − ‖h − μ‖²."""
    return 2 * mean * mixed - mean.square()


def displacement(weight: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """(Ã_w − Ā)² = (w − ½)²(ΔÃ)² per token; its average is C of eq:calibrated-weight."""
    return (weight - 0.5).square() * (first - second).square()


def energy(first: Tensor, second: Tensor) -> Tensor:
    """Ā² per token; its average is Q of eq:calibrated-weight."""
    return ((first + second) / 2).square()


def offset_change(shift: Tensor, weight: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """m·(2Ā + uΔ) per token, u = w − ½; its average is R(w) − R(½) when `shift` is m(c) = E[uΔ | c].

    From R(w) = E(μ̄ + m)²: since m is a function of the context, E[m·μ̄] = E[m·Ā] and E[m²] = E[m·uΔ]. A shift that is
    wrong by a factor scales the result by that factor, so its sign is still right.
    """
    return shift * (first + second + (weight - 0.5) * (first - second))


def saddle_integrand(
    weight: Tensor, mean: Tensor, first: Tensor, second: Tensor, multiplier: Tensor | float, kappa: float
) -> Tensor:
    """j per token (eq:single-rollout-saddle-integrand): descend in w, ascend in h and in β ≥ 0."""
    constraint = displacement(weight, first, second) - kappa * energy(first, second)
    return moment(mean, mix(weight, first, second)) + multiplier * constraint


def split_by_text(text_N: Tensor, shares: list[float], order: Tensor) -> list[Tensor]:
    """Row numbers of each part of a split by whole texts. `order` permutes the sorted distinct texts; every part with a
    positive share gets at least one text when there are enough."""
    texts, index = torch.unique(text_N, return_inverse=True)
    count = texts.numel()
    if order.numel() != count:
        raise ValueError(f"the split needs an order of {count} texts, got {order.numel()}")
    edges = (torch.tensor(shares, dtype=torch.float64).cumsum(0) / sum(shares) * count).tolist()
    least = [int(share > 0) for share in shares]
    if count < sum(least):
        least = [0] * len(shares)
    cuts = [0]
    for number, edge in enumerate(edges):
        cuts.append(min(max(round(edge), cuts[-1] + least[number]), count - sum(least[number + 1 :])))
    rank = torch.empty(count, dtype=torch.long)
    rank[order.cpu()] = torch.arange(count)
    rank_N = rank.to(index.device)[index]
    return [torch.nonzero((rank_N >= a) & (rank_N < b)).flatten() for a, b in pairwise(cuts)]

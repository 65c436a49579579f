"""Advantages: length-adaptive GAE on masked thoughts (eq:masked-gae), and the pilot normaliser both critics share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

PILOT_EPSILON = 1e-6
"""ε_A, added to the variance of the pilot's advantages under the root (app:advantage-snapshots)."""


def trace(length: Tensor, alpha: float) -> Tensor:
    """λ(L) = 1 − 1/(αL) (eq:masked-gae) for each realised length, in float64; an empty thought counts as L = 1."""
    return 1 - 1 / (alpha * length.clamp(min=1).double())


def masked_gae(
    reward_T: Tensor, value_T: Tensor, mask_T: Tensor, trace_: Tensor | float, discount: float = 1.0
) -> Tensor:
    """A_t of eq:masked-gae, [..., T], zero where masked.

    The last valid action is terminal: there is no bootstrap value and no advantage beyond it. `trace_` is λ, one per
    trajectory ([...]) or one for all. Masks must be prefixes: m_t = 1{t ≤ L}.
    """
    if bool((mask_T[..., 1:] & ~mask_T[..., :-1]).any()):
        raise ValueError("a thought's mask must be contiguous and start at the first step")
    lam = torch.as_tensor(trace_, dtype=value_T.dtype, device=value_T.device)
    zero = torch.zeros_like(value_T[..., 0])
    later_value, later_advantage = zero, zero
    columns = []
    for t in range(value_T.shape[-1] - 1, -1, -1):
        valid = mask_T[..., t]
        delta = reward_T[..., t] + discount * later_value - value_T[..., t]
        later_advantage = torch.where(valid, delta + discount * lam * later_advantage, zero)
        later_value = torch.where(valid, value_T[..., t], zero)
        columns.append(later_advantage)
    return torch.stack(columns[::-1], dim=-1)


def adaptive_gae(reward_T: Tensor, value_T: Tensor, mask_T: Tensor, alpha: float) -> Tensor:
    """GAE with γ = 1 and each trajectory's own λ(L), L its number of valid actions (eq:masked-gae)."""
    return masked_gae(reward_T, value_T, mask_T, trace(mask_T.sum(-1), alpha).to(value_T.dtype))


@dataclass(frozen=True)
class PilotNormaliser:
    """μ_pilot and σ_pilot of app:advantage-snapshots, independent of the batch that is normalised."""

    mean: float
    deviation: float
    tokens: int

    @classmethod
    def fit(cls, first: Tensor, second: Tensor, mask: Tensor, epsilon: float = PILOT_EPSILON) -> PilotNormaliser:
        """Pool both critics' raw GAEs on valid tokens with equal weight; σ_pilot = √(variance + ε_A)."""
        if not epsilon > 0:
            raise ValueError(f"the pilot's epsilon must be positive, got {epsilon}")
        pooled = torch.cat([first[mask], second[mask]]).double()
        if pooled.numel() == 0:
            raise ValueError("the pilot needs at least one valid token")
        if not bool(torch.isfinite(pooled).all()):
            raise ValueError("the pilot met an advantage that is not finite")
        variance = float(pooled.var(unbiased=False))
        return cls(float(pooled.mean()), math.sqrt(variance + epsilon), pooled.numel() // 2)

    def normalise(self, advantage: Tensor, mask: Tensor) -> Tensor:
        """Ã = (A − μ_pilot)/σ_pilot on valid tokens, zero elsewhere."""
        return torch.where(mask, (advantage - self.mean) / self.deviation, torch.zeros_like(advantage))

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean, "deviation": self.deviation, "tokens": self.tokens}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> PilotNormaliser:
        return cls(float(state["mean"]), float(state["deviation"]), int(state["tokens"]))

"""The pilot normaliser: one mean and one standard deviation shared by both critics, frozen for the window."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class PilotNormaliser:
    """μ_pilot and σ_pilot of app:advantage-snapshots; `normalise` never looks at the batch it is given."""

    mean: float
    deviation: float
    tokens: int

    @classmethod
    def fit(cls, first: Tensor, second: Tensor, mask: Tensor, epsilon: float = 1e-6) -> PilotNormaliser:
        """Pools both critics' raw GAEs on valid tokens with equal weight; σ = √(variance + ε_A)."""
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

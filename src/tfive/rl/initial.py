"""Initial weights of everything a run adds to the model: heads, gates, low-rank updates.

Each is a counter-based function of the run's seed and the weight's own name, so no two weights of a run begin alike,
and no weight of one run begins as a weight of another.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tfive.rng import normals


@dataclass(frozen=True)
class InitialWeights:
    """Where the weights of one named part come from."""

    seed: int
    name: str

    def of(self, part: str) -> InitialWeights:
        """Where those of a part of this part come from."""
        return InitialWeights(self.seed, f"{self.name}/{part}")

    def normal(self, *shape: int, deviation: float) -> Tensor:
        """N(0, deviation²) in float32."""
        return torch.from_numpy(normals(self.seed, f"initial/{self.name}", shape)).float() * deviation


def dense(width_in: int, width_out: int, initial: InitialWeights, gain: float = 1.0) -> nn.Linear:
    """A linear layer with N(0, gain²/width_in) weights and zero bias, in float32."""
    layer = nn.Linear(width_in, width_out, dtype=torch.float32)
    with torch.no_grad():
        layer.weight.copy_(initial.normal(width_out, width_in, deviation=gain * max(width_in, 1) ** -0.5))
        layer.bias.zero_()
    return layer

"""What self-checks are made of: a comparison with its bound, and everything one implementation computes of a batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tfive_lab.bench.phases import TreePhases

FLOAT32, BFLOAT16, KL = 2e-4, 0.25, 0.015
"""Bounds: absolute log-probability, loss or value in float32, the same in bfloat16, and the mean mismatch KL."""


@dataclass(frozen=True)
class Check:
    """One comparison: how far apart at most, and the bound. Without a bound it was skipped, and `note` says why."""

    model: str
    name: str
    max_abs_diff: float | None
    bound: float | None
    note: str = ""

    @property
    def ok(self) -> bool:
        """Within the bound, or not applicable here."""
        return self.bound is None or (self.max_abs_diff is not None and self.max_abs_diff <= self.bound)


def gap(mine: Tensor, other: Tensor) -> float:
    """The largest difference of two entries."""
    return float((mine.double() - other.double()).abs().max())


def relative(mine: list[Tensor], other: list[Tensor]) -> float:
    """|a − b| / |b| over all tensors together."""
    total = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(mine, other, strict=True))
    return (total / sum(float(b.double().square().sum()) for b in other)) ** 0.5


@dataclass(frozen=True)
class Outputs:
    """Everything that one implementation computes from given thoughts."""

    log_prob_QT: Tensor
    loss_QK: Tensor
    value_QT: Tensor
    gradients: list[Tensor]

    def apart(self, other: Outputs) -> float:
        """Largest difference in log-probabilities, losses and values."""
        names = ("log_prob_QT", "loss_QK", "value_QT")
        return max(gap(getattr(self, n), getattr(other, n)) for n in names)


def of_tree(side: TreePhases) -> Outputs:
    """What the tree engine computes of its thoughts."""
    side.reading = side.tree.read(side.texts)
    none_Q, loss_QK = side.scoring()
    log_prob_QT = side.actor()
    gradients = [p.grad.clone() for p in side.model.parameters() if p.grad is not None]
    return Outputs(log_prob_QT, torch.cat([none_Q[:, None], loss_QK], 1), side.values(), gradients)

"""Early stopping of head learning: held-out texts select the step whose weight is frozen.

The moment E[2hÃ − h²] (eq:moment-objective) cannot select it: a weight that exploits the errors of h looks better to
that very h while the true offset grows. The criterion is the change of the offset itself. With u = w − ½, Δ = Ã₁ − Ã₂
and m(c) = E[uΔ | c], exactly

    R(w) − R(½) = E[m(c)·(2Ā + uΔ)],

which single rollouts estimate without bias once m is known; and m is easy to learn, because uΔ has little of the
noise of Ā.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from tfive.rl.calibration.heads import kept_state
from tfive.rl.calibration.moments import CalibrationData, displacement, energy, offset_change


@dataclass(frozen=True)
class Evaluation:
    """One evaluation on held-out texts: copies of the heads, the change of the offset, and the displacement C/Q."""

    states: tuple[dict[str, Any], ...]
    multiplier: float
    change: float
    retention: float


class EarlyStopping:
    """Evaluates the heads on held-out texts and selects the feasible evaluation (C/Q ≤ κ) with the lowest offset.

    `stale` counts evaluations since the last improvement, or since the last one beyond the retention limit.
    """

    def __init__(self, data: CalibrationData, kappa: float) -> None:
        self.data, self.kappa = data, kappa
        self.signal = float(data.occupation.mean(energy(data.first_NT, data.second_NT)))
        self.evaluations: list[Evaluation] = []
        self.stale = 0

    def evaluate(
        self, weight_NT: Tensor, moved_NT: Tensor, heads: tuple[nn.Module, ...], multiplier: float
    ) -> Evaluation:
        """Evaluate and copy the heads, given w and m = E[(w − ½)Δ | c] on the held-out data."""
        first, second, occupation = self.data.first_NT, self.data.second_NT, self.data.occupation
        moved = float(occupation.mean(displacement(weight_NT, first, second)))
        retention = moved / self.signal if self.signal > 0 else float("inf") if moved > 0 else 0.0
        change = float(occupation.mean(offset_change(moved_NT, weight_NT, first, second)))
        states = tuple(kept_state(head) for head in heads)
        evaluation = Evaluation(states, multiplier, change, retention)
        self.evaluations.append(evaluation)
        improving = self.best() == len(self.evaluations) - 1 or retention > self.kappa
        self.stale = 0 if improving else self.stale + 1
        return evaluation

    def best(self, only_last: bool = False) -> int:
        """Index of the feasible evaluation with the lowest offset; if none is feasible, of the least displaced one."""
        indices = range(len(self.evaluations))
        if only_last:
            return indices[-1]
        feasible = [i for i in indices if self.evaluations[i].retention <= self.kappa]
        if feasible:
            return min(feasible, key=lambda i: self.evaluations[i].change)
        return min(indices, key=lambda i: self.evaluations[i].retention)

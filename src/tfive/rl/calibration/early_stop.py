"""The early stop of head learning: texts kept back decide which weight to freeze.

A moment E[2hÃ − h²] cannot decide it: a weight that leans against the errors of h looks better to that very h while it
*adds* offset. What decides is the change of the offset itself. With u = w − ½, Δ = Ã₁ − Ã₂ and m(c) = E[uΔ | c],
exactly

    R(w) − R(½) = E[m(c)·(2Ā + uΔ)],

which single rollouts observe without bias once m is known; and m is easy to learn, because uΔ has little of the noise
of Ā.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from tfive.rl.calibration.moments import CalibrationData, displacement, energy, offset_change


@dataclass(frozen=True)
class Snapshot:
    """The learning heads at one step, the held-out change of the offset, and the weight's displacement C/Q there."""

    states: tuple[dict[str, Any], ...]
    multiplier: float
    change: float
    retention: float


class Judge:
    """Looks at the heads on kept-back texts now and then, and chooses the feasible look with the lowest offset."""

    def __init__(self, data: CalibrationData, kappa: float) -> None:
        self.data, self.kappa = data, kappa
        self.signal = float(data.occupation.mean(energy(data.first_NT, data.second_NT)))
        self.snapshots: list[Snapshot] = []
        self.stale = 0

    def look(self, weight_NT: Tensor, moved_NT: Tensor, heads: tuple[nn.Module, ...], multiplier: float) -> Snapshot:
        """Takes a snapshot of the heads, given w and m = E[(w − ½)Δ | c] on the kept-back data."""
        first, second, occupation = self.data.first_NT, self.data.second_NT, self.data.occupation
        moved = float(occupation.mean(displacement(weight_NT, first, second)))
        retention = moved / self.signal if self.signal > 0 else float("inf") if moved > 0 else 0.0
        change = float(occupation.mean(offset_change(moved_NT, weight_NT, first, second)))
        states = tuple(copy.deepcopy(head.state_dict()) for head in heads)
        snapshot = Snapshot(states, multiplier, change, retention)
        self.snapshots.append(snapshot)
        improving = self.choose() == len(self.snapshots) - 1 or retention > self.kappa
        self.stale = 0 if improving else self.stale + 1
        return snapshot

    def choose(self, only_last: bool = False) -> int:
        """The number of the feasible snapshot with the lowest offset; if none is feasible, of the least displaced."""
        everyone = range(len(self.snapshots))
        if only_last:
            return everyone[-1]
        feasible = [i for i in everyone if self.snapshots[i].retention <= self.kappa]
        if feasible:
            return min(feasible, key=lambda i: self.snapshots[i].change)
        return min(everyone, key=lambda i: self.snapshots[i].retention)

"""The early stop of head learning: texts kept back decide which weight to freeze, each judged by its harshest mean
head."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tfive.credit.mixture import mix
from tfive.credit.moments import CalibrationData, displacement, energy, moment


@dataclass(frozen=True)
class Snapshot:
    """Both heads at one step, what they say on the kept-back texts, and the weight's displacement there, C/Q."""

    weight_state: dict[str, Any]
    mean_state: dict[str, Any]
    multiplier: float
    mixed_NT: Tensor
    mean_NT: Tensor
    retention: float


@dataclass(frozen=True)
class Choice:
    """The chosen weight's snapshot, its harshest mean head's state, and the moment that head found (0 if none did)."""

    number: int
    snapshot: Snapshot
    mean_state: dict[str, Any]
    risk: float


class Judge:
    """Held-out view of the saddle, ``min over weights of max over mean heads``, on snapshots of both.

    A weight must answer to every mean head seen so far and to h = 0, not only to its contemporary: a mean head that has
    forgotten or memorised would otherwise flatter it.
    """

    def __init__(self, data: CalibrationData, kappa: float) -> None:
        self.data, self.kappa = data, kappa
        self.signal = float(data.occupation.mean(energy(data.first_NT, data.second_NT)))
        self.snapshots: list[Snapshot] = []
        self.stale = 0
        occupation = data.occupation
        scale = occupation.mask_NT.double() / (occupation.horizon * occupation.count)
        if occupation.importance_N is not None:
            scale = scale * occupation.importance_N.double().unsqueeze(-1)
        self._scale = scale.flatten()

    def look(
        self, weight_NT: Tensor, mean_NT: Tensor, heads: tuple[nn.Module, nn.Module], multiplier: float
    ) -> dict[str, float]:
        """Takes a snapshot of both heads and their outputs on the kept-back data; returns one line of the trace."""
        first, second, occupation = self.data.first_NT, self.data.second_NT, self.data.occupation
        moved = float(occupation.mean(displacement(weight_NT, first, second)))
        retention = moved / self.signal if self.signal > 0 else float("inf") if moved > 0 else 0.0
        mixed_NT = mix(weight_NT, first, second)
        states = [copy.deepcopy(head.state_dict()) for head in heads]
        self.snapshots.append(Snapshot(states[0], states[1], multiplier, mixed_NT, mean_NT, retention))
        newest = len(self.snapshots) - 1
        # Older weights are judged anew whenever h learns more, so progress means: the newest weight is now the best.
        improving = self.choose().number == newest or retention > self.kappa
        self.stale = 0 if improving else self.stale + 1
        return {
            "moment": float(occupation.mean(moment(mean_NT, mixed_NT))),
            "risk": float(self._values()[newest].max().clamp(min=0)),
            "retention": retention,
            "multiplier": multiplier,
            "weight_mean": float(occupation.mean(weight_NT) / occupation.mean(torch.ones_like(weight_NT))),
        }

    def _values(self) -> Tensor:
        """L(w_i, h_j) on the kept-back texts for all snapshots, [i, j]."""
        mixed = torch.stack([s.mixed_NT.double().flatten() for s in self.snapshots])
        mean = torch.stack([s.mean_NT.double().flatten() for s in self.snapshots])
        weighted = mean * self._scale
        return 2 * mixed @ weighted.T - (mean * weighted).sum(-1)

    def choose(self, only_last: bool = False) -> Choice:
        """The feasible weight with the smallest risk; if none is feasible, the least displaced one."""
        values = self._values()
        risks = values.max(dim=1).values.clamp(min=0).tolist()
        everyone = range(len(self.snapshots))
        feasible = [i for i in everyone if self.snapshots[i].retention <= self.kappa]
        if only_last:
            number = len(self.snapshots) - 1
        elif feasible:
            number = min(feasible, key=risks.__getitem__)
        else:
            number = min(everyone, key=lambda i: self.snapshots[i].retention)
        harshest = int(values[number].argmax())
        return Choice(number, self.snapshots[number], self.snapshots[harshest].mean_state, risks[number])

"""Early stopping of head learning: held-out texts select the step whose weight is frozen.

The moment E[2hÃ − h²] (eq:moment-objective) cannot select it: a weight that exploits the errors of h looks better to
that very h while the true offset grows. The criterion is the change of the offset itself. With u = w − ½, Δ = Ã₁ − Ã₂
and m(c) = E[uΔ | c], exactly

    R(w) − R(½) = E[m(c)·(2Ā + uΔ)],

which single rollouts estimate without bias once m is known; and m is easy to learn, because uΔ has little of the
noise of Ā.

What evaluations came to stays on the device until a decision hangs on it (`EarlyStopping`, `BestStep`): the host goes
on launching steps meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
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
    moment: float
    weight_mean: float

    @property
    def line(self) -> dict[str, float]:
        """Its numbers, for the trace."""
        return {name: value for name, value in vars(self).items() if name != "states"}


class EarlyStopping:
    """Evaluates the heads on held-out texts and selects the feasible evaluation (C/Q ≤ κ) with the lowest offset.

    `stale` counts evaluations since the last improvement, or since the last one beyond the retention limit.
    """

    def __init__(self, data: CalibrationData, kappa: float) -> None:
        self.data, self.kappa = data, kappa
        self.signal = float(data.occupation.mean(energy(data.first_NT, data.second_NT)))
        self._known: list[Evaluation] = []
        self._open: list[tuple[tuple[dict[str, Any], ...], Tensor]] = []
        """Evaluations whose numbers are still on the device."""
        self._stale = 0

    def look(
        self,
        weight_NT: Tensor,
        moved_NT: Tensor,
        heads: tuple[nn.Module, ...],
        multiplier: Tensor,
        moment: Tensor,
    ) -> None:
        """Evaluate and copy the heads, given w and m = E[(w − ½)Δ | c] on the held-out data; the host does not wait.
        `multiplier` and `moment` are noted as they are now."""
        first, second, occupation = self.data.first_NT, self.data.second_NT, self.data.occupation
        numbers = (
            occupation.mean(displacement(weight_NT, first, second)),
            occupation.mean(offset_change(moved_NT, weight_NT, first, second)),
            multiplier,
            moment,
            occupation.mean(weight_NT) / occupation.mean(torch.ones_like(weight_NT)),
        )
        states = tuple(kept_state(head) for head in heads)
        self._open.append((states, torch.stack([number.double() for number in numbers])))

    @property
    def evaluations(self) -> list[Evaluation]:
        """All evaluations so far."""
        self._settle()
        return self._known

    def _settle(self) -> None:
        """Wait for all open evaluations at once."""
        numbers = torch.stack([row for _, row in self._open]).tolist() if self._open else []
        for (states, _), (moved, change, multiplier, moment, weight_mean) in zip(self._open, numbers):
            retention = moved / self.signal if self.signal > 0 else float("inf") if moved > 0 else 0.0
            self._known.append(Evaluation(states, multiplier, change, retention, moment, weight_mean))
            improving = self._best() == len(self._known) - 1 or retention > self.kappa
            self._stale = 0 if improving else self._stale + 1
        self._open.clear()

    @property
    def stale(self) -> int:
        """Evaluations since the last improvement."""
        self._settle()
        return self._stale

    def asks(self, patience: int) -> bool:
        """Whether `over` will wait for the device, which it does only where so many can have brought nothing."""
        return bool(self._open) and self._stale + len(self._open) >= patience

    def over(self, patience: int) -> bool:
        """Whether so many evaluations have brought nothing."""
        return self._stale + len(self._open) >= patience and self.stale >= patience

    def best(self, only_last: bool = False) -> int:
        """Index of the feasible evaluation with the lowest offset; if none is feasible, of the least displaced one."""
        count = len(self.evaluations)
        return range(count)[-1] if only_last else self._best()

    def _best(self) -> int:
        indices = range(len(self._known))
        feasible = [i for i in indices if self._known[i].retention <= self.kappa]
        if feasible:
            return min(feasible, key=lambda i: self._known[i].change)
        return min(indices, key=lambda i: self._known[i].retention)


class BestStep:
    """The step of one head that held-out texts value most; values stay on the device as long as none can end it."""

    def __init__(self, head: nn.Module, patience: int, *, last: bool = False) -> None:
        """`last`: nothing is held out, and the last step is taken whatever its value."""
        self.head, self.patience, self.last = head, patience, last
        self._states = [kept_state(head)]
        """The head before any look, and at every look so far."""
        self._values: list[Tensor] = []
        self._known, self._best, self._stale = 0, -float("inf"), 0
        """Of how many looks the host knows the values, the best of them, and how many are no better."""

    def look(self, value: Tensor) -> None:
        """Note the head as it is now, and its value."""
        self._values.append(value.detach().double())
        self._states.append(kept_state(self.head))

    @property
    def asks(self) -> bool:
        """Whether `over` will wait for the device, which it does only where a look can end it."""
        return len(self._values) > self._known and self._stale + len(self._values) - self._known >= self.patience

    def over(self) -> bool:
        """Whether `patience` looks in a row were no better than the best before them."""
        if not self.asks:
            return self._stale >= self.patience
        for value in torch.stack(self._values[self._known :]).tolist():
            better = value > self._best or self.last
            self._best, self._stale = (value, 0) if better else (self._best, self._stale + 1)
        self._known = len(self._values)
        return self._stale >= self.patience

    def take(self) -> Tensor:
        """Leave the head at its best step, whose value is returned: chosen on the device, the host does not wait. A
        value that is no number is never the best; the first of equal ones is."""
        if not self._values:
            self.head.load_state_dict(self._states[0])
            return torch.tensor(-float("inf"), dtype=torch.float64)
        if self.last:
            self.head.load_state_dict(self._states[-1])
            return self._values[-1]
        # Made where the values are: sent there, it would be waited for.
        nothing = torch.full_like(self._values[0], -float("inf"))
        values = torch.stack([nothing, *self._values])
        best_1 = torch.where(values.isnan(), nothing, values).argmax()[None]
        chosen = {name: torch.stack([state[name] for state in self._states])[best_1][0] for name in self._states[0]}
        self.head.load_state_dict(chosen)
        return values[best_1][0]

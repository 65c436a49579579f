"""Updates that the host does not watch: it launches or replays one after another and asks once, at their end, how many
were refused. Waiting for the norm of every gradient takes longer than a small head's whole step."""

from __future__ import annotations

import torch
from torch import Tensor

from tfive.rl.optimizer import MasterOptimizer


class UnseenSteps:
    """Steps of an optimizer, one after another, and what they came to.

    Each does what `MasterOptimizer.step` does, to the bit: a gradient that is not finite changes no weight. Where an
    update needs the host (several processes, shards, stochastic rounding, a rate that changes), it waits as ever.
    """

    def __init__(self, optimizer: MasterOptimizer) -> None:
        self.optimizer = optimizer
        self.unseen = optimizer.steps_unseen
        """Whether the host is left out, so that steps can be captured."""
        self._refused: Tensor | None = None
        self._watched = 0
        """Refused updates that the host did wait for."""

    def step(self, loss: Tensor) -> None:
        """One update by the gradient of this loss alone: a capture that broke may have left another's."""
        self.optimizer.zero_grad()
        loss.backward()
        if not self.unseen:
            self._watched += not self.optimizer.step().applied
            return
        refused = self.optimizer.step_unseen()
        if self._refused is None:
            self._refused = torch.zeros_like(refused)
        self._refused.add_(refused)

    def settle(self, made: int) -> int:
        """Enter `made` steps in the optimizer's books, those of replayed graphs included; returns how many of them were
        refused. The host waits for that."""
        if not self.unseen or self._refused is None:
            watched, self._watched = self._watched, 0
            return watched
        refused = int(self._refused)
        self._refused.zero_()
        self.optimizer.steps += made - refused
        self.optimizer.skipped += refused
        return refused

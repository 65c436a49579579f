"""Stands for an optimizer that other processes have."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tfive.distributed.world import SINGLE
from tfive.rl.optimizer import MasterOptimizer, StepReport


class Onlooker(MasterOptimizer):
    """Has no weights and makes no update; what the update of the others came to is told by them (`Role.told`)."""

    def __init__(self, lr: float = math.nan) -> None:
        self.lr, self._factor, self._round_offset = lr, 1.0, 0
        self.shards, self.world, self.steps, self.skipped = None, SINGLE, 0, 0
        self._slots = []

    def step(self, divide_by: float = 1.0, *, counted: bool = True) -> StepReport:
        """Nothing is known here of what the others did."""
        return StepReport(math.nan, math.nan, applied=False)

    def skip(self, norm: float = math.nan) -> StepReport:
        return self.step()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Others load it."""

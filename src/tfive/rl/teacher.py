"""RLP's no-think teacher: a moving average of the actor's exact weights, which reads texts without any thought."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Self

from torch import Tensor

from tfive.rl.gains import no_thought_losses
from tfive.rl.optimizer import Ema
from tfive.tree.forward import TreeModel
from tfive.tree.layout import TextBatch


class Teacher:
    """φ ← decay·φ + (1 − decay)·θ in float32, starting at θ. `engine` is the compute copy, filled from the average."""

    def __init__(self, engine: TreeModel, *, decay: float, rows: int) -> None:
        self.engine, self.rows = engine, rows
        self.average = Ema(decay)

    @classmethod
    def of(cls, student: TreeModel, *, decay: float, rows: int) -> Self:
        """A teacher with a frozen copy of the student's model, under the student's plan."""
        model = copy.deepcopy(student.model).requires_grad_(False)
        delimiters = None if student.delimiters is None else copy.deepcopy(student.delimiters).requires_grad_(False)
        return cls(TreeModel(model, student.plan, student.engine, delimiters), decay=decay, rows=rows)

    @property
    def started(self) -> bool:
        """Whether it has followed the model at least once."""
        return self.average.updates > 0

    def follow(self, weights: Mapping[str, Tensor]) -> None:
        """Take the actor's exact weights (`MasterOptimizer.masters()`) into the average; the first ones set it."""
        self.average.update(weights)

    def losses(self, texts: TextBatch) -> Tensor:
        """−log p_φ of the plan's continuation of every item without a thought, `[B, R]`."""
        named = dict(self.engine.model.named_parameters())
        if self.engine.delimiters is not None:
            named |= {f"delimiters.{name}": p for name, p in self.engine.delimiters.named_parameters()}
        self.average.copy_to(named.items())
        return no_thought_losses(self.engine, texts, rows=self.rows)

    def state_dict(self) -> dict[str, Any]:
        return self.average.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        device = self.engine.device
        average = {name: tensor.to(device) for name, tensor in state["average"].items()}
        self.average.load_state_dict({**state, "average": average})

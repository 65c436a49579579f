"""RLP's no-think teacher: an exponential moving average of the actor's weights that predicts without any thought.

`torch.optim.swa_utils.AveragedModel` averages a module in the module's own precision. Here the averaged weights are the
optimizer's float32 masters, which are not a module, while the copy that computes may be bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from tfive.distributed.sharding import Sharding, held_of
from tfive.distributed.world import SINGLE, World
from tfive.rl.gains import no_thought_losses
from tfive.rl.pass_size import PassSize
from tfive.rl.weight_slots import wide
from tfive.tree.forward import TreeModel
from tfive.tree.gated import GATES
from tfive.tree.layout import TextBatch
from tfive.tree.low_rank import copy_sharing_frozen


class Ema:
    """Exponential moving average of weights in float32; the first update sets it to the weights."""

    def __init__(self, decay: float) -> None:
        if not 0.0 <= decay < 1.0:
            raise ValueError(f"decay must lie in [0, 1), not {decay}")
        self.decay = decay
        self.updates = 0
        self.average: dict[str, Tensor] = {}

    @torch.no_grad()
    def update(self, weights: Mapping[str, Tensor]) -> None:
        """average ← decay · average + (1 − decay) · weights; give `MasterOptimizer.masters()`, not the compute copy."""
        if self.average and set(weights) != set(self.average):
            raise ValueError(f"the average is of other weights: {sorted(set(weights) ^ set(self.average))[:3]}")
        exact = {name: weight.detach() for name, weight in weights.items() if weight.dtype == wide(weight.dtype)}
        if self.average and exact:
            # All of them by a few kernels.
            torch._foreach_lerp_([self.average[name] for name in exact], list(exact.values()), 1.0 - self.decay)
        for name, weight in weights.items():
            if name not in self.average:
                self.average[name] = weight.detach().to(wide(weight.dtype), copy=True)
            elif name not in exact:
                # One after another: where weights are narrow there is no room for all of them twice.
                self.average[name].lerp_(weight.detach().to(wide(weight.dtype)), 1.0 - self.decay)
        self.updates += 1

    @torch.no_grad()
    def copy_to(
        self,
        named_parameters: Iterable[tuple[str, Tensor]],
        whole: Callable[[str, Tensor], Tensor] = lambda name, average: average,
    ) -> None:
        """Write the average into a compute copy, rounded to its precision; every averaged weight must be there. `whole`
        puts a weight together of which each process averages its own rows."""
        targets = dict(named_parameters)
        for name, average in self.average.items():
            targets[name].copy_(whole(name, average))

    def state_dict(self) -> dict[str, Any]:
        """Decay, count and the averages (references)."""
        return {"decay": self.decay, "updates": self.updates, "average": dict(self.average)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved average, on the devices of the present one if there is any."""
        self.decay, self.updates = float(state["decay"]), int(state["updates"])
        present = self.average
        self.average = {
            name: tensor.to(present[name].device if name in present else tensor.device).clone()
            for name, tensor in state["average"].items()
        }


class Teacher:
    """φ ← decay·φ + (1 − decay)·θ in float32, starting at θ. `engine` is the compute copy, filled from the average.

    Where the actor's weights are in `shards`, a process averages its own rows alone, and the teacher is put together
    when it is asked.
    """

    def __init__(
        self,
        engine: TreeModel,
        *,
        decay: float,
        rows: int | PassSize,
        world: World = SINGLE,
        shards: Sharding | None = None,
    ) -> None:
        self.engine, self.world, self.shards = engine, world, shards
        self.passes = PassSize.of(rows, alone=world.size == 1)
        self.average = Ema(decay)

    @classmethod
    def of(
        cls,
        student: TreeModel,
        *,
        decay: float,
        rows: int | PassSize,
        world: World = SINGLE,
        shards: Sharding | None = None,
    ) -> Self:
        """A teacher with a frozen copy of what the student trains, under the student's plan; what the student does not
        train is the same for both."""
        model = copy_sharing_frozen(student.model).requires_grad_(False)
        own = student.delimiters
        delimiters = None if own is None else copy_sharing_frozen(own).requires_grad_(False)
        engine = TreeModel(model, student.plan, student.engine, delimiters)
        return cls(engine, decay=decay, rows=rows, world=world, shards=shards)

    @property
    def started(self) -> bool:
        """Whether the average has been set."""
        return self.average.updates > 0

    def follow(self, weights: Mapping[str, Tensor]) -> None:
        """Update the average with the actor's exact weights (`MasterOptimizer.masters()`); the first call sets it.

        Reading gates are left out: the teacher reads no thought.
        """
        self.average.update({name: weight for name, weight in weights.items() if not name.startswith(GATES)})

    def losses(self, texts: TextBatch) -> Tensor:
        """−log p_φ of the plan's continuation of every item without a thought, `[B, R]`."""
        named = dict(self.engine.model.named_parameters())
        if self.engine.delimiters is not None:
            named |= {f"delimiters.{name}": p for name, p in self.engine.delimiters.named_parameters()}
        if self.shards is None:
            self.average.copy_to(named.items())
        else:
            self.average.copy_to(named.items(), self.shards.gathered)
        read = partial(no_thought_losses, self.engine, texts, world=self.world)
        return self.passes.fit_told(read, self.engine.let_go)

    def state_dict(self) -> dict[str, Any]:
        """Decay, count and the averages; those of shards are pieces."""
        state, shards = self.average.state_dict(), self.shards
        if shards is not None:
            state["average"] = {name: shards.piece(name, rows) for name, rows in state["average"].items()}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state of whole tensors, or of the same pieces."""
        device = self.engine.device
        average = {name: self._own(name, saved).to(device) for name, saved in state["average"].items()}
        self.average.load_state_dict({**state, "average": average})

    def _own(self, name: str, saved: Any) -> Tensor:
        """The part of a saved average that this process has: all of it, or its rows."""
        if self.shards is None:
            return saved
        rows = self.shards.local(dict(self.shards.named_parameters())[name])
        return held_of(saved, name, self.shards.piece(name, rows))

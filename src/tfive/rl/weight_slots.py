"""A trained weight with the state of its updates: exact weights, accumulated gradient, moments, whole or this process's
rows of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tfive.distributed.pieces import Piece, piece_of
from tfive.distributed.sharding import Sharding, held_of


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a weight of `dtype` is trained: float64 stays, everything else is float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass
class WeightSlot:
    """One parameter with the state of its updates; `master` is None if the parameter itself holds the exact weights."""

    name: str
    number: int
    parameter: nn.Parameter
    master: Tensor | None
    decays: bool
    lr_multiplier: float
    gradient: Tensor | None = None
    moments: tuple[Tensor, Tensor, Tensor] | None = None
    apart: tuple[Tensor, Tensor, Tensor] | None = None
    """The moments of updates that have a rate of their own."""
    shards: Sharding | None = None
    handle: RemovableHandle | None = field(default=None, repr=False)

    @property
    def held(self) -> Tensor:
        """The parameter itself, or this process's rows of it."""
        return self.parameter.detach() if self.shards is None else self.shards.local(self.parameter)

    @property
    def weights(self) -> Tensor:
        return self.held if self.master is None else self.master

    def saved(self, tensor: Tensor) -> Tensor | Piece:
        """A tensor of the parameter's state as it goes into a state dict."""
        return tensor if self.shards is None else self.shards.piece(self.name, tensor)

    def own(self, saved: Tensor | Piece) -> Tensor:
        """The part of a saved tensor that this process holds."""
        mine = piece_of(self.held) if self.shards is None else self.shards.piece(self.name, self.held)
        return held_of(saved, self.name, mine)

    def collect(self, parameter: Tensor) -> None:
        """Add the parameter's gradient to the float32 accumulator and free it."""
        if parameter.grad is None:
            return
        own = parameter.grad if self.shards is None else self.shards.local(parameter.grad)
        arrived = own.to(wide(parameter.dtype))
        self.gradient = arrived if self.gradient is None else self.gradient.add_(arrived)
        parameter.grad = None

    def write(self) -> None:
        """Round the master into the parameter; a shard is its own master."""
        if self.master is not None and self.shards is None:
            self.parameter.copy_(self.master)

    def ready_moments(self, narrow: bool) -> tuple[Tensor, Tensor, Tensor]:
        """First moment, second moment and step counter, allocated on the first update so that a frozen part has
        none; `narrow`: in bfloat16."""
        if self.moments is None:
            held = self.held
            dtype = torch.bfloat16 if narrow else wide(held.dtype)
            like = torch.zeros_like(held, dtype=dtype, memory_format=torch.contiguous_format)
            steps = torch.zeros((), dtype=torch.float32, device=like.device)
            self.moments = (like, torch.zeros_like(like), steps)
        return self.moments


def collecting(slot: WeightSlot) -> Callable[[Tensor], None]:
    """A parameter's gradient hook. It refers to the slot weakly: autograd keeps hooks out of the garbage collector's
    sight, and a cycle slot → parameter → hook → slot would never be freed."""
    found = weakref.ref(slot)

    def collect(parameter: Tensor) -> None:
        own = found()
        if own is not None:
            own.collect(parameter)

    return collect


def filled(slot: WeightSlot, entry: Mapping[str, Any], prefix: str, narrow: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Fresh moments of a slot with the saved values under `prefix`."""
    first, second, steps = slot.ready_moments(narrow)
    saved = slot.own(entry[f"{prefix}first"])
    if saved.dtype != first.dtype:
        raise ValueError(f"optimiser state of {slot.name} was saved in another precision setting")
    first.copy_(saved)
    second.copy_(slot.own(entry[f"{prefix}second"]))
    steps.fill_(entry[f"{prefix}steps"])
    return first, second, steps

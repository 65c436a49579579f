"""A trained weight with the state of its updates: exact weights, accumulated gradient, moments, whole or this process's
rows of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
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
    kept: Tensor | None = None
    """Where the gradient is accumulated, whatever the step, if captured passes write it there."""
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
        if self.gradient is not None:
            self.gradient.add_(own)
        elif self.kept is not None:
            self.gradient = self.kept.copy_(own)
        else:
            self.gradient = own.to(wide(parameter.dtype))
        parameter.grad = None

    def take_gradient(self, saved: Tensor | Piece | None) -> None:
        """Have a saved gradient, or none, accumulated so far."""
        held, self.gradient, self.parameter.grad = self.held, None, None
        if saved is not None:
            room = torch.empty_like(held, dtype=wide(held.dtype)) if self.kept is None else self.kept
            self.gradient = room.copy_(self.own(saved))

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


@dataclass(frozen=True)
class Accumulators:
    """The gradients accumulated in slots, as captured passes see them (`tree.fast.replayed_backward.Gradients`)."""

    slots: Sequence[WeightSlot]

    @property
    def held(self) -> list[Tensor | None]:
        return [slot.gradient for slot in self.slots]

    def hold(self, held: Sequence[Tensor | None]) -> None:
        for slot, gradient in zip(self.slots, held, strict=True):
            slot.gradient, slot.parameter.grad = gradient, None

    def fix(self) -> None:
        for slot in self.slots:
            if slot.kept is None:
                like = torch.empty_like(slot.held, dtype=wide(slot.held.dtype)) if slot.gradient is None else None
                slot.kept = slot.gradient if like is None else like

    def free(self) -> None:
        for slot in self.slots:
            slot.kept = None


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

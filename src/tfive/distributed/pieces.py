"""A tensor that several processes hold in pieces: what a piece is, and what its holders can do together.

Nothing here imports `torch.distributed`: a run of one process reads this file and no other of sharding. A plain tensor
is a piece that is the whole; a `DTensor` (FSDP2) is described by its local tensor and placements.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

Result = TypeVar("Result")


@dataclass(frozen=True, order=True)
class Box:
    """A block of a tensor's elements: where it begins along each axis, and how long it is."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """All of a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The block as an index."""
        return tuple(slice(start, start + length) for start, length in zip(self.offset, self.shape))

    def common(self, other: Box) -> Box:
        """What both blocks hold; a block without elements where they do not meet."""
        starts = tuple(map(max, self.offset, other.offset))
        ends = (min(a + n, b + m) for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape))
        return Box(starts, tuple(max(0, end - start) for start, end in zip(starts, ends)))

    def inside(self, outer: Box) -> Box:
        """The same block counted from the beginning of a block around it."""
        return Box(tuple(a - b for a, b in zip(self.offset, outer.offset)), self.shape)


@dataclass(frozen=True)
class Piece:
    """This process's part of a tensor of `shape`: its rows from number `first` on; it may have none. Rows are counted
    along `axis`."""

    rows: Tensor
    first: int
    shape: tuple[int, ...]
    axis: int = 0

    @property
    def box(self) -> Box:
        """The block of the whole that this is."""
        offset = [0] * len(self.shape)
        if offset:
            offset[self.axis] = self.first
        return Box(tuple(offset), tuple(self.rows.shape))

    @property
    def partial(self) -> bool:
        """Whether there is more of the tensor than this."""
        return tuple(self.rows.shape) != self.shape


class Sharding(Protocol):
    """Parameters held in pieces, as an actor and its optimizer see them. `run`, `norm`, `gathered` and `refresh` are
    common work: every process must call them, equally often and in the same order."""

    model: Any
    """The model whose weights are in pieces; its parts may be called inside `run` alone."""
    beside: dict[str, Any]
    """Small modules beside it, by name."""

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The weights in pieces, named as those of the whole copy."""

    def run(self, forward: Callable[[], Result]) -> Result:
        """What a pass through `model` gives, with gradients to the pieces; `backward` must follow."""

    def local(self, tensor: Tensor) -> Tensor:
        """This process's rows of a parameter or of its gradient, in place."""

    def piece(self, name: str, rows: Tensor) -> Piece:
        """`rows`, shaped like the local rows of parameter `name`, as a piece of the whole."""

    def gathered(self, name: str, rows: Tensor) -> Tensor:
        """The whole tensor of which every process gives its `rows`, on every process."""

    def computes_in(self, name: str) -> torch.dtype:
        """The precision in which the model computes with parameter `name`."""

    def norm(self, own: float) -> float:
        """The norm of a vector over all pieces from that of this process's; the same number everywhere."""

    def refresh(self) -> None:
        """Write the weights, as they are now, into the whole copy that computes without gradients."""

    def take(self) -> None:
        """Set every piece to the rows of that whole copy."""


def rows_of(whole: Tensor | Piece, name: str, parameter: nn.Parameter, mine: Piece) -> Tensor:
    """The rows of `mine` out of a saved tensor: a whole one, or the same piece of it."""
    if isinstance(whole, Piece):
        same = whole.first == mine.first and whole.shape == mine.shape and whole.rows.shape == mine.rows.shape
        if not same:
            raise ValueError(f"{name}: the saved piece is of another number of processes; load it whole")
        return whole.rows
    if tuple(whole.shape) != tuple(parameter.shape):
        raise ValueError(f"{name} has shape {tuple(parameter.shape)}, the saved state {tuple(whole.shape)}")
    return whole[mine.first : mine.first + len(mine.rows)]


def piece_of(tensor: Tensor) -> Piece:
    """The tensor as a piece: its own part of a `DTensor`, the whole of any other."""
    module = sys.modules.get("torch.distributed.tensor")
    if module is None or not isinstance(tensor, module.DTensor):
        return Piece(tensor.detach(), 0, tuple(tensor.shape))
    sharded: Any = tensor
    axis, first, length = _own_rows(tuple(sharded.shape), sharded.device_mesh, sharded.placements)
    local = sharded.to_local().detach()
    if local.ndim and local.shape[axis] != length:
        raise ValueError(f"{local.shape[axis]} rows of a tensor of which its placements say {length}")
    return Piece(local, first, tuple(sharded.shape), axis)


def _own_rows(shape: tuple[int, ...], mesh: Any, placements: Sequence[Any]) -> tuple[int, int, int]:
    """Axis, first and number of this process's rows: every dimension of the mesh that shards cuts what is left into
    pieces of equal length, the last ones shorter or empty."""
    axes = {placement.dim for placement in placements if placement.is_shard()}
    whole = all(placement.is_replicate() or type(placement).__name__ == "Shard" for placement in placements)
    if not whole or len(axes) > 1:
        raise ValueError(f"a tensor that is placed as {tuple(placements)} cannot be described as rows")
    axis = axes.pop() if axes else 0
    first, left = 0, shape[axis] if shape else 1
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return axis, 0, 0
    for dimension, placement in enumerate(placements):
        if placement.is_shard():
            length = -(-left // mesh.size(dimension))
            start = min(coordinate[dimension] * length, left)
            first, left = first + start, min(length, left - start)
    return axis, first, left

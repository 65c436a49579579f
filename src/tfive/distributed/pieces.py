"""Pieces of tensors: which part of a tensor a process holds, whatever splits it.

A plain tensor is a piece that is the whole. A `DTensor` (FSDP2) is described by its local tensor and placements; the
module that defines it is never imported here, so that a run of one process does not load it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


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
    """What a process holds of a tensor of `shape`: the block `local` that begins at `offset`."""

    local: Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]

    @property
    def box(self) -> Box:
        return Box(self.offset, tuple(self.local.shape))

    @property
    def partial(self) -> bool:
        """Whether there is more of the tensor than this."""
        return tuple(self.local.shape) != self.shape


def piece_of(tensor: Tensor) -> Piece:
    """The tensor as a piece: its own part of a `DTensor`, the whole of any other."""
    module = sys.modules.get("torch.distributed.tensor")
    if module is None or not isinstance(tensor, module.DTensor):
        return Piece(tensor.detach(), tuple(tensor.shape), (0,) * tensor.ndim)
    sharded: Any = tensor
    local = sharded.to_local().detach()
    box = _own_box(tuple(sharded.shape), sharded.device_mesh, sharded.placements)
    if tuple(local.shape) != box.shape:
        raise ValueError(f"a local tensor of shape {tuple(local.shape)} where its placements say {box.shape}")
    return Piece(local, tuple(sharded.shape), box.offset)


def _own_box(shape: tuple[int, ...], mesh: Any, placements: Sequence[Any]) -> Box:
    """The block of this process: every axis of the mesh that shards cuts what is left into pieces of equal length, the
    last ones shorter or empty."""
    offset, left = [0] * len(shape), list(shape)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return Box(tuple(offset), (0,) * len(shape))
    for axis, placement in enumerate(placements):
        if placement.is_replicate():
            continue
        if not placement.is_shard() or type(placement).__name__ != "Shard":
            raise ValueError(f"a tensor that is placed as {placement} cannot be described as a block")
        along = placement.dim
        length = -(-left[along] // mesh.size(axis))
        start = min(coordinate[axis] * length, left[along])
        offset[along] += start
        left[along] = min(length, left[along] - start)
    return Box(tuple(offset), tuple(left))

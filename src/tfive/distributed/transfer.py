"""A tree of tensors and numbers from one process to all others, bit for bit and without pickle."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from tfive.distributed.pieces import Piece
from tfive.distributed.world import World

TENSOR = "tensor"
"""The one key of a node that stands for a tensor in the text that goes ahead."""


def transferred(world: World, tree: Any, source: int) -> Any:
    """What process `source` gives as `tree` (dictionaries with text keys, lists, tensors, plain values), on every
    process; what the others give is not read. Tensors arrive on the host."""
    if world.size == 1:
        return tree
    sends, tensors = world.rank == source, list[Tensor]()
    text = json.dumps(_described(tree, tensors)) if sends else ""
    shape = json.loads(world.broadcast_bytes(_bytes_of(text), source).numpy().tobytes())
    if sends:
        flat = [_raw(tensor) for tensor in tensors]
        world.broadcast_bytes(torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8), source)
        return tree
    return _filled(shape, _Reader(world.broadcast_bytes(torch.empty(0, dtype=torch.uint8), source)))


def outlined(world: World, tree: Any, source: int) -> Any:
    """A state of which only some processes have the tensors, process `source` among them: for those the `tree` they
    give, for the others (who give None) the same tree with a piece without elements in place of every tensor."""
    text = json.dumps(_outline(tree)) if world.rank == source else ""
    shape = json.loads(world.broadcast_bytes(_bytes_of(text), source).numpy().tobytes())
    return _without_elements(shape) if tree is None else tree


def _outline(tree: Any) -> Any:
    if isinstance(tree, Tensor | Piece):
        held = tree.local if isinstance(tree, Piece) else tree
        dtype = str(held.dtype).removeprefix("torch.")
        # A single number has no part without elements: every process has it.
        return {TENSOR: [dtype, list(tree.shape)]} if tree.shape else {"number": [dtype, held.item()]}
    if isinstance(tree, dict):
        return {"entries": [[key, _outline(value)] for key, value in tree.items()]}
    if isinstance(tree, list | tuple):
        return {"list": [_outline(value) for value in tree]}
    return tree


def _without_elements(shape: Any) -> Any:
    if not isinstance(shape, dict):
        return shape
    if TENSOR in shape:
        dtype, sizes = shape[TENSOR]
        nothing = torch.empty(0, *sizes[1:], dtype=getattr(torch, dtype))
        return Piece(nothing, tuple(sizes), (0,) * len(sizes))
    if "number" in shape:
        dtype, value = shape["number"]
        return torch.tensor(value, dtype=getattr(torch, dtype))
    if "list" in shape:
        return [_without_elements(one) for one in shape["list"]]
    return {key: _without_elements(value) for key, value in shape["entries"]}


class _Reader:
    """Takes tensors one after another out of the bytes that came."""

    def __init__(self, flat: Tensor) -> None:
        self.flat, self.at = flat, 0

    def take(self, dtype: torch.dtype, shape: list[int]) -> Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        part = self.flat[self.at : self.at + size].clone()
        self.at += size
        return part.view(dtype).view(shape)


def _described(tree: Any, tensors: list[Tensor]) -> Any:
    if isinstance(tree, Tensor):
        tensors.append(tree)
        return {TENSOR: [str(tree.dtype).removeprefix("torch."), list(tree.shape)]}
    if isinstance(tree, dict):
        return {"entries": [[key, _described(value, tensors)] for key, value in tree.items()]}
    if isinstance(tree, list | tuple):
        return {"list": [_described(value, tensors) for value in tree]}
    return tree


def _filled(shape: Any, reader: _Reader) -> Any:
    if not isinstance(shape, dict):
        return shape
    if TENSOR in shape:
        dtype, sizes = shape[TENSOR]
        return reader.take(getattr(torch, dtype), sizes)
    if "list" in shape:
        return [_filled(one, reader) for one in shape["list"]]
    return {key: _filled(value, reader) for key, value in shape["entries"]}


def _raw(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _bytes_of(text: str) -> Tensor:
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)

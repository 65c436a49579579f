"""Which process writes which part of each tensor, and how tensors are put together again from the parts.

Every element is written once. A part that only one process holds is written by it; parts that several hold (replicated
tensors, and the copies of a sharded one) are dealt to their holders so that all write about the same number of bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from tfive.distributed.pieces import Box, Piece
from tfive.training.state_tree import Encoded, Path, named
from tfive.training.tensor_files import CODES, DTYPES

FILE_BYTES = 1 << 29
"""Tensors of about so many bytes share a file."""

_LARGEST = 1 << 48
"""No tensor has more elements. An empty one has no more either with its lengths of 0 taken as 1: the steps along its
axes are products of those."""

Wanted = Callable[[Path, tuple[int, ...]], Box | None]
"""The part of a stored tensor (its path, its shape) that this process needs; None for the whole."""


def pieces_like(state: Encoded) -> Wanted:
    """What a process needs that holds `state` now: the same pieces. Before the first update there are no moments; they
    are cut as the weights that stand beside them."""
    pieces = {path: piece for path, piece in state.everywhere.items() if piece.partial}
    beside = {(path[:-1], piece.shape): piece for path, piece in pieces.items()}

    def wanted(path: Path, shape: tuple[int, ...]) -> Box | None:
        found = pieces.get(path) or beside.get((path[:-1], shape))
        return None if found is None else found.box

    return wanted


@dataclass(frozen=True)
class Share:
    """A part of tensor `number` that process `rank` writes."""

    number: int
    box: Box
    rank: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint: where it is in the tree, and the files that hold its parts."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[tuple[str, Box], ...]

    def entry(self) -> dict[str, Any]:
        """What the manifest says of it."""
        parts = [{"file": file, "offset": list(box.offset), "shape": list(box.shape)} for file, box in self.parts]
        return {"path": list(self.path), "dtype": CODES[self.dtype], "shape": list(self.shape), "parts": parts}

    @classmethod
    def of(cls, entry: Any) -> StoredTensor:
        """The tensor that an entry describes, whatever was read; one that describes none, or whose parts are not
        exactly the whole, is a `ValueError`, so that no entry asks for more memory than its files fill."""
        path, dtype, lengths, listed = _fields(entry, path=list, dtype=str, shape=list, parts=list)
        if dtype not in DTYPES or any(type(key) not in (str, int) for key in path):
            raise ValueError(f"a tensor of {dtype} at {path!r} is none that is stored")
        shape, parts = _whole_numbers(lengths), []
        for part in listed:
            file, offset, own = _fields(part, file=str, offset=list, shape=list)
            parts.append((file, Box(_whole_numbers(offset), _whole_numbers(own))))
        problem = tiling_problem(shape, [box for _, box in parts])
        if problem is not None:
            raise ValueError(f"{named(tuple(path))} {problem}")
        return cls(tuple(path), DTYPES[dtype], shape, tuple(parts))


def _fields(entry: Any, **kinds: type) -> list[Any]:
    """The named fields of an entry, each of its kind; anything else is a `ValueError`."""
    if not isinstance(entry, dict) or any(type(entry.get(name)) is not kind for name, kind in kinds.items()):
        raise ValueError(f"an entry lacks one of {', '.join(kinds)}")
    return [entry[name] for name in kinds]


def _whole_numbers(given: list[Any]) -> tuple[int, ...]:
    """Lengths or offsets of an entry; anything but whole numbers is a `ValueError`."""
    wrong = [one for one in given if type(one) is not int]
    if wrong:
        raise ValueError(f"{wrong[0]!r} stands where a whole number belongs")
    return tuple(given)


def tiling_problem(shape: tuple[int, ...], boxes: Sequence[Box]) -> str | None:
    """What keeps the boxes from holding every element of a tensor exactly once; None if they do."""
    whole = Box.whole(shape)
    if any(length < 0 for length in shape):
        return f"has shape {shape}"
    for box in boxes:
        if not len(shape) == len(box.offset) == len(box.shape) or min((0, *box.offset, *box.shape)) < 0:
            return f"of shape {shape} has a part of shape {box.shape} at {box.offset}"
        if box.common(whole) != box:
            return f"of shape {shape} has a part beyond it, of shape {box.shape} at {box.offset}"
    if any(one.common(other).elements for one, other in combinations(boxes, 2)):
        return f"of shape {shape} has parts that overlap"
    missing = whole.elements - sum(box.elements for box in boxes)
    return f"of shape {shape} lacks {missing} elements" if missing else None


def dealt(held: Sequence[Sequence[Box]], widths: Sequence[int]) -> list[Share]:
    """Who writes what, from the boxes that each process holds (`held[rank][number]`) and the bytes of an element.

    Every process computes the same.
    """
    loads = [0] * len(held)
    several: list[tuple[int, int, Box, list[int]]] = []
    shares: list[Share] = []
    for number in range(len(widths)):
        holders: dict[Box, list[int]] = {}
        for rank, boxes in enumerate(held):
            if boxes[number].elements:
                holders.setdefault(boxes[number], []).append(rank)
        for box, ranks in holders.items():
            size = box.elements * widths[number]
            if len(ranks) > 1:
                several.append((-size, number, box, ranks))
            else:
                loads[ranks[0]] += size
                shares.append(Share(number, box, ranks[0]))
    for size, number, box, ranks in sorted(several):
        rank = min(ranks, key=lambda one: (loads[one], one))
        loads[rank] -= size
        shares.append(Share(number, box, rank))
    return sorted(shares, key=lambda share: (share.number, share.box))


def filed(shares: Sequence[Share], whole: Sequence[bool], widths: Sequence[int]) -> dict[str, list[Share]]:
    """The files of all processes with what stands in each. Whole tensors, which every process reads, stand apart from
    parts, which one process may need alone."""
    files: dict[str, list[Share]] = {}
    held: dict[tuple[str, int], tuple[int, int]] = {}
    for share in shares:
        kind = "tensors" if whole[share.number] else "parts"
        number, size = held.get((kind, share.rank), (0, 0))
        if size >= FILE_BYTES:
            number, size = number + 1, 0
        held[kind, share.rank] = (number, size + share.box.elements * widths[share.number])
        files.setdefault(f"{kind}-{share.rank:05d}-{number:05d}.safetensors", []).append(share)
    return files


def stored(
    files: Mapping[str, Sequence[Share]], paths: Sequence[Path], dtypes: Sequence[torch.dtype], shapes: Sequence[Any]
) -> list[StoredTensor]:
    """The tensors as the manifest describes them, by number; parts that are not the whole are a `ValueError`."""
    parts: list[list[tuple[str, Box]]] = [[] for _ in paths]
    for name, shares in files.items():
        for share in shares:
            parts[share.number].append((name, share.box))
    found = [
        StoredTensor(path, dtype, tuple(shape), tuple(sorted(own)))
        for path, dtype, shape, own in zip(paths, dtypes, shapes, parts)
    ]
    for tensor in found:
        problem = tiling_problem(tensor.shape, [box for _, box in tensor.parts])
        if problem is not None:
            raise ValueError(f"{named(tensor.path)} {problem}")
    return found


class Reassembly:
    """Tensors that are put together from the parts of one file after another."""

    def __init__(self, tensors: Sequence[StoredTensor], wanted: Wanted | None) -> None:
        self.tensors = tensors
        self.boxes = [
            (None if wanted is None else wanted(one.path, one.shape)) or Box.whole(one.shape) for one in tensors
        ]
        for one, box in zip(tensors, self.boxes):
            if len(box.shape) != len(one.shape) or box.common(Box.whole(one.shape)) != box:
                raise ValueError(f"{named(one.path)} of shape {one.shape} has no part at {box.offset} of {box.shape}")
        self._found: list[Tensor | None] = [None] * len(tensors)
        self._by_file: dict[str, list[tuple[int, Box]]] = {}
        for number, one in enumerate(tensors):
            for file, box in one.parts:
                if box.common(self.boxes[number]).elements:
                    self._by_file.setdefault(file, []).append((number, box))

    def needs(self, file: str) -> bool:
        """Whether any part in the file is wanted."""
        return file in self._by_file

    def take(self, file: str, content: Mapping[str, Tensor]) -> None:
        """Copy what is wanted out of a file."""
        for number, box in self._by_file.get(file, ()):
            part, one = content.get(str(number)), self.tensors[number]
            if part is None or tuple(part.shape) != box.shape or part.dtype != one.dtype:
                raise ValueError(f"{file} holds another part of {named(one.path)} than the manifest says")
            wanted = self.boxes[number]
            if box == wanted:
                self._found[number] = part
                continue
            target = self._target(number)
            common = box.common(wanted)
            target[common.inside(wanted).slices] = part[common.inside(box).slices]

    def _target(self, number: int) -> Tensor:
        found = self._found[number]
        if found is None:
            shape, one = self.boxes[number].shape, self.tensors[number]
            # Beside a length of 0 the others may be anything: a tensor without a file.
            if math.prod(max(length, 1) for length in shape) > _LARGEST:
                raise ValueError(f"{named(one.path)} has shape {shape}")
            found = torch.empty(shape, dtype=one.dtype)
            self._found[number] = found
        return found

    def finished(self) -> Iterator[Tensor | Piece]:
        """By number what was wanted of each tensor: the whole, or a piece."""
        for number, (one, box) in enumerate(zip(self.tensors, self.boxes)):
            found = self._target(number)
            yield found if box.shape == one.shape else Piece(found, one.shape, box.offset)

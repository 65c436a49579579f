"""Trees of state as JSON plus numbered tensors, and back, bit for bit.

A tree is made of dicts (string or integer keys), lists, tuples, None, booleans, integers, floats, strings, torch
tensors (also those of which a process holds a piece) and numpy arrays. Anything else is refused by its path, because it
would not come back as it was.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tfive.distributed.pieces import Piece, piece_of
from tfive.training.tensor_files import CODES

Document = Any
"""What `json` can write: a plain value, a list, or a one-key tagged object."""

Path = tuple[str | int, ...]
"""Where something is in a tree: keys of dicts and numbers in lists, from the root."""


@dataclass
class Encoded:
    """A tree as a JSON document that refers to tensors by number (one that occurs twice has one number)."""

    document: Document = None
    pieces: list[Piece] = field(default_factory=list)
    """What this process holds of each tensor, by number."""
    paths: list[Path] = field(default_factory=list)
    """Where each tensor is first referred to, by number."""
    everywhere: dict[Path, Piece] = field(default_factory=dict)
    """The tensors by every place that refers to them."""


def encode(tree: Any) -> Encoded:
    """The tree as a document with its tensors, which are references and not copies."""
    found = Encoded()
    found.document = _Encoder(found).encoded(tree, ())
    return found


def decode(document: Document, tensors: Sequence[Tensor | Piece]) -> Any:
    """The tree that `encode` was given, from whole tensors or pieces of them by number; they come back on the CPU. A
    document that `encode` does not make is a `ValueError`."""
    if isinstance(document, list):
        return [decode(part, tensors) for part in document]
    if not isinstance(document, dict):
        return document
    ((tag, content),) = document.items()
    match tag:
        case "dict":
            return {key: decode(value, tensors) for key, value in entries(document)}
        case "tuple" if isinstance(content, list):
            return tuple(decode(part, tensors) for part in content)
        case "float" if content in ("nan", "inf", "-inf"):
            return float(content)
        case "tensor" if _counts(content, tensors):
            return tensors[content]
        case "array" if _counts(content, tensors):
            array = tensors[content]
            if isinstance(array, Tensor) and array.dtype not in _TORCH_ALONE:
                return array.numpy()
    raise ValueError(f"a {tag!r} of {content!r:.80} is nothing that is stored")


def entries(document: Document) -> list[tuple[str | int, Document]]:
    """Keys and values of a dict's document, not decoded; a `ValueError` where it is none."""
    listed = document.get("dict") if isinstance(document, dict) else None
    if not isinstance(listed, list):
        raise ValueError("a dict has no list of entries")
    wrong = [one for one in listed if not (isinstance(one, list) and len(one) == 2 and type(one[0]) in (str, int))]
    if wrong:
        raise ValueError(f"{wrong[0]!r:.80} is no entry of a dict")
    return [(key, value) for key, value in listed]


def _counts(number: Any, tensors: Sequence[Any]) -> bool:
    return type(number) is int and 0 <= number < len(tensors)


def named(path: Path) -> str:
    """A path for a person."""
    return ".".join(("state", *map(str, path)))


_TORCH_ALONE = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
"""What is stored and numpy has not."""


class _Encoder:
    def __init__(self, found: Encoded) -> None:
        self.found = found
        self.known: dict[Any, int] = {}

    def encoded(self, value: Any, path: Path) -> Document:
        if value is None or isinstance(value, bool | str) or type(value) is int:
            return value
        if isinstance(value, float):
            number = float(value)
            return number if math.isfinite(number) else {"float": repr(number)}
        if isinstance(value, Tensor | Piece):
            return {"tensor": self._numbered(value, path)}
        if isinstance(value, np.ndarray):
            return {"array": self._numbered(_from_numpy(value, path), path)}
        if isinstance(value, Mapping):
            return {"dict": [[_key(key, path), self.encoded(part, (*path, key))] for key, part in value.items()]}
        if isinstance(value, list | tuple):
            parts = [self.encoded(part, (*path, number)) for number, part in enumerate(value)]
            return parts if isinstance(value, list) else {"tuple": parts}
        raise TypeError(
            f"{named(path)}: a {type(value).__name__} cannot be stored; use plain numbers, strings, tensors or arrays"
        )

    def _numbered(self, value: Tensor | Piece, path: Path) -> int:
        piece = value if isinstance(value, Piece) else _described(value, path)
        local = piece.local
        if local.layout != torch.strided or local.is_quantized or local.dtype not in CODES:
            raise TypeError(f"{named(path)}: a tensor of {local.dtype}, {local.layout} cannot be stored")
        self.found.everywhere[path] = piece
        memory = (local.device, local.data_ptr(), local.stride(), local.dtype, piece.box, piece.shape)
        if local.numel() and memory in self.known:
            return self.known[memory]
        self.known[memory] = len(self.found.pieces)
        self.found.pieces.append(piece)
        self.found.paths.append(path)
        return self.known[memory]


def _described(tensor: Tensor, path: Path) -> Piece:
    try:
        return piece_of(tensor)
    except ValueError as error:
        raise TypeError(f"{named(path)}: {error}") from error


def _key(key: Any, path: Path) -> str | int:
    if type(key) in (str, int):
        return key
    raise TypeError(f"{named(path)}: key {key!r} is neither a string nor an integer")


def _from_numpy(array: np.ndarray, path: Path) -> Tensor:
    if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        raise TypeError(f"{named(path)}: arrays of {array.dtype} cannot be stored")
    return torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("="), order="C", copy=True))

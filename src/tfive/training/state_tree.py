"""Trees of state as JSON plus numbered tensors, and back, bit for bit.

A tree is made of dicts (string or integer keys), lists, tuples, None, booleans, integers, floats, strings, torch
tensors and numpy arrays. Anything else is refused by its path, because it would not come back as it was.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

Document = Any
"""What `json` can write: a plain value, a list, or a one-key tagged object."""


def encode(tree: Any) -> tuple[Document, list[Tensor]]:
    """The tree as a JSON document, and the tensors it refers to by number (a tensor that occurs twice is kept once)."""
    tensors: list[Tensor] = []
    known: dict[Any, int] = {}
    return _encode(tree, "state", tensors, known), tensors


def decode(document: Document, tensors: Sequence[Tensor]) -> Any:
    """The tree that `encode` was given; tensors come back on the CPU."""
    if isinstance(document, list):
        return [decode(part, tensors) for part in document]
    if not isinstance(document, dict):
        return document
    ((tag, content),) = document.items()
    match tag:
        case "dict":
            return {key: decode(value, tensors) for key, value in content}
        case "tuple":
            return tuple(decode(part, tensors) for part in content)
        case "float":
            return float(content)
        case "tensor":
            return tensors[content]
        case "array":
            return tensors[content].numpy()
    raise ValueError(f"unknown tag {tag!r}")


def _encode(value: Any, path: str, tensors: list[Tensor], known: dict[Any, int]) -> Document:
    if value is None or isinstance(value, bool | str) or type(value) is int:
        return value
    if isinstance(value, float):
        number = float(value)
        return number if math.isfinite(number) else {"float": repr(number)}
    if isinstance(value, Tensor):
        return {"tensor": _numbered(value, path, tensors, known)}
    if isinstance(value, np.ndarray):
        return {"array": _numbered(_from_numpy(value, path), path, tensors, known)}
    if isinstance(value, Mapping):
        return {
            "dict": [[_key(key, path), _encode(part, f"{path}.{key}", tensors, known)] for key, part in value.items()]
        }
    if isinstance(value, list | tuple):
        parts = [_encode(part, f"{path}[{number}]", tensors, known) for number, part in enumerate(value)]
        return parts if isinstance(value, list) else {"tuple": parts}
    raise TypeError(f"{path}: a {type(value).__name__} cannot be stored; use plain numbers, strings, tensors or arrays")


def _key(key: Any, path: str) -> str | int:
    if type(key) in (str, int):
        return key
    raise TypeError(f"{path}: key {key!r} is neither a string nor an integer")


def _from_numpy(array: np.ndarray, path: str) -> Tensor:
    if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        raise TypeError(f"{path}: arrays of {array.dtype} cannot be stored")
    return torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("="), order="C", copy=True))


def _numbered(tensor: Tensor, path: str, tensors: list[Tensor], known: dict[Any, int]) -> int:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.dtype.is_complex:
        raise TypeError(f"{path}: a tensor of {tensor.dtype}, {tensor.layout} cannot be stored")
    memory = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
    if tensor.numel() and memory in known:
        return known[memory]
    known[memory] = len(tensors)
    tensors.append(tensor.detach())
    return known[memory]

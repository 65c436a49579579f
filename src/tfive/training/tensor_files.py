"""Files of a checkpoint: safetensors written from host memory as it lies there, everything with its sha256.

The writer makes no second copy and calls nothing that holds Python's lock for long, because it runs beside training.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from tfive.errors import out_of_memory

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "BOOL": torch.bool,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
"""The format's names of what can be stored."""

CODES = {dtype: code for code, dtype in DTYPES.items()}

_BLOCK = 1 << 24
"""Bytes that are written and hashed at a time."""

Fingerprint = dict[str, Any]
"""`bytes` and `sha256` of a file."""


def tensor_blocks(tensors: Mapping[str, Tensor]) -> Iterator[memoryview]:
    """A safetensors file of contiguous host tensors: its header, then their memory."""
    header: dict[str, Any] = {}
    end = 0
    # Wide elements first, so that each stands at a multiple of its size.
    ordered = sorted(tensors.items(), key=lambda entry: -entry[1].element_size())
    for name, tensor in ordered:
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    written = json.dumps(header, separators=(",", ":")).encode()
    written += b" " * (-len(written) % 8)
    yield memoryview(len(written).to_bytes(8, "little") + written)
    for _, tensor in ordered:
        memory = tensor.reshape(-1).view(torch.uint8).numpy().data
        for start in range(0, len(memory), _BLOCK):
            yield memory[start : start + _BLOCK]


def write_file(path: Path, blocks: Iterator[memoryview], fault: Callable[[str], None]) -> Fingerprint:
    """Write a new file, sync it to disk and return its fingerprint; `fault` is called with `mid-write` when a part of
    it is written."""
    digest, size = hashlib.sha256(), 0
    with path.open("xb") as file:
        for number, block in enumerate(blocks):
            if number == 0:
                half = len(block) // 2
                file.write(block[:half])
                file.flush()
                fault("mid-write")
                file.write(block[half:])
            else:
                file.write(block)
            digest.update(block)
            size += len(block)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": size, "sha256": digest.hexdigest()}


def fingerprint(content: bytes) -> Fingerprint:
    """What `write_file` returns for a file of this content."""
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def tensors_in(content: bytes) -> dict[str, Tensor]:
    """The tensors of a safetensors file, on the CPU; a `ValueError` where it is none or holds what torch has not."""
    try:
        return safetensors.torch.load(content)
    except (SafetensorError, KeyError, TypeError, OverflowError, RuntimeError) as error:
        if out_of_memory(error):
            raise
        raise ValueError(f"no file of tensors ({type(error).__name__}: {error})") from error


def sync_folder(folder: Path) -> None:
    """Make the folder's entries themselves durable (a rename is not before its folder is synced)."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

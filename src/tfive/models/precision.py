"""Where a model computes and in which precision, when nobody says."""

from __future__ import annotations

import torch

from tfive.errors import UserError

COMPUTE = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def choose_device(name: str = "auto") -> torch.device:
    """The named device, checked to exist; `auto` and `cuda` are this process's own GPU, `auto` the CPU without one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"model.device = {name!r} is no device; use auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"model.device = {name!r} is not supported; use auto, cpu, cuda or cuda:N")
    if device.type == "cpu":
        return torch.device("cpu")
    index = device.index or 0
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index >= count:
        raise UserError(
            f"model.device = {name!r} asks for GPU {index}, this machine has {count}; use model.device = cpu"
        )
    return torch.device("cuda", index)


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The precision of the compute copy: `auto` is bfloat16 on a GPU that computes in it, float32 elsewhere."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported(False) else torch.float32
    if name not in COMPUTE:
        raise UserError(f"model.compute = {name!r} is not offered; use auto, float32 or bfloat16")
    return COMPUTE[name]

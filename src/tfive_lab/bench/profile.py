"""Where a phase's time goes: device time by kernel and by family of kernels, launches, and the host's own time."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

FAMILIES = {
    "delta rule and its layer": (
        "_step",
        "convolve",
        "spread_back",
        "gates",
        "gated_norm",
        "read",
        "slopes",
        "invert",
        "fork",
    ),
    "matrix products": ("gemm", "cutlass", "nvjet", "splitk", "cublas", "sm90_xmma"),
    "attention": ("attend", "_merge", "flash", "fmha", "cudnn"),
    "vocabulary": ("_block_sums", "_draw", "softmax", "logsumexp"),
    "norms and rotation": ("_rotate", "rms_norm", "rmsnorm", "layer_norm"),
    "copies": ("memcpy", "memset", "copy", "catarray"),
}
"""Families by parts of kernels' names, the first that fits; all others are `other`."""


def family(name: str) -> str:
    """The family a kernel belongs to."""
    small = name.lower()
    own = small.split("(")[0].split("<")[0]
    for title, parts in FAMILIES.items():
        if any(own == part or own.startswith(part) if title.startswith("delta") else part in small for part in parts):
            return title
    return "other"


def profiled(call: Callable[[], Any], device: torch.device, most: int = 30) -> dict[str, Any]:
    """Device milliseconds by family and kernel, launches and host milliseconds of one call; it was warmed up before."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    call()
    host = time.perf_counter() - start
    with torch.profiler.profile(activities=kinds) as recorded:
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    spent: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for event in recorded.events():
        on_device = event.device_type == torch.autograd.DeviceType.CUDA
        if on_device if device.type == "cuda" else not event.cpu_parent:
            cell = spent[event.name[:120]]
            cell[0] += event.time_range.elapsed_us() / 1e3
            cell[1] += 1
    families: dict[str, float] = defaultdict(float)
    for name, (milliseconds, _) in spent.items():
        families[family(name)] += milliseconds
    ranked = sorted(spent.items(), key=lambda item: -item[1][0])
    return {
        "host_ms": 1e3 * host,
        "device_ms": sum(cell[0] for cell in spent.values()),
        "launches": int(sum(cell[1] for cell in spent.values())),
        "families_ms": dict(sorted(families.items(), key=lambda item: -item[1])),
        "kernels": [{"name": name, "ms": cell[0], "count": int(cell[1])} for name, cell in ranked[:most]],
    }

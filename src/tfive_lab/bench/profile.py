"""Where a call's time goes: device time by kernel and by family of kernels, launches, the host's own time, and for how
long the device waits in each named part."""

from __future__ import annotations

import bisect
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch

FAMILIES = {
    "delta rule and its layer": (
        "_node",
        "_remember",
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

Span = tuple[float, float]
"""Begin and end, microseconds."""
PART = "part: "
"""What the names of recorded parts begin with."""


def part(name: str) -> torch.profiler.record_function:
    """A context whose time and device time `profiled` reports by this name; parts may lie in one another."""
    return torch.profiler.record_function(PART + name)


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
    busy, parts, asked = list[Span](), list[tuple[str, Span]](), list[tuple[str, float]]()
    for event in recorded.events():
        on_device, span = event.device_type == torch.autograd.DeviceType.CUDA, event.time_range
        if event.name.startswith(PART):
            if not on_device:
                parts.append((event.name.removeprefix(PART), (span.start, span.end)))
            continue
        if not on_device and event.name.startswith("cu"):  # the runtime's calls, and the driver's that Triton makes
            asked.append((event.name, span.start))
        parent = event.cpu_parent
        if on_device if device.type == "cuda" else parent is None or parent.name.startswith(PART):
            busy.append((span.start, span.end))
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
        "parts": by_part(parts, busy, asked),
        "families_ms": dict(sorted(families.items(), key=lambda item: -item[1])),
        "kernels": [{"name": name, "ms": cell[0], "count": int(cell[1])} for name, cell in ranked[:most]],
    }


def by_part(
    parts: Sequence[tuple[str, Span]], busy: Sequence[Span], asked: Sequence[tuple[str, float]]
) -> dict[str, dict[str, float]]:
    """By name: how often, milliseconds on the host's clock, for how many of them the device worked (whoever had asked
    for it), and what was asked of it: launches of kernels and of graphs, and waits for it."""
    begins, until = _united(busy)
    found: dict[str, dict[str, float]] = {}
    for name, (start, end) in parts:
        row = found.setdefault(name, {"calls": 0, "ms": 0.0, "busy_ms": 0.0, "kernels": 0, "graphs": 0, "waits": 0})
        row["calls"] += 1
        row["ms"] += (end - start) / 1e3
        row["busy_ms"] += _worked(begins, until, start, end) / 1e3
        for call, at in asked:
            if start <= at <= end:
                row["kernels"] += "LaunchKernel" in call
                row["graphs"] += call == "cudaGraphLaunch"
                row["waits"] += "Synchronize" in call
    return found


def _united(spans: Sequence[Span]) -> tuple[list[float], list[float]]:
    """The spans' union: begins and ends of its pieces, in order."""
    begins, ends = list[float](), list[float]()
    for begin, end in sorted(spans):
        if ends and begin <= ends[-1]:
            ends[-1] = max(ends[-1], end)
        else:
            begins.append(begin)
            ends.append(end)
    return begins, ends


def _worked(begins: Sequence[float], ends: Sequence[float], start: float, end: float) -> float:
    """How much of start … end the pieces cover."""
    first = bisect.bisect_right(ends, start)
    last = bisect.bisect_left(begins, end)
    return sum(min(ends[k], end) - max(begins[k], start) for k in range(first, last))

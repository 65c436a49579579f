"""When the device waits for the host: a pass's idle stretches, and which stage of the host's work they fall into."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.autograd import DeviceType

from tfive.tree.decode import Sampler
from tfive.tree.fast.grown import GrownLayouts
from tfive.tree.fast.hf_fused import Fusion
from tfive.tree.fast.tiled import Tiles
from tfive.tree.forward import TreeModel
from tfive.tree.hf import Backbone
from tfive.tree.picks import Picks
from tfive.tree.scoring import Scoring
from tfive.tree.step_pass import StepPass

STAGES: tuple[tuple[type, str], ...] = (
    (TreeModel, "read"),
    (TreeModel, "sample"),
    (TreeModel, "score"),
    (TreeModel, "policy"),
    (TreeModel, "reduce"),
    (Fusion, "refresh"),
    (GrownLayouts, "__call__"),
    (Picks, "of"),
    (Backbone, "run"),
    (Tiles, "between"),
    (Tiles, "queries"),
    (Scoring, "__post_init__"),
    (Scoring, "branches"),
    (Scoring, "plain"),
    (StepPass, "begin"),
    (Sampler, "run"),
)
"""The host's work, by the functions that are watched."""
_LEAST = 0.03
"""Shortest stretch (ms) that is listed by itself."""


def _called(owner: type, name: str) -> str:
    return f"{owner.__name__}.{name}"


@contextmanager
def _watched(owner: type, name: str) -> Iterator[None]:
    """Calls of a function are marked in profiles, for the length of the context."""
    own = owner.__dict__.get(name)
    inherited: Any = getattr(owner, name)

    @functools.wraps(inherited)
    def marked(*args: Any, **kwargs: Any) -> Any:
        with torch.profiler.record_function(_called(owner, name)):
            return inherited(*args, **kwargs)

    setattr(owner, name, staticmethod(marked) if isinstance(own, staticmethod) else marked)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


def _idle(busy: Sequence[tuple[float, float]], start: float, stop: float) -> list[tuple[float, float]]:
    """Stretches of `start … stop` that none of the intervals covers."""
    found, reached = [], start
    for begin, end in sorted(busy):
        if begin > reached:
            found.append((reached, min(begin, stop)))
        reached = max(reached, end)
    return [*found, (reached, stop)] if reached < stop else found


def timeline(
    call: Callable[[], Any], device: torch.device, stages: Sequence[tuple[type, str]] = STAGES
) -> dict[str, Any]:
    """Milliseconds of one call (warmed up before): the device's work and idle time, the latter by the innermost stage
    that the host was in, every long stretch by itself, and the host's stages in order."""
    names = {_called(*stage) for stage in stages}
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with ExitStack() as watching:
        for owner, name in stages:
            watching.enter_context(_watched(owner, name))
        recorded = watching.enter_context(torch.profiler.profile(activities=kinds, acc_events=True))
        with torch.profiler.record_function("all of it"):
            call()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
    events: list[Any] = list(recorded.events())
    host = [event for event in events if event.device_type == DeviceType.CPU]
    whole = next(event for event in host if event.name == "all of it").time_range
    marks = [(e.time_range.start, e.time_range.end, e.name) for e in host if e.name in names]
    work = [e for e in events if e.device_type == DeviceType.CUDA and e.name not in names | {"all of it"}]
    calls = sorted((e.time_range.start, e.name) for e in host if "launch" in e.name.lower())

    def stage_at(moment: float) -> str:
        inside = [mark for mark in marks if mark[0] <= moment < mark[1]]
        return max(inside)[2] if inside else "elsewhere"

    waits = _idle([(e.time_range.start, e.time_range.end) for e in work], whole.start, whole.end)
    by_stage: dict[str, float] = {}
    for begin, end in waits:
        stage = stage_at((begin + end) / 2)
        by_stage[stage] = by_stage.get(stage, 0.0) + (end - begin) / 1e3
    nexts = sorted((e.time_range.start, e.name[:60]) for e in work)
    return {
        "whole_ms": (whole.end - whole.start) / 1e3,
        "busy_ms": sum(e.time_range.elapsed_us() for e in work) / 1e3,
        "idle_ms": sum(end - begin for begin, end in waits) / 1e3,
        "idle_by_stage_ms": dict(sorted(by_stage.items(), key=lambda item: -item[1])),
        "kernels": len(work),
        "launches": len(calls),
        "stretches": [
            {
                "at_ms": (begin - whole.start) / 1e3,
                "ms": (end - begin) / 1e3,
                "stage": stage_at((begin + end) / 2),
                "then": next((name for at, name in nexts if at >= end - 1), "the end"),
            }
            for begin, end in waits
            if end - begin >= 1e3 * _LEAST
        ],
        "stages": [
            {
                "at_ms": (begin - whole.start) / 1e3,
                "ms": (end - begin) / 1e3,
                "name": name,
                "launches": sum(begin <= at < end for at, _ in calls),
            }
            for begin, end, name in sorted(marks)
        ],
    }


def seconds(call: Callable[[], Any], device: torch.device, repeats: int) -> dict[str, float]:
    """Median seconds of a call, and of it until it has returned, without a profiler."""
    whole, host = [], []
    for _ in range(repeats):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        call()
        host.append(time.perf_counter() - start)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        whole.append(time.perf_counter() - start)
    return {"seconds": statistics.median(whole), "host_seconds": statistics.median(host)}

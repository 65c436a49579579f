"""How time and memory grow with the work: `python benchmarks/growth.py --shape qwen3.5-2b --budget 60 --out results`.

One number of the work is doubled at a time, all others stay: positions, thought length (checkpoints at thirds of it),
texts, group size, tokens of a text. Every phase gets a curve and its exponent: the slope of log time (or memory) by
least squares over the larger half of the points, where fixed costs matter least, and over the last doubling alone.
Without a GPU a small model and small numbers are used.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tfive.cli.options import script
from tfive.models.precision import choose_device, choose_dtype
from tfive.tree.settings import EngineOptions
from tfive_lab.bench.phases import PHASES, Clock, empty, tree_phases
from tfive_lab.bench.selfcheck import MODELS
from tfive_lab.bench.work import SHAPES, Work, find_model, random_model

LINEAR = 1.1
"""Exponents above this count as worse than linear: a tenth is what clocks and launches can make of one."""
AXES = {
    "positions": (4, 8, 16, 32, 64),
    "length": (6, 12, 24, 48, 96),
    "texts": (2, 4, 8, 16, 32),
    "group": (1, 2, 4, 8, 16),
    "tokens": (512, 1024, 2048, 4096, 8192),
}
SMALL_AXES = {
    "positions": (2, 4, 8, 16, 32),
    "length": (6, 12, 24, 48),
    "texts": (1, 2, 4, 8),
    "group": (1, 2, 4, 8),
    "tokens": (128, 256, 512, 1024),
}
THOUGHTS = ("positions", "length", "texts", "group")
"""Numbers that multiply thoughts or their tokens."""


@dataclass(frozen=True)
class Point:
    """One size of the work: seconds and bytes beyond what was there before, by phase."""

    value: int
    seconds: dict[str, float]
    bytes: dict[str, float]


def sized(work: Work, axis: str, value: int) -> Work:
    """The work with one of its numbers changed."""
    if axis == "length":
        third = max(1, value // 3)
        return replace(work, length=value, checkpoints=(third, 2 * third, value))
    changed: dict[str, Any] = {axis: value}
    return replace(work, **changed)


class ResidentPeak:
    """Peak memory of this process since `reset`, in bytes; 0 where the system keeps no such mark."""

    _status, _marks = Path("/proc/self/status"), Path("/proc/self/clear_refs")

    def reset(self) -> None:
        """Forget the peak so far."""
        with contextlib.suppress(OSError):
            self._marks.write_text("5")

    def read(self, name: str = "VmHWM") -> float:
        """The peak, or (`VmRSS`) what is held now."""
        if not self._status.exists():
            return 0.0
        lines = self._status.read_text().splitlines()
        return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith(name))


def measure(side: Any, clock: Clock, repeats: int, value: int) -> Point:
    """Medians of all phases after one round to warm up."""
    resident, peak = ResidentPeak(), dict.fromkeys(PHASES, 0.0)
    taken: dict[str, list[float]] = {phase: [] for phase in PHASES}
    for turn in range(repeats + 1):
        for phase in PHASES:
            if clock.cuda:
                before = float(torch.cuda.memory_allocated(clock.device))
            else:
                resident.reset()
                before = resident.read("VmRSS")
            clock.peak.clear()
            seconds, _ = clock(phase, getattr(side, phase))
            after = float(clock.peak[phase]) if clock.cuda else resident.read()
            if turn:
                taken[phase].append(seconds)
                peak[phase] = max(peak[phase], after - before)
        side.model.zero_grad(set_to_none=True)
    return Point(value, {phase: statistics.median(some) for phase, some in taken.items()}, peak)


def slope(xs: list[float], ys: list[float]) -> float | None:
    """The exponent of y ~ x^a by least squares; None where a value is not positive or there is but one."""
    if len(xs) < 2 or min(ys) <= 0:
        return None
    x, y = [math.log(v) for v in xs], [math.log(v) for v in ys]
    mx, my = statistics.mean(x), statistics.mean(y)
    return sum((a - mx) * (b - my) for a, b in zip(x, y)) / sum((a - mx) ** 2 for a in x)


def exponents(points: list[Point], kind: str) -> dict[str, dict[str, float | None]]:
    """By phase: over the larger half of the points (at least two), and over the last doubling."""
    found = {}
    for phase in PHASES:
        curve = [(float(p.value), getattr(p, kind)[phase]) for p in points]
        half = curve[min(len(curve) // 2, max(0, len(curve) - 2)) :]
        found[phase] = {
            "larger half": slope([x for x, _ in half], [y for _, y in half]),
            "last doubling": slope([x for x, _ in curve[-2:]], [y for _, y in curve[-2:]]),
        }
    return found


def turns(axes: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, int]]:
    """Small sizes of all axes first, so that a short time cuts all curves alike."""
    for at in range(max(len(values) for values in axes.values())):
        yield from ((axis, values[at]) for axis, values in axes.items() if at < len(values))


def growth(model: Any, work: Work, axes: dict[str, tuple[int, ...]], engine: EngineOptions, repeats: int,
           budget: float) -> dict[str, Any]:  # fmt: skip
    """The curves; an axis ends where memory does, all where the budget of seconds does."""
    clock = Clock(next(model.parameters()).device)
    start, points, ended = time.perf_counter(), {axis: list[Point]() for axis in axes}, dict[str, str]()
    for axis, value in turns(axes):
        if time.perf_counter() - start > budget:
            ended.setdefault(axis, f"not tried from {value} on: the budget of {budget:.0f} s was over")
        if axis in ended:
            continue
        try:
            points[axis].append(measure(tree_phases(model, sized(work, axis, value), engine), clock, repeats, value))
        except torch.OutOfMemoryError:
            ended[axis] = f"{value} does not fit in memory"
        empty(clock)
    report: dict[str, Any] = {"seconds_spent": time.perf_counter() - start, "axes": {}, "ended": ended}
    for axis, some in points.items():
        report["axes"][axis] = {
            "points": [asdict(point) for point in some],
            "time exponents": exponents(some, "seconds"),
            "memory exponents": exponents(some, "bytes"),
        }
    report["worse than linear"] = worse(report["axes"])
    return report


def worse(axes: dict[str, Any]) -> list[str]:
    """Every curve that bends upwards, in words."""
    return [
        f"{phase}: {kind} against {axis}, exponent {found['larger half']:.2f}"
        for axis, curves in axes.items()
        for kind in ("time", "memory")
        for phase, found in curves[f"{kind} exponents"].items()
        if (found["larger half"] or 0.0) > LINEAR
    ]


def render(report: dict[str, Any]) -> str:
    """A line an axis and phase."""
    lines = [f"{report['model']} · {report['device']}"]
    for axis, curves in report["axes"].items():
        for phase in PHASES:
            seconds = " ".join(f"{p['value']}:{p['seconds'][phase]:.3f}s" for p in curves["points"])
            shown = [curves[f"{kind} exponents"][phase]["larger half"] for kind in ("time", "memory")]
            words = ", ".join("–" if one is None else f"{one:.2f}" for one in shown)
            lines.append(f"{axis:<10}{phase:<10}{seconds}  exponents of time and memory {words}")
    lines += [f"{axis}: {why}" for axis, why in report["ended"].items()]
    lines.append("worse than linear: " + ("; ".join(report["worse than linear"]) or "nothing"))
    return "\n".join(lines)


def main(given: list[str] | None = None) -> int:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    shapes = ["small", "nano", *SHAPES]
    parser.add_argument(
        "--shape", choices=shapes, default="small", help="a random model of this shape (small: a hybrid)"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--compute", default="auto", help="auto, float32 or bfloat16")
    parser.add_argument("--axes", nargs="+", choices=list(AXES), default=list(AXES))
    parser.add_argument("--repeats", type=int, default=2, help="rounds per point (median), after one to warm up")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds after which no further point is begun")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations in the backward pass")
    parser.add_argument("--out", type=Path, help="folder for the JSON")
    asked = parser.parse_args(given)
    device = choose_device(asked.device)
    dtype = choose_dtype(asked.compute, device)
    if asked.shape == "small":
        model, name = random_model(MODELS["hybrid"], device, dtype), "small hybrid (random weights)"
    else:
        model, name = find_model(asked.shape, device, dtype)
    large = device.type == "cuda"
    work = Work() if large else Work(texts=2, tokens=128, positions=4)
    axes = {axis: values for axis, values in (AXES if large else SMALL_AXES).items() if axis in asked.axes}
    engine = EngineOptions(activation_checkpointing=asked.checkpointing)
    about = {"model": name, "device": torch.cuda.get_device_name(device) if large else "cpu", "work": asdict(work)}
    report = about | growth(model, work, axes, engine, asked.repeats, asked.budget)
    print(render(report))
    if asked.out is not None:
        asked.out.mkdir(parents=True, exist_ok=True)
        path = asked.out / f"growth-{asked.shape}.json"
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    script(main)

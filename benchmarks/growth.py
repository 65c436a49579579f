"""How time and memory grow with the work: `python benchmarks/growth.py --shape qwen3-1.7b --budget 55 --out results`.

One number of the work is doubled at a time, all others stay: positions, thought length (checkpoints at thirds of it),
texts, group size, tokens of a text (of one text alone). Every phase gets a curve and its exponent: the slope of log
time (or memory) by least squares over the larger half of the points, where fixed costs matter least, and over the last
doubling alone. Without a GPU a small model is used, and time is that of one processor, whatever else it does.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tfive.cli.options import script
from tfive.models.precision import choose_device, choose_dtype
from tfive.tree.settings import EngineOptions
from tfive_lab.bench.phases import PHASES, Clock, TreePhases, empty, tree_phases
from tfive_lab.bench.selfcheck import MODELS
from tfive_lab.bench.work import SHAPES, Work, find_model, random_model

LINEAR = 1.1
"""Exponents above this count as worse than linear: a tenth is what clocks and launches can make of one."""
AXES: dict[str, tuple[int, ...]] = {
    "positions": (4, 8, 16, 32, 64),
    "length": (6, 12, 24, 48, 96),
    "texts": (1, 2, 4, 8, 16),
    "group": (1, 2, 4, 8, 16),
    "tokens": (512, 1024, 2048, 4096, 8192),
}
WORK = Work(texts=4)
SMALL_AXES: dict[str, tuple[int, ...]] = AXES | {"tokens": (512, 1024, 2048, 4096)}
SMALL_WORK = Work(texts=1, tokens=128, positions=8)
"""Without a GPU."""
SMALL = {"attention": "attention", "small": "hybrid"}
"""Small random models: of attention alone, and a hybrid."""


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
    # A long text is one of few: otherwise memory would end the curve.
    changed: dict[str, Any] = {axis: value} | ({"texts": 1} if axis == "tokens" else {})
    return replace(work, **changed)


class Processor:
    """Seconds of processor time and peak memory of calls without a GPU; 0 bytes where the system keeps no such mark."""

    _status, _marks = Path("/proc/self/status"), Path("/proc/self/clear_refs")

    def __call__(self, call: Callable[[], Any]) -> tuple[float, float]:
        """What `call` takes, and bytes beyond those before it."""
        gc.collect()
        with contextlib.suppress(OSError, AttributeError):
            # Freed memory that the allocator holds would hide what the call takes.
            ctypes.CDLL("libc.so.6").malloc_trim(0)
            self._marks.write_text("5")
        before, start = self._read("VmRSS"), time.process_time()
        call()
        seconds = time.process_time() - start
        return seconds, max(0.0, self._read("VmHWM") - before)

    def _read(self, name: str) -> float:
        if not self._status.exists():
            return 0.0
        lines = self._status.read_text().splitlines()
        return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith(name))


class Gpu:
    """The same on a GPU: seconds between two moments at which it has nothing to do, and its memory."""

    def __init__(self, device: torch.device) -> None:
        self.clock = Clock(device)

    def __call__(self, call: Callable[[], Any]) -> tuple[float, float]:
        before = float(torch.cuda.memory_allocated(self.clock.device))
        self.clock.peak.clear()
        seconds, _ = self.clock("call", call)
        return seconds, self.clock.peak["call"] - before


Meter = Callable[[Callable[[], Any]], tuple[float, float]]


def measure(side: TreePhases, meter: Meter, repeats: int, value: int) -> Point:
    """Medians of all phases after one round to warm up."""
    peak = dict.fromkeys(PHASES, 0.0)
    taken: dict[str, list[float]] = {phase: [] for phase in PHASES}
    for turn in range(repeats + 1):
        for phase in PHASES:
            seconds, more = meter(getattr(side, phase))
            if turn:
                taken[phase].append(seconds)
                peak[phase] = max(peak[phase], more)
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
           budget: float, keep: Callable[[dict[str, Any]], None] = lambda _: None) -> dict[str, Any]:  # fmt: skip
    """The curves; an axis ends where memory does, all where the budget of seconds does. `keep` gets them after every
    point, so that what is cut short leaves what it measured."""
    device = next(model.parameters()).device
    meter: Meter = Gpu(device) if device.type == "cuda" else Processor()
    # Which blocks are fused is found by trying them: once.
    chosen = tree_phases(model, work, engine).tree
    start, points, ended = time.perf_counter(), {axis: list[Point]() for axis in axes}, dict[str, str]()
    for axis, value in turns(axes):
        if time.perf_counter() - start > budget:
            ended.setdefault(axis, f"not tried from {value} on: the budget of {budget:.0f} s was over")
        if axis in ended:
            continue
        side = tree_phases(model, sized(work, axis, value), engine)
        side.tree.share_fusion(chosen)
        side.tree._training = chosen.training
        try:
            points[axis].append(measure(side, meter, repeats, value))
        except torch.OutOfMemoryError:
            ended[axis] = f"{value} does not fit in memory"
        del side
        empty(Clock(device))
        keep(_report(points, ended, time.perf_counter() - start))
    return _report(points, ended, time.perf_counter() - start)


def _report(points: dict[str, list[Point]], ended: dict[str, str], spent: float) -> dict[str, Any]:
    report: dict[str, Any] = {"seconds_spent": spent, "axes": {}, "ended": dict(ended)}
    for axis, some in points.items():
        report["axes"][axis] = {
            "points": [asdict(point) for point in some],
            "time exponents": exponents(some, "seconds"),
            "memory exponents": exponents(some, "bytes"),
        }
    report["worse than linear"] = worse(report["axes"])
    return report


def worse(axes: dict[str, Any]) -> list[str]:
    """Every curve that bends upwards, in words. Against the tokens of a text attention does so by nature."""
    return [
        f"{phase}: {kind} against {axis}, exponent {found['larger half']:.2f}"
        for axis, curves in axes.items()
        for kind in ("time", "memory")
        for phase, found in curves[f"{kind} exponents"].items()
        if (found["larger half"] or 0.0) > LINEAR
    ]


def render(report: dict[str, Any]) -> str:
    """Every curve on a line, then the exponents as a table."""
    lines = [f"{report['model']} · {report['device']} · {report['work']}"]
    for axis, curves in report["axes"].items():
        for phase in PHASES:
            each = (
                f"{p['value']}: {p['seconds'][phase]:.3f} s {p['bytes'][phase] / 2**20:.0f} MiB"
                for p in curves["points"]
            )
            lines.append(f"{axis:<10}{phase:<10}{'  '.join(each)}")
    lines += [f"{axis}: {why}" for axis, why in report["ended"].items()]
    lines += ["", f"| exponents of time, memory | {' | '.join(PHASES)} |", f"|---|{'---|' * len(PHASES)}"]
    for axis, curves in report["axes"].items():
        values = [str(point["value"]) for point in curves["points"]]
        shown = f"{axis}, {values[0]} to {values[-1]}" if values else axis
        lines.append(f"| {shown} | {' | '.join(_exponents(curves, phase) for phase in PHASES)} |")
    lines += ["", "worse than linear: " + ("; ".join(report["worse than linear"]) or "nothing")]
    return "\n".join(lines)


def _exponents(curves: dict[str, Any], phase: str) -> str:
    found = [curves[f"{kind} exponents"][phase]["larger half"] for kind in ("time", "memory")]
    return ", ".join("–" if one is None else f"{one:.2f}" for one in found)


def main(given: list[str] | None = None) -> int:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    shapes = [*SMALL, "nano", *SHAPES]
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
    if asked.shape in SMALL:
        kind = SMALL[asked.shape]
        model, name = random_model(MODELS[kind], device, dtype), f"small {kind} model (random weights)"
    else:
        model, name = find_model(asked.shape, device, dtype)
    large = device.type == "cuda"
    if not large:
        torch.set_num_threads(1)
    work = WORK if large else SMALL_WORK
    axes: dict[str, tuple[int, ...]] = {
        axis: values for axis, values in (AXES if large else SMALL_AXES).items() if axis in asked.axes
    }
    engine = EngineOptions(activation_checkpointing=asked.checkpointing)
    about = {
        "model": name,
        "device": torch.cuda.get_device_name(device) if large else "processor time",
        "work": asdict(work),
    }

    def keep(found: dict[str, Any]) -> None:
        if asked.out is not None:
            asked.out.mkdir(parents=True, exist_ok=True)
            path = asked.out / f"growth-{asked.shape}.json"
            path.write_text(json.dumps(about | found, indent=1) + "\n", encoding="utf-8")

    report = growth(model, work, axes, engine, asked.repeats, asked.budget, keep)
    print(render(about | report))
    keep(report)
    return 0


if __name__ == "__main__":
    script(main)

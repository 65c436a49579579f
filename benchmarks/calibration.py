"""Seconds of learning calibration heads by float32 and by TF32 products, and of what runs side by side:
`python benchmarks/calibration.py`.

All in one process, in turns, on the same made-up trajectories, whose better critic depends on the state; beside the
seconds what was learned, and the kernels that took the device's time. `two` are the halves of `window.crossed`, each
with as many thoughts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tfive.cli.options import script
from tfive.models.precision import choose_device
from tfive.rl.calibration import saddle
from tfive.rl.calibration.heads import MeanHead, WeightHead
from tfive.rl.calibration.mixture import MeanInputs, WeightInputs
from tfive.rl.calibration.moments import CalibrationData, Occupation, shared
from tfive.rl.calibration.saddle import CalibrationPlan, Candidate, calibrating
from tfive.rl.calibration.settings import CalibrationSettings
from tfive.tree.fast.cuda_graph import CudaGraphs
from tfive.tree.fast.side_by_side import Task, alone, together


class Way(NamedTuple):
    """How heads are learned: torch's precision of products, how many pairs of heads, and whether pairs, and parts of
    each, are learned side by side."""

    products: str
    heads: int
    pairs: bool = False
    parts: bool = False


WAYS = {
    "float32": Way("highest", 1),
    "tf32": Way("high", 1),
    "side by side": Way("high", 1, parts=True),
    "two": Way("high", 2),
    "two, pairs alone side by side": Way("high", 2, pairs=True),
    "two side by side": Way("high", 2, pairs=True, parts=True),
}
SHOWN = 12
"""Kernels of a profile that are kept, those with most device time."""


def made_up(asked: argparse.Namespace, device: torch.device) -> CalibrationData:
    """Trajectories of two critics: the context moves both, and each is noisier where the other is not."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    count, steps, prefix = asked.thoughts, asked.length, asked.hidden + 2 * asked.critic_width
    seen, hidden = drawn(count, steps, prefix), drawn(count, 1, asked.hidden + asked.horizon + 1)
    hidden = hidden.expand(-1, steps, -1)
    context = (0.5 * seen[..., :4].sum(-1) + hidden[..., :4].sum(-1)) / 4
    side = torch.sigmoid(2 * seen[..., 4])
    first = context + (0.3 + side) * drawn(count, steps)
    second = 0.5 * context + (1.3 - side) * drawn(count, steps)
    at = (torch.arange(steps) / steps).expand(count, -1)
    value = torch.stack([0.3 * seen[..., 5], 0.3 * seen[..., 6]], -1)
    visible = WeightInputs(seen, value, at, drawn(count, steps, asked.hidden), -drawn(count, steps).abs())
    mean = MeanInputs(seen, value, at, 1 - at, drawn(count, steps), hidden)
    moved = shared(lambda tensor: tensor.to(device))
    text_N = torch.arange(count, device=device) // asked.positions
    occupation = Occupation(torch.ones(count, steps, dtype=torch.bool, device=device), text_N, steps)
    return CalibrationData(visible.map(moved), mean.map(moved), moved(first), moved(second), occupation)


def in_turns(recorder: CudaGraphs | None, tasks: Sequence[Any], beside: bool = False) -> Task[list[Any]]:
    """`together`, one after the other on one stream."""
    return (yield from together(recorder, tasks, beside=False))


def learning(
    data: CalibrationData, asked: argparse.Namespace, device: torch.device, seed: int, graphs: CudaGraphs | None
) -> Task[Candidate]:
    """A candidate from fresh heads."""
    prefix, scoring = asked.hidden + 2 * asked.critic_width, asked.hidden + asked.horizon + 1
    weight_head = WeightHead(prefix, asked.hidden, dropout=0.1).to(device)
    mean_head = MeanHead(prefix, scoring).to(device)
    weight_head.standardize(data.weight_inputs, data.occupation.mask_NT)
    mean_head.standardize(data.mean_inputs, data.occupation.mask_NT)
    settings = CalibrationSettings(steps=asked.steps, warm_steps=asked.steps, batch=asked.batch)
    return (yield from calibrating(weight_head, mean_head, data, CalibrationPlan.of(settings, graphs), seed=seed))


def learned(
    way: Way, data: CalibrationData, asked: argparse.Namespace, device: torch.device, graphs: CudaGraphs | None
) -> list[Candidate]:
    """The candidates of one way."""
    torch.set_float32_matmul_precision(way.products)
    pairs, saddle.together = (together if beside else in_turns for beside in (way.pairs, way.parts))
    try:
        return alone(pairs(graphs, [partial(learning, data, asked, device, seed) for seed in range(way.heads)]))
    finally:
        saddle.together = together
        if graphs is not None:
            graphs.release()


def facts(found: Candidate) -> dict[str, Any]:
    """What was learned: the change of the offset, the moment on held-out texts, and the step that was kept."""
    return {"change": found.change, "risk": found.risk, "step": found.step, "updates": found.updates}


def kernels(work: Any) -> list[dict[str, Any]]:
    """The device time of `work` by kernel, in ms."""
    both = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=both) as profile:
        work()
        torch.cuda.synchronize()
    rows = [one for one in profile.key_averages() if one.self_device_time_total > 0]
    rows.sort(key=lambda one: -one.self_device_time_total)
    whole = sum(one.self_device_time_total for one in rows) / 1e3
    said = [{"name": "all", "ms": round(whole, 2), "times": sum(one.count for one in rows)}]
    return said + [
        {"name": one.key[:100], "ms": round(one.self_device_time_total / 1e3, 2), "times": one.count}
        for one in rows[:SHOWN]
    ]


def main(given: list[str] | None = None) -> int:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="auto")
    sizes = {"thoughts": 640, "length": 12, "hidden": 576, "critic-width": 256, "horizon": 16, "positions": 16}
    for name, value in (sizes | {"steps": 100, "batch": 512, "repeats": 5}).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--out", type=Path, help="file for the JSON")
    asked = parser.parse_args(given)
    device = choose_device(asked.device)
    data, graphs = made_up(asked, device), CudaGraphs.on(device, True, frequent=True)
    took: dict[str, list[float]] = {name: [] for name in WAYS}
    report: dict[str, Any] = {"asked": {k: v for k, v in vars(asked).items() if k != "out"}, "learned": {}}
    report["device"] = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    report["versions"] = {"torch": torch.__version__}
    for turn in range(asked.repeats + 1):  # the first sets libraries up
        for name, way in WAYS.items():
            start = time.perf_counter()
            found = learned(way, data, asked, device, graphs)
            if device.type == "cuda":
                torch.cuda.synchronize()
            if turn:
                took[name].append(time.perf_counter() - start)
            report["learned"][name] = [facts(one) for one in found]
    report["seconds"] = {name: {"median": statistics.median(all_), "all": all_} for name, all_ in took.items()}
    if device.type == "cuda":
        report["kernels"] = {}
        for name in ("tf32", "two side by side"):
            report["kernels"][name] = kernels(partial(learned, WAYS[name], data, asked, device, graphs))
    report["trouble"] = "" if graphs is None else graphs.trouble
    if asked.out is not None:
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        asked.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    script(main)

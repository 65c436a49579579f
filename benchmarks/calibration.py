"""Seconds of learning calibration heads by float32 and by TF32 products: `python benchmarks/calibration.py`.

Both in one process, in turns, on the same made-up trajectories, whose better critic depends on the state; beside the
seconds what was learned, and the kernels that took the device's time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tfive.cli.options import script
from tfive.models.precision import choose_device
from tfive.rl.calibration.heads import MeanHead, WeightHead
from tfive.rl.calibration.mixture import MeanInputs, WeightInputs
from tfive.rl.calibration.moments import CalibrationData, Occupation, shared
from tfive.rl.calibration.saddle import CalibrationPlan, Candidate, calibrate
from tfive.rl.calibration.settings import CalibrationSettings
from tfive.tree.fast.cuda_graph import CudaGraphs

PRODUCTS = {"float32": "highest", "tf32": "high"}
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


def learned(data: CalibrationData, asked: argparse.Namespace, device: torch.device, graphs: CudaGraphs | None) -> Any:
    """A candidate from fresh heads."""
    prefix, scoring = asked.hidden + 2 * asked.critic_width, asked.hidden + asked.horizon + 1
    weight_head = WeightHead(prefix, asked.hidden, dropout=0.1).to(device)
    mean_head = MeanHead(prefix, scoring).to(device)
    weight_head.standardize(data.weight_inputs, data.occupation.mask_NT)
    mean_head.standardize(data.mean_inputs, data.occupation.mask_NT)
    settings = CalibrationSettings(steps=asked.steps, warm_steps=asked.steps, batch=asked.batch)
    try:
        return calibrate(weight_head, mean_head, data, CalibrationPlan.of(settings, graphs), seed=0)
    finally:
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
    took: dict[str, list[float]] = {name: [] for name in PRODUCTS}
    report: dict[str, Any] = {"asked": {k: v for k, v in vars(asked).items() if k != "out"}, "learned": {}}
    report["device"] = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    report["versions"] = {"torch": torch.__version__}
    for turn in range(asked.repeats + 1):  # the first sets libraries up
        for name, precision in PRODUCTS.items():
            torch.set_float32_matmul_precision(precision)
            start = time.perf_counter()
            found = learned(data, asked, device, graphs)
            if device.type == "cuda":
                torch.cuda.synchronize()
            if turn:
                took[name].append(time.perf_counter() - start)
            report["learned"][name] = facts(found)
    report["seconds"] = {name: {"median": statistics.median(all_), "all": all_} for name, all_ in took.items()}
    if device.type == "cuda":
        report["kernels"] = {}
        for name, precision in PRODUCTS.items():
            torch.set_float32_matmul_precision(precision)
            report["kernels"][name] = kernels(lambda: learned(data, asked, device, graphs))
    if asked.out is not None:
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        asked.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    script(main)

"""When the device waits for the host in each phase of the tree: `python benchmarks/timeline.py --shape qwen3-1.7b`.

Medians first, without a profiler; then one call of each phase with its idle stretches, and its kernels by family.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tfive.cli.options import script
from tfive.models.precision import choose_device, choose_dtype
from tfive.tree.settings import EngineOptions
from tfive_lab.bench.engine import mismatch
from tfive_lab.bench.phases import PHASES, tree_phases
from tfive_lab.bench.profile import profiled
from tfive_lab.bench.timeline import seconds, timeline
from tfive_lab.bench.work import SHAPES, SMALL, Work, find_model


def main(given: list[str] | None = None) -> int:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=["nano", *SHAPES], help="a random model of this shape")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--compute", default="auto", help="auto, float32 or bfloat16")
    parser.add_argument("--delta-rule", default="auto", choices=["auto", "torch", "triton", "fla"])
    parser.add_argument("--replayed", action="store_true", help="by captured passes, as runs do")
    parser.add_argument("--repeats", type=int, default=5, help="calls of each phase (median)")
    parser.add_argument("--phases", default=",".join(PHASES[:3]), help="which of them, separated by commas")
    for name in ("texts", "tokens", "positions", "group"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--out", type=Path, help="folder for the JSON")
    asked = parser.parse_args(given)
    device = choose_device(asked.device)
    model, name = find_model(asked.shape, device, choose_dtype(asked.compute, device))
    work = Work() if device.type == "cuda" else SMALL
    changes = {key: getattr(asked, key) for key in ("texts", "tokens", "positions", "group")}
    work = replace(work, **{key: value for key, value in changes.items() if value is not None})
    side = tree_phases(model, work, EngineOptions(delta_rule=asked.delta_rule, replayed_passes=asked.replayed))
    report: dict[str, Any] = {"model": name, "device": str(device), "torch": torch.__version__, "phases": {}}

    def save() -> None:
        if asked.out is not None:
            asked.out.mkdir(parents=True, exist_ok=True)
            path = asked.out / f"timeline-{asked.shape or 'embedded'}{'-replayed' if asked.replayed else ''}.json"
            path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")

    phases = asked.phases.split(",")
    for phase in phases:
        call = getattr(side, phase)
        for _ in range(3):  # the first sets up, the second captures
            call()
        report["phases"][phase] = seconds(call, device, asked.repeats)
        print(phase, json.dumps(report["phases"][phase]), flush=True)
        save()
    if side.thoughts is not None and "actor" in phases:
        report |= mismatch(side.thoughts.log_q_BRT.flatten(0, 1), side.actor())
        print(f"mismatch KL {report['mismatch_kl']:.2e}")
    for phase in phases:
        found = timeline(getattr(side, phase), device)
        found["profile"] = profiled(getattr(side, phase), device)
        report["phases"][phase] |= found
        short = {key: value for key, value in found.items() if key not in ("stretches", "stages", "profile")}
        print(phase, json.dumps(short), flush=True)
        save()
    return 0


if __name__ == "__main__":
    script(main)

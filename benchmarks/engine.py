"""The tree against the plain path, as JSON: `python benchmarks/engine.py --shape qwen3-1.7b --out results`.

Without a shape the embedded model is used. `--selfcheck` compares the device's fast paths with the reference instead;
`--profile` adds a table of where the device's time goes in each phase of the tree.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch

from tfive.cli.options import script
from tfive.models.precision import choose_device, choose_dtype
from tfive.tree.settings import EngineOptions
from tfive_lab.bench import engine as bench
from tfive_lab.bench import selfcheck as bench_selfcheck
from tfive_lab.bench.phases import PHASES, tree_phases
from tfive_lab.bench.work import SHAPES, SMALL, Work, find_model


def arguments(given: list[str] | None) -> argparse.Namespace:
    """What was typed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=["nano", *SHAPES], help="a random model of this shape")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--compute", default="auto", help="auto, float32 or bfloat16")
    parser.add_argument("--attention", default="auto", choices=["auto", "sdpa", "folded", "tiled", "flex"])
    parser.add_argument("--delta-rule", default="auto", choices=["auto", "torch", "fla"])
    parser.add_argument("--repeats", type=int, help="rounds per side (median)")
    parser.add_argument("--plain-repeats", type=int, help="rounds of the plain side")
    for name in ("texts", "tokens", "positions", "group"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--tree-only", action="store_true", help="time the tree alone")
    parser.add_argument("--short", action="store_true", help="leave out doubled positions and recomputed activations")
    parser.add_argument("--selfcheck", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path, help="folder for the JSON")
    return parser.parse_args(given)


def profile(work: Work, asked: argparse.Namespace, settings: EngineOptions) -> str:
    """Where the device's time goes in each phase of the tree: kernels by time."""
    device = choose_device(asked.device)
    model, _ = find_model(asked.shape, device, choose_dtype(asked.compute, device))
    side = tree_phases(model, work, settings)
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    order = "cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
    parts = []
    for phase in PHASES:
        getattr(side, phase)()
        with torch.profiler.profile(activities=kinds) as recorded:
            getattr(side, phase)()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        parts.append(f"== {phase}\n{recorded.key_averages().table(sort_by=order, row_limit=25)}")
    return "\n".join(parts)


def main(given: list[str] | None = None) -> int:
    """Run, print, write."""
    asked = arguments(given)
    settings = EngineOptions(attention=asked.attention, delta_rule=asked.delta_rule)
    work = Work() if choose_device(asked.device).type == "cuda" else SMALL
    changes = {name: getattr(asked, name) for name in ("texts", "tokens", "positions", "group")}
    work = replace(work, **{name: value for name, value in changes.items() if value is not None})
    name = f"engine-{asked.shape or 'embedded'}{'-tree-only' if asked.tree_only else ''}"
    if asked.selfcheck:
        name, report = "selfcheck", bench_selfcheck.selfcheck(asked.device)
        print(bench_selfcheck.render(report))
    else:
        report = bench.engine(
            asked.shape,
            device=asked.device,
            compute=asked.compute,
            work=work,
            repeats=asked.repeats,
            plain_repeats=asked.plain_repeats,
            settings=settings,
            plain=not asked.tree_only,
            extras=False if asked.short else None,
        )
        print(bench.render(report))
    if asked.out is not None:
        asked.out.mkdir(parents=True, exist_ok=True)
        (asked.out / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if asked.profile:
        table = profile(work, asked, settings)
        print(table)
        if asked.out is not None:
            (asked.out / f"{name}-profile.txt").write_text(table, encoding="utf-8")
    return 0 if report.get("ok", True) else 1


if __name__ == "__main__":
    script(main)

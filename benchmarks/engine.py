"""The tree against the plain path, as JSON: `python benchmarks/engine.py --shape qwen3-1.7b --out results`.

Without a shape the embedded model is used. `--selfcheck` compares the device's fast paths with the reference instead;
`--profile` adds where the device's time goes in each phase of the tree.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from tfive.cli.options import script
from tfive.models.precision import choose_device, choose_dtype
from tfive.report.runs import read_json
from tfive.tree.settings import EngineOptions
from tfive_lab.bench import engine as bench
from tfive_lab.bench import selfcheck as bench_selfcheck
from tfive_lab.bench.phases import PHASES, tree_phases
from tfive_lab.bench.profile import profiled
from tfive_lab.bench.work import SHAPES, SMALL, Work, find_model


def arguments(given: list[str] | None) -> argparse.Namespace:
    """What was typed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=["nano", *SHAPES], help="a random model of this shape")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--compute", default="auto", help="auto, float32 or bfloat16")
    parser.add_argument("--attention", default="auto", choices=["auto", "sdpa", "folded", "tiled", "flex"])
    parser.add_argument("--delta-rule", default="auto", choices=["auto", "torch", "triton", "fla"])
    parser.add_argument("--repeats", type=int, help="rounds per side (median)")
    parser.add_argument("--plain-repeats", type=int, help="rounds of the plain side")
    parser.add_argument(
        "--plain-sizes", help="batch sizes the plain side tries, separated by commas, or a report whose best are taken"
    )
    parser.add_argument("--replayed", action="store_true", help="time the phases with replayed passes as well")
    for name in ("texts", "tokens", "positions", "group"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--tree-only", action="store_true", help="time the tree alone")
    parser.add_argument("--short", action="store_true", help="leave out doubled positions and recomputed activations")
    parser.add_argument("--selfcheck", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path, help="folder for the JSON")
    return parser.parse_args(given)


def plain_sizes(given: str | None) -> dict[str, tuple[int, ...]] | None:
    """Batch sizes of each phase: the same for all, or those that an earlier report found to be fastest."""
    if given is None:
        return None
    if given.endswith(".json"):
        best = read_json(Path(given))["plain_rows"]
        return {phase: (int(best[phase]),) for phase in PHASES}
    return dict.fromkeys(PHASES, tuple(map(int, given.split(","))))


def profile(work: Work, asked: argparse.Namespace, settings: EngineOptions) -> dict[str, Any]:
    """Where the device's time goes in each phase of the tree and in ten sampling steps."""
    device = choose_device(asked.device)
    model, _ = find_model(asked.shape, device, choose_dtype(asked.compute, device))
    side = tree_phases(model, work, settings)
    found = {}
    for phase in (*PHASES, "ten_steps"):
        getattr(side, phase)()
        found[phase] = profiled(getattr(side, phase), device)
    return found


def main(given: list[str] | None = None) -> int:
    """Run, print, write."""
    asked = arguments(given)
    settings = EngineOptions(attention=asked.attention, delta_rule=asked.delta_rule)
    work = Work() if choose_device(asked.device).type == "cuda" else SMALL
    changes = {name: getattr(asked, name) for name in ("texts", "tokens", "positions", "group")}
    work = replace(work, **{name: value for name, value in changes.items() if value is not None})

    def keep(found: dict[str, Any]) -> None:
        if asked.out is not None:
            asked.out.mkdir(parents=True, exist_ok=True)
            (asked.out / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    name = f"engine-{asked.shape or 'embedded'}{'-tree-only' if asked.tree_only else ''}"
    if asked.selfcheck:
        name = "selfcheck"
        report = bench_selfcheck.selfcheck(asked.device, keep)
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
            batch_sizes=plain_sizes(asked.plain_sizes),
            extras=False if asked.short else None,
            replayed=asked.replayed,
            keep=keep,
        )
        print(bench.render(report))
    keep(report)
    if asked.profile:
        found = profile(work, asked, settings)
        for phase, figures in found.items():
            print(f"{phase}: {json.dumps({key: value for key, value in figures.items() if key != 'kernels'})}")
        if asked.out is not None:
            path = asked.out / f"{name}-profile.json"
            path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0 if report.get("ok", True) else 1


if __name__ == "__main__":
    script(main)

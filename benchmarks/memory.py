"""Predicted and measured peak memory of training, seconds of a step: `python benchmarks/memory.py --shape qwen3.5-9b`.

The model has random weights, made on the device. The JSON is printed, and with `--out` also written after every method,
so that a run which is cut short leaves what it measured.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from tfive.cli.options import script
from tfive_lab.bench.memory import FITTING, LOCAL, memory_report
from tfive_lab.bench.step import SMALL, StepWork
from tfive_lab.bench.work import SHAPES


def arguments(given: list[str] | None) -> argparse.Namespace:
    """What was typed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", default="nano", choices=[*LOCAL, *SHAPES], help="a random model of this shape")
    parser.add_argument("--methods", default="t5,rlp", help="separated by commas")
    parser.add_argument("--lengths", default="12", help="thought lengths, e.g. 12,64")
    parser.add_argument("--items", type=int, help="actor items a step")
    parser.add_argument("--steps", type=int, help="optimizer steps a window, a multiple of 2")
    parser.add_argument("--windows", type=int, default=2, help="windows a method; the first is start-up")
    parser.add_argument("--texts", type=int, help="texts a pass; none: the most that are predicted to fit")
    parser.add_argument("--room", type=float, default=0.75, help="part of the device that the prediction may fill")
    parser.add_argument("--budget", type=float, help="seconds to stay within")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--compute", default="auto", help="auto, float32 or bfloat16")
    own = "; ".join(f"{shape}: {' '.join(chosen)}" for shape, chosen in FITTING.items())
    said = f"settings after those of the shape ({own})"
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides", help=said)
    parser.add_argument("--out", type=Path, help="file for the JSON")
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> int:
    """Run, print, write."""
    asked = arguments(given)
    base = SMALL if asked.shape in LOCAL else StepWork(items=64, steps=2)
    base = replace(base, items=asked.items or base.items, steps=asked.steps or base.steps)
    texts = [] if asked.texts is None else [f"run.texts_per_pass={asked.texts}"]

    def keep(report: dict[str, Any]) -> None:
        if asked.out is not None:
            asked.out.parent.mkdir(parents=True, exist_ok=True)
            asked.out.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", "utf-8")

    report = memory_report(
        asked.shape,
        asked.methods.split(","),
        [replace(base, length=int(length)) for length in asked.lengths.split(",")],
        device=asked.device,
        compute=asked.compute,
        overrides=[*asked.overrides, *texts],
        windows=asked.windows,
        budget=asked.budget,
        room=None if texts else asked.room,
        keep=keep,
    )
    keep(report)
    print(json.dumps(report, indent=1, ensure_ascii=False))
    return 0


if __name__ == "__main__":
    script(main)

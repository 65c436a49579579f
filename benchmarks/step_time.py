"""Step time of T⁵ and the methods beside it, as JSON: `python benchmarks/step_time.py --shape qwen3.5-2b --out FILE`.

Without a shape the embedded model is timed on a small work. The file is written after every method, so that a run which
is cut short leaves what it measured.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from tfive.cli.options import script
from tfive_lab.bench.counted import KINDS, counted, critic_overrides, row_name
from tfive_lab.bench.step import SMALL, TIMED, StepWork, configure, step_times
from tfive_lab.bench.step_report import render
from tfive_lab.bench.work import SHAPES, blocks_of


def arguments(given: list[str] | None) -> argparse.Namespace:
    """What was typed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=["nano", *SHAPES], help="a random model of this shape")
    parser.add_argument("--methods", default="t5,rlp", help="separated by commas")
    parser.add_argument("--lengths", default=None, help="thought lengths, e.g. 12,64")
    parser.add_argument("--steps", default=None, help="optimizer steps a window for each length, e.g. 4,2")
    parser.add_argument("--items", default=None, help="actor items a step for each length, e.g. 128,64")
    parser.add_argument(
        "--windows", type=int, help="windows a method (2); the first is start-up, of the others the median counts"
    )
    parser.add_argument("--budget", type=float, help="seconds to stay within")
    parser.add_argument("--critics", default="one-block", help=f"some of {KINDS} (whole)")
    parser.add_argument("--short", action="store_true", help="64 items a step, 2 steps a window, 3 windows")
    parser.add_argument("--count", action="store_true", help="print the counted cost and time nothing")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--compute", default="auto", help="auto, float32 or bfloat16")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    parser.add_argument("--witness", help="folder of a finished run with these settings on a real model")
    parser.add_argument("--witness-command", action="store_true", help="print the run that would be such a witness")
    parser.add_argument("--out", type=Path, help="file for the JSON")
    return parser.parse_args(given)


def works_of(asked: argparse.Namespace) -> list[StepWork] | None:
    """The works asked for, or None for the usual ones of the shape."""
    small = asked.shape in (None, "nano")
    base = SMALL if small else StepWork()
    usual = "64" if asked.short and not small else str(base.items)
    items = [int(one) for one in (asked.items or usual).split(",")]
    lengths = [int(one) for one in (asked.lengths or ("12" if small else "12,64")).split(",")]
    steps = [int(one) for one in (asked.steps or ("2" if asked.short else "4" if small else "4,2")).split(",")]

    def of(numbers: list[int], place: int) -> int:
        return numbers[min(place, len(numbers) - 1)]

    return [replace(base, length=length, steps=of(steps, n), items=of(items, n)) for n, length in enumerate(lengths)]


def witness_command(work: StepWork, overrides: list[str]) -> str:
    """A training run of the embedded model with the very settings that are timed (text and model are its own)."""
    settings = [one for one in (*TIMED, *work.overrides(), *overrides) if not one.startswith(("text.", "run."))]
    words = " ".join(f"--set '{one}'" for one in (*settings, "window.windows=3", "text.positions.per_text=4"))
    return f"tfive train nano {words} --out runs/step-witness-T{work.length}"


def counted_tables(asked: argparse.Namespace) -> str:
    """The counted cost of T⁵ with every kind of critics asked for beside RLP's, one table a length."""
    shape = asked.shape if asked.shape in SHAPES else "qwen3.5-2b"
    layers = blocks_of(shape)
    tables = []
    asked.shape = shape
    for work in works_of(asked) or ():
        columns = [(row_name("t5", kind), critic_overrides(kind)) for kind in asked.critics.split(",")]
        configs = [
            (name, configure(name.partition(",")[0], work, [*own, *asked.overrides], "cpu", "bfloat16"))
            for name, own in [*columns, ("rlp", [])]
        ]
        tables.append(f"T {work.length}\n\n{counted(configs, layers)}")
    return "\n\n".join(tables)


def main(given: list[str] | None = None) -> int:
    """Run, print, write."""
    asked = arguments(given)
    if asked.witness_command:
        print("\n".join(witness_command(work, asked.overrides) for work in works_of(asked) or ()))
        return 0
    if asked.count:
        print(counted_tables(asked))
        return 0

    def keep(report: dict[str, Any]) -> None:
        if asked.out is not None:
            asked.out.parent.mkdir(parents=True, exist_ok=True)
            asked.out.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", "utf-8")

    report = step_times(
        asked.shape,
        asked.methods.split(","),
        works_of(asked),
        device=asked.device,
        compute=asked.compute,
        windows=asked.windows or (3 if asked.short else 2),
        budget=asked.budget,
        overrides=asked.overrides,
        critics=asked.critics.split(","),
        witness=asked.witness,
        keep=keep,
    )
    keep(report)
    print(render(report))
    return 0


if __name__ == "__main__":
    script(main)

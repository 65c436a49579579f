"""`tfive bench`: time the engine, or check it on this device."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from tfive.cli.options import AsJson, Device, Overrides, describe, show

Shape = Annotated[
    str | None,
    typer.Option(
        help="A random model of this shape: nano, smollm2-135m, qwen2.5-0.5b, qwen3-1.7b, qwen3-4b, qwen3.5-2b or "
        "qwen3.5-9b.",
        show_default=False,
    ),
]

bench_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Time the engine, or check it on this device."
)


@bench_app.command(
    "engine",
    help=describe(
        "Time the tree against one row per thought on the same work, and compare what they give.",
        "tfive bench engine",
        "tfive bench engine --shape qwen3-1.7b --json",
    ),
)
def bench_engine(
    shape: Shape = None,
    device: Device = "auto",
    compute: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    repeats: Annotated[int | None, typer.Option(min=1, help="Rounds a side.", show_default=False)] = None,
    as_json: AsJson = False,
) -> None:
    """Measure and tabulate."""
    from tfive_lab.bench.engine import engine, render

    found = engine(shape, device=device, compute=compute, repeats=repeats)
    show(json.dumps(found, indent=1) if as_json else render(found))


@bench_app.command(
    "selfcheck",
    help=describe(
        "Compare the fast paths of this device with the reference; exit status 1 when one is out of bounds.",
        "tfive bench selfcheck",
        "tfive bench selfcheck --device cuda --json",
    ),
)
def bench_selfcheck(device: Device = "auto", as_json: AsJson = False) -> None:
    """Check and tabulate."""
    from tfive_lab.bench.selfcheck import render, selfcheck

    found = selfcheck(device)
    show(json.dumps(found, indent=1) if as_json else render(found))
    if not found["ok"]:
        raise typer.Exit(1)


@bench_app.command(
    "step",
    help=describe(
        "Time a training step of each method at equal actor items; random weights are forced past qualification.",
        "tfive bench step",
        "tfive bench step --methods t5,rlp,quiet-star-grpo --json",
        "tfive bench step --shape qwen3.5-2b --device cuda --json",
    ),
)
def bench_step(
    shape: Shape = None,
    methods: Annotated[str, typer.Option(metavar="NAMES", help="Methods, separated by commas.")] = "t5,rlp",
    device: Device = "auto",
    compute: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    windows: Annotated[int, typer.Option(min=2, help="Windows a method; the first is start-up.")] = 2,
    budget: Annotated[float | None, typer.Option(help="Seconds to stay within.", show_default=False)] = None,
    overrides: Overrides = None,
    witness: Annotated[
        str | None, typer.Option(metavar="DIR", help="A finished run with these settings.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure and tabulate."""
    from tfive_lab.bench.step import step_times
    from tfive_lab.bench.step_report import render

    found = step_times(
        shape,
        [name.strip() for name in methods.split(",")],
        device=device,
        compute=compute,
        windows=windows,
        budget=budget,
        overrides=overrides or [],
        witness=witness,
    )
    show(json.dumps(found, indent=1) if as_json else render(found))

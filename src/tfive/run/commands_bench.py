"""`tfive bench`: time the engine, or check it on this device."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from tfive.run.options import AsJson, Device, describe

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
    shape: Annotated[str | None, typer.Option(help="A random model of this shape.", show_default=False)] = None,
    device: Device = "auto",
    compute: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    repeats: Annotated[int | None, typer.Option(min=1, help="Rounds a side.", show_default=False)] = None,
    as_json: AsJson = False,
) -> None:
    """Measure and tabulate."""
    from tfive.run.bench import engine, render

    found = engine(shape, device=device, compute=compute, repeats=repeats)
    print(json.dumps(found, indent=1) if as_json else render(found))


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
    from tfive.run.bench_selfcheck import render, selfcheck

    found = selfcheck(device)
    print(json.dumps(found, indent=1) if as_json else render(found))
    if not found["ok"]:
        raise typer.Exit(1)

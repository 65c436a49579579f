"""The `tfive theory` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tfive.cli.options import AsJson, Quiet, describe, show

THEORY_HELP = describe(
    "Check every numbered claim of the paper on finite worlds, with the functions the trainer uses.",
    "tfive theory --worlds 20",
    "tfive theory --statement lem:moment-duality --statement prop:population-saddle",
    "tfive theory --worlds 200 --json",
    "tfive theory --figures figures --worlds 24",
)


def theory(
    statement: Annotated[
        list[str] | None,
        typer.Option("--statement", metavar="LABEL", help="Only this label; may be repeated.", show_default=False),
    ] = None,
    worlds: Annotated[
        int | None,
        typer.Option(help="Random worlds to try (200), or worlds a setting of the map (24).", show_default=False),
    ] = None,
    seed: Annotated[int, typer.Option(help="Which random worlds.")] = 0,
    figures: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Draw the map of when calibration helps instead.", show_default=False),
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Check and tabulate, or draw the map; exit status 1 when a claim fails."""
    if figures is not None:
        from tfive_lab.theory.figures import draw

        show(draw(figures, 24 if worlds is None else worlds, quiet=quiet or as_json))
        return
    from tfive.cli.theory_check import theory as check

    text, passed = check(statement, 200 if worlds is None else worlds, seed, as_json=as_json, quiet=quiet)
    show(text)
    if not passed:
        raise typer.Exit(1)

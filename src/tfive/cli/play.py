"""The `tfive play` command."""

from __future__ import annotations

from typing import Annotated

import typer

from tfive.cli.options import describe, loading

PLAY_HELP = describe(
    "Type a text and see where a model thinks, what it thinks, and how its predictions of the next tokens change: on a "
    "page of this machine, or in the terminal. Any model will do; an exported one has learned to think.",
    "tfive play out",
    "tfive play nano --terminal",
    'tfive play out --text "37 boxes of 48 pencils each, which makes"',
)


def play(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Folder of tfive export, nano, any model folder, file or hub id.")
    ],
    text: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Show this text in the terminal, and end.", show_default=False),
    ] = None,
    terminal: Annotated[bool, typer.Option("--terminal", help="Play here instead of on a page.")] = False,
    host: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Serve the page elsewhere than on this machine.", show_default=False),
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Serve the page at this port.", show_default="a free one")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Random numbers of the first thoughts in the terminal.")] = 0,
) -> None:
    """Play until Ctrl-C; without a screen to open a page on, in the terminal."""
    with loading():
        from tfive.cli.play_server import play_command

    play_command(model, text=text, terminal=terminal, host=host, port=port, seed=seed)

"""`tfive config`: show and check a resolved configuration, list presets, print the schema."""

from __future__ import annotations

from typing import Annotated

import typer

from tfive.cli.options import AsJson, Overrides, Sources, describe, fail, show

config_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Show or check a configuration, list presets, print the schema."
)


@config_app.command(
    "show",
    help=describe(
        "Print the resolved configuration, each value with where it came from.",
        "tfive config show nano",
        "tfive config show qwen3.5-2b --set thought.length=8 --set 'thought.checkpoints=[4, 8]'",
        "tfive config show nano --explain",
        "tfive config show nano --method rlp",
        "tfive config show nano --json",
    ),
)
def config_show(
    sources: Sources = None,
    overrides: Overrides = None,
    explain: Annotated[bool, typer.Option("--explain", help="Say above each key what it means.")] = False,
    method: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Only the keys that this method reads.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Resolve and print."""
    from tfive.cli.show_config import show_config

    show(show_config(sources or [], overrides or [], explain, as_json, method))


@config_app.command(
    "presets",
    help=describe(
        "List the presets: whole runs, and variants (ablations of T⁵, RLP as published) to name after one.",
        "tfive config presets",
        "tfive config presets --json",
        "tfive train nano ablation-minimum",
    ),
)
def config_presets(as_json: AsJson = False) -> None:
    """List."""
    from tfive.cli.show_config import list_presets

    show(list_presets(as_json))


@config_app.command(
    "methods",
    help=describe(
        "List the methods that can be trained, those of installed packages included.",
        "tfive config methods",
        "tfive config methods --json",
        "tfive train nano --set method=rlp",
    ),
)
def config_methods(as_json: AsJson = False) -> None:
    """List."""
    from tfive.cli.show_config import list_methods

    show(list_methods(as_json))


@config_app.command(
    "schema",
    help=describe(
        "Print a JSON schema of configuration files: every key with its meaning, default and range. Editors read it: "
        "write it to a file and begin a TOML file beside it with the line #:schema ./tfive.schema.json, and taplo or "
        "VS Code's Even Better TOML complete keys, show what they mean and mark mistakes.",
        "tfive config schema > tfive.schema.json",
    ),
)
def config_schema() -> None:
    """Print."""
    from tfive.cli.show_config import show_schema

    show(show_schema())


@config_app.command(
    "check",
    help=describe(
        "Check a configuration; every broken rule is one line, and the exit status is 2.",
        "tfive config check nano",
        "tfive config check nano --set gae.alpha=2.0",
    ),
)
def config_check(sources: Sources = None, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Resolve and check."""
    from tfive.cli.show_config import check_config

    text, problems = check_config(sources or [], overrides or [], as_json)
    if text:
        show(text)
    if problems:
        for problem in problems if not as_json else ():
            fail(problem, 2)
        raise typer.Exit(2)

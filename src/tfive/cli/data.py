"""`tfive data`: prepare a corpus, show it, count it, search it for benchmark items."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from tfive.cli.options import AsJson, Overrides, Quiet, Sources, TrustRemoteCode, describe, loading, read_first, show

data_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Prepare a corpus, show it, count it.")


@data_app.command(
    "prepare",
    help=describe(
        "Read the sources, split and pack them, choose positions, and keep the result in the cache.",
        "tfive data prepare nano",
        "tfive data prepare nano --set text.workers=2",
    ),
)
def data_prepare(
    sources: Sources = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    trust: TrustRemoteCode = False,
) -> None:
    """Prepare, or find it prepared."""
    read_first(sources, overrides)
    with loading(quiet):
        from tfive.training.corpus import prepare

    show(prepare(sources or [], overrides or [], as_json=as_json, quiet=quiet, trust_remote_code=trust))


@data_app.command(
    "stats",
    help=describe(
        "Count sequences, documents, tokens and positions of each split, role and source.",
        "tfive data stats nano",
        "tfive data stats nano --json",
    ),
)
def data_stats(
    sources: Sources = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    trust: TrustRemoteCode = False,
) -> None:
    """Prepare if need be, then count."""
    read_first(sources, overrides)
    with loading(quiet):
        from tfive.training.corpus import stats

    show(stats(sources or [], overrides or [], as_json=as_json, quiet=quiet, trust_remote_code=trust))


@data_app.command(
    "inspect",
    help=describe(
        "Show sequences as text, with a mark after every position that gets a thought.",
        "tfive data inspect nano",
        "tfive data inspect nano --role actor --start 10 --count 1",
        "tfive data inspect nano --split development --json",
    ),
)
def data_inspect(
    sources: Sources = None,
    overrides: Overrides = None,
    split: Annotated[str | None, typer.Option(help="train, calibration or development.", show_default=False)] = None,
    role: Annotated[str | None, typer.Option(help="A role, e.g. actor.", show_default=False)] = None,
    start: Annotated[int, typer.Option(help="First of the chosen sequences to show.")] = 0,
    count: Annotated[int, typer.Option(help="How many to show.")] = 3,
    as_json: AsJson = False,
    quiet: Quiet = False,
    trust: TrustRemoteCode = False,
) -> None:
    """Prepare if need be, then show."""
    read_first(sources, overrides)
    with loading(quiet):
        from tfive.training.corpus import inspect

    chosen: dict[str, Any] = {"split": split, "role": role, "start": start, "count": count}
    colour = sys.stdout.isatty()
    text = inspect(
        sources or [], overrides or [], **chosen, as_json=as_json, quiet=quiet, colour=colour, trust_remote_code=trust
    )
    # Colours are escape sequences of our own; what stands between them is escaped already.
    print(text) if colour and not as_json else show(text)


@data_app.command(
    "overlap",
    help=describe(
        "Look for benchmark items in a corpus: 13 words in a row, or whole questions of 8 to 12 words.",
        "tfive data overlap nano --tasks primary --data benchmarks",
        "tfive data overlap corpora/web.jsonl.gz corpora/math --tasks gsm8k --tasks math500 --data benchmarks --json",
    ),
)
def data_overlap(
    corpora: Annotated[
        list[str],
        typer.Argument(metavar="CORPUS", help="Files and folders of text, presets and TOML files.", show_default=False),
    ],
    tasks: Annotated[
        list[str] | None, typer.Option("--tasks", metavar="TASK|SUITE", help="May be repeated.", show_default="primary")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of the tasks' files; without it they come from the hub."),
    ] = None,
    fields: Annotated[
        list[str] | None,
        typer.Option("--field", help="Field of a file's rows that holds text; may be repeated.", show_default="text"),
    ] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Read every document once and report."""
    with loading(quiet):
        from tfive.cli.data_overlap import overlap

    chosen = (tasks or ["primary"], data, fields or ["text"], overrides or [])
    show(overlap(corpora, *chosen, as_json=as_json, quiet=quiet))


@data_app.command(
    "sheets",
    help=describe(
        "Make exercise sheets of worked problems: the text of the preset worked-answers.",
        "tfive data sheets Qwen/Qwen2.5-Coder-0.5B-Instruct gsm8k_train.jsonl",
        "tfive data sheets models/mine problems.jsonl.gz sheets --length 256",
    ),
)
def data_sheets(
    model: Annotated[str, typer.Argument(help="Whose tokens fill a sheet: hub name, folder or .gguf file.")],
    problems: Annotated[
        Path, typer.Argument(help="Rows with question, working and answer, rows of GSM8K or MATH, or rows with text.")
    ],
    folder: Annotated[Path, typer.Argument(help="Where the sheets are written.")] = Path("sheets"),
    length: Annotated[int, typer.Option(min=64, help="Tokens of a sheet: text.sequence_length of the run.")] = 512,
    quiet: Quiet = False,
    trust: TrustRemoteCode = False,
) -> None:
    """Read problems, write sheets."""
    with loading(quiet):
        from tfive.cli.data_sheets import sheets

    show(sheets(model, problems, folder, length, trust_remote_code=trust))

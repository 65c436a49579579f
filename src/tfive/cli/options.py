"""What the commands share: their common options, their help text and how a failure is reported."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from tfive.errors import RunFailed, UserError
from tfive.printable import printable


def _shipped_presets(incomplete: str) -> list[str]:
    """Presets that begin as typed so far; a shell completes files by itself."""
    names = {entry.name for entry in files("tfive.config").joinpath("presets").iterdir()}
    return sorted(name[:-5] for name in names if name.endswith(".toml") and name.startswith(incomplete))


Sources = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="PRESET|FILE.toml",
        help="Presets and TOML files, layered left to right.",
        show_default=False,
        autocompletion=_shipped_presets,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override one key, e.g. thought.length=8; may be repeated.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document for a program to read.")]
Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", help="Say nothing on the way; train and resume leave what came of it to the folder."),
]
Page = Annotated[
    bool, typer.Option("--page", help="Serve the run's page on this machine meanwhile, and write it at the end.")
]
SkipDamaged = Annotated[
    bool, typer.Option("--skip-damaged", help="Use the newest checkpoint that is whole, though a newer one is damaged.")
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Let the model run code of its own, in this command alone; no file can say this.",
    ),
]
Processes = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Processes that share the work on this machine.", show_default=False),
]
Restarts = Annotated[
    int, typer.Option(min=0, metavar="N", help="How often processes that died are started again, with --processes.")
]


def _seconds(value: float) -> float:
    if not value > 0:  # not a number, too
        raise typer.BadParameter(f"{value} is not above 0")
    return value


Timeout = Annotated[
    float,
    typer.Option(
        max=1e6,
        metavar="SECONDS",
        callback=_seconds,
        help="With several processes: after how long without a sign of life one counts as lost and ends the others.",
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]


def describe(summary: str, *examples: str) -> str:
    """Help text of a command: what it does, then lines a reader can copy."""
    return f"{summary}\n\n\b\nExamples:\n" + "\n".join(f"  {line}" for line in examples)


@contextmanager
def loading(quiet: bool = False, what: str = "loading torch and transformers") -> Iterator[None]:
    """Shows on a terminal what is being waited for: importing libraries alone takes seconds."""
    if quiet or not sys.stderr.isatty():
        yield
        return
    from tfive.training.progress import ProgressReport, Waiting

    with ProgressReport(sys.stderr).showing(Waiting(what)):
        yield


def read_first(sources: Sequence[str] | None, overrides: Sequence[str] | None, *, rules: bool = True) -> None:
    """Refuse a configuration that cannot be, or that breaks a rule, before libraries are loaded, which takes seconds.
    Of several processes none does: one of them speaks for all, later. What comes through a pipe is read once."""
    if "RANK" in os.environ or any(Path(one).exists() and not Path(one).is_file() for one in sources or ()):
        return
    from tfive.config.config import resolve

    found = resolve(sources or [], overrides or [])
    if rules:
        found.checked()


def run_first(folder: str) -> None:
    """The same for a folder that should hold a run."""
    if "RANK" not in os.environ:
        from tfive.training.run_folder import read_config

        read_config(Path(folder))


LONGEST = 1_500
"""Characters of the longest error line; of a longer one the beginning and the end are shown."""


def show(text: str) -> None:
    """Print on standard output what a command found, with nothing in it that could steer the terminal."""
    print(printable(text))


def fail(message: str, status: int, program: str = "tfive") -> int:
    """Print what went wrong in one line on standard error; returns the exit status."""
    line = printable(" ".join(message.split()))
    if len(line) > LONGEST:
        line = f"{line[: LONGEST // 2]} … {line[-LONGEST // 2 :]}"
    print(f"{program}: error: {line}", file=sys.stderr)
    return status


def interrupted() -> int:
    """The status after Ctrl-C; of several processes, all of which get it, their launcher says so."""
    return 130 if "TORCHELASTIC_RUN_ID" in os.environ else fail("interrupted", 130)


def script(main: Callable[[], int]) -> NoReturn:
    """Run a script's `main` and exit as a command does: status 0, 1 (the work failed) or 2 (bad input), one line."""
    program = Path(sys.argv[0]).name
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(fail(str(error), 2, program))
    except RunFailed as error:
        sys.exit(fail(str(error), 1, program))

"""The `tfive` command. Every subcommand delegates at once and imports what it needs only when it is called."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from tfive import __version__
from tfive.cli.bench import bench_app
from tfive.cli.config import config_app
from tfive.cli.data import data_app
from tfive.cli.evaluate import eval_app
from tfive.cli.options import (
    AsJson,
    Overrides,
    Page,
    Processes,
    Quiet,
    Restarts,
    SkipDamaged,
    Sources,
    TrustRemoteCode,
    describe,
    fail,
    interrupted,
    loading,
    read_first,
    run_first,
    show,
)
from tfive.cli.play import PLAY_HELP, play
from tfive.cli.theory import THEORY_HELP, theory
from tfive.distributed.environment import CRASHED, LINGER, LOST, SAID, peer_lost
from tfive.errors import RunFailed, UserError, out_of_memory

app = typer.Typer(
    name="tfive",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Teach a base language model short hidden thoughts that make plain text more predictable.",
    epilog="Start with: tfive init (a text of your own), or tfive train nano (the embedded example)",
)
app.add_typer(config_app, name="config")
app.add_typer(data_app, name="data")
app.add_typer(bench_app, name="bench")
app.add_typer(eval_app, name="eval")


def _version(asked: bool) -> None:
    if asked:
        show(f"tfive {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options that stand before any command."""


@app.command(
    help=describe(
        "Report Python, torch, devices, precision, optional packages, disk, and of a preset or file whether it fits in "
        "memory, whether its model, benchmarks and enough text are there, and about how long it takes.",
        "tfive doctor",
        "tfive doctor qwen3-1.7b",
        "tfive doctor nano --json",
        "tfive doctor qwen3.5-2b --processes 24 --set distributed.shard=8",
    )
)
def doctor(
    sources: Sources = None,
    overrides: Overrides = None,
    processes: Annotated[
        int | None,
        typer.Option(min=2, metavar="N", help="Predict a run on so many GPUs, eight a node.", show_default=False),
    ] = None,
    profile: Annotated[
        str | None, typer.Option(metavar="NAME", help="As --set distributed.profile=NAME.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Report."""
    asked = [*(overrides or []), *([] if profile is None else [f"distributed.profile={profile}"])]
    read_first(sources, asked, rules=False)
    with loading(as_json):
        from tfive.cli.doctor import report

    with loading(as_json, "looking at this machine"):
        text = report(sources or [], asked, as_json, processes)
    show(text)


@app.command(
    help=describe(
        "Write a configuration for a text of your own, sized by the minutes you have. On a terminal, what no option "
        "says is asked for.",
        "tfive init",
        "tfive init mine.toml --text notes.txt --minutes 10",
        "tfive init mine.toml --model Qwen/Qwen3-0.6B-Base --text books/ --device cuda --minutes 60",
    )
)
def init(
    out: Annotated[str, typer.Argument(metavar="FILE.toml", help="File to write; never overwritten.")] = "mine.toml",
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="nano, a folder, a hub id or a .gguf file.", show_default=False)
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(metavar="PATH", help="Text file or folder; may be repeated.", show_default=False),
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N.", show_default=False)] = None,
    minutes: Annotated[float | None, typer.Option(help="How long to train, roughly.", show_default=False)] = None,
    pattern: Annotated[
        str | None,
        typer.Option(metavar="REGEX", help="Most thoughts stand right after this.", show_default=False),
    ] = None,
) -> None:
    """Ask, look, write."""
    with loading():
        from tfive.cli.init import init_command

    show(init_command(out, model=model, text=text or [], device=device, minutes=minutes, pattern=pattern))


@app.command(
    help=describe(
        "Train: a preset or TOML files, layered left to right, with overrides. Ctrl-C saves and says how to resume.",
        "tfive train nano",
        "tfive train nano --set run.seed=1 --out runs/second",
        "tfive train nano mine.toml --json",
        "tfive train nano --page",
        "tfive train nano --processes 2",
    )
)
def train(
    sources: Sources = None,
    overrides: Overrides = None,
    out: Annotated[
        str | None, typer.Option("--out", metavar="DIR", help="Folder for everything the run writes.")
    ] = None,
    processes: Processes = None,
    restarts: Restarts = 3,
    page: Page = False,
    trust: TrustRemoteCode = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Train from the start."""
    options = {"as_json": as_json, "quiet": quiet, "trust_remote_code": trust}
    read_first(sources, overrides)
    with loading(quiet):
        from tfive.cli.launch import launch_train, started_by_launcher
    if processes is not None and not started_by_launcher(processes, page):
        raise typer.Exit(launch_train(sources or [], overrides or [], out, options, processes, restarts))
    with loading(quiet):
        from tfive.cli.live import train_with_page
        from tfive.training.start import run_command

    _print((train_with_page if page else run_command)(sources or [], overrides or [], out, **options))


@app.command(
    help=describe(
        "Go on with a stopped run from its newest checkpoint; a damaged one is refused by name.",
        "tfive resume runs/nano-t5-seed0",
        "tfive resume runs/nano-t5-seed0 --skip-damaged",
    )
)
def resume(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="Folder that tfive train wrote.")],
    skip_damaged: SkipDamaged = False,
    processes: Processes = None,
    restarts: Restarts = 3,
    page: Page = False,
    trust: TrustRemoteCode = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Resume."""
    options = {"as_json": as_json, "quiet": quiet, "trust_remote_code": trust, "skip_damaged": skip_damaged}
    run_first(folder)
    with loading(quiet):
        from tfive.cli.launch import launch_resume, started_by_launcher
    if processes is not None and not started_by_launcher(processes, page):
        raise typer.Exit(launch_resume(folder, options, processes, restarts))
    with loading(quiet):
        from tfive.cli.live import resume_with_page
        from tfive.training.start import resume_command

    _print((resume_with_page if page else resume_command)(folder, **options))


@app.command(
    help=describe(
        "Write the trained model of a run: a Hugging Face folder for the actor, with delimiters, gate and a model card "
        "beside it.",
        "tfive export runs/nano-t5-seed0 out",
        "tfive export runs/nano-t5-seed0 out --exact --json",
        "tfive export runs/nano-t5-seed0 out --push you/model",
        "tfive export runs/lora out --adapter",
    )
)
def export(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="Folder that tfive train wrote.")],
    out: Annotated[str, typer.Argument(metavar="OUT", help="Folder to write; it must not hold anything yet.")],
    exact: Annotated[bool, typer.Option("--exact", help="Float32 master weights instead of the compute copy.")] = False,
    untrained: Annotated[
        bool, typer.Option("--untrained", help="Export a run even if its actor was never updated.")
    ] = False,
    skip_damaged: SkipDamaged = False,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Low-rank updates alone, for peft (runs with actor.adapt = lora).")
    ] = False,
    repo: Annotated[
        str | None,
        typer.Option("--push", metavar="REPO", help="Also upload it to this repository of the hub, private if new."),
    ] = None,
    trust: TrustRemoteCode = False,
    as_json: AsJson = False,
) -> None:
    """Export the newest checkpoint."""
    run_first(folder)
    with loading(as_json):
        from tfive.training.export import export_command

    chosen = {"exact": exact, "untrained": untrained, "adapter": adapter, "skip_damaged": skip_damaged}
    with loading(as_json, f"writing {out}"):
        text = export_command(folder, out, repo=repo, as_json=as_json, trust_remote_code=trust, **chosen)
    show(text)


@app.command(
    help=describe(
        "Train several methods with several seeds on the same text and positions, and tabulate them. The same command "
        "goes on where it stopped. A method may carry presets or values: t5+critic.pair=bracket.",
        "tfive compare nano --methods t5,rlp,anchor-only --seeds 3",
        "tfive compare nano --methods t5,t5+qualify.eta=0.2 --seeds 0,1 --out runs/bar",
        "tfive compare nano --methods base,ntp,t5 --seeds 3 --jobs 8 --json",
    )
)
def compare(
    sources: Sources = None,
    methods: Annotated[
        str, typer.Option(metavar="NAMES", help="Methods, separated by commas; the first is the reference.")
    ] = "t5,rlp,quiet-star-grpo,quiet-star-ppo,anchor-only,ntp,base",
    seeds: Annotated[str, typer.Option(metavar="N", help="How many seeds (3), or which: 0,4 (one alone: 4,).")] = "3",
    overrides: Overrides = None,
    out: Annotated[str | None, typer.Option("--out", metavar="DIR", help="Folder of the study.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time, on run.threads cores each; disturbs timing.")] = 1,
    retry: Annotated[bool, typer.Option("--retry", help="Run failed cells again.")] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Compare; exit status 1 when a run failed or is not finished."""
    from tfive.cli.report import compare_command

    text, complete = compare_command(
        sources or [], methods, seeds, overrides or [], out, jobs=jobs, retry=retry, as_json=as_json, quiet=quiet
    )
    show(text)
    if not complete:
        raise typer.Exit(1)


@app.command(
    help=describe(
        "Write the page of a run, a study or evaluations: one HTML file that opens offline, and a Markdown report. "
        "Runs that go on, were stopped or have failed have a page too. Figures for the Markdown need matplotlib.",
        "tfive report runs/nano-t5-seed0",
        "tfive report runs/compare-nano --json",
        "tfive report evaluations/base evaluations/mine",
    )
)
def report(
    folders: Annotated[
        list[str],
        typer.Argument(metavar="DIR...", help="Folder of a run or a study, of evaluations, or of a run and these."),
    ],
    as_json: AsJson = False,
) -> None:
    """Report."""
    from tfive.cli.report import report_command

    show(report_command(folders, as_json=as_json))


@app.command(
    help=describe(
        "Serve the page of a run, a study or evaluations on this machine, refreshed as windows close, until Ctrl-C. "
        "Its address holds a random token; it only reads.",
        "tfive watch runs/nano-t5-seed0",
        "tfive watch runs/compare-nano --port 8000",
    )
)
def watch(
    folders: Annotated[list[str], typer.Argument(metavar="DIR...", help="Folders, as tfive report takes them.")],
    host: Annotated[
        str,
        typer.Option(metavar="ADDRESS", help="Listen elsewhere than on this machine alone: others can read the run."),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 0,
) -> None:
    """Serve until Ctrl-C."""
    from tfive.cli.watch import watch_command

    watch_command(folders, host, port)


app.command(help=PLAY_HELP)(play)
app.command(help=THEORY_HELP)(theory)


def _print(text: str | None) -> None:
    if text is not None:
        show(text)


def _call(arguments: Sequence[str] | None) -> int:
    # BadParameter → UsageError → click's common base. typer carries its own copy of click in some versions and the
    # separate package in others, so the base is reached through the one name typer exports in all of them.
    usage_errors: type[Exception] = typer.BadParameter.__mro__[2]
    try:
        result: Any = app(
            args=list(arguments) if arguments is not None else None, prog_name="tfive", standalone_mode=False
        )
        # typer turns Ctrl-C into this status without a word
        return interrupted() if result == 130 else result if isinstance(result, int) else 0
    except (UserError, RunFailed) as error:
        status = 2 if isinstance(error, UserError) else 1
        if getattr(error, SAID, False):
            return status
        _print(getattr(error, "result", None))
        return fail(str(error), status)
    except usage_errors as error:
        return _usage(error)
    except (KeyboardInterrupt, typer.Abort):
        return interrupted()
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return fail(f"{where}{error.strerror or error}", 2)
    except Exception as error:  # noqa: BLE001
        return fail(f"out of memory, ask for less ({error})", 1) if out_of_memory(error) else _crashed(error)


def _crashed(error: Exception) -> int:
    """The status of one of several processes that ended in an unforeseen error; a process alone shows it as ever."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        raise error
    if peer_lost(error):
        return _lost(str(error))
    traceback.print_exception(error)
    return CRASHED


def _lost(line: str) -> int:
    """The status of a process whose peers are gone. One of them may be about to say why, and a launcher ends all when
    the first one ends: it is given the time. The launcher says who died."""
    time.sleep(LINGER)
    return LOST if "TORCHELASTIC_RUN_ID" in os.environ else fail(line, LOST)


def _usage(error: Any) -> int:
    """One line for a wrong option, argument or command; a bare group name prints its help instead."""
    message = error.format_message()
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        show(message)
        return 2
    path = context.command_path if context is not None else "tfive"
    return fail(f"{message} (see: {path} --help)", 2)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the `tfive` command: exit status 0, 1 (the work failed) or 2 (bad input)."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure: Callable[..., None] | None = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")
    if os.environ.get("TFIVE_TRACEBACK"):
        app(args=list(arguments) if arguments is not None else None, prog_name="tfive", standalone_mode=False)
        return
    sys.exit(_call(arguments))


if __name__ == "__main__":
    main()

"""`tfive eval`: benchmarks, verdicts, comparisons and gains of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from tfive.cli.options import AsJson, Device, Processes, Quiet, Timeout, describe, loading, show

WAYS = {"both": ("generated", "likelihood"), "generated": ("generated",), "likelihood": ("likelihood",)}


class _ModelFirst(TyperGroup):
    """`tfive eval MODEL …` is `tfive eval run MODEL …`: a first word that is no command is a model or an option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("-h", "--help"):
            args = ["run", *args]
        return super().parse_args(ctx, args)


eval_app = typer.Typer(
    cls=_ModelFirst,
    no_args_is_help=True,
    rich_markup_mode=None,
    help=describe(
        "Benchmarks, verdicts, comparisons and gains of a model. A model (folder, hub id, .gguf or nano) may stand in "
        "place of the command: tfive eval MODEL is tfive eval run MODEL.",
        "tfive eval out --suite primary --data benchmarks",
        "tfive eval tasks",
    ),
)

Data = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", help="Folder of benchmark files; without it items come from the hub.", show_default=False
    ),
]
Compute = Annotated[str, typer.Option(help="auto, float32 or bfloat16.")]


@eval_app.command(
    "run",
    help=describe(
        "Ask a model the items of a suite or of tasks. The same command resumes a stopped run.",
        "tfive eval run out --suite primary --data benchmarks --out evaluations/mine",
        "tfive eval out --tasks gsm8k --tasks piqa --limit 100 --samples 4 --temperature 0.7 --data benchmarks",
        "tfive eval out --tasks arc_challenge --ways likelihood --thoughts every=4 --data benchmarks --json",
        "tfive eval out --tasks gsm8k --bare-answers --thoughts answer --data benchmarks",
        "tfive eval out --suite primary --data benchmarks --processes 8",
    ),
)
def eval_run(
    context: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Model folder, hub id, .gguf file or nano.")],
    suite: Annotated[str, typer.Option(help="primary, earlier or supplementary.")] = "primary",
    tasks: Annotated[
        list[str] | None,
        typer.Option(help="Only this task, in place of a suite; may be repeated.", show_default=False),
    ] = None,
    data: Data = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of answers and scores.", show_default=False)
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Only the first N items of a task.", show_default=False)] = None,
    samples: Annotated[int | None, typer.Option(help="Outputs per item.", show_default=False)] = None,
    temperature: Annotated[float | None, typer.Option(help="0 takes the likeliest token.", show_default=False)] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Longest output.", show_default=False)] = None,
    ways: Annotated[str, typer.Option(help="generated, likelihood or both (options only).")] = "both",
    thoughts: Annotated[
        str, typer.Option(help="none, answer, answer=other, answer=empty, every, every=K, horizon or entropy=NATS.")
    ] = "none",
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="TOML whose thought and sampling shape thoughts of a model that has none.",
            show_default=False,
        ),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Ask in the tokenizer's chat template.")] = False,
    bare: Annotated[bool, typer.Option("--bare-answers", help="Ask for the answer without its working.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of sampling.")] = 0,
    parity: Annotated[
        bool, typer.Option("--parity", help="Every output by itself: the same alone as in any batch.")
    ] = False,
    rows: Annotated[int, typer.Option(min=0, help="Most outputs written at once; 0: as many as fit.")] = 0,
    flips: Annotated[int, typer.Option(min=0, help="Write N items also alone; report how many change.")] = 0,
    device: Device = "auto",
    compute: Compute = "auto",
    processes: Processes = None,
    timeout: Timeout = 600.0,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Evaluate."""
    _in_several(context, processes, quiet)
    with loading(quiet):
        from tfive.cli.evaluate_suite import Wanted, evaluate_command

    if ways not in WAYS:
        raise typer.BadParameter(f"--ways {ways!r}: give generated, likelihood or both")
    names = tuple(name for text in tasks for name in text.split(",")) if tasks else (suite,)
    options: dict[str, Any] = {"samples": samples, "temperature": temperature, "max_new_tokens": max_new_tokens}
    options |= {"config": config, "bare": bare}
    options |= {"thoughts": thoughts, "chat": chat, "seed": seed, "parity": parity, "rows": rows, "flips": flips}
    wanted = Wanted(
        model, names, data, out, limit, ways=WAYS[ways], device=device, compute=compute, timeout=timeout, **options
    )
    found = evaluate_command(wanted, as_json=as_json, quiet=quiet)
    if found is not None:
        show(found)


@eval_app.command(
    "tasks",
    help=describe(
        "List every task with its item count and the state of its manifest; with --data, that of its file too.",
        "tfive eval tasks",
        "tfive eval tasks --data benchmarks --json",
    ),
)
def eval_tasks(data: Data = None, as_json: AsJson = False) -> None:
    """List."""
    from tfive.cli.evaluate_tasks import tasks_command

    show(tasks_command(data, as_json=as_json))


@eval_app.command(
    "explain",
    help=describe(
        "Show one item of a run: the question, every answer, and how its verdict came about.",
        "tfive eval explain evaluations/mine gsm8k-test-17",
        "tfive eval explain evaluations/mine gsm8k/17 --json",
    ),
)
def eval_explain(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder that tfive eval wrote.")],
    item: Annotated[str, typer.Argument(metavar="ITEM", help="Id of an item, or TASK/ID.")],
    as_json: AsJson = False,
) -> None:
    """Show."""
    from tfive.cli.evaluate_suite import explain_command

    show(explain_command(run, item, as_json=as_json))


@eval_app.command(
    "compare",
    help=describe(
        "Compare two runs item by item: difference with its bootstrap interval, and McNemar's exact test.",
        "tfive eval compare evaluations/mine evaluations/base",
    ),
)
def eval_compare(
    first: Annotated[Path, typer.Argument(metavar="A", help="Folder that tfive eval wrote.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Another one.")],
    as_json: AsJson = False,
) -> None:
    """Compare."""
    from tfive.cli.evaluate_suite import compare_command

    show(compare_command(first, second, as_json=as_json))


@eval_app.command(
    "gains",
    help=describe(
        "Measure thoughts on texts of your own: every gain with its controls, by kind of position and by file.",
        "tfive eval gains out --corpus web.jsonl.gz=85 --corpus math.jsonl.gz=15 --base nano",
        "tfive eval gains out --corpus mine.toml --base nano --tokens 128",
        "tfive eval gains nano --corpus notes.txt --texts 32 --tokens 128 --json",
    ),
)
def eval_gains(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Exported folder, or any model with untrained thoughts.")
    ],
    corpus: Annotated[
        list[str],
        typer.Option(metavar="TEXT[=SHARE]", help="File or folder of text, or a TOML file's sources; may be repeated."),
    ],
    base: Annotated[
        str | None, typer.Option(metavar="MODEL", help="The model before training.", show_default=False)
    ] = None,
    texts: Annotated[int, typer.Option(help="How many texts.")] = 64,
    tokens: Annotated[int, typer.Option(help="Tokens of a text.")] = 256,
    positions: Annotated[int, typer.Option(min=1, help="Most positions of a text.")] = 8,
    entropy: Annotated[float, typer.Option(help="Share of positions where the model is uncertain.")] = 0.5,
    pattern: Annotated[
        str, typer.Option(metavar="REGEX", help="Half of the positions right after this.", show_default=False)
    ] = "",
    rows: Annotated[int, typer.Option(min=1, help="Texts in one pass.")] = 4,
    seed: Annotated[int, typer.Option(min=0, help="Of texts, positions and thoughts.")] = 0,
    device: Device = "auto",
    compute: Compute = "auto",
    processes: Processes = None,
    timeout: Timeout = 600.0,
    as_json: AsJson = False,
) -> None:
    """Measure and tabulate."""
    _in_several(context, processes, as_json)
    with loading(as_json):
        from tfive.cli.evaluate_gains import gains_command
        from tfive.evaluate.diagnostics import SampleSize

    size = SampleSize(texts, tokens, rows, seed)
    chosen: dict[str, Any] = {"base": base, "size": size, "per_text": positions, "entropy": entropy}
    chosen["pattern"] = pattern
    with loading(as_json, "measuring thoughts"):
        text = gains_command(model, corpus, **chosen, device=device, compute=compute, timeout=timeout, as_json=as_json)
    if text is not None:
        show(text)


@eval_app.command(
    "headroom",
    help=describe(
        "What thoughts could be worth on a text before training: the model's own, the best of several by the real "
        "continuation, the true working where the text has one, and how much of their differences a critic foresees.",
        "tfive eval headroom nano --corpus notes.jsonl --texts 32",
        "tfive eval headroom out --corpus sheets.jsonl.gz --pattern '\\nAnswer:\\n' --config run.toml --json",
    ),
)
def eval_headroom(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Exported folder, or any model with untrained thoughts.")
    ],
    corpus: Annotated[list[str], typer.Option(metavar="FILE[=SHARE]", help="Text; may be repeated.")],
    pattern: Annotated[
        str,
        typer.Option(
            metavar="REGEX",
            help="Positions right after this; a group named working is cut out of the text and is its true thought.",
            show_default=False,
        ),
    ] = "",
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="TOML with thought, sampling and critic settings.", show_default=False),
    ] = None,
    texts: Annotated[int, typer.Option(help="How many texts.")] = 64,
    tokens: Annotated[int, typer.Option(help="Tokens of a text.")] = 256,
    positions: Annotated[int, typer.Option(min=1, help="Most positions of a text.")] = 4,
    samples: Annotated[int, typer.Option(help="Thoughts at each position.")] = 16,
    critic_passes: Annotated[int, typer.Option(help="Passes of the critic over half of the texts; 0: none.")] = 4,
    rows: Annotated[int, typer.Option(min=1, help="Texts in one pass of single thoughts.")] = 16,
    seed: Annotated[int, typer.Option(min=0, help="Of texts, positions and thoughts.")] = 0,
    device: Device = "auto",
    compute: Compute = "auto",
    processes: Processes = None,
    timeout: Timeout = 600.0,
    as_json: AsJson = False,
) -> None:
    """Measure and tabulate."""
    _in_several(context, processes, as_json)
    from tfive.cli.evaluate_headroom import headroom_command
    from tfive.evaluate.diagnostics import SampleSize

    size = SampleSize(texts, tokens, rows, seed)
    chosen: dict[str, Any] = {"config": config, "size": size, "per_text": positions, "pattern": pattern}
    chosen |= {"samples": samples, "passes": critic_passes}
    text = headroom_command(model, corpus, **chosen, device=device, compute=compute, timeout=timeout, as_json=as_json)
    if text is not None:
        show(text)


def _in_several(context: typer.Context, processes: int | None, quiet: bool) -> None:
    """Start the processes that `--processes` asks for and end as they do, unless this is one of them."""
    if processes is None:
        return
    from tfive.cli.launch import launch_again, started_by_launcher

    if not started_by_launcher(processes):
        raise typer.Exit(launch_again(context, processes, quiet=quiet))

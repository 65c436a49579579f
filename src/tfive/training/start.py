"""Starting and resuming a run: the folder, the model, the prepared text, the recorder, then the loop."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from tfive.config.config import Config
from tfive.errors import RunFailed, UserError
from tfive.models.load import Loaded, load_model
from tfive.models.weights import model_digests, own_digests
from tfive.text.views import corpus_notes
from tfive.training import continuity, positions
from tfive.training.benchmarks import benchmarks_of
from tfive.training.build import build
from tfive.training.checkpoint import CheckpointStore
from tfive.training.console import Console
from tfive.training.corpus import corpus_of
from tfive.training.devices import kernels_named, place
from tfive.training.inputs import require
from tfive.training.live_status import PROGRESS
from tfive.training.lock import LOCK, FolderLock
from tfive.training.loop import CHECKPOINTS, Loop, WindowCallback, read_config, save_config
from tfive.training.memory_limits import check_size
from tfive.training.progress import Headline, ProgressReport, Waiting
from tfive.training.recorder import METRICS, Recorder
from tfive.training.summary import SUMMARY, read_summary, summary_text
from tfive.training.trackers import open_trackers
from tfive.training.warmstart import REPORT, warm_start


def train(
    config: Config | str | Path,
    out: str | Path | None = None,
    *,
    model: Loaded | None = None,
    texts: Iterable[str] | None = None,
    on_window: WindowCallback | None = None,
    quiet: bool = False,
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """Train from the start in a new folder and return the summary; `config` may also name a preset or a TOML file.

    `model` and `texts` are the caller's own, instead of `model.name` and `text.sources`; such a run cannot be resumed
    by the command line, which could not find them again. `on_window` gets each window's report. `trust_remote_code`
    lets a model bring code of its own; it is never read from a file. A summary whose `problems` are not empty is of a
    run that destroyed its model or did not move it.
    """
    config = config if isinstance(config, Config) else Config.load(config)
    folder = default_folder(config) if out is None else Path(out)
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise UserError(f"{folder}: {nearest} is no folder that can be written to; name another with --out")
    _require_empty(folder)
    require(config, model=model is None, texts=texts is None)
    with FolderLock(folder):
        _require_empty(folder)  # again: another process may have come and gone before the lock was ours
        given: dict[str, Any] = {"model": model, "texts": texts, "on_window": on_window, "quiet": quiet}
        return _run(config, folder, **given, trust=trust_remote_code, resumed=False)


def _require_empty(folder: Path) -> None:
    """A new run begins in a folder without files; the lock of a process that was killed at once is none."""
    if not folder.exists() or all(path.name == LOCK for path in folder.iterdir()):
        return
    if (folder / SUMMARY).is_file():
        raise UserError(f"{folder}: already holds a finished run; name another folder with --out")
    kept = any((folder / name).exists() for name in (CHECKPOINTS, REPORT, positions.REPORT))
    begun = f"go on with tfive resume {folder}, or " if kept else ""
    raise UserError(f"{folder}: already holds files; {begun}name another folder with --out")


def default_folder(config: Config) -> Path:
    """Where a run writes that is not told where."""
    return Path(f"runs/{config.model.name.replace('/', '-')}-{config.method}-seed{config.run.seed}")


def resume(
    folder: str | Path,
    *,
    on_window: WindowCallback | None = None,
    quiet: bool = False,
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """Go on with a stopped run from its newest valid checkpoint; a finished one gives its summary again."""
    folder = Path(folder)
    if (folder / SUMMARY).is_file():
        return read_summary(folder)
    config = read_config(folder)
    with FolderLock(folder) as lock:
        if lock.left_by is not None:
            Console(quiet=quiet).say(f"{folder}: {lock.left_by} ended without giving its lock back")
        began = CheckpointStore(folder / CHECKPOINTS).entry("began")
        if began is not None:
            # Now, before anything is loaded or opened; once more with the model and the text when they are.
            continuity.check(began, config, None, None, folder)
        return _run(config, folder, on_window=on_window, quiet=quiet, trust=trust_remote_code, resumed=True)


def _run(
    config: Config,
    folder: Path,
    *,
    model: Loaded | None = None,
    texts: Iterable[str] | None = None,
    on_window: WindowCallback | None,
    quiet: bool,
    trust: bool,
    resumed: bool,
) -> dict[str, Any]:
    console, progress = Console(quiet=quiet), ProgressReport(sys.stderr)
    with _showing(progress, Waiting(f"loading {config.model.name}"), quiet):
        placement = place(config.model.device, config.model.compute, config.run.deterministic)
        placement.apply(config.run.seed)
        console.say(
            f"{config.method} on {config.model.name}, seed {config.run.seed}, {placement.device}; writing to {folder}"
        )
        loaded = model or load_model(
            config.model.name,
            device=placement.device,
            dtype=placement.compute,
            revision=config.model.revision,
            trust_remote_code=trust,
        )
        check_size(config, loaded, placement.device)
        digests = model_digests(config.model.name, config.model.revision) if model is None else own_digests(model.model)
        benchmarks = benchmarks_of(config, loaded)
    with _showing(progress, Waiting("preparing the text"), quiet):
        with Recorder(None, quiet=quiet, progress=progress) as preparing:
            corpus = corpus_of(config, loaded=loaded, texts=texts, telemetry=preparing)
        for note in corpus_notes(corpus):
            console.say(note)
    if not resumed:
        save_config(config, folder)
    # A run that was stopped before its first window has no checkpoint; all that it did comes out the same again.
    prepares = config.warmstart.source != "off" or positions.positions_move(config)
    begun = not prepares or bool(CheckpointStore(folder / CHECKPOINTS).paths())
    if resumed and not begun:
        (folder / METRICS).unlink(missing_ok=True)
    trackers = open_trackers(config.run.trackers, folder, folder.name, config.run.project, config.leaves())
    with (
        Recorder(folder, trackers=trackers, quiet=quiet, progress=progress) as recorder,
        placement.no_autocast(),
        kernels_named(),
    ):
        recorder.on_event = console.event
        with _showing(progress, Waiting("building critics, heads and development texts"), quiet):
            warmed = warm_start(config, loaded, corpus, recorder, folder)
            moved = positions.move_positions(config, loaded, corpus, recorder, folder, warmed)
            assembly = build(config, loaded, corpus, recorder, warmed, moved)
            shown = _both(console.window, on_window)
            where = placement.describe()
            loop = Loop(assembly, recorder, folder, on_window=shown, place=where, benchmarks=benchmarks, model=digests)
        if resumed and not begun:
            console.say("no checkpoint yet; beginning again")
        elif resumed:
            for line in loop.restore():
                console.say(line)
            console.say(f"going on in window {assembly.method.window}, phase {assembly.method.phase}")
        else:
            console.draws(assembly.draws)
        with progress.showing(loop.live, folder / PROGRESS, drawn=not quiet):
            summary = loop.go()
    console.summary(summary)
    console.say(
        f"next: tfive report {folder}, tfive export {folder} OUT; what the numbers mean: docs/howto/diagnostics.md"
    )
    return summary


def _showing(progress: ProgressReport, headline: Headline, quiet: bool) -> AbstractContextManager[None]:
    return nullcontext() if quiet else progress.showing(headline)


def _both(first: WindowCallback, second: WindowCallback | None) -> WindowCallback:
    def call(report: dict[str, Any]) -> None:
        first(report)
        if second is not None:
            second(report)

    return call


def run_command(
    sources: Sequence[str],
    overrides: Sequence[str],
    out: str | None,
    *,
    as_json: bool,
    quiet: bool,
    trust_remote_code: bool = False,
) -> str | None:
    """What `tfive train` does; returns the last line to print, if any. A run that trained nothing raises `Unsound`."""
    config, folder = Config.load(*sources, overrides=overrides), Path(out) if out else None
    summary = train(config, folder, quiet=quiet, trust_remote_code=trust_remote_code)
    return _sound(summary, summary_text(summary) if as_json else None)


def resume_command(folder: str, *, as_json: bool, quiet: bool, trust_remote_code: bool = False) -> str | None:
    """What `tfive resume` does; returns the last line to print, if any. A run that trained nothing raises `Unsound`."""
    over = (Path(folder) / SUMMARY).is_file()
    summary = resume(Path(folder), quiet=quiet, trust_remote_code=trust_remote_code)
    if as_json:
        return _sound(summary, summary_text(summary))
    done = f"{folder}: finished, {summary['windows']} windows; nothing to do; use it: tfive export {folder} OUT"
    return _sound(summary, done if over and not quiet else None)


class Unsound(RunFailed):
    """A run came to its end and its numbers mean nothing: the model is destroyed, or nothing moved."""

    def __init__(self, problem: str, result: str | None) -> None:
        super().__init__(problem)
        self.result = result
        """What to print nevertheless."""


def _sound(summary: dict[str, Any], result: str | None) -> str | None:
    found = summary.get("problems") or []
    if found:
        raise Unsound("; ".join(map(str, found)), result)
    return result

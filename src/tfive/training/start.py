"""Starting and resuming a run: the folder, the model, the prepared text, the recorder, then the loop."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfive.config.config import Config
from tfive.distributed.environment import SAID, launched
from tfive.distributed.launch import joined
from tfive.distributed.meeting import Meeting, meeting
from tfive.distributed.pulse import Pulse
from tfive.distributed.world import World
from tfive.errors import RunFailed, UserError
from tfive.inference.thought_model import plan_for
from tfive.models.load import Loaded, load_model
from tfive.models.weights import model_digests, own_digests
from tfive.report.page_data import run_in_short
from tfive.text.prepared import PreparedCorpus
from tfive.text.views import corpus_notes
from tfive.training import continuity, positions
from tfive.training.agreement import of_data, require_same
from tfive.training.begin import AGAIN, RESUMED, Begun, agreed, new_folder, stopped_folder
from tfive.training.benchmarks import Benchmarks, benchmarks_of
from tfive.training.build import build, ledger_of
from tfive.training.checkpoint import CheckpointStore
from tfive.training.console import Console
from tfive.training.corpus import corpus_of, require_other_texts
from tfive.training.devices import Placement, kernels_named, place
from tfive.training.garbage import lasting
from tfive.training.given_workings import given_workings
from tfive.training.inputs import require
from tfive.training.live_status import PROGRESS
from tfive.training.loop import Loop, WindowCallback
from tfive.training.memory_limits import check_copies, check_size, out_of_memory_explained
from tfive.training.progress import Headline, ProgressReport, Waiting
from tfive.training.recorder import Recorder
from tfive.training.run_folder import CHECKPOINTS, CONFIG, read_config
from tfive.training.status_files import Stopped
from tfive.training.stop_signal import ended_by_signals
from tfive.training.summary import SUMMARY, read_summary, summary_text
from tfive.training.trackers import Tracker, open_trackers
from tfive.training.warmstart import warm_start
from tfive.training.warmstart_kept import REPORT as WARMED
from tfive.training.warmstart_kept import rounds_kept
from tfive.training.watchdog import watching
from tfive.tree.gated import recurrent_refusal
from tfive.tree.hf import Backbone


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
    own: dict[str, Any] = {"model": model, "texts": texts, "on_window": on_window, "trust": trust_remote_code}
    return _train(lambda: config if isinstance(config, Config) else Config.load(config), out, quiet=quiet, **own)


def _train(load: Callable[[], Config], out: str | Path | None, *, quiet: bool, **given: Any) -> dict[str, Any]:
    """Begin a new run, together with the other processes of this launch."""
    with meeting() as met:
        config = agreed(met, load)
        folder = default_folder(config) if out is None else Path(out)

        def require_inputs() -> None:
            require(config, model=given["model"] is None, texts=given["texts"] is None)

        with new_folder(met, folder, require_inputs, quiet) as begun:
            return _run(config, begun, met, quiet=quiet, **given)


def default_folder(config: Config) -> Path:
    """Where a run writes that is not told where."""
    return Path(f"runs/{config.model.name.replace('/', '-')}-{config.method}-seed{config.run.seed}")


def resume(
    folder: str | Path,
    *,
    skip_damaged: bool = False,
    on_window: WindowCallback | None = None,
    quiet: bool = False,
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """Go on with a stopped run from its newest checkpoint; a finished one gives its summary again.

    A damaged checkpoint is refused by name, unless `skip_damaged` asks for the newest one that is whole.
    """
    folder = Path(folder)
    if (folder / SUMMARY).is_file():
        return read_summary(folder)
    with meeting() as met:
        config = agreed(met, lambda: read_config(folder))

        def check() -> None:
            began = CheckpointStore(folder / CHECKPOINTS).entry("began")
            if began is not None:
                # Now, before anything is loaded or opened; once more with the model and the text when they are.
                continuity.check(began, config, None, None, folder)

        prepares = config.warmstart.source != "off" or positions.positions_move(config)
        with stopped_folder(met, folder, check, prepares=prepares, quiet=quiet) as begun:
            own: dict[str, Any] = {"on_window": on_window, "quiet": quiet, "trust": trust_remote_code}
            return _run(config, begun, met, **own, skip_damaged=skip_damaged)


@dataclass(frozen=True)
class Inputs:
    """What a run is made of, the same on every process."""

    placement: Placement
    loaded: Loaded
    digests: dict[str, str]
    """Of the files of the base model."""
    benchmarks: Benchmarks | None
    corpus: PreparedCorpus


def _inputs(
    config: Config,
    folder: Path,
    met: Meeting,
    progress: ProgressReport,
    *,
    model: Any,
    texts: Any,
    quiet: bool,
    trust: bool,
) -> Inputs:
    """Load the model and prepare the text on every process; another model or text on one of them is refused."""
    console = Console(quiet=quiet)
    with _showing(progress, Waiting(f"loading {config.model.name}"), quiet), met.refusals("model"):
        placement = _placed(config, met)
        placement.apply(config.run.seed)
        several = f", {met.place.size} processes" if met.place.size > 1 else ""
        console.say(
            f"{config.method} on {config.model.name}, seed {config.run.seed}, {placement.device}{several}; "
            f"writing to {folder}"
        )
        if model is None:
            check_copies(config, placement.device, met.place)
        loaded = model or load_model(
            config.model.name,
            device=placement.device,
            dtype=placement.compute,
            revision=config.model.revision,
            trust_remote_code=trust,
        )
        if config.thought.reading == "gated" and Backbone(loaded.model).recurrent:
            raise UserError(recurrent_refusal(loaded.name))
        check_size(config, loaded, placement.device, met.place)
        digests = model_digests(config.model.name, config.model.revision) if model is None else own_digests(model.model)
        benchmarks = benchmarks_of(config, loaded)

    def prepared() -> PreparedCorpus:
        with Recorder(None, quiet=quiet, progress=progress) as preparing:
            return corpus_of(config, loaded=loaded, texts=texts, telemetry=preparing)

    with _showing(progress, Waiting("preparing the text"), quiet):
        corpus = met.first_alone("text", prepared)
        for note in corpus_notes(corpus):
            console.say(note)
    require_same(met, "data", of_data(digests, corpus.fingerprint), "give all ranks the same model and text")
    require_other_texts(config, corpus)
    ledger_of(config, corpus)  # what the text cannot fill is told now, not after a warm start
    with met.refusals("workings"):  # before there is a folder
        if config.warmstart.source == "given" and not (folder / WARMED).is_file():
            plan = plan_for(config.thought, loaded.model, loaded.tokenizer)
            given_workings(config, loaded.tokenizer, plan, corpus.sequence_length)
    return Inputs(placement, loaded, digests, benchmarks, corpus)


def _run(
    config: Config,
    begun: Begun,
    met: Meeting,
    *,
    model: Loaded | None = None,
    texts: Iterable[str] | None = None,
    on_window: WindowCallback | None,
    quiet: bool,
    trust: bool,
    skip_damaged: bool = False,
) -> dict[str, Any]:
    quiet, progress, folder = quiet or not met.place.first, ProgressReport(sys.stderr), begun.folder
    with ExitStack() as held:
        # From here on, and not from the first exchange: a process may be stopped while it loads.
        held.enter_context(watching(met, pulse := Pulse(), config.distributed.timeout))
        inputs = _inputs(config, folder, met, progress, model=model, texts=texts, quiet=quiet, trust=trust)
        placement = inputs.placement
        if met.place.first:
            begun.prepare(config, own=model is not None or texts is not None)
        world = held.enter_context(joined(placement.device, store=met.store, pulse=pulse))
        trackers = _trackers(config, folder) if world.leads else ()
        with (
            Recorder(folder if world.leads else None, trackers=trackers, quiet=quiet, progress=progress) as recorder,
            placement.no_autocast(),
            kernels_named(),
        ):
            recorder.on_phase = world.pulse.at
            own: dict[str, Any] = {"on_window": on_window, "quiet": quiet, "skip_damaged": skip_damaged}
            return _recorded(config, begun, inputs, recorder, world, progress, **own)


def _recorded(
    config: Config,
    begun: Begun,
    inputs: Inputs,
    recorder: Recorder,
    world: World,
    progress: ProgressReport,
    *,
    on_window: WindowCallback | None,
    quiet: bool,
    skip_damaged: bool,
) -> dict[str, Any]:
    """Build everything, go on from a checkpoint if there is one, and train to the end."""
    console, folder, loaded, corpus = Console(quiet=quiet), begun.folder, inputs.loaded, inputs.corpus
    recorder.on_event = console.event
    cold, again = config.warmstart.source == "off", begun.how == AGAIN
    if again:
        console.say(f"no checkpoint yet; {_goes_on(folder)}")
    warming, building = Waiting("warm start"), "building critics, heads and development texts"
    shown = folder / PROGRESS if world.leads else None
    with ExitStack() as held:
        held.enter_context(begun.unwritten_if_refused() if world.leads else nullcontext())
        held.enter_context(out_of_memory_explained("build", config))
        with nullcontext() if cold else _showing(progress, warming, quiet, shown):
            kept: dict[str, Any] = {"digests": inputs.digests, "counting": again}
            warmed = warm_start(config, loaded, corpus, recorder, folder, world, **kept)
        held.enter_context(_showing(progress, Waiting(building), quiet, shown))
        moved = positions.move_positions(config, loaded, corpus, recorder, folder, warmed, world)
        assembly = build(config, loaded, corpus, recorder, warmed, world, moved)
        loop = Loop(
            assembly,
            recorder,
            folder,
            on_window=_both(console.window, on_window) if world.leads else None,
            place=inputs.placement.describe() | ({"processes": world.size} if world.size > 1 else {}),
            benchmarks=inputs.benchmarks,
            model=inputs.digests,
        )
    if begun.how == RESUMED:
        for line in loop.restore(skip_damaged=skip_damaged):
            console.say(line)
        console.say(f"going on in window {assembly.method.window}, phase {assembly.method.phase}")
    elif not again:
        console.draws(assembly.draws(1), config.window.windows, clock=config.run.seconds is not None)
    with _showing(progress, loop.live, quiet, shown), lasting():
        summary = loop.go()
    console.summary(summary)
    if not quiet and not summary["problems"]:
        console.say(run_in_short(folder))
    console.say(
        f"next: tfive report {folder}, tfive export {folder} OUT; what the numbers mean: docs/howto/diagnostics.md"
    )
    return summary


def _placed(config: Config, met: Meeting) -> Placement:
    """Where this process computes; one of several has the GPU of its number."""
    process = met.place.local_rank if met.place.size > 1 else None
    run = config.run
    return place(config.model.device, config.model.compute, run.deterministic, process=process, threads=run.threads)


def _showing(
    progress: ProgressReport, headline: Headline, quiet: bool, file: Path | None = None
) -> AbstractContextManager[None]:
    return nullcontext() if quiet and file is None else progress.showing(headline, file, drawn=not quiet)


def _trackers(config: Config, folder: Path) -> Sequence[Tracker]:
    return open_trackers(config.run.trackers, folder, folder.name, config.run.project, config.leaves())


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
    own: dict[str, Any] = {"model": None, "texts": None, "on_window": None, "trust": trust_remote_code}

    def load() -> Config:
        return Config.load(*sources, overrides=overrides)

    with _ended_in_a_line(lambda: Path(out) if out else default_folder(load())):
        summary = _train(load, out or None, quiet=quiet, **own)
    return _sound(summary, summary_text(summary) if as_json else None)


def resume_command(
    folder: str, *, as_json: bool, quiet: bool, trust_remote_code: bool = False, skip_damaged: bool = False
) -> str | None:
    """What `tfive resume` does; returns the last line to print, if any. A run that trained nothing raises `Unsound`."""
    over = (Path(folder) / SUMMARY).is_file()
    with _ended_in_a_line(lambda: Path(folder)):
        summary = resume(Path(folder), quiet=quiet, trust_remote_code=trust_remote_code, skip_damaged=skip_damaged)
    if as_json:
        return _sound(summary, summary_text(summary))
    done = f"{folder}: finished, {summary['windows']} windows; nothing to do; use it: tfive export {folder} OUT"
    return _sound(summary, done if over and not quiet else None)


def _goes_on(folder: Path) -> str:
    """Where a run without a checkpoint begins again."""
    if (folder / WARMED).is_file():
        return "beginning again after the warm start that is there"
    rounds = rounds_kept(folder)
    return f"going on in its warm start after round {rounds}" if rounds else "beginning again"


def _ended_in_a_line(folder: Callable[[], Path]) -> AbstractContextManager[None]:
    """A signal while nothing can be saved says what there is to go on from; of several processes the launcher does."""

    def told(name: str) -> Exception:
        where = folder()
        go_on = f"go on with: tfive resume {where}"
        if (where / CHECKPOINTS).is_dir() and any((where / CHECKPOINTS).iterdir()):
            return Stopped(f"{name}: the last checkpoint in {where} stays; {go_on}")
        if (where / CONFIG).is_file():
            kept = "nothing is trained yet"
            if (where / WARMED).is_file():
                kept = "its warm start is kept"
            elif read_config(where).warmstart.source != "off":
                rounds = rounds_kept(where)
                kept = f"its warm start is not over and {f'goes on after round {rounds}' if rounds else 'begins again'}"
            return Stopped(f"{name}: {kept}; {go_on}")
        return Stopped(f"{name}: nothing was written; give the command again")

    return ended_by_signals(told) if launched().size == 1 else nullcontext()


class Unsound(RunFailed):
    """A run came to its end and its numbers mean nothing: the model is destroyed, or nothing moved."""

    def __init__(self, problem: str, result: str | None) -> None:
        super().__init__(problem)
        self.result = result
        """What to print nevertheless."""


def _sound(summary: dict[str, Any], result: str | None) -> str | None:
    found, speaks = summary.get("problems") or [], launched().first
    if found:
        error = Unsound("; ".join(map(str, found)), result)
        setattr(error, SAID, not speaks)
        raise error
    return result if speaks else None

"""The training loop: advance the method, measure, save, and stop cleanly whenever it is asked to."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from torch import Tensor

from tfive.config.config import Config
from tfive.errors import RunFailed, UserError
from tfive.rl.critic_files import save_critics
from tfive.training import continuity
from tfive.training.benchmarks import Benchmarks
from tfive.training.build import Assembly
from tfive.training.checkpoint import CheckpointStore
from tfive.training.develop import MeasuredTexts, save_items
from tfive.training.explorer import EXPLORER, Explorer
from tfive.training.health import problems, relative_change
from tfive.training.identity import actor_items, cost, identity, rollouts
from tfive.training.live_status import LiveStatus
from tfive.training.memory_limits import out_of_memory_explained
from tfive.training.recorder import Recorder
from tfive.training.status_files import StatusFiles, Stopped
from tfive.training.summary import headline, save_summary

CONFIG, CHECKPOINTS, CRITICS = "config.toml", "checkpoints", "critics"

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
"""What asks a run to save and stop: a person, a scheduler, a terminal that closed."""

WindowCallback = Callable[[dict[str, Any]], None]


@dataclass
class Loop:
    """One run in one folder. `go` works until the last window is closed, or raises `Stopped` after saving."""

    assembly: Assembly
    recorder: Recorder
    folder: Path
    on_window: WindowCallback | None = None
    faults: Callable[[str], None] | None = None
    """Called at every micro-step and inside every save, for tests that crash there."""
    place: dict[str, Any] = field(default_factory=dict)
    """Where the run computes, for the summary."""
    benchmarks: Benchmarks | None = None
    """What is measured beside the development texts, on a schedule of its own."""
    model: dict[str, str] = field(default_factory=dict)
    """Digests of the files of the base model (`models.weights`)."""

    def __post_init__(self) -> None:
        self.live = LiveStatus(
            self.assembly.config, self.assembly.method, self.recorder, self.assembly.actor.engine.device
        )
        self.store = CheckpointStore(self.folder / CHECKPOINTS, keep=self.assembly.config.run.keep, faults=self.faults)
        self.history: list[dict[str, Any]] = []
        """Development measurements: before training, then one per measured window."""
        self.window_costs: list[dict[str, Any]] = []
        """What had been spent when each window closed, and which actor texts it drew."""
        self.identity = identity(self.assembly)
        parts = self.assembly
        self.explorer = Explorer(self.folder / EXPLORER, parts.config, parts.corpus, parts.development)
        self.status = StatusFiles(self.folder)
        self.places = [{"window": 0, **self.place}]
        """Where the run computed: from the start, and after every resume that changed something."""
        self._stop: str | None = None

    def go(self) -> dict[str, Any]:
        """Train to the end and return the summary."""
        with self.status.kept():
            return self._go()

    def _go(self) -> dict[str, Any]:
        config, method = self.assembly.config, self.assembly.method
        self._say_where()
        with self._listening():
            if not self.history:
                self._measure(0)
                self._measure_benchmarks(0)
                if config.run.checkpoint_every or method.finished(config.window.windows):
                    self.save()
            while not method.finished(config.window.windows):
                self._point(f"phase:{method.phase}")
                phase = self._micro_step()
                if method.phase != phase:
                    self._say_where()
                if method.closed:
                    self._close_window()
                elif self._stop is not None or (config.run.checkpoint_phases and method.phase != phase):
                    self.save()
                if self._stop is not None:
                    raise Stopped(f"{self._stop}: saved in {self.folder}; go on with: tfive resume {self.folder}")
        summary = self.summary(*self._measure_test())
        critics = self.assembly.critics
        if critics is not None:
            shutil.rmtree(self.folder / CRITICS, ignore_errors=True)
            exact = [optimizer.masters() for optimizer in critics.optimizers]
            save_critics(self.folder / CRITICS, critics.critics, exact)
        save_summary(summary, self.folder)
        return summary

    def _say_where(self) -> None:
        method = self.assembly.method
        account = self.recorder.account()
        self.status.write(window=method.window, phase=method.phase, account=account)

    @property
    def _began(self) -> dict[str, Any]:
        return continuity.record(self.assembly.config, self.model, self.assembly.corpus.fingerprint)

    def _micro_step(self) -> str:
        try:
            with out_of_memory_explained(self.assembly.method.phase):
                return self.assembly.method.advance()
        except RunFailed as error:
            # The failed micro-step left half-done work behind; the last checkpoint is the state to go on from.
            there = f" (the last checkpoint is in {self.folder / CHECKPOINTS})" if self.store.paths() else ""
            raise RunFailed(f"{error}{there}") from error

    def _close_window(self) -> None:
        config, method = self.assembly.config, self.assembly.method
        self.recorder.at(method.window)
        self.live.close_window()
        drawn = actor_items(self.assembly, method.window)
        self.window_costs.append({"window": method.window, **cost(self.assembly, self.recorder), "actor_items": drawn})
        self.status.spent(self.window_costs[-1])
        last = method.window >= config.window.windows
        if last or method.window % config.run.develop_every == 0:
            method.report["development"] = self._measure(method.window)
        self._measure_benchmarks(method.window)
        self.recorder.metrics(_flat(method.report), method.window)
        if self.on_window is not None:
            self.on_window(method.report)
        every = config.run.checkpoint_every
        if last or self._stop is not None or (every and method.window % every == 0):
            self.save()

    def _measure(self, window: int) -> dict[str, Any]:
        with self.recorder.phase("develop", "develop"), out_of_memory_explained("develop"):
            found, items = self._measured(self.assembly.development, window)
            self.explorer.save(window, self.assembly.method, items)
            ends = window in (0, self.assembly.config.window.windows)
            shown = self.assembly.development.samples(self._decode)
            samples = {"samples": shown} if ends else {}
        self.recorder.samples(shown, window)
        self.history.append({"window": window, "cost": cost(self.assembly, self.recorder), **found, **samples})
        if not window:
            self.status.spent({"window": 0, **self.history[0]["cost"]})
        self.recorder.metrics(_flat({"development": found}), window)
        return found

    def _measured(self, texts: MeasuredTexts, window: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
        found, items = texts.measure(self.assembly.reader, self.assembly.gate if window else None)
        save_items(items, self.folder / texts.role, window)
        self.recorder.count(texts.role, **texts.amounts())
        return found, items

    def _measure_test(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The base model and the trained one on texts that chose nothing, once, when all is over."""
        with self.recorder.phase("test", "test"):
            before, _ = self.assembly.test.measure(self.assembly.base, None)
            self.recorder.count(self.assembly.test.role, **self.assembly.test.amounts())
            after, _ = self._measured(self.assembly.test, self.assembly.method.window)
            return before, after

    def _measure_benchmarks(self, window: int) -> None:
        """Gains and scores on benchmark items with what had been spent by then, where the schedule asks for them."""
        planned = self.assembly.config.window
        if self.benchmarks is None or not self.benchmarks.due(window, planned.actor_steps, planned.windows):
            return
        spent = cost(self.assembly, self.recorder)
        record: dict[str, Any] = {"steps": window * planned.actor_steps, "tokens": spent["thought_tokens"]}
        record["seconds"] = sum(seconds for phase, seconds in spent["seconds"].items() if "/" not in phase)
        with self.recorder.phase("benchmarks", "benchmarks"):
            record |= self.benchmarks.measure(self.assembly, self.folder, window, self.recorder)
        self.recorder.metrics(_flat({"benchmarks": record}), window)

    def save(self) -> Path:
        """Write a checkpoint of everything."""
        return self.store.save(
            {
                "method": self.assembly.method.state_dict(),
                "ledger": self.assembly.ledger.state_dict(),
                "recorder": self.recorder.state_dict(),
                "history": self.history,
                "window_costs": self.window_costs,
                "began": self._began,
                "places": self.places,
            }
        )

    def restore(self) -> list[str]:
        """Load the newest valid checkpoint; returns a line for every damaged one that was skipped, and for everything
        that has changed since and may (also written to the log)."""
        found = self.store.newest()
        if found.checkpoint is None:
            reason = "; ".join(f"{path.name}: {why}" for path, why in found.damaged) or "there is none"
            raise UserError(
                f"{self.folder}: no usable checkpoint ({reason}); use the tfive that wrote it, or start again with "
                "tfive train"
            )
        name, state = found.checkpoint.path.name, found.checkpoint.tree
        with fits(self.folder, name):
            corpus = self.assembly.corpus.fingerprint
            changed = continuity.check(state["began"], self.assembly.config, self.model, corpus, self.folder)
            self.recorder.load_state_dict(state["recorder"])
            self.assembly.method.load_state_dict(state["method"])
            self.assembly.ledger.load_state_dict(state["ledger"])
            self.history = [_measurement(one) for one in state["history"]]
            self.window_costs = [dict(one) for one in state["window_costs"]]
            self.places = list(state["places"])
            before = {key: value for key, value in self.places[-1].items() if key != "window"}
            elsewhere = continuity.moved(before, self.place)
        if elsewhere:
            self.places.append({"window": self.assembly.method.window, **self.place})
        for line in (*changed, *elsewhere):
            self.recorder.event("resumed", line, window=self.assembly.method.window)
        self.explorer.forget_after(self.history[-1]["window"])
        self.status.restore([{"window": 0, **self.history[0]["cost"]}, *self.window_costs])
        self.live = LiveStatus(self.live.config, self.assembly.method, self.recorder, self.live.device)
        return [f"{path.name} is damaged ({why}) and was skipped" for path, why in found.damaged]

    def summary(self, before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
        """The result of the whole run: test texts `before` and `after` training, development texts at its beginning,
        its end and between, and what it cost."""
        report = self.assembly.method.report
        account = self.recorder.account()
        change = relative_change(
            self.assembly.actor.optimizer.masters(), dict(self.assembly.base.model.named_parameters())
        )
        return {
            "note": self.assembly.method.note,
            "problems": problems(
                self.assembly.config,
                self.history,
                change,
                self.assembly.base.head.vocabulary,
                self.assembly.method.largest_push,
            ),
            "method": self.assembly.config.method,
            "model": self.assembly.loaded.name,
            "seed": self.assembly.config.run.seed,
            "reading": self.assembly.config.thought.reading,
            **headline("test", before, after),
            **headline("dev", self.history[0], self.history[-1]),
            "r2": report.get("r2"),
            "retention": report.get("retention"),
            "actor_updates": getattr(self.assembly.method, "updates", None),
            "windows": self.assembly.method.window,
            "seconds": round(self.recorder.seconds, 1),
            "generated_tokens": account["total"]["generated_tokens"],
            "account": account,
            "rollouts": rollouts(account, self.assembly.method.window, self.assembly.config.window.items),
            "actor_steps": self.assembly.config.window.actor_steps,
            "draws": self.assembly.draws,
            "identity": self.identity,
            "weight_change": change,
            "place": self.place,
            "places": self.places,
            "test": {"before": before, "after": after},
            "history": self.history,
            "laps": self.window_costs,
            **({} if self.assembly.warmstart is None else {"warmstart": self.assembly.warmstart}),
            **({} if self.assembly.moved_positions is None else {"positions": self.assembly.moved_positions}),
        }

    def _decode(self, tokens: list[int]) -> str:
        return str(self.assembly.loaded.tokenizer.decode(tokens))

    def _point(self, name: str) -> None:
        if self.faults is not None:
            self.faults(name)

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """SIGINT, SIGTERM and SIGHUP ask for a stop after the present micro-step; a second one ends the process at
        once. What was ignored when the process began (`nohup`) stays ignored."""

        def ask(number: int, frame: FrameType | None) -> None:
            if self._stop is not None:
                raise KeyboardInterrupt
            self._stop = signal.Signals(number).name
            if self._stop == "SIGHUP":
                _leave_the_terminal()

        heard = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        try:
            before = {number: signal.signal(number, ask) for number in heard}
        except ValueError:
            # Only the main thread may listen; a caller that trains in another one stops it by its own means.
            before = {}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _measurement(entry: Any) -> dict[str, Any]:
    """One entry of a checkpoint's history; what is none raises an error here and not at the end of the run."""
    return {**entry, "window": int(entry["window"]), "no_thought_loss": float(entry["no_thought_loss"])}


def _leave_the_terminal() -> None:
    """Write to nowhere what would go to a terminal that is gone: a failing print must not keep a run from saving."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        if os.isatty(stream):
            os.dup2(nowhere, stream)
    os.close(nowhere)


@contextmanager
def fits(folder: Path, name: str) -> Iterator[None]:
    """Turns whatever a checkpoint of another shape raises, once its checksums hold, into one line."""
    try:
        yield
    except UserError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UserError(
            f"{folder}: {name} is no checkpoint of this run ({reason}); use the tfive that wrote it, or restore it"
        ) from error


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """Nested reports as dotted numbers; anything else (a stage's name, a missing value) is left out."""
    found: dict[str, float] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict):
            found |= _flat(value, f"{key}.")
        elif isinstance(value, list | tuple):
            found |= _flat({str(number): entry for number, entry in enumerate(value, 1)}, f"{key}.")
        elif isinstance(value, bool | int | float):
            found[key] = float(value)
    return found


def read_config(folder: Path) -> Config:
    """The configuration of the run in `folder`; one that this version does not take is refused in one line."""
    if not (folder / CONFIG).is_file():
        raise UserError(f"{folder}: no run here ({CONFIG} is missing); name the folder that tfive train wrote")
    try:
        return Config.load(folder / CONFIG)
    except UserError as error:
        raise UserError(f"{folder}: not a configuration of this version of tfive: {error}") from error


def save_config(config: Config, folder: Path) -> None:
    """The resolved configuration beside everything else the run writes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(config.to_toml(), "utf-8")

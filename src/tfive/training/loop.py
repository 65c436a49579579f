"""The training loop: advance the method, measure, save, and stop cleanly whenever it is asked to."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from tfive.distributed.environment import peer_lost
from tfive.errors import RunFailed
from tfive.rl.critic_files import save_critics
from tfive.training import continuity
from tfive.training.benchmarks import Benchmarks
from tfive.training.build import Assembly
from tfive.training.checkpoint import CheckpointStore
from tfive.training.develop import MeasuredTexts, save_items
from tfive.training.explorer import EXPLORER, Explorer
from tfive.training.health import problems, relative_change
from tfive.training.identity import actor_items, cost, identity, rollouts, training_seconds, window_seconds
from tfive.training.live_status import LiveStatus, peak_bytes
from tfive.training.memory_limits import out_of_memory_explained
from tfive.training.placement import pieces_like
from tfive.training.processes import course_so_far, weights_so_far
from tfive.training.recorder import Recorder
from tfive.training.run_folder import CHECKPOINTS, CRITICS
from tfive.training.state_tree import encode
from tfive.training.status_files import StatusFiles, Stopped
from tfive.training.stop_signal import StopSignal
from tfive.training.summary import headline, save_summary

LAST_WRITE = 5.0
"""Seconds for a checkpoint that was begun to come to its end after another process died."""

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
        self.world = self.assembly.world
        self.store = CheckpointStore(
            self.folder / CHECKPOINTS,
            keep=self.assembly.config.run.keep,
            faults=self.faults,
            world=self.world,
        )
        self.history: list[dict[str, Any]] = []
        """Development measurements: before training, then one per measured window."""
        self.window_costs: list[dict[str, Any]] = []
        """What had been spent when each window closed, and which actor texts it drew."""
        self.identity = identity(self.assembly)
        parts = self.assembly
        writes = self.world.leads
        self.explorer = Explorer(self.folder / EXPLORER, parts.config, parts.corpus, parts.development, writes)
        self.status = StatusFiles(self.folder, writes=writes)
        self.places = [{"window": 0, **self.place}]
        """Where the run computed: from the start, and after every resume that changed something."""
        self._asked = self.live.stop = StopSignal(says=writes and self.recorder.in_lines)
        self._ending: str | None = None
        """Why the run is to stop, decided with all processes at the same place."""
        self._save_failed = False
        self.windows = self.assembly.config.window.windows
        """The last window: that of the plan, or the one in which the seconds of the plan have passed."""

    def go(self) -> dict[str, Any]:
        """Train to the end and return the summary."""
        with self.status.kept(), self._settling():
            return self._go()

    @contextmanager
    def _settling(self) -> Iterator[None]:
        """A run that fails lets the checkpoint that it has begun come to its end; a second signal does not wait."""
        try:
            yield
        except Exception as error:
            gone = peer_lost(error)
            unwritten = self.store.settle(LAST_WRITE if gone else 30.0)
            if gone:
                raise
            if unwritten is not None:
                raise RunFailed(f"{' '.join(str(error).split())}; {unwritten}") from error
            raise

    def _go(self) -> dict[str, Any]:
        config, method = self.assembly.config, self.assembly.method
        self._say_where()
        with self._asked.heard():
            if not self.history:
                self._measure(0)
                self._measure_benchmarks(0)
                if config.run.checkpoint_every or method.finished(self.windows):
                    self.save()
                    self.store.wait()  # from here on there is something to go on from
            while not method.finished(self.windows):
                self._point(f"phase:{method.phase}")
                phase = self._micro_step()
                self._hear_others()
                if method.phase != phase:
                    self._say_where()
                if method.closed:
                    self._close_window()
                elif self._ending is not None or (config.run.checkpoint_phases and method.phase != phase):
                    self.save()
                self._stop_if_asked()
            self._hear_others()  # a signal may have come while the last checkpoint was made
            self._stop_if_asked()
        summary = self.summary(*self._measure_test())
        self.store.wait()
        self._save_results(summary)
        self.world.barrier("the end of the run")
        return summary

    def _save_results(self, summary: dict[str, Any]) -> None:
        critics = self.assembly.critics
        # Putting shards together is work of all processes; writing is the first one's.
        exact = [] if critics is None else critics.exact(kept=self.world.leads)
        if not self.world.leads:
            return
        if critics is not None:
            shutil.rmtree(self.folder / CRITICS, ignore_errors=True)
            save_critics(self.folder / CRITICS, critics.critics, exact)
        save_summary(summary, self.folder)

    def _hear_others(self) -> None:
        """A stop that one process was asked for is one of all; so is a checkpoint that one could not write."""
        if self.world.any_of(self._asked.name is not None):
            self._ending = self._asked.name or "stopped with another process"
        self._save_failed = self.world.any_of(self.store.failed)

    def _stop_if_asked(self) -> None:
        """A run that is to stop has saved; what is left is to wait for the disk."""
        if self._ending is not None or self._save_failed:
            self.store.wait()
        if self._ending is not None:
            raise Stopped(f"{self._ending}: saved in {self.folder}; go on with: tfive resume {self.folder}")

    def _say_where(self) -> None:
        method = self.assembly.method
        account = self.recorder.account()
        self.status.write(window=method.window, phase=method.phase, account=account)

    @property
    def _began(self) -> dict[str, Any]:
        return continuity.record(self.assembly.config, self.model, self.assembly.corpus.fingerprint)

    def _micro_step(self) -> str:
        try:
            with self._settling(), self._memory(self.assembly.method.phase):
                return self.assembly.method.advance()
        except RunFailed as error:
            # The failed micro-step left half-done work behind; the last checkpoint is the state to go on from.
            there = f" (the last checkpoint is in {self.folder / CHECKPOINTS})" if self.store.paths() else ""
            raise RunFailed(f"{error}{there}") from error

    def _close_window(self) -> None:
        config, method = self.assembly.config, self.assembly.method
        if self.world.size > 1:
            self.world.agree(f"the course of window {method.window}", course_so_far(method))
            weights = weights_so_far(self.assembly.actor)
            if (holders := self.assembly.actor.role.members) is not None:
                holders.agree(f"the actor after window {method.window}", weights)
        self.recorder.at(method.window)
        self.live.close_window()
        drawn = actor_items(self.assembly, method.window)
        self.window_costs.append({"window": method.window, **cost(self.assembly, self.recorder), "actor_items": drawn})
        self.status.spent(self.window_costs[-1])
        self._look_at_the_clock()
        last = method.window >= self.windows
        if last or method.window % config.run.develop_every == 0:
            method.report["development"] = self._measure(method.window)
        self._measure_benchmarks(method.window)
        self.recorder.metrics(_flat(method.report), method.window)
        if self.on_window is not None:
            self.on_window(method.report)
        every = config.run.checkpoint_every
        self._hear_others()
        if last or self._ending is not None or (every and method.window % every == 0):
            self.save()

    def _look_at_the_clock(self) -> None:
        """A window that closes when windows have taken their seconds is the last. The leading process's clock decides
        for all, the one that checkpoints hold; measuring takes none, so a run that goes on from here finds the same."""
        most, method, leads = self.assembly.config.run.seconds, self.assembly.method, self.world.leads
        if most is not None and method.closed and self.world.any_of(leads and window_seconds(self.recorder) >= most):
            self.windows = min(self.windows, method.window)

    def _measure(self, window: int) -> dict[str, Any]:
        with self.recorder.phase("develop", "develop"), self._memory("develop"):
            found, items = self._measured(self.assembly.development, window)
            self.explorer.save(window, self.assembly.method, items, last=window == self.windows)
            ends = window in (0, self.windows)
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
        if self.world.leads:
            save_items(items, self.folder / texts.role, window)
        self.recorder.count(texts.role, **texts.amounts())
        return found, items

    def _measure_test(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The base model and the trained one on texts that chose nothing, once, when all is over."""
        texts = len(self.assembly.test.texts.tokens_BS)
        told = f"measuring on {texts} texts that chose nothing, the base model and the trained one"
        self.recorder.event("test", told, window=self.assembly.method.window)
        with self.recorder.phase("test", "test"), self._memory("test"):
            before, _ = self.assembly.test.measure(self.assembly.base, None)
            self.recorder.count(self.assembly.test.role, **self.assembly.test.amounts())
            after, _ = self._measured(self.assembly.test, self.assembly.method.window)
            return before, after

    def _measure_benchmarks(self, window: int) -> None:
        """Gains and scores on benchmark items with what had been spent by then, where the schedule asks for them."""
        planned = self.assembly.config.window
        if self.benchmarks is None or not self.benchmarks.due(window, planned.actor_steps, self.windows):
            return
        spent = cost(self.assembly, self.recorder)
        record: dict[str, Any] = {"steps": window * planned.actor_steps, "tokens": spent["thought_tokens"]}
        record["seconds"] = training_seconds(self.recorder)
        with self.recorder.phase("benchmarks", "benchmarks"), self._memory("benchmarks"):
            record |= self.benchmarks.measure(self.assembly, self.folder, window, self.recorder)
        self.recorder.metrics(_flat({"benchmarks": record}), window)

    def save(self) -> None:
        """Begin a checkpoint of everything, with all processes; it is written while the run goes on."""
        with self._memory("save"):
            state = self._state()
        self.store.begin(state)

    def _memory(self, phase: str) -> AbstractContextManager[None]:
        return out_of_memory_explained(phase, self.assembly.config, lambda: self.assembly.tried(phase))

    def _state(self) -> dict[str, Any]:
        return {
            "method": self.assembly.method.state_dict(),
            "ledger": self.assembly.ledger.state_dict(),
            "recorder": self.recorder.state_dict(),
            "history": self.history,
            "window_costs": self.window_costs,
            "began": self._began,
            "places": self.places,
        }

    def restore(self, *, skip_damaged: bool = False) -> list[str]:
        """Load the newest checkpoint, or with `skip_damaged` the newest valid one; returns a line for every one that
        was skipped, and for everything that has changed since and may (also written to the log)."""
        held = encode({"method": self.assembly.method.state_dict()}) if self.world.size > 1 else None
        wanted = None if held is None else pieces_like(held)
        checkpoint, skipped = self.store.usable(skip_damaged=skip_damaged, wanted=wanted)
        name, state = checkpoint.path.name, checkpoint.tree
        with continuity.fits(self.folder, name), self._memory("restore"):
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
        self._look_at_the_clock()
        return skipped

    def summary(self, before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
        """The result of the whole run: test texts `before` and `after` training, development texts at its beginning,
        its end and between, and what it cost."""
        report = self.assembly.method.report
        account = self.recorder.account()
        actor, base = self.assembly.actor, dict(self.assembly.base.model.named_parameters())
        change = float(actor.role.told(relative_change(actor.optimizer.whole_masters(), base, actor.engine.model)))
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
            **{name: report.get(name) for name in ("r2", "retention", "actor_gain", "reading_openness")},
            "actor_updates": getattr(self.assembly.method, "updates", None),
            "windows": self.assembly.method.window,
            "seconds": round(self.recorder.seconds, 1),
            "generated_tokens": account["total"]["generated_tokens"],
            "account": account,
            "rollouts": rollouts(account, self.assembly.method.window, self.assembly.config.window.items),
            "actor_steps": self.assembly.config.window.actor_steps,
            "draws": self.assembly.draws(self.assembly.method.window),
            "identity": self.identity,
            "weight_change": change,
            "place": self.place,
            "places": self.places,
            **self._processes(),
            "test": {"before": before, "after": after},
            "history": self.history,
            "laps": self.window_costs,
            **({} if self.assembly.warmstart is None else {"warmstart": self.assembly.warmstart}),
            **({} if self.assembly.moved_positions is None else {"positions": self.assembly.moved_positions}),
        }

    def _processes(self) -> dict[str, Any]:
        """What each process took, where there are several."""
        if self.world.size == 1:
            return {}
        own = {"seconds": self.recorder.seconds, "peak_bytes": float(peak_bytes(self.live.device))}
        return {"processes": self.world.gather_numbers(own)}

    def _decode(self, tokens: list[int]) -> str:
        return str(self.assembly.loaded.tokenizer.decode(tokens))

    def _point(self, name: str) -> None:
        if self.faults is not None:
            self.faults(name)


def _measurement(entry: Any) -> dict[str, Any]:
    """One entry of a checkpoint's history; what is none raises an error here and not at the end of the run."""
    return {**entry, "window": int(entry["window"]), "no_thought_loss": float(entry["no_thought_loss"])}


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

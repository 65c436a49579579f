"""What a rank does in a sweep of kills: the `tfive` command itself, which dies where it was told to.

`SWEEP` is JSON: `log`, a folder for what is noted here, and `deaths`, a list of [place, rank], one for each attempt. A
place is the beginning or the end of something a rank does; without deaths every place that is passed is noted.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from tfive.cli.app import main
from tfive.distributed.group import Group
from tfive.distributed.meeting import StoreMeeting
from tfive.rl.critics import Critics
from tfive.training import loop as loop_module
from tfive.training import start
from tfive.training.checkpoint import CheckpointStore
from tfive.training.loop import Loop
from tfive.training.recorder import Recorder
from tfive.tree.forward import TreeModel

STARTED, RESTORED = "start: begin", "restore: end"
ONCE = (
    (StoreMeeting, "exchange", "meeting"),
    (start, "load_model", "load"),
    (start, "build", "build"),
    (Loop, "restore", "restore"),
    (Group, "agree", "agreement"),
    (CheckpointStore, "begin", "save"),
    (CheckpointStore, "wait", "wait for a save"),
    (loop_module, "save_critics", "critics' files"),
    (loop_module, "save_summary", "summary"),
)
"""Functions that are places of their own, beside every phase and every point of a save."""

INSIDE = (
    (TreeModel, "sample", "sampling"),
    (TreeModel, "score", "scoring"),
    (Critics, "evaluate", "values"),
    (Group, "gather_all", "rows"),
    (Group, "reduce_gradients", "gradients"),
)
"""Functions that begin places inside of phases, another in each."""


class Sweep:
    """Notes where this rank passes, and ends it at the place of this attempt."""

    def __init__(self, told: dict[str, Any], rank: int, attempt: int) -> None:
        self.log, self.rank, self.attempt = Path(told["log"]), rank, attempt
        planned = told["deaths"][attempt : attempt + 1]
        self.death = next((place for place, who in planned if who == rank), None)
        self.noted: set[str] = set()
        self.loop: Loop | None = None
        self.phases: list[str] = []

    def at(self, place: str) -> None:
        if place == self.death:
            self._note(place, killed=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if place not in self.noted:
            self.noted.add(place)
            self._note(place, killed=False)

    def _note(self, place: str, *, killed: bool) -> None:
        line = {"place": place, "attempt": self.attempt, "rank": self.rank, "killed": killed, "time": time.time()}
        with (self.log / f"rank-{self.rank}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    @contextmanager
    def around(self, name: str) -> Iterator[None]:
        self.at(f"{name}: begin")
        yield
        self.at(f"{name}: end")

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A phase; with its window, where that is the edge of one."""
        self.phases.append(name)
        path, window = "/".join(self.phases), 0 if self.loop is None else self.loop.assembly.method.window
        with self.around(f"{path} of window {window}" if path in ("open", "close", "develop") else path):
            yield
        self.phases.pop()

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """The beginning of something in the present phase."""
        if self.phases:
            self.at(f"{self.phases[0]}, {name}: begin")
        yield


def wrapped(function: Callable[..., Any], around: Callable[[], AbstractContextManager[None]]) -> Callable[..., Any]:
    def called(*arguments: Any, **options: Any) -> Any:
        with around():
            return function(*arguments, **options)

    return called


def attach(sweep: Sweep) -> None:
    """Make places of every phase, of the functions above, and of the points of a save."""
    made, phase = Loop.__init__, Recorder.phase

    def with_points(self: Loop, *arguments: Any, **options: Any) -> None:
        made(self, *arguments, **{**options, "faults": lambda point: _saving(sweep, point)})
        sweep.loop = self

    @contextmanager
    def seen(self: Recorder, name: str, role: str = "all") -> Iterator[None]:
        with phase(self, name, role), sweep.phase(name):
            yield

    Loop.__init__ = with_points  # type: ignore[method-assign]
    Recorder.phase = seen  # type: ignore[method-assign]
    for functions, place in ((ONCE, sweep.around), (INSIDE, sweep.inside)):
        for owner, name, called in functions:
            setattr(owner, name, wrapped(getattr(owner, name), partial(place, called)))


def _saving(sweep: Sweep, point: str) -> None:
    if not point.startswith("phase:"):
        sweep.at(f"save, {point}")


def rank(*words: str) -> None:
    """One rank of a sweep, from its start to its end."""
    faulthandler.register(signal.SIGUSR1)
    place = (int(os.environ[name]) for name in ("RANK", "TORCHELASTIC_RESTART_COUNT"))
    sweep = Sweep(json.loads(os.environ["SWEEP"]), *place)
    sweep.at(STARTED)
    attach(sweep)
    main(words)

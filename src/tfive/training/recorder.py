"""What a run records: timed phases, metrics, events, progress, and the account of everything generated.

A method is handed a `Recorder` as its `tfive.telemetry.Telemetry`. Metrics go to `metrics.jsonl`, a line per call, and
to the trackers. The account follows `eq:total-rollout-budget`: trajectories, generated tokens, actor-eligible tokens,
scored tokens and head updates per role, seconds per phase and role.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Self, TypeVar

from tfive.errors import UserError
from tfive.training.progress import ProgressReport
from tfive.training.trackers import Tracker

Item = TypeVar("Item")

AMOUNTS = ("trajectories", "generated_tokens", "actor_tokens", "scored_tokens", "head_updates")
"""What is counted per role; every newly generated trajectory is counted once, replay adds none."""

METRICS = "metrics.jsonl"


class Recorder:
    """Writes metrics, times phases, shows progress, keeps the account. Close it, or use it as a context manager."""

    def __init__(
        self,
        folder: Path | None = None,
        *,
        trackers: Sequence[Tracker] = (),
        quiet: bool = False,
        stream: IO[str] | None = None,
        progress: ProgressReport | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._clock = clock
        self.on_event: Callable[[str, str], None] | None = None
        """Called with every event, e.g. to print it."""
        self.on_phase: Callable[[str], None] | None = None
        """Called with the path of every phase that begins, and at every step of one that shows progress."""
        self._trackers = list(trackers)
        self._progress = None if quiet else progress or ProgressReport(stream if stream is not None else sys.stderr)
        self._started = clock()
        self._earlier_seconds = 0.0
        self._step = 0
        self._amounts: dict[str, dict[str, int]] = {}
        self._seconds: dict[str, dict[str, float]] = {}
        self._open: list[str] = []
        self._entered = self._started
        """When the outermost open phase was entered, or the last one left."""
        self.trajectories = 0
        """All that were counted, whatever their role."""
        self._path = folder / METRICS if folder is not None else None
        self._file: IO[str] | None = None
        self._digest = hashlib.sha256()
        """Of the metrics file so far."""
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a", encoding="utf-8")
            self._digest.update(self._path.read_bytes())

    @property
    def in_lines(self) -> bool:
        """Whether what is said stays as lines: not where a headline is drawn over and over, nor where nothing is."""
        return self._progress is not None and not self._progress.live

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the metrics file and every tracker."""
        if self._file is not None:
            self._file.close()
            self._file = None
        for tracker in self._trackers:
            tracker.close()
        self._trackers = []

    @property
    def seconds(self) -> float:
        """Seconds the run has worked, those before a restart included."""
        return self._earlier_seconds + self._clock() - self._started

    def at(self, step: int) -> None:
        """Set the step (the window) that events belong to unless they name another."""
        self._step = step

    @contextmanager
    def phase(self, name: str, role: str = "all") -> Iterator[None]:
        """A timed block. Nested phases are named by their path and the outer one keeps its whole duration."""
        self._open.append(name)
        path = "/".join(self._open)
        self._tell_phase()
        began = self._clock()
        self._entered = began if len(self._open) == 1 else self._entered
        try:
            yield
        finally:
            roles = self._seconds.setdefault(path, {})
            roles[role] = roles.get(role, 0.0) + self._clock() - began
            self._open.pop()

    def _tell_phase(self) -> None:
        if self.on_phase is not None:
            self.on_phase("/".join(self._open))

    def now(self) -> tuple[str, float]:
        """The outermost open phase (empty between two) and how many seconds it has lasted."""
        return "".join(self._open[:1]), self._clock() - self._entered

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        """The numbers of one step: one line of JSON, and a record in every tracker.

        A value that is not finite is kept as null, so that the file stays readable by any JSON parser.
        """
        if self._file is not None:
            line: dict[str, float | None] = {"step": step, "seconds": round(self.seconds, 3)}
            line |= {name: value if math.isfinite(value) else None for name, value in values.items()}
            self._write(line)
        for tracker in self._trackers:
            tracker.write(values, step)

    def samples(self, rows: Sequence[Mapping[str, str]], step: int) -> None:
        """A few thoughts as text, for the trackers."""
        for tracker in self._trackers:
            tracker.samples(rows, step)

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._file is not None:
            text = json.dumps(line, ensure_ascii=False) + "\n"
            self._file.write(text)
            self._file.flush()
            self._digest.update(text.encode())

    def event(self, what: str, detail: str, window: int | None = None) -> None:
        """A transition: one line in the metrics file, and a call of `on_event`."""
        if self._file is not None:
            line = {"step": self._step if window is None else window, "seconds": round(self.seconds, 3)}
            self._write({**line, "event": what, "detail": detail})
        if self.on_event is not None:
            self.on_event(what, detail)

    def count(self, role: str, **amounts: int) -> None:
        """Add to the account of `role`: trajectories, generated_tokens, actor_tokens, scored_tokens, head_updates."""
        account = self._amounts.setdefault(role, dict.fromkeys(AMOUNTS, 0))
        for name, amount in amounts.items():
            if name not in account:
                raise ValueError(f"{name} is not counted; choose among {', '.join(AMOUNTS)}")
            account[name] += int(amount)
        self.trajectories += int(amounts.get("trajectories", 0))

    def account(self) -> dict[str, Any]:
        """Everything counted so far: per role, in total, and the seconds per phase and role."""
        total = {name: sum(account[name] for account in self._amounts.values()) for name in AMOUNTS}
        return {
            "roles": {role: dict(account) for role, account in self._amounts.items()},
            "total": total,
            "seconds": {phase: dict(roles) for phase, roles in self._seconds.items()},
            "wall_seconds": self.seconds,
        }

    def progress(self, items: Iterable[Item], label: str, total: int | None = None) -> Iterator[Item]:
        """The same items; rate and time left appear once they have taken a while (`tfive.training.progress`)."""
        if total is None:
            length = getattr(items, "__len__", None)
            total = length() if length is not None else None
        items = items if self.on_phase is None else self._told(items)
        return iter(items) if self._progress is None else self._progress.track(items, label, total)

    def _told(self, items: Iterable[Item]) -> Iterator[Item]:
        for item in items:
            self._tell_phase()
            yield item

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: the account, the time worked, and how far the metrics file had come."""
        return {
            "step": self._step,
            "wall_seconds": self.seconds,
            "amounts": {role: dict(account) for role, account in self._amounts.items()},
            "seconds": {phase: dict(roles) for phase, roles in self._seconds.items()},
            "metrics_bytes": self._path.stat().st_size if self._path is not None else 0,
            "metrics_sha256": self._digest.hexdigest(),
        }

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Go on from a checkpoint; metrics written after it are cut off, because they will be written again. A file
        that does not hold what was written by then is refused, or left as it is if not `strict`."""
        self._step = int(state["step"])
        self._earlier_seconds, self._started = float(state["wall_seconds"]), self._clock()
        self._amounts = {role: dict(account) for role, account in state["amounts"].items()}
        self.trajectories = sum(account["trajectories"] for account in self._amounts.values())
        self._seconds = {phase: dict(roles) for phase, roles in state["seconds"].items()}
        if self._file is not None and self._path is not None:
            kept = int(state["metrics_bytes"])
            with self._path.open("rb") as file:
                begun = file.read(kept)
            self._digest = hashlib.sha256(begun)
            if self._digest.hexdigest() != state["metrics_sha256"]:
                if not strict:
                    self._digest = hashlib.sha256(self._path.read_bytes())
                    return
                raise UserError(f"{self._path}: not what the run had written by its checkpoint; restore that file")
            os.truncate(self._path, kept)

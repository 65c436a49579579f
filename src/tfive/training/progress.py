"""Progress bars with rate and time left, for work that takes more than two seconds in front of somebody."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import IO, TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

Item = TypeVar("Item")

PATIENCE = 2.0
"""Seconds after which work that is still going on shows a bar."""


def rate_and_time_left(done: int, total: int | None, spent: float) -> str:
    """`3.2/s, 0:01:05 left`, from the mean pace so far."""
    if done == 0 or spent <= 0:
        return ""
    pace = f"{done / spent:.3g}/s"
    if total is None or total < done:
        return pace
    left = round((total - done) * spent / done)
    return f"{pace}, {left // 3600}:{left // 60 % 60:02d}:{left % 60:02d} left"


class Bars:
    """All bars of one terminal, drawn together so that nested ones do not overwrite each other."""

    def __init__(
        self, stream: IO[str], patience: float = PATIENCE, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._stream, self._patience, self._clock = stream, patience, clock
        self._lock = threading.Lock()
        self._progress: Progress | None = None
        self._shown = 0

    def track(self, items: Iterable[Item], label: str, total: int | None = None) -> Iterator[Item]:
        """The same items; the bar comes after `patience` seconds and goes when they are spent."""
        bar = _Bar(self, label, total, self._clock)
        timer = threading.Timer(self._patience, bar.show)
        timer.daemon = True
        timer.start()
        try:
            for item in items:
                yield item
                bar.advance()
        finally:
            timer.cancel()
            bar.close()

    def add(self, label: str, total: int | None, completed: int) -> TaskID:
        """A new line on the shared display, which starts with the first one."""
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        with self._lock:
            if self._progress is None:
                columns = (
                    TextColumn("{task.description}"),
                    BarColumn(),
                    MofNCompleteColumn(),
                    TextColumn("{task.fields[pace]}"),
                )
                console = Console(file=self._stream, force_terminal=True)
                self._progress = Progress(*columns, console=console, transient=True)
                self._progress.start()
            self._shown += 1
            return self._progress.add_task(label, total=total, completed=completed, pace="")

    def update(self, task: TaskID, completed: int, pace: str) -> None:
        """Move one line."""
        with self._lock:
            if self._progress is not None:
                self._progress.update(task, completed=completed, pace=pace)

    def remove(self, task: TaskID) -> None:
        """Take one line away; the display ends with the last."""
        with self._lock:
            if self._progress is None:
                return
            self._progress.remove_task(task)
            self._shown -= 1
            if self._shown == 0:
                self._progress.stop()
                self._progress = None


class _Bar:
    """One line: hidden until shown, closed at most once, whichever thread comes first."""

    def __init__(self, bars: Bars, label: str, total: int | None, clock: Callable[[], float]) -> None:
        self._bars, self._label, self._total, self._clock = bars, label, total, clock
        self._began = clock()
        self._done = 0
        self._task: TaskID | None = None
        self._closed = False
        self._lock = threading.Lock()

    def show(self) -> None:
        with self._lock:
            if not self._closed:
                self._task = self._bars.add(self._label, self._total, self._done)

    def advance(self) -> None:
        self._done += 1
        if self._task is not None:
            pace = rate_and_time_left(self._done, self._total, self._clock() - self._began)
            self._bars.update(self._task, self._done, pace)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._task is not None:
                self._bars.remove(self._task)

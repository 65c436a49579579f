"""Progress with rate and time left: bars on a terminal, now and then a plain line in a log, nothing for quick work."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import IO, TypeVar

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

Item = TypeVar("Item")

SHOW_AFTER = 2.0
"""Seconds after which work that is still going on shows a bar."""

LINE_EVERY = 30.0
"""Seconds between two lines about the same work where there is no terminal to draw a bar on."""


class RateColumn(ProgressColumn):
    """Items per second, as far as they are known."""

    def render(self, task: Task) -> Text:
        """`3.2/s`."""
        return Text(f"{task.speed:.3g}/s" if task.speed else "")


class LateProgress(Progress):
    """A rich display that leaves out tasks younger than `show_after` seconds, so that quick loops do not flicker."""

    show_after = SHOW_AFTER

    def get_renderables(self) -> Iterable[RenderableType]:
        """One table of all tasks old enough, or nothing."""
        old = [task for task in self.tasks if (task.elapsed or 0.0) >= self.show_after]
        return [self.make_tasks_table(old)] if old else []


class ProgressReport:
    """All progress of one stream: nested loops share one live display; a stream that is no terminal gets lines."""

    def __init__(
        self, stream: IO[str], *, show_after: float = SHOW_AFTER, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._stream, self._show_after, self._clock = stream, show_after, clock
        self._live = stream.isatty()
        self._display: LateProgress | None = None
        self._timer: threading.Timer | None = None

    def track(self, items: Iterable[Item], label: str, total: int | None = None) -> Iterator[Item]:
        """The same items; what is shown about them ends with them."""
        display = self._display or self._open()
        number = display.add_task(label, total=total)
        task = next(task for task in display.tasks if task.id == number)
        spoken = self._clock()
        try:
            for item in items:
                yield item
                display.advance(number)
                if not self._live and self._clock() - spoken >= LINE_EVERY:
                    spoken = self._clock()
                    print(_line(task), file=self._stream, flush=True)
        finally:
            display.remove_task(number)
            if not display.tasks:
                self._close(display)

    def _open(self) -> LateProgress:
        """The display of the outermost loop. A timer starts it, so that one long first item gets its bar as well."""
        console = Console(file=self._stream, force_terminal=self._live)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), RateColumn())
        self._display = display = LateProgress(
            *columns, TimeRemainingColumn(), console=console, transient=True, get_time=self._clock
        )
        display.show_after = self._show_after
        if self._live:
            self._timer = threading.Timer(self._show_after, display.start)
            self._timer.daemon = True
            self._timer.start()
        return display

    def _close(self, display: LateProgress) -> None:
        self._display = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()
            self._timer = None
        if display.live.is_started:
            display.stop()


def _line(task: Task) -> str:
    """`reading web: 120 of 500, 4/s, 0:01:35 left`."""
    of = "" if task.total is None else f" of {int(task.total)}"
    left = TimeRemainingColumn().render(task).plain
    parts = [f"{task.description}: {int(task.completed)}{of}", RateColumn().render(task).plain]
    return ", ".join(part for part in (*parts, f"{left} left" if task.total is not None else "") if part)

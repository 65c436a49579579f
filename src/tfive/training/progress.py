"""Signs of life: a line about the whole work and bars for its loops, drawn on a terminal or in a notebook, printed now
and then into a log.

Drawing happens in a thread of its own, which reads a few plain numbers: work on a device is never waited for.
"""

from __future__ import annotations

import html
import importlib
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

Item = TypeVar("Item")

SHOW_AFTER = 2.0
"""Seconds after which work that is still going on shows a bar."""

LINE_EVERY = 30.0
"""Seconds between two lines about the same loop where there is no terminal to draw a bar on."""

HEADLINE_EVERY = 60.0
"""Seconds between two lines about the whole work there."""

TICK = 0.5
"""Seconds between two looks at the clock."""

FILE_EVERY = 4
"""Looks at the clock between two writings of the file."""

SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


class Headline(Protocol):
    """What is to be said of the whole work at any moment."""

    def line(self) -> str:
        """One line."""

    def fraction(self) -> float | None:
        """How much of the work is done, None where that is not known."""


class Waiting:
    """Something that takes a while and has no parts to count: `loading nano, 12 s`."""

    def __init__(self, what: str, clock: Callable[[], float] = time.perf_counter) -> None:
        self.what, self._clock, self._began = what, clock, clock()

    def line(self) -> str:
        """What goes on, and for how long."""
        return f"{self.what}, {self._clock() - self._began:.0f} s"

    def fraction(self) -> float | None:
        """Unknown."""
        return None


class RateColumn(ProgressColumn):
    """Items per second, as far as they are known."""

    def render(self, task: Task) -> Text:
        """`3.2/s`."""
        return Text(f"{task.speed:.3g}/s" if task.speed else "")


class LateProgress(Progress):
    """A rich display of a headline and of all tasks older than `show_after` seconds, so that quick loops do not
    flicker."""

    show_after = SHOW_AFTER
    headline: Headline | None = None

    def get_renderables(self) -> Iterable[RenderableType]:
        """The headline if there is one, then one table of all tasks old enough."""
        if self.headline is not None:
            turn = SPINNER[int(self.get_time() * 8) % len(SPINNER)]
            yield Text(f"{turn} {self.headline.line()}", overflow="ellipsis", no_wrap=True)
        old = [task for task in self.tasks if (task.elapsed or 0.0) >= self.show_after]
        if old:
            yield self.make_tasks_table(old)


class ProgressReport:
    """All progress of one stream: a headline and nested loops share one live display; a log gets lines."""

    def __init__(
        self, stream: IO[str], *, show_after: float = SHOW_AFTER, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._stream, self._show_after, self._clock = stream, show_after, clock
        self._notebook = _notebook() if stream in (sys.stderr, sys.stdout) else None
        self.live = stream.isatty() and self._notebook is None
        self._display: LateProgress | None = None
        self._headline: Headline | None = None
        self._timer: threading.Timer | None = None

    @contextmanager
    def showing(self, headline: Headline, file: Path | None = None, *, drawn: bool = True) -> Iterator[None]:
        """Show `headline` while the block works: drawn at once on a terminal, a line a minute in a log, and in `file`,
        where other programs look and which is gone afterwards; with `drawn` false in the file alone."""
        over = threading.Event()
        watch = threading.Thread(target=self._watch, args=(headline, file, drawn, over), daemon=True)
        if drawn:
            self._headline = headline
            display = self._display or self._open()
            display.headline = headline
            if self.live and not display.live.is_started:
                self._stop_timer()
                display.start()
        watch.start()
        try:
            yield
        finally:
            over.set()
            watch.join()
            if drawn:
                self._headline = display.headline = None
                if not display.tasks:
                    self._close(display)

    def _watch(self, headline: Headline, file: Path | None, drawn: bool, over: threading.Event) -> None:
        """Until the work is over: write the file, update a notebook, print a line a minute where nothing is drawn."""
        handle = self._notebook(headline) if drawn and self._notebook is not None else None
        spoken, turn = self._clock(), 0
        while not over.wait(TICK):
            turn += 1
            if file is not None and turn % FILE_EVERY == 0 and not _replaced(file, headline.line()):
                file = None
            if handle is not None:
                handle()
            elif drawn and not self.live and self._clock() - spoken >= HEADLINE_EVERY:
                spoken = self._clock()
                print(f"  {headline.line()}", file=self._stream, flush=True)
        if file is not None:
            file.unlink(missing_ok=True)

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
                if not self.live and self._clock() - spoken >= LINE_EVERY:
                    spoken = self._clock()
                    print(_line(task), file=self._stream, flush=True)
        finally:
            display.remove_task(number)
            if not display.tasks and self._headline is None:
                self._close(display)

    def _open(self) -> LateProgress:
        """The display of the outermost loop. A timer starts it, so that one long first item gets its bar as well."""
        console = Console(file=self._stream, force_terminal=self.live, force_jupyter=False)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), RateColumn())
        self._display = display = LateProgress(
            *columns,
            TimeRemainingColumn(),
            console=console,
            transient=True,
            get_time=self._clock,
            refresh_per_second=4,
        )
        display.show_after = self._show_after
        if self.live:
            self._timer = threading.Timer(self._show_after, display.start)
            self._timer.daemon = True
            self._timer.start()
        return display

    def _close(self, display: LateProgress) -> None:
        self._display = None
        self._stop_timer()
        if display.live.is_started:
            display.stop()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()
            self._timer = None


def _replaced(file: Path, line: str) -> bool:
    """Whether the line could be written; a full disk or a vanished folder must not end the work it tells of, which
    finds out about it by itself."""
    beside = file.with_name(f".{file.name}")
    try:
        beside.write_text(f"{line}\n", "utf-8")
        beside.replace(file)
    except OSError:
        return False
    return True


def _notebook() -> Callable[[Headline], Callable[[], None]] | None:
    """In a notebook: a function that puts a bar with a headline below the cell and returns what updates it."""
    shell: Any = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is None or not hasattr(shell, "kernel"):
        return None
    display: Any = importlib.import_module("IPython.display")

    def put(headline: Headline) -> Callable[[], None]:
        handle = display.display(display.HTML(_bar(headline)), display_id=True)
        return lambda: handle.update(display.HTML(_bar(headline)))

    return put


def _bar(headline: Headline) -> str:
    done = headline.fraction()
    value = "" if done is None else f' value="{done:.3f}"'
    return f'<progress max="1"{value}></progress> <code>{html.escape(headline.line())}</code>'


def _line(task: Task) -> str:
    """`reading web: 120 of 500, 4/s, 0:01:35 left`."""
    of = "" if task.total is None else f" of {int(task.total)}"
    left = TimeRemainingColumn().render(task).plain
    parts = [f"{task.description}: {int(task.completed)}{of}", RateColumn().render(task).plain]
    return ", ".join(part for part in (*parts, f"{left} left" if task.total is not None else "") if part)

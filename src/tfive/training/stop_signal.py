"""Signals that ask a run to save and stop."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
"""What asks a run to save and stop: a person, a scheduler, a terminal that closed."""


class StopSignal:
    """The first signal that this process was sent while it listened."""

    def __init__(self, *, says: bool = False) -> None:
        """`says`: tell whoever sent it what happens now, in a line of its own; where a headline is drawn, that does."""
        self.name: str | None = None
        self.says = says

    @property
    def told(self) -> str:
        """What happens now, which may take a while; nothing before a signal."""
        return "" if self.name is None else f"{self.name}: saves and stops after this step, a second one ends at once"

    @contextmanager
    def heard(self) -> Iterator[None]:
        """SIGINT, SIGTERM and SIGHUP ask for a stop after the present micro-step; a second one ends the process at
        once. What was ignored when the process began (`nohup`) stays ignored."""

        def ask(number: int, frame: FrameType | None) -> None:
            if self.name is not None:
                raise KeyboardInterrupt
            self.name = signal.Signals(number).name
            if self.name == "SIGHUP":
                _leave_the_terminal()
            elif self.says:
                # Not by print, which may be what the signal has interrupted.
                with suppress(OSError):
                    os.write(2, f"{self.told}\n".encode())

        with _handled_by(ask):
            yield


@contextmanager
def ended_by_signals(told: Callable[[str], Exception]) -> Iterator[None]:
    """A signal outside of windows, where nothing can be saved, ends the work at once: what is open is closed on the way
    out, and what is raised is `told` of the signal's name."""

    def end(number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if name == "SIGHUP":
            _leave_the_terminal()
        raise KeyboardInterrupt(name)

    try:
        with _handled_by(end):
            yield
    except KeyboardInterrupt as error:
        raise told(str(error) or "SIGINT") from error


@contextmanager
def _handled_by(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """All `SIGNALS` but those that were ignored when the process began (`nohup`) call the handler meanwhile."""
    heard = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    try:
        before = {number: signal.signal(number, handler) for number in heard}
    except ValueError:
        # Only the main thread may listen; a caller that trains in another one stops it by its own means.
        before = {}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


def _leave_the_terminal() -> None:
    """Write to nowhere what would go to a terminal that is gone: a failing print must not keep a run from saving."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        if os.isatty(stream):
            os.dup2(nowhere, stream)
    os.close(nowhere)

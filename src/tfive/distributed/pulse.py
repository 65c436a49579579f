"""Where a process's main thread is, for those who watch it (`training.watchdog`)."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

START = "start"
"""What a process does before its first phase: loading and preparing, which may take long without a step."""


@dataclass
class Pulse:
    """The main thread writes, the watchdog's thread reads."""

    phase: str = START
    waits: str = ""
    """The collective it waits in, empty outside of one."""
    steps: int = 0
    news: threading.Event = field(default_factory=threading.Event)
    """Set when another phase is entered, so that others hear of it at once."""

    def at(self, phase: str) -> None:
        """The main thread enters a phase, or makes a step in it."""
        entered, self.phase, self.steps = phase != self.phase, phase, self.steps + 1
        if entered:
            self.news.set()

    def beat(self) -> None:
        """The main thread has made a step of long work without an exchange."""
        self.steps += 1

    def entered(self, collective: str) -> None:
        """The main thread waits for other processes from here on."""
        self.waits, self.steps = collective, self.steps + 1

    def left(self) -> None:
        """The other processes have come."""
        self.waits, self.steps = "", self.steps + 1

"""What times training by phase: a recorder without files, and a clock that waits for the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from tfive.training.recorder import Recorder
from tfive_lab.bench.profile import part

Clock = Callable[[], float]
"""Seconds from some origin, as `time.perf_counter` counts them."""


class Timed(Recorder):
    """A recorder without files whose clock waits for the device; events are kept in a list."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(None, quiet=True, clock=clock)
        self.events: list[str] = []
        self.on_event = lambda what, detail: self.events.append(f"{what}: {detail}")

    @contextmanager
    def phase(self, name: str, role: str = "all") -> Iterator[None]:
        """A timed block, which a profile lists as a part."""
        with part(name), super().phase(name, role):
            yield

    def phases(self) -> dict[str, float]:
        """Seconds so far of every phase."""
        return {phase: sum(roles.values()) for phase, roles in self.account()["seconds"].items()}


def device_clock(device: torch.device) -> Clock:
    """A clock that is read when all work queued on the device is done."""

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    return now

"""Where a run is, in one line: window, phase, step, thoughts a second, time to the end, attempts left, memory.

Everything is read from plain numbers that the run keeps anyway, so that asking never waits for a device.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import torch

from tfive.config.config import Config
from tfive.methods.method import Method
from tfive.training.recorder import Recorder

PROGRESS = "progress.txt"
"""The same line as a file in the run's folder while the run works."""


def planned_thoughts(config: Config) -> int:
    """Thoughts that the run samples if every window needs one round of fitting and testing."""
    spec, window = config.spec, config.window
    if not spec.thinks:
        return 0
    reading = min(config.reading_windows, window.windows)
    rewarded = sum(window.count(role) for role in spec.roles_of(config)) * (window.windows - reading)
    once = sum(window.count(role) for role in spec.first_roles)
    return config.group * (rewarded + reading * window.items + once)


class RunStatus:
    """The headline of a training run."""

    def __init__(self, config: Config, method: Method[Any], recorder: Recorder, device: torch.device) -> None:
        self.config, self.method, self.recorder, self.device = config, method, recorder, device
        self.windows, self.planned = config.window.windows, planned_thoughts(config)
        self._begun = recorder.seconds
        """When the loop began: loading and preparing are behind it."""
        self._before = self._thoughts()
        """Thoughts of a run that goes on, sampled before."""
        self._closed: list[tuple[int, float]] = []
        """Window and time at each close that was seen; of a resumed run, those since."""

    def close_window(self) -> None:
        """A window is over; called by the loop."""
        self._closed.append((self.method.window, self.recorder.seconds))

    def line(self) -> str:
        """`window 2 of 6, fit 3 (0:12), 41 thoughts/s, about 0:02:10 left, attempt 3 of 20, 1.2 GB`."""
        method, recorder = self.method, self.recorder
        seconds = recorder.seconds
        phases, since = recorder.now()
        where = "measuring" if phases == "develop" else f"{phases or method.phase}{self._step()}"
        window = min(method.window + (method.closed and phases != "develop"), self.windows)
        parts = [f"window {window} of {self.windows}", f"{where} ({clock(since)})"]
        rate = (self._thoughts() - self._before) / max(seconds - self._begun, 1e-9)
        parts.append(f"{rate:.3g} thoughts/s" if self.planned and rate else "")
        left = self.seconds_left()
        parts += ["" if left is None else f"about {clock(left)} left", method.standing(), memory(self.device)]
        return ", ".join(part for part in parts if part)

    def fraction(self) -> float | None:
        """How much of the run is done, by windows and by the thoughts of the window that is open."""
        windows = self.method.window - (0 if self.method.closed else 1)
        if not self.planned or self._closed:
            return min(windows / self.windows, 1.0)
        return min(self._thoughts() / self.planned, 0.99)

    def seconds_left(self) -> float | None:
        """From the mean of the windows closed so far; before the first, from the thoughts sampled and planned."""
        seconds = self.recorder.seconds
        if self._closed:
            number, when = self._closed[-1]
            # The first window of a run warms its critics up; later ones say more about what is to come.
            first, since = self._closed[0] if len(self._closed) > 1 else (self._closed[0][0] - 1, self._begun)
            each = (when - since) / max(number - first, 1)
            return max(each * (self.windows - number) - (seconds - when), 0.0)
        done = self._thoughts() - self._before
        if not self.planned or not done:
            return None
        each = (seconds - self._begun) / done
        return max(each * (self.planned - self._thoughts()), 0.0)

    def _step(self) -> str:
        return f" {self.method.step + 1}" if self.method.step else ""

    def _thoughts(self) -> int:
        return self.recorder.trajectories


def clock(seconds: float) -> str:
    """`0:12`, `3:05`, `1:02:10`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def memory(device: torch.device) -> str:
    """What the run holds now: the device's memory, or the process's where that is the same."""
    if device.type == "cuda":
        return f"{torch.cuda.memory_allocated(device) / 1e9:.1f} GB on the GPU"
    return "" if sys.platform == "win32" else f"{_resident() / 1e9:.1f} GB"


def _resident() -> int:
    """Bytes this process holds; where the system does not tell, the most it has held."""
    resource: Any = importlib.import_module("resource")
    try:
        return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * int(resource.getpagesize())
    except (OSError, ValueError, IndexError):
        return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * (1 if sys.platform == "darwin" else 1024)

"""The line that whoever watches a run sees: window, phase, step, thoughts a second, time to the end, attempts left,
memory. (What a page reads of a run while it goes on is in `training/status_files.py`.)

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
from tfive.training.identity import window_seconds
from tfive.training.recorder import Recorder
from tfive.training.stop_signal import StopSignal

PROGRESS = "progress.txt"
"""The same line as a file in the run's folder while the run works."""
MEASURING = {"develop": "measuring", "test": "measuring test texts", "benchmarks": "asking benchmarks"}
"""Phases between windows and after the last, and what the line calls them."""


def thoughts_of_window(config: Config, number: int) -> int:
    """Thoughts that window `number` (from 1) samples if one round of fitting and testing is enough."""
    spec, window = config.spec, config.window
    if not spec.thinks:
        return 0
    # The reward scale is set in the first window of all, what judges thoughts is drawn in the first that is rewarded.
    drawn = {role: 1 if role == "scale" else config.reading_windows + 1 for role in spec.first_roles_of(config)}
    once = sum(window.count(role) for role, first in drawn.items() if first == number)
    if number <= config.reading_windows:
        return config.group * (window.items + once)
    return config.group * (sum(window.count(role) for role in spec.roles_of(config)) + once)


def planned_thoughts(config: Config, first: int = 1) -> int:
    """Thoughts of all windows from window `first` on; asked for every second, so those of a long run are not added up
    one by one."""
    last, steady = config.window.windows, max(first, config.reading_windows + 2)
    before = sum(thoughts_of_window(config, number) for number in range(first, min(steady, last + 1)))
    return before + max(last - steady + 1, 0) * thoughts_of_window(config, steady)


class LiveStatus:
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
        self._at_close = self._before
        self.stop = StopSignal()
        """What asks the run to stop; the loop's own."""

    def close_window(self) -> None:
        """A window is over; called by the loop."""
        self._closed.append((self.method.window, self.recorder.seconds))
        self._at_close = self._thoughts()

    def line(self) -> str:
        """`window 2 of 6, fit 3 (0:12), 41 thoughts/s, about 0:02:10 left, attempt 3 of 20, 1.2 GB`; of a run that a
        clock ends `window 2, 0:40 of 16:40 trained, …`."""
        method, recorder = self.method, self.recorder
        seconds = recorder.seconds
        phases, since = recorder.now()
        outer = phases.partition("/")[0]
        where = MEASURING.get(outer) or f"{phases or method.phase}{self._step()}"
        window = min(method.window + (self._between() and outer not in MEASURING), self.windows)
        most = self.config.run.seconds
        # A clock that ends the run says more of how far it is than a plan of windows it will not reach.
        spent = clock(window_seconds(recorder))
        of = f" of {self.windows}" if most is None else f", {spent} of {clock(most)} trained"
        at = f"window {window}{of}" if window else f"before window 1{of}"
        parts = [self.stop.told, at, f"{where} ({clock(since)})"]
        rate = (self._thoughts() - self._before) / max(seconds - self._begun, 1e-9)
        parts.append(f"{rate:.3g} thoughts/s" if self.planned and rate else "")
        # When all windows are over there is measuring to do, and how long that takes is not known.
        left = None if outer in MEASURING and self._over() else self.seconds_left()
        parts += ["" if left is None else f"about {clock(left)} left", method.standing(), memory(self.device)]
        return ", ".join(part for part in parts if part)

    def fraction(self) -> float | None:
        """How much of the run is done, by the thoughts still to come, or by windows where there are none."""
        most = self.config.run.seconds
        taken = 0.0 if most is None else min(window_seconds(self.recorder) / most, 1.0)
        if self.planned:
            return max(1 - self._to_come() / self.planned, taken)
        return max(min((self.method.window - (0 if self.method.closed else 1)) / self.windows, 1.0), taken)

    def seconds_left(self) -> float | None:
        """Seconds to the end of the plan, or to the end of the time that the run may take where that comes first; the
        window that is then under way, and measuring, come on top."""
        planned, most = self._by_plan(), self.config.run.seconds
        if most is None:
            return planned
        left = max(most - window_seconds(self.recorder), 0.0)
        return left if planned is None else min(planned, left)

    def _by_plan(self) -> float | None:
        """Thoughts still to come at the pace so far; without thoughts, windows. Rounds of fitting that are yet to fail
        are not foreseen."""
        spent, done = self.recorder.seconds - self._begun, self._thoughts() - self._before
        if self.planned:
            return spent / done * self._to_come() if done else None
        if not self._closed:
            return None
        first, (number, when) = self._closed[0][0] - 1, self._closed[-1]
        each = (when - self._begun) / (number - first)
        return max(each * (self.windows - number) - (self.recorder.seconds - when), 0.0)

    def _to_come(self) -> int:
        """Thoughts of this window that are left, and all of later ones."""
        current = self.method.window + (1 if self._between() else 0)
        left = thoughts_of_window(self.config, current) - (self._thoughts() - self._at_close)
        this = max(left, 0) if current <= self.windows else 0
        return this + planned_thoughts(self.config, current + 1)

    def _over(self) -> bool:
        """Whether no window comes any more, by the plan or by the clock."""
        most = self.config.run.seconds
        late = most is not None and window_seconds(self.recorder) >= most
        return self.method.closed and (late or self.method.window >= self.windows)

    def _between(self) -> bool:
        """Whether one window is over and the next has not begun; the number rises inside `open`."""
        return bool(self.method.closed) and not self.recorder.now()[0].startswith("open")

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


def peak_bytes(device: torch.device) -> int:
    """The most bytes that this process has held so far, of the device's memory or of the host's."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return 0 if sys.platform == "win32" else _most_resident()


def _most_resident() -> int:
    resource: Any = importlib.import_module("resource")
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * (1 if sys.platform == "darwin" else 1024)


def _resident() -> int:
    """Bytes this process holds; where the system does not tell, the most it has held."""
    resource: Any = importlib.import_module("resource")
    try:
        return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * int(resource.getpagesize())
    except (OSError, ValueError, IndexError):
        return _most_resident()

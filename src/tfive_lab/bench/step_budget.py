"""Seconds that a comparison of step times stays within: what is begun, how many windows it gets, where it is left."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field


class TimeSpent(Exception):
    """The budget was over before there was anything to report of a method."""


@dataclass
class Budget:
    """`seconds` from now on for a number of timed methods, or no limit."""

    seconds: float | None
    methods: int
    """How many are still to be timed."""
    began: float = field(default_factory=time.perf_counter)
    rates: list[float] = field(default_factory=list)
    """Seconds a counted node of the methods timed so far, their first windows included."""
    setup: float = 0.0
    """Seconds that the newest method took to be built; the first may have compiled kernels as well."""

    @property
    def end(self) -> float | None:
        """When it is over, on the clock of `time.perf_counter`."""
        return None if self.seconds is None else self.began + self.seconds

    def expected(self, nodes: float) -> float:
        """Seconds that a method of so many counted nodes will take, by those before it; 0 for the first."""
        return self.setup + nodes * statistics.fmean(self.rates) if self.rates else 0.0

    def allows(self, nodes: float) -> bool:
        """Whether a method of so many counted nodes is expected to be over in time."""
        return self.end is None or time.perf_counter() + self.expected(nodes) <= self.end

    def share(self) -> float | None:
        """Until when the next method may begin windows beyond its second: an equal share of what is left."""
        now = time.perf_counter()
        return None if self.end is None else now + (self.end - now) / max(self.methods, 1)

    def book(self, nodes: float, seconds: float, setup: float = 0.0) -> None:
        """A method of so many counted nodes took so long, `setup` seconds of it to be built."""
        self.rates.append((seconds - setup) / nodes)
        self.setup = setup

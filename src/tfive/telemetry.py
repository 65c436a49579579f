"""What code below `training/` reports while it works: phases, progress, events and counts, by an object it is given.

The one that writes files and draws bars is `tfive.training.recorder.Recorder`. `Silent` says nothing, for tests and
scripts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeVar

Item = TypeVar("Item")

DIAGNOSE = "diagnose"
"""A phase inside others that is only reported (probes, cross-fitted offsets): no part of what a step costs."""


class Telemetry(Protocol):
    """The calls a method, an evaluation or a corpus preparation may make."""

    def phase(self, name: str, role: str = "all") -> AbstractContextManager[None]:
        """A timed block; its seconds are booked under (`name`, `role`)."""

    def metric(self, name: str, value: float, step: int | None = None) -> None:
        """One measured number."""

    def metrics(self, values: Mapping[str, float], step: int | None = None) -> None:
        """Several numbers of the same step."""

    def progress(self, items: Iterable[Item], label: str, total: int | None = None) -> Iterator[Item]:
        """The same items, with a progress bar when somebody is looking and it takes more than two seconds."""

    def event(self, what: str, detail: str, window: int | None = None) -> None:
        """A transition worth a line: a stage entered, critics admitted, an actor paused."""

    def count(self, role: str, **amounts: int) -> None:
        """Add to the account of `eq:total-rollout-budget`: trajectories, generated_tokens, actor_tokens, …"""


class Silent:
    """A `Telemetry` that keeps nothing."""

    def phase(self, name: str, role: str = "all") -> AbstractContextManager[None]:
        """A block that is not timed."""
        return nullcontext()

    def metric(self, name: str, value: float, step: int | None = None) -> None:
        """Dropped."""

    def metrics(self, values: Mapping[str, float], step: int | None = None) -> None:
        """Dropped."""

    def progress(self, items: Iterable[Item], label: str, total: int | None = None) -> Iterator[Item]:
        """The same items."""
        return iter(items)

    def event(self, what: str, detail: str, window: int | None = None) -> None:
        """Dropped."""

    def count(self, role: str, **amounts: int) -> None:
        """Dropped."""

"""What code below `training/` reports while it works: phases, progress, events and counts, by an object it is given.

`tfive.training.recorder.Recorder` writes files and draws bars; `Silent` keeps nothing, for tests and scripts. Numbers
of a window are no part of this: a method puts them into its `report`, and the loop logs that when the window closes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

Item = TypeVar("Item")

DIAGNOSE = "diagnose"
"""A phase inside others that is only reported (probes, cross-fitted offsets): no part of what a step costs."""


class Telemetry(Protocol):
    """The calls a method, an evaluation or a corpus preparation may make."""

    def phase(self, name: str, role: str = "all") -> AbstractContextManager[None]:
        """A timed block; its seconds are booked under (`name`, `role`)."""

    def progress(self, items: Iterable[Item], label: str, total: int | None = None) -> Iterator[Item]:
        """The same items, with a progress bar on a terminal once they have taken more than two seconds."""

    def event(self, what: str, detail: str, window: int | None = None) -> None:
        """A transition worth a line: a stage entered, critics admitted, an actor paused."""

    def count(self, role: str, **amounts: int) -> None:
        """Add to the account of `eq:total-rollout-budget`: trajectories, generated_tokens, actor_tokens, …"""


class Accounting(Telemetry, Protocol):
    """A `Telemetry` whose account goes on counting where it was."""

    def state_dict(self) -> dict[str, Any]:
        """What to keep of it."""

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Go on from what was kept; files that have changed since are refused, or left as they are if not `strict`."""


class Silent:
    """An `Accounting` telemetry that keeps nothing."""

    def phase(self, name: str, role: str = "all") -> AbstractContextManager[None]:
        """A block that is not timed."""
        return nullcontext()

    def progress(self, items: Iterable[Item], label: str, total: int | None = None) -> Iterator[Item]:
        """The same items."""
        return iter(items)

    def event(self, what: str, detail: str, window: int | None = None) -> None:
        """Dropped."""

    def count(self, role: str, **amounts: int) -> None:
        """Dropped."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Dropped."""

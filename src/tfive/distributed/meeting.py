"""Where the processes of a launch meet before anything else: a store that all can reach, and texts exchanged by it.

What is refused on one of them is refused on all, in the words of the first, before a process group is made or anything
is written; so a node with another file or another version ends the launch in a line and not by a time limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

from tfive.distributed.environment import SAID, Launched, PeerLost, launched
from tfive.errors import RunFailed, UserError

PATIENCE = 300.0
"""Seconds for all processes of a launch to come."""

LOADING = 86_400.0
"""Seconds for each to say what it was asked: one may read a large model or prepare a text meanwhile. One that dies
while the others wait is the launcher's concern."""


Result = TypeVar("Result")

PARTING = 5.0
"""Seconds that the store's keeper waits for the others when it ends."""


class Meeting:
    """One process alone: it hears itself."""

    def __init__(self, place: Launched) -> None:
        self.place = place
        self.store: Any = None

    def exchange(self, name: str, text: str, patience: float = LOADING) -> list[str]:
        """What every process says under `name`, by rank; each name is used once."""
        return [text]

    def says_first(self, line: str) -> bool:
        """Whether this process is the first that asks to say `line`, and so the one to print it."""
        return True

    @contextmanager
    def refusals(self, name: str) -> Iterator[None]:
        """Work that may be refused on some of the processes: all of them then raise the first one's refusal."""
        yield

    def first_alone(self, name: str, work: Callable[[], Result]) -> Result:
        """What `work` gives on each process; the others begin when the first has done it, and find what it left."""
        return work()


class StoreMeeting(Meeting):
    """Several processes that meet in a store of `torch.distributed`, kept by the first of them or by the launcher."""

    def __init__(self, place: Launched, store: Any) -> None:
        super().__init__(place)
        self.store = store

    def exchange(self, name: str, text: str, patience: float = LOADING) -> list[str]:
        """Every process's text; `PeerLost` if one does not come within `patience` seconds."""
        keys = [f"{name}/{rank}" for rank in range(self.place.size)]
        with lost(f"waiting for all ranks at {name}"):
            self.store.set(keys[self.place.rank], text)
            self.store.wait(keys, timedelta(seconds=patience))
            found: list[bytes] = self.store.multi_get(keys)
        return [one.decode() for one in found]

    def says_first(self, line: str) -> bool:
        """Counted in the store; where it is gone, the first rank was there before and has spoken."""
        try:
            return bool(self.store.add(f"said/{line}", 1) == 1)
        except RuntimeError:
            return self.place.first

    def part(self) -> None:
        """Whoever keeps the store goes last, so that all have heard what was said."""
        try:
            if self.store.add("parted", 1) == self.place.size:
                self.store.set("all parted", "")
            if self.place.first:
                self.store.wait(["all parted"], timedelta(seconds=PARTING))
        except RuntimeError:
            return  # somebody is gone already

    @contextmanager
    def refusals(self, name: str) -> Iterator[None]:
        """Exchange refusals, an empty one for work that went well."""
        own = ""
        try:
            yield
        except UserError as error:
            own = str(error)
        except OSError as error:
            own = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        said = self.exchange(f"refusals/{name}", own)
        first = next((rank for rank, line in enumerate(said) if line), None)
        if first is not None:
            raise UserError(said[first] if len(set(said)) == 1 else f"rank {first}: {said[first]}")

    def first_alone(self, name: str, work: Callable[[], Result]) -> Result:
        """The first process, then all others."""
        done: list[Result] = []
        for first in (True, False):
            with self.refusals(f"{name}, {'first' if first else 'others'}"):
                if self.place.first == first:
                    done.append(work())
        return done[0]


@contextmanager
def meeting(place: Launched | None = None, patience: float = PATIENCE) -> Iterator[Meeting]:
    """The processes of this launch, met; alone for one process, for which nothing is imported."""
    place = launched() if place is None else place
    if place.size == 1:
        yield Meeting(place)
        return
    import torch.distributed as dist

    with lost(f"rank {place.rank} of {place.size}: not all ranks have come within {patience:g} s"):
        store, _, _ = next(dist.rendezvous("env://", place.rank, place.size, timeout=timedelta(seconds=patience)))
        # A launcher's own store outlives an attempt: its keys are of dead processes then.
        found = StoreMeeting(place, dist.PrefixStore(f"tfive/{place.restart}", store))
    try:
        yield found
    except PeerLost:
        raise
    except (UserError, RunFailed) as error:
        setattr(error, SAID, not found.says_first(str(error)))
        if isinstance(error, UserError):
            found.part()
        raise
    found.part()


@contextmanager
def lost(where: str) -> Iterator[None]:
    """Turns what an exchange raises when another process is gone or silent into `PeerLost`."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(f"{where}: {' '.join(str(error).split())[:200]}") from error

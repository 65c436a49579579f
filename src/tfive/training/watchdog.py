"""A rank that hangs is found by the others and named, with the phase it is in.

Every rank publishes a beat: where its main thread is, and how many steps it has made. A thread of its own does that, so
a beat that stops means a stopped process or machine, and a beat whose steps stand still means a main thread that hangs;
ranks that wait for another one in a collective are its victims and not named. Beats go through the store of the
rendezvous, which the first rank or the launcher keeps: when it no longer answers, its keeper is the silent one.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Protocol

from tfive.distributed.environment import LOST, Launched
from tfive.distributed.meeting import PATIENCE, Meeting
from tfive.distributed.pulse import START, Pulse

GRACE = 3.0
"""Seconds that ranks wait for the one that speaks, before they go too."""


class Store(Protocol):
    """What the beats are exchanged through (a `torch.distributed` store)."""

    def set(self, key: str, value: str) -> None: ...

    def check(self, keys: list[str]) -> bool: ...

    def multi_get(self, keys: list[str]) -> list[bytes]: ...


@dataclass
class Beat:
    """What one rank has last published."""

    number: int = 0
    steps: int = 0
    phase: str = START
    waits: str = ""
    process: int = 0
    host: str = ""
    node: int = -1


@dataclass
class Seen:
    """A rank's last beat, and since when by this rank's clock its number and its steps have not changed."""

    beat: Beat
    silent_since: float
    still_since: float


@dataclass
class Watch:
    """What one rank knows of all; `hung` judges it. No threads and no store here, so that it can be tested."""

    size: int
    timeout: float
    began: float
    seen: dict[int, Seen] = field(default_factory=dict)
    answered: float = 0.0
    """When the store has last answered."""
    limit: str = "distributed.timeout"
    """What a person sets `timeout` by."""

    def __post_init__(self) -> None:
        self.seen = {rank: Seen(Beat(), self.began, self.began) for rank in range(self.size)}
        self.answered = self.began

    def learn(self, rank: int, beat: Beat, now: float) -> None:
        """Take in what `rank` has published."""
        known = self.seen[rank]
        if beat.number != known.beat.number:
            known.silent_since = now
        if beat.steps != known.beat.steps:
            known.still_since = now
        known.beat = beat

    def hung(self, now: float) -> list[int]:
        """Ranks that have given no sign for `timeout` seconds: silent ones, or those that others wait for."""
        if now - self.answered > self.timeout:
            return [0]
        silent = [rank for rank, seen in self.seen.items() if now - seen.silent_since > self.timeout]
        if silent:
            return silent
        # Loading and preparing take their time without a step.
        going = [rank for rank, seen in self.seen.items() if seen.beat.phase != START or seen.beat.waits]
        still = [rank for rank in going if now - self.seen[rank].still_since > self.timeout]
        busy = [rank for rank in still if not self.seen[rank].beat.waits]
        if busy or len(still) < self.size:
            return busy
        behind = min(self.seen[rank].beat.steps for rank in still)
        return [rank for rank in still if self.seen[rank].beat.steps == behind]

    def line(self, hung: Sequence[int]) -> str:
        """The hung ranks, their processes and phases, and what to do."""
        told = []
        for rank in hung:
            beat = self.seen[rank].beat
            where = f" (process {beat.process} on {beat.host})" if beat.process else ""
            waits = f", waiting in {beat.waits}" if beat.waits else ""
            told.append(f"rank {rank} of {self.size}{where} last heard of in phase {beat.phase}{waits}")
        return (
            f"{', '.join(told)}: no sign for {self.timeout:g} s; all ranks end (a slower machine needs a larger "
            f"{self.limit})"
        )


class Watchdog:
    """Publishes this rank's beat and watches those of the others, until it is closed."""

    def __init__(
        self,
        place: Launched,
        pulse: Pulse,
        open_store: Callable[[], Store],
        timeout: float,
        end: Callable[[int], None] = os._exit,
        limit: str = Watch.limit,
        known: Sequence[Beat] = (),
    ) -> None:
        """`known` says which process each rank is, for one that stops before its first beat is heard."""
        self.place, self.pulse, self._open, self._end = place, pulse, open_store, end
        self._every = min(5.0, max(0.1, timeout / 10))
        self._watch = Watch(place.size, timeout, time.monotonic(), limit=limit)
        for rank, beat in enumerate(known):
            self._watch.seen[rank].beat = beat
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._parent = os.getppid()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._beat, self._judge)]

    def __enter__(self) -> Watchdog:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._closed.set()
        self.pulse.news.set()

    def _beat(self) -> None:
        """Exchange beats; a store that does not answer keeps this thread waiting, which the other one notices."""
        store, number, pulse = self._open(), 0, self.pulse
        while not self._closed.is_set():
            number += 1
            pulse.news.clear()
            try:
                store.set(_key(self.place.rank), self._own(number))
                heard = self._heard(store)
            except RuntimeError:
                heard = None  # its keeper is gone or does not answer; how long is judged by the other thread
            if heard is not None:
                with self._lock:
                    now = self._watch.answered = time.monotonic()
                    for rank, beat in heard.items():
                        self._watch.learn(rank, beat, now)
            pulse.news.wait(self._every)

    def _own(self, number: int) -> str:
        """This rank's beat as it is published."""
        pulse = self.pulse
        return _told(replace(_here(self.place), number=number, steps=pulse.steps, phase=pulse.phase, waits=pulse.waits))

    def _heard(self, store: Store) -> dict[int, Beat]:
        """The beats that there are: a store lets wait for one that was never published, and so seems not to answer."""
        known = self._watch.seen
        there = [rank for rank in known if known[rank].beat.number or store.check([_key(rank)])]
        return {
            rank: Beat(**json.loads(text)) for rank, text in zip(there, store.multi_get([_key(rank) for rank in there]))
        }

    def _judge(self) -> None:
        while not self._closed.wait(self._every):
            if self.place.launch is not None and os.getppid() != self._parent:
                self._end(LOST)  # the launcher was killed: nobody is left who would end this process
                return
            with self._lock:
                # Whoever judges is there; what its own main thread does is for the others to say.
                hung = [rank for rank in self._watch.hung(time.monotonic()) if rank != self.place.rank]
            if hung:
                self._give_up(hung)
                return

    def _give_up(self, hung: Sequence[int]) -> None:
        speaker = next((rank for rank in range(self.place.size) if rank not in hung), hung[0])
        if self.place.rank != speaker and self._closed.wait(GRACE):
            return
        if self.place.rank == speaker:
            print(f"tfive: error: {self._watch.line(hung)}", file=sys.stderr, flush=True)
            self._kill(hung)
        self._end(LOST)

    def _kill(self, hung: Sequence[int]) -> None:
        """End hung ranks of this node at once: a stopped process hears no gentler signal."""
        for rank in hung:
            beat = self._watch.seen[rank].beat
            if rank != self.place.rank and beat.process and beat.node == self.place.node:
                try:
                    os.kill(beat.process, signal.SIGKILL)
                except ProcessLookupError:
                    continue  # it has ended meanwhile


def watching(met: Meeting, pulse: Pulse, timeout: float, limit: str = Watch.limit) -> AbstractContextManager[object]:
    """The watchdog of a process among several; nothing for one alone. `limit` is what a person sets `timeout` by."""
    if met.place.size == 1:
        return nullcontext()
    told = met.exchange("processes", _told(_here(met.place)), max(timeout, PATIENCE))
    known = [Beat(**json.loads(text)) for text in told]
    # A connection of its own: one that the main thread waits in serves nobody else.
    return Watchdog(met.place, pulse, met.store.clone, timeout, limit=limit, known=known)


def _here(place: Launched) -> Beat:
    """Which process this is."""
    return Beat(process=os.getpid(), host=socket.gethostname(), node=place.node)


def _told(beat: Beat) -> str:
    return json.dumps(asdict(beat))


def _key(rank: int) -> str:
    return f"beat/{rank}"

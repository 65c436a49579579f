"""What a launcher tells a process about its place among others, read from the environment and checked."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from tfive.errors import UserError

NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""What every rank of several must be told; torchrun sets them all."""

LOST = 75
"""Exit status of a rank that ended because another one did, or hangs: nothing of its own is wrong (EX_TEMPFAIL)."""

SAID = "said_by_another_rank"
"""Attribute of an error that another process prints."""

LINGER = 5.0
"""Seconds that a rank without peers waits before it ends, for the one with a reason to end first."""

CRASHED = 70
"""Exit status of a rank that ended in an unforeseen error, after its traceback (EX_SOFTWARE)."""


class PeerLost(Exception):
    """Another rank is gone, or has not answered in time; the launcher ends this one too and may start all again."""


def peer_lost(error: BaseException) -> bool:
    """Whether an error says no more than that another rank is gone, whoever raised it."""
    words = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer")
    return isinstance(error, PeerLost) or (isinstance(error, RuntimeError) and any(w in str(error) for w in words))


@dataclass(frozen=True)
class Launched:
    """A process's place: which of how many, on which device of its node, in which launch, after how many restarts."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    node: int = 0
    """Which launcher started it."""
    launch: str | None = None
    """What tells this launch from every other one; the same after a restart. None without an elastic launcher."""
    restart: int = 0
    local_size: int = 0
    """How many processes its launcher has started on this node; 0 where nobody says."""

    @property
    def first(self) -> bool:
        """Whether this is the one process that writes and prints."""
        return self.rank == 0


def launched(environment: Mapping[str, str] = os.environ) -> Launched:
    """The place the environment gives this process: alone where it says nothing, or WORLD_SIZE 1.

    Several processes without a rendezvous would each train a private copy, so half an environment is refused.
    """
    size, rank = _number("WORLD_SIZE", environment, 1), _number("RANK", environment, 0)
    if size > 1 or rank > 0:
        missing = [name for name in NEEDED if not environment.get(name)]
        if missing:
            given = "WORLD_SIZE" if size > 1 else "RANK"
            raise UserError(
                f"environment {given} = {environment[given]} without {', '.join(missing)}: there is no rendezvous; "
                f"start with --processes N or torchrun, or unset {given}"
            )
        _number("MASTER_PORT", environment, 0)
    if not 0 <= rank < size:
        raise UserError(f"environment RANK = {rank}: it must be below WORLD_SIZE = {size}; start with torchrun")
    return Launched(
        rank,
        size,
        _number("LOCAL_RANK", environment, 0),
        _number("GROUP_RANK", environment, 0),
        _launch(environment),
        _number("TORCHELASTIC_RESTART_COUNT", environment, 0),
        _number("LOCAL_WORLD_SIZE", environment, 0),
    )


def _number(name: str, environment: Mapping[str, str], otherwise: int) -> int:
    value = environment.get(name, str(otherwise))
    if not (value.isascii() and value.isdigit()):
        raise UserError(f"environment {name} = {value}: a whole number is needed; start with torchrun, or unset {name}")
    return int(value)


def _launch(environment: Mapping[str, str]) -> str | None:
    """The launch's identity; torchrun calls a launch that was given no `--rdzv-id` none, and its process tells it."""
    given = environment.get("TORCHELASTIC_RUN_ID")
    if given == "none":
        return f"{socket.gethostname()}-{os.getppid()}"
    return given or None

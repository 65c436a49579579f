"""Joining the processes that a launcher (`torchrun`) has started: the group, and this process's place in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch

from tfive.distributed.environment import Launched, launched
from tfive.distributed.pulse import Pulse
from tfive.distributed.world import SINGLE, World

PATIENCE = 86_400.0
"""Seconds a collective waits. One process may prepare a text or measure benchmarks while the others wait for it; one
that hangs is found by the watchdog, and one that died by its closed connection."""


@contextmanager
def joined(
    device: torch.device, timeout: float = PATIENCE, store: Any = None, pulse: Pulse | None = None
) -> Iterator[World]:
    """The world of this process while the block runs; without a launcher a world of one, for which nothing is
    imported. `device` is where the run computes; `store` is one in which the processes have met before, and `pulse`
    what others watch of this one since then."""
    place = launched()
    if place.size == 1:
        yield SINGLE
        return
    import torch.distributed as dist

    from tfive.distributed.group import Group

    backend = backend_of(device, place)
    met = {} if store is None else {"store": store, "rank": place.rank, "world_size": place.size}
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout), **met)
    try:
        world = Group(torch.device("cpu") if backend == "gloo" else device)
        world.pulse = pulse or world.pulse
        yield world
    finally:
        dist.destroy_process_group()


def backend_of(device: torch.device, place: Launched) -> str:
    """What processes exchange by: NCCL where each has a GPU of its own, gloo where they have none or share one, which
    NCCL refuses. All processes of a node must come to the same answer, so it is theirs together."""
    own = device.type == "cuda" and (place.local_size or place.size) <= torch.cuda.device_count()
    return "nccl" if own else "gloo"

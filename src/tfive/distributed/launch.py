"""Joining the processes that a launcher (`torchrun`) has started: the group, and this process's place in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch

from tfive.distributed.environment import launched
from tfive.distributed.world import SINGLE, World

PATIENCE = 86_400.0
"""Seconds a collective waits. One process may prepare a text or measure benchmarks while the others wait for it; one
that hangs is found by the watchdog, and one that died by its closed connection."""


@contextmanager
def joined(device: torch.device, timeout: float = PATIENCE, store: Any = None) -> Iterator[World]:
    """The world of this process while the block runs; without a launcher a world of one, for which nothing is
    imported. `device` is where the run computes; `store` is one in which the processes have met before."""
    place = launched()
    if place.size == 1:
        yield SINGLE
        return
    import torch.distributed as dist

    from tfive.distributed.group import Group

    alone = device.type == "cpu" or torch.cuda.device_count() <= place.local_rank
    met = {} if store is None else {"store": store, "rank": place.rank, "world_size": place.size}
    dist.init_process_group("gloo" if alone else "nccl", timeout=timedelta(seconds=timeout), **met)
    try:
        yield Group(torch.device("cpu") if alone else device)
    finally:
        dist.destroy_process_group()

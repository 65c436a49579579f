"""Joining the processes that a launcher (`torchrun`) has started: the group, and this process's place in it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch

from tfive.distributed.world import SINGLE, World
from tfive.errors import UserError


def launched_size() -> int:
    """How many processes the launcher says there are; 1 without one."""
    value = os.environ.get("WORLD_SIZE", "1")
    if not value.isdigit() or int(value) < 1:
        raise UserError(f"environment WORLD_SIZE = {value}: no number of processes; unset it, or start with torchrun")
    return int(value)


def local_rank() -> int:
    """The number of this process on its machine, which is also that of its GPU."""
    return int(os.environ.get("LOCAL_RANK", "0"))


@contextmanager
def joined(device: torch.device, timeout: float) -> Iterator[World]:
    """The world of this process while the block runs; without a launcher a world of one, for which nothing is
    imported. `device` is where the run computes; a process that is silent for `timeout` seconds ends the others."""
    if launched_size() == 1:
        yield SINGLE
        return
    import torch.distributed as dist

    from tfive.distributed.group import Group

    alone = device.type == "cpu" or torch.cuda.device_count() <= local_rank()
    dist.init_process_group("gloo" if alone else "nccl", timeout=timedelta(seconds=timeout))
    try:
        yield Group(torch.device("cpu") if alone else device)
    finally:
        dist.destroy_process_group()

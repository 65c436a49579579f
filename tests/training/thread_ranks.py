"""Several ranks as threads of one process: enough for code whose only collective is `gather_ragged`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from tfive.distributed.world import World

Result = TypeVar("Result")


class ThreadRank(World):
    """One of `size` ranks; what they exchange passes through a list that all of them see."""

    def __init__(self, rank: int, size: int, meeting: threading.Barrier, table: list[Any]) -> None:
        super().__init__()
        self.rank, self.size = rank, size
        self._meeting, self._table = meeting, table

    def gather_ragged(self, own: Sequence[Tensor]) -> list[Tensor]:
        self._table[self.rank] = list(own)
        self._meeting.wait()
        found = [torch.cat([self._table[rank][column] for rank in range(self.size)]) for column in range(len(own))]
        self._meeting.wait()
        return found


def together(size: int, work: Callable[[ThreadRank], Result], seconds: float = 30.0) -> list[Result | Exception]:
    """What `work` returns or raises on each rank; a rank that waits for others longer than `seconds` fails."""
    meeting, table = threading.Barrier(size, timeout=seconds), [None] * size
    found: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            found[rank] = work(ThreadRank(rank, size, meeting, table))
        except Exception as error:  # noqa: BLE001 - handed to the test
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found

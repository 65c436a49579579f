"""A world of several processes over `torch.distributed`. Nothing else of the project imports that.

Tensors travel as bytes, so every dtype arrives bit for bit, and several of them in one exchange.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tfive.distributed.meeting import lost
from tfive.distributed.world import Rows, World, added
from tfive.errors import RunFailed

BUCKET = 1 << 25
"""Elements of gradients that are summed in one exchange."""


class Group(World):
    """The processes of the default group, or of another one."""

    def __init__(self, device: torch.device, group: Any = None) -> None:
        """`device` is where the group's backend exchanges tensors: the host for gloo, this process's GPU for NCCL."""
        super().__init__()
        self.device, self.group = device, group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def gather_all(self, own: Sequence[tuple[Tensor, int]], count: int) -> list[Tensor]:
        """Rows of every process in order, in one exchange of bytes."""
        sizes = [_length(self.share_of(rank, count)) for rank in range(self.size)]
        fronted = [tensor.movedim(dim, 0) for tensor, dim in own]
        found = self._exchanged([tensor[: sizes[self.rank]] for tensor in fronted], sizes, "gather")
        return [tensor.movedim(0, dim) for tensor, (_, dim) in zip(found, own)]

    def gather_ragged(self, own: Sequence[Tensor]) -> list[Tensor]:
        """Rows of every process one after another; how many there are is exchanged first."""
        length = torch.tensor([len(own[0])], dtype=torch.int64, device=own[0].device)
        (lengths,) = self._exchanged([length], [1] * self.size, "gather")
        return self._exchanged(list(own), lengths.tolist(), "gather")

    @contextmanager
    def waiting(self, name: str) -> Iterator[None]:
        """A collective: watchers see that this process waits there, and a lost process is one error for all."""
        self.pulse.entered(name)
        with lost(name):
            yield
        self.pulse.left()

    def _exchanged(self, own: list[Tensor], sizes: Sequence[int], name: str) -> list[Tensor]:
        """Every tensor with `sizes[rank]` rows from each rank, concatenated."""
        most = max(sizes)
        row_bytes = [_row_bytes(tensor) for tensor in own]
        sent = torch.cat([_padded(self._sent(tensor), most * size) for tensor, size in zip(own, row_bytes)])
        received = [torch.empty_like(sent) for _ in range(self.size)]
        with self.waiting(name):
            dist.all_gather(received, sent, group=self.group)
        found: list[Tensor] = []
        start = 0
        for tensor, size in zip(own, row_bytes):
            parts = [some[start : start + rows * size] for some, rows in zip(received, sizes)]
            flat = torch.cat(parts).to(tensor.device)
            found.append(flat.view(tensor.dtype).view(sum(sizes), *tensor.shape[1:]))
            start += most * size
        return found

    def _sent(self, tensor: Tensor) -> Tensor:
        """The tensor's bytes where the backend takes them."""
        return tensor.detach().contiguous().reshape(-1).view(torch.uint8).to(self.device)

    def sum_in_order(self, parts: Rows, columns: int) -> list[float]:
        """Every part's numbers are gathered and added alike by all."""
        own = torch.tensor(list(parts), dtype=torch.float64).reshape(-1, columns)
        (every,) = self.gather_ragged([own])
        return added(every.tolist(), columns)

    def reduce_gradients(
        self, gradients: Sequence[Tensor | None], zeros: Callable[[int], Tensor]
    ) -> list[Tensor | None]:
        """Which gradients there are is exchanged first: a process without a part of a step has none."""
        there = torch.tensor([[gradient is not None for gradient in gradients]], dtype=torch.uint8)
        (every,) = self._exchanged([there], [1] * self.size, "gradients")
        wanted = every.amax(0).tolist()
        whole: list[Tensor | None] = [
            None if not wanted[i] else zeros(i) if gradient is None else gradient
            for i, gradient in enumerate(gradients)
        ]
        for bucket in _buckets([tensor for tensor in whole if tensor is not None]):
            self._sum_in_place(bucket)
        return whole

    def _sum_in_place(self, bucket: list[Tensor]) -> None:
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        wire = flat.to(self.device)
        with self.waiting("gradients"):
            dist.all_reduce(wire, group=self.group)
        flat = wire.to(flat.device)
        for tensor, part in zip(bucket, flat.split([tensor.numel() for tensor in bucket])):
            tensor.copy_(part.view_as(tensor))

    def any_of(self, flag: bool) -> bool:
        """Whether any process says so."""
        (every,) = self._exchanged([torch.tensor([flag])], [1] * self.size, "agreement")
        return bool(every.any())

    def broadcast_bytes(self, own: Tensor, source: int) -> Tensor:
        """The length goes ahead."""
        length = torch.tensor([len(own)], dtype=torch.int64, device=self.device)
        root = source if self.group is None else dist.get_global_rank(self.group, source)
        with self.waiting("broadcast"):
            dist.broadcast(length, root, group=self.group)
        sends = self.rank == source
        flat = own.to(self.device) if sends else torch.empty(int(length), dtype=torch.uint8, device=self.device)
        with self.waiting("broadcast"):
            dist.broadcast(flat, root, group=self.group)
        return flat.cpu()

    def part(self, ranks: Sequence[int]) -> Group | None:
        """A group of its own, made by all."""
        made = dist.new_group(list(ranks))
        if self.rank not in ranks:
            return None
        found = Group(self.device, made)
        found.pulse = self.pulse
        return found

    def dealt(self, ranks: range) -> Group:
        """The same group with other shares."""
        found = Group(self.device, self.group)
        found.pulse, found.dealt_to = self.pulse, ranks
        return found

    def gather_numbers(self, own: Mapping[str, float]) -> list[dict[str, float]]:
        """Every process's numbers, by rank."""
        numbers = torch.tensor([list(own.values())], dtype=torch.float64)
        (every,) = self._exchanged([numbers], [1] * self.size, "gather")
        return [dict(zip(own, row)) for row in every.tolist()]

    def gather_texts(self, own: str) -> list[str]:
        """How long they are is exchanged first."""
        encoded = torch.frombuffer(bytearray(own.encode()), dtype=torch.uint8) if own else torch.empty(0).byte()
        (lengths,) = self._exchanged([torch.tensor([len(encoded)])], [1] * self.size, "gather")
        (every,) = self._exchanged([encoded], lengths.tolist(), "gather")
        return [part.numpy().tobytes().decode() for part in every.cpu().split(lengths.tolist())]

    def barrier(self, name: str) -> None:
        """Wait until every process is at `name`."""
        self.agree(name, name)

    def agree(self, name: str, value: str) -> None:
        """Compare digests of `value`; every process raises if one differs."""
        digest = torch.tensor([list(hashlib.sha256(value.encode()).digest())], dtype=torch.uint8)
        (every,) = self._exchanged([digest], [1] * self.size, name)
        others = [rank for rank in range(self.size) if not torch.equal(every[rank], every[0])]
        if others:
            raise RunFailed(f"{name} differs between processes: rank {others[0]} has another value than rank 0")


def _length(rows: slice) -> int:
    return int(rows.stop - rows.start)


def _row_bytes(tensor: Tensor) -> int:
    return tensor.element_size() * int(torch.Size(tensor.shape[1:]).numel())


def _padded(flat: Tensor, length: int) -> Tensor:
    return torch.cat([flat, flat.new_zeros(length - len(flat))])


def _buckets(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Neighbouring tensors of one dtype and device, about `BUCKET` elements together."""
    found: list[list[Tensor]] = []
    held = 0
    for tensor in tensors:
        last = found[-1][0] if found else None
        same = last is not None and (last.dtype, last.device) == (tensor.dtype, tensor.device)
        if same and held + tensor.numel() <= BUCKET:
            found[-1].append(tensor)
            held += tensor.numel()
        else:
            found.append([tensor])
            held = tensor.numel()
    return found

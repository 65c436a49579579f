"""Weights that several processes hold in pieces, as actors, critics and their optimizers see them.

Nothing here imports `torch.distributed`: a run without shards reads this file and not `distributed/shards.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from tfive.distributed.pieces import Piece
from tfive.errors import UserError

Result = TypeVar("Result")


class Sharding(Protocol):
    """Parameters held in pieces, as an actor and its optimizer see them. `run`, `norm`, `gathered` and `refresh` are
    common work: every process must call them, equally often and in the same order."""

    model: Any
    """The model whose weights are in pieces; its parts may be called inside `run` alone."""
    beside: dict[str, Any]
    """Small modules beside it, by name."""

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The weights in pieces, named as those of the whole copy."""

    def run(self, forward: Callable[[], Result]) -> Result:
        """What a pass through `model` gives, with gradients to the pieces; `backward` must follow."""

    def local(self, tensor: Tensor) -> Tensor:
        """This process's rows of a parameter or of its gradient, in place."""

    def piece(self, name: str, rows: Tensor) -> Piece:
        """`rows`, shaped like the local rows of parameter `name`, as a piece of the whole."""

    def gathered(self, name: str, rows: Tensor) -> Tensor:
        """The whole tensor of which every process gives its `rows`, on every process."""

    def computes_in(self, name: str) -> torch.dtype:
        """The precision in which the model computes with parameter `name`."""

    def norm(self, own: float) -> float:
        """The norm of a vector over all pieces from that of this process's; the same number everywhere."""

    def refresh(self) -> None:
        """Write the weights, as they are now, into the whole copy that computes without gradients."""

    def take(self) -> None:
        """Set every piece to the rows of that whole copy."""


def shard_width(processes: int, shard: int) -> int:
    """How many of `processes` hold weights between them where `distributed.shard` is `shard`."""
    width = shard or processes
    if processes % width:
        raise UserError(
            f"distributed.shard = {shard}: {processes} process{'es' * (processes > 1)} cannot be divided into groups "
            f"of {shard}; use a number that divides them, 1 for no shards or 0 for all"
        )
    return width


def held_of(saved: Tensor | Piece, name: str, mine: Piece) -> Tensor:
    """What a process that holds `mine` needs of a saved tensor: its block of a whole one, or the same block."""
    if saved.shape != mine.shape:
        raise ValueError(f"{name} has shape {mine.shape}, the saved state {tuple(saved.shape)}")
    if not isinstance(saved, Piece):
        return saved[mine.box.slices]
    if saved.box != mine.box:
        raise ValueError(f"{name}: the saved piece is of another number of processes; load it whole")
    return saved.local

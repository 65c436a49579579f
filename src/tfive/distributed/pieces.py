"""A tensor that several processes hold in pieces: what a piece is, and what its holders can do together.

Nothing here imports `torch.distributed`: a run of one process reads this file and no other of sharding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

Result = TypeVar("Result")


@dataclass(frozen=True)
class Piece:
    """This process's part of a tensor of `shape`: its rows from number `first` on; it may have none."""

    rows: Tensor
    first: int
    shape: tuple[int, ...]
    writes: bool = True
    """False where another process holds the same rows and saves them."""


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


def rows_of(whole: Tensor | Piece, name: str, parameter: nn.Parameter, mine: Piece) -> Tensor:
    """The rows of `mine` out of a saved tensor: a whole one, or the same piece of it."""
    if isinstance(whole, Piece):
        same = whole.first == mine.first and whole.shape == mine.shape and whole.rows.shape == mine.rows.shape
        if not same:
            raise ValueError(f"{name}: the saved piece is of another number of processes; load it whole")
        return whole.rows
    if tuple(whole.shape) != tuple(parameter.shape):
        raise ValueError(f"{name} has shape {tuple(parameter.shape)}, the saved state {tuple(whole.shape)}")
    return whole[mine.first : mine.first + len(mine.rows)]

"""Which branches a sampling step computes, once some thoughts have closed and the rest are worth a smaller step.

A captured step has a fixed number of rows, so lists come in a few sizes; one that is not filled by thoughts still being
written goes on with closed ones, whose tokens nobody reads. Lists are made where the branches are: only how many are
left must be known to the host, to choose a size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tfive.tree.running_sum import running_sum

PARTS = (3 / 4, 1 / 2, 3 / 8, 1 / 4, 3 / 16, 1 / 8, 1 / 16)
"""Shares of all branches that lists hold, about. Each is captured when it first serves."""
LEAST, WHOLE = 48, 16
"""Rows of the smallest list, since fewer make a step no shorter; all sizes are multiples of the other."""

LARGE, LONG = 256, 32
"""Branches, and tokens of a thought, from which on lists are used unasked: a step of fewer branches is no shorter for a
list, and few tokens are over before the list's graphs have paid."""

WORTH = 0.8
"""A list of more than this share of all is not worth a graph."""


@dataclass(frozen=True)
class Listed:
    """Some branches of all texts, in their order; x counts them."""

    index_x: Tensor
    """int64: each one's place among all branches, text by text."""
    branch_BR: Tensor
    """int32: of each text, its listed branches first, in their order."""
    begin_B: Tensor
    """int32: how many of the texts before it are listed."""
    count_B: Tensor
    """int32: how many of its own are."""


def wanted(setting: str, branches: int, tokens: int) -> bool:
    """Whether thoughts of so many tokens at most are written by lists, for the option `packed`."""
    return setting == "on" or (setting == "auto" and branches >= LARGE and tokens >= LONG)


class Lists:
    """The list of one sampling loop, on tensors that captured steps read."""

    def __init__(self, rows: int, branches: int, device: torch.device) -> None:
        self.every = rows * branches
        wanted = {-(-int(self.every * part) // WHOLE) * WHOLE for part in PARTS}
        self.sizes = sorted(size for size in wanted if LEAST <= size <= WORTH * self.every)
        self._index = torch.zeros(self.every, dtype=torch.int64, device=device)
        self._branch_BR = torch.zeros(rows, branches, dtype=torch.int32, device=device)
        self._begin_B, self._count_B = (torch.zeros(rows, dtype=torch.int32, device=device) for _ in range(2))

    def size_for(self, count: int) -> int:
        """The smallest list that holds so many; all branches where none does."""
        return next((size for size in self.sizes if size >= count), self.every)

    def of(self, size: int) -> Listed:
        """The list of this size, as it was filled last."""
        return Listed(self._index[:size], self._branch_BR, self._begin_B, self._count_B)

    def fill(self, writing_BR: Tensor, size: int) -> Listed:
        """List these branches, and others until there are `size`; nothing waits for the host."""
        index_x = (~writing_BR).flatten().to(torch.uint8).argsort(stable=True)[:size].sort().values
        chosen_BR = torch.zeros_like(writing_BR)
        chosen_BR.view(-1).index_fill_(0, index_x, True)
        count_B = chosen_BR.sum(1)
        self._index[:size].copy_(index_x)
        self._branch_BR.copy_((~chosen_BR).to(torch.uint8).argsort(dim=1, stable=True))
        self._count_B.copy_(count_B)
        self._begin_B.copy_(running_sum(count_B) - count_B)
        return self.of(size)

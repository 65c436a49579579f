"""Gated products of a block in stretches of rows that stay in a processor's cache, without gradients.

Between its three matrices a block's widest part makes tensors several times as wide as the hidden states. For a whole
batch they go through main memory four times; in stretches they do not. Rows of wide matrices come out bit for bit the
same; those of very small ones may round otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

ROWS = 1024
"""Rows of a stretch at most; stretches are of nearly equal size, since a few rows have kernels that round otherwise."""
_PARTS = ("gate_proj", "up_proj", "down_proj", "act_fn")


@torch.no_grad()
def stretched(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """A forward for a gated product that goes stretch by stretch, None for any other module.

    What counts is what the module computes, not what it is called: the same numbers on trial rows.
    """
    m: Any = module
    if not all(isinstance(getattr(m, name, None), nn.Module) for name in _PARTS):
        return None

    def product(hidden: Tensor) -> Tensor:
        found: Tensor = m.down_proj(m.act_fn(m.gate_proj(hidden)).mul_(m.up_proj(hidden)))
        return found

    def forward(hidden: Tensor) -> Tensor:
        rows = hidden.flatten(0, -2)
        if len(rows) <= ROWS:
            return product(hidden)
        parts = rows.tensor_split(-(-len(rows) // ROWS))
        return torch.cat([product(part) for part in parts]).unflatten(0, hidden.shape[:-1])

    weight = m.gate_proj.weight
    if type(weight) is not nn.Parameter:
        return None  # a shard, which is whole for the length of a pass alone
    trial = torch.randn(64, weight.shape[-1], generator=torch.Generator().manual_seed(0)).to(weight)
    # The module's own forward, whatever stands in its place for the length of a pass.
    return forward if torch.equal(product(trial), type(m).forward(m, trial)) else None

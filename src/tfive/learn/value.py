"""Value regression: clipped against the frozen pre-fit prediction, half-squared, or expectile. Sums and counts, not
means."""

from __future__ import annotations

import torch
from torch import Tensor


def _masked_sum(loss: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    return torch.where(mask, loss, torch.zeros_like(loss)).sum(), mask.sum()


def clipped_value_loss(
    value: Tensor, return_: Tensor, frozen: Tensor, mask: Tensor, clip: float
) -> tuple[Tensor, Tensor]:
    """Sum and count of ``½ max{(V−G)², (V̄−G)²}``, V̄ within ±ε_v of the pre-fit prediction (eq:value-loss)."""
    if not clip > 0:
        raise ValueError(f"the value clip must be positive, got {clip}")
    frozen, return_ = frozen.detach(), return_.detach()
    near = frozen + (value - frozen).clamp(-clip, clip)
    return _masked_sum(0.5 * torch.maximum((value - return_).square(), (near - return_).square()), mask)


def squared_value_loss(value: Tensor, return_: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Sum and count of ``½ (V−G)²`` (app:value-fitting's ordinary half-squared error)."""
    return _masked_sum(0.5 * (value - return_.detach()).square(), mask)


def expectile_value_loss(value: Tensor, return_: Tensor, mask: Tensor, expectile: float) -> tuple[Tensor, Tensor]:
    """Sum and count of ``|τ − 1{G<V}| (V−G)²``; τ = ½ is the half-squared loss. A `bracket` pair uses τ and 1 − τ."""
    if not 0 < expectile < 1:
        raise ValueError(f"an expectile lies strictly between 0 and 1, got {expectile}")
    gap = return_.detach() - value
    below = (gap < 0).to(gap.dtype)
    tilt = expectile + (1 - 2 * expectile) * below
    return _masked_sum(tilt * gap.square(), mask)

"""Running sums that deterministic runs may use on GPUs, where torch's own floating-point scan is not admitted."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_WIDTH = 512
"""Entries whose running sum is one product with a triangle of ones; longer rows go block by block."""


def running_sum(values: Tensor) -> Tensor:
    """The cumulative sum over the last dimension.

    In torch's deterministic mode `cumsum` of floating-point numbers raises an error on CUDA devices, because its scan
    of one long row adds in an order that timing decides. There it is computed by matrix products of a fixed order.
    """
    if values.device.type == "cuda" and values.is_floating_point() and torch.are_deterministic_algorithms_enabled():
        return running_sum_by_products(values)
    return values.cumsum(-1)


def running_sum_by_products(values: Tensor) -> Tensor:
    """The same sums, from products with triangles of ones: inside blocks, and over the blocks before."""
    width = values.shape[-1]
    if width <= _WIDTH:
        triangle = torch.ones(width, width, dtype=values.dtype, device=values.device).triu()
        return values @ triangle
    blocks = F.pad(values, (0, -width % _WIDTH)).unflatten(-1, (-1, _WIDTH))
    inside = running_sum_by_products(blocks)
    total = inside[..., -1]
    before = running_sum_by_products(total) - total
    return (inside + before.unsqueeze(-1)).flatten(-2)[..., :width]

"""Low-rank updates as explicit modules: no registry, no active-adapter switch, each critic carries its own."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class LoraLinear(nn.Module):
    """`linear(x) + (alpha / rank) · up(down(x))` with `linear` frozen; the update starts at exactly zero."""

    def __init__(self, linear: nn.Linear, rank: int, alpha: float, generator: torch.Generator) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.scale = alpha / rank
        down = torch.empty(rank, linear.in_features).normal_(0.0, linear.in_features**-0.5, generator=generator)
        device = linear.weight.device
        self.down = nn.Parameter(down.to(device))
        self.up = nn.Parameter(torch.zeros(linear.out_features, rank, device=device))

    @property
    def weight(self) -> Tensor:
        """The frozen weight, for code that asks a layer for its dtype or device."""
        return self.linear.weight

    def forward(self, x: Tensor) -> Tensor:
        narrow = F.linear(x, self.down.to(x.dtype))
        return self.linear(x) + self.scale * F.linear(narrow, self.up.to(x.dtype))


def with_lora(module: nn.Module, rank: int, alpha: float, seed: int) -> int:
    """Freeze `module`, wrap every linear layer inside it, and return how many there were."""
    module.requires_grad_(False)
    return _wrapped(module, rank, alpha, torch.Generator().manual_seed(seed))


def _wrapped(module: nn.Module, rank: int, alpha: float, generator: torch.Generator) -> int:
    count = 0
    for name, child in list(module.named_children()):
        if isinstance(child, nn.Linear):
            setattr(module, name, LoraLinear(child, rank, alpha, generator))
            count += 1
        else:
            count += _wrapped(child, rank, alpha, generator)
    return count

"""Low-rank updates (`tree/low_rank.py`) inside fused blocks."""

from __future__ import annotations

from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tfive.tree.low_rank import LoraLinear

Linear = nn.Linear | LoraLinear

_SHARES, _FEW, _LONG = 4, 256, 4096
"""Parts of a product, for at most so many rows and at least so many inner features; found by trial on an H200."""


def is_plain(part: Any) -> bool:
    """Whether a module is a linear layer, updated or not, that nothing else listens to."""
    plain = part.linear if isinstance(part, LoraLinear) else part
    return type(plain) is nn.Linear and not any(m._forward_hooks or m._forward_pre_hooks for m in (part, plain))


class HeldUpdates:
    """The low-rank updates of layers that read one input, in the layers' precision: a narrow product, then one by a
    matrix with a block for each layer. They are not added to the held weights, which are too coarse to hold them."""

    def __init__(self, parts: tuple[Linear, ...]) -> None:
        self.parts, self.starts, start = [], [], 0
        for part in parts:
            if isinstance(part, LoraLinear):
                self.parts.append(part)
                self.starts.append(start)
            start += part.out_features
        like = parts[0].weight
        self.ranks = [len(part.down) for part in self.parts]
        self.down_rD = like.new_empty(sum(self.ranks), parts[0].in_features)
        self.up_ro = like.new_zeros(sum(self.ranks), start)

    @classmethod
    def of(cls, parts: tuple[Linear, ...]) -> Self | None:
        """Those of some layers; None where none is updated."""
        return cls(parts) if any(isinstance(part, LoraLinear) for part in parts) else None

    def add(self, inputs: Tensor, products: Tensor) -> Tensor:
        """The products plus the updates' part, in place."""
        narrow = F.linear(inputs, self.down_rD)
        products.view(-1, products.shape[-1]).addmm_(narrow.view(-1, narrow.shape[-1]), self.up_ro)
        return products

    def refresh(self, factor_D: Tensor | None = None) -> None:
        """Bring the copies up to date; `factor_D` is the weight of a norm that is folded in."""
        for down, up, part, start in zip(
            self.down_rD.split(self.ranks), self.up_ro.split(self.ranks), self.parts, self.starts
        ):
            down.copy_(part.down if factor_D is None else part.down * factor_D)
            up[:, start : start + part.out_features].copy_(part.scale * part.up.t())


class Outward:
    """A product that is added to the residual stream, with its low-rank update where it has one."""

    def __init__(self, part: Linear, hold: bool = False) -> None:
        self.part, self.updates = part, HeldUpdates.of((part,)) if hold else None

    def onto(self, residual_xD: Tensor, inputs: Tensor) -> Tensor:
        """The residual stream plus the product, in place: it belongs to the pass, and a copy would cost a kernel."""
        residual_xD.addmm_(inputs, self.part.weight.t())
        if self.updates is not None:
            self.updates.add(inputs, residual_xD)
        elif isinstance(self.part, LoraLinear):
            narrow = F.linear(inputs, self.part.down.to(inputs.dtype))
            residual_xD.addmm_(narrow, self.part.up.t().to(inputs.dtype), alpha=self.part.scale)
        return residual_xD if self.part.bias is None else residual_xD.add_(self.part.bias)

    def shares(self, rows: int) -> int:
        """In how many parts of its inner features the product of so many rows is best computed: few rows of a small
        product leave most of a GPU idle, and library kernels add their own parts up by a kernel more."""
        weight, plain = self.part.weight, isinstance(self.part, nn.Linear) and self.part.bias is None
        fits = plain and weight.device.type == "cuda" and weight.dtype == torch.bfloat16 and rows <= _FEW
        return _SHARES if fits and weight.shape[1] >= _LONG and weight.shape[1] % (64 * _SHARES) == 0 else 1

    def apart(self, inputs_xI: Tensor, shares: int) -> Tensor:
        """The product in so many parts, `[s, x, D]`, in float32 at least."""
        inputs_sxI = inputs_xI.unflatten(1, (shares, -1)).transpose(0, 1)
        weight_sID = self.part.weight.unflatten(1, (shares, -1)).permute(1, 2, 0)
        if inputs_xI.device.type == "cuda" and inputs_xI.dtype == torch.bfloat16:
            return torch.bmm(inputs_sxI, weight_sID, out_dtype=torch.float32)
        wide = torch.promote_types(inputs_xI.dtype, torch.float32)
        return torch.bmm(inputs_sxI.to(wide), weight_sID.to(wide))

    def holding(self) -> Outward:
        """The same on copies of its update."""
        held = Outward(self.part, True)
        held.refresh()
        return held

    def refresh(self) -> None:
        """Bring the copies up to date."""
        if self.updates is not None:
            self.updates.refresh()

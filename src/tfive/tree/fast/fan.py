"""Products of the residual stream, as fused blocks make them: on the model's weights or on held copies.

Local shape letters as in `fused.py`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tfive.tree.fast.fused import Division, Ops, TorchOps
from tfive.tree.fast.updates import HeldUpdates, Linear
from tfive.tree.hf import RootMeanSquare


class Unfit(Exception):
    """This block is none that can be fused; the message says why."""


class HeldNorm(RootMeanSquare):
    """A norm whose weight, the added one included, is computed when weights are refreshed, not in every step."""

    def __init__(self, norm: RootMeanSquare) -> None:
        super().__init__(norm.module, norm.epsilon, norm.shift)
        self.held = norm.weight.detach().clone()

    @property
    def weight(self) -> Tensor:
        return self.held

    def refresh(self) -> None:
        """Bring the copy up to date."""
        self.held.copy_(super().weight)


def held(norm: RootMeanSquare) -> RootMeanSquare:
    """The norm with its weight at hand."""
    return HeldNorm(norm) if norm.shift else norm


def _state(tensor: Tensor) -> tuple[int, int, int]:
    """Where a tensor lies, how much of it there is, and how often it was written."""
    return tensor.data_ptr(), tensor.numel(), -1 if tensor.is_inference() else tensor._version


class Fan:
    """A norm and the products of what it gives, from the residual stream to the inputs of a layer.

    A held fan multiplies once, by a matrix that holds copies of all its weights. Where it can it folds the norm in: the
    norm's weight into the matrix, while its division by the root mean square is left (`Division`) to the kernel that
    reads the products.
    """

    def __init__(self, norm: RootMeanSquare, parts: tuple[Linear, ...], hold: bool = False, fold: bool = False) -> None:
        self.norm, self.parts, self.sizes = norm, parts, [part.out_features for part in parts]
        biased = [part.bias is not None for part in parts]
        if any(biased) != all(biased):
            raise Unfit("only some products of one input have a bias")
        # A bias comes after the division.
        self.folds = fold and not any(biased)
        self.weight = torch.cat([part.weight.detach() for part in parts]) if hold else None
        biases = [part.bias.detach() for part in parts if part.bias is not None]
        self.bias = torch.cat(biases) if hold and biases else None
        self.updates = HeldUpdates.of(parts) if hold else None
        self._ready: tuple[Tensor, tuple[int, int, int]] | None = None

    def prepare(self, normed_xD: Tensor, residual_xD: Tensor) -> None:
        """Take what the norm gives of this residual stream, computed on the way by the kernel before it."""
        self._ready = normed_xD, _state(residual_xD)

    def _normed(self, residual: Tensor, ops: Ops) -> Tensor:
        ready, self._ready = self._ready, None
        # A hook between blocks may have changed the stream or put another in its place.
        if ready is not None and ready[1] == _state(residual):
            return ready[0].view(residual.shape)
        return residual if self.folds else ops.norm(residual, self.norm.weight, self.norm.epsilon)

    def __call__(self, residual: Tensor, ops: Ops) -> tuple[Tensor, ...]:
        inputs = self._normed(residual, ops)
        if self.weight is None:
            return tuple(part(inputs) for part in self.parts)
        products = F.linear(inputs, self.weight, self.bias)
        return (products if self.updates is None else self.updates.add(inputs, products)).split(self.sizes, -1)

    def division(self, residual_xD: Tensor) -> Division | None:
        """What is left of the norm."""
        return (residual_xD, self.norm.epsilon) if self.folds else None

    def holding(self, fold: bool) -> Fan:
        """The same on copies of its weights."""
        fan = Fan(held(self.norm), self.parts, True, fold)
        fan.refresh(TorchOps())
        return fan

    def refresh(self, ops: Ops) -> None:
        """Bring the copies up to date."""
        if isinstance(self.norm, HeldNorm):
            self.norm.refresh()
        for name, held in (("weight", self.weight), ("bias", self.bias)):
            for place, part in zip(() if held is None else held.split(self.sizes), self.parts):
                if self.folds:
                    ops.fold(getattr(part, name).detach(), self.norm.weight, place)
                else:
                    place.copy_(getattr(part, name))
        if self.updates is not None:
            self.updates.refresh(self.norm.weight if self.folds else None)

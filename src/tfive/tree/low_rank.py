"""Low-rank updates of frozen linear layers, and copies of models that use frozen weights in place.

The frozen weight is never written to and may belong to several models at once: the base model, the actor, a teacher and
critics each add their own update to the same numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Module = TypeVar("Module", bound=nn.Module)


class LoraLinear(nn.Module):
    """`linear(x) + scale · up(down(x))` with `linear` frozen; the update starts at exactly zero.

    Its two factors are float32 at least, whatever the frozen weight is: an update is far smaller than the spacing of
    bfloat16 numbers around the weight, so adding it to the weight itself would lose most of it.
    """

    def __init__(self, linear: nn.Linear, down_rK: Tensor, scale: float) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.scale = scale
        down_rK = down_rK.to(linear.weight.device, torch.promote_types(linear.weight.dtype, torch.float32))
        self.down = nn.Parameter(down_rK)
        self.up = nn.Parameter(down_rK.new_zeros(linear.out_features, len(down_rK)))

    @property
    def weight(self) -> Tensor:
        """The frozen weight, for code that reads a layer's dtype or device from it."""
        return self.linear.weight

    @property
    def bias(self) -> Tensor | None:
        """The frozen bias."""
        return self.linear.bias

    @property
    def in_features(self) -> int:
        """As of the frozen layer."""
        return self.linear.in_features

    @property
    def out_features(self) -> int:
        """As of the frozen layer."""
        return self.linear.out_features

    def forward(self, x: Tensor) -> Tensor:
        narrow = F.linear(x, self.down.to(x.dtype))
        return self.linear(x) + self.scale * F.linear(narrow, self.up.to(x.dtype))

    @torch.no_grad()
    def merged(self) -> Tensor:
        """The weight of one linear layer that computes the same, float32 at least."""
        return self.linear.weight.to(self.up.dtype).addmm(self.up, self.down, alpha=self.scale)

    @torch.no_grad()
    def change(self) -> tuple[float, float]:
        """Squared Frobenius norms of the update and of the frozen weight; the product itself is never formed."""
        inner = (self.up.t() @ self.up) * (self.down @ self.down.t())
        return self.scale**2 * float(inner.sum()), float(self.linear.weight.float().square().sum())


def low_rank_parts(model: nn.Module) -> Iterator[tuple[str, LoraLinear]]:
    """Every updated layer of a model, by the name that the plain layer had."""
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            yield name, module


def _frozen(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that low-rank updates stand on. Without updates there are none: weights that are trained in shards
    need no gradient themselves, and yet change."""
    if not any(True for _ in low_rank_parts(model)):
        return {}
    named = model.named_parameters(remove_duplicate=False)
    return {name: weight for name, weight in named if not weight.requires_grad}


def copy_on_the_same_weights(model: Module) -> Module:
    """A deep copy whose parameters are the model's own."""
    return copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})


def copy_sharing_frozen(model: Module) -> Module:
    """A deep copy that uses parameters under low-rank updates in place: only what is trained exists twice."""
    return copy.deepcopy(model, {id(weight): weight for weight in _frozen(model).values()})


def trained_state(model: nn.Module) -> dict[str, Tensor]:
    """The state dict without frozen parameters: all of it for a model that is trained in full."""
    frozen = _frozen(model)
    return {name: value for name, value in model.state_dict().items() if name not in frozen}


def load_trained_state(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Load what `trained_state` gave for a model of the same kind; RuntimeError where the names are others."""
    missing, strange = model.load_state_dict(state, strict=False)
    missing = [name for name in missing if name in trained_state(model)]
    if missing or strange:
        raise RuntimeError(f"the saved weights are of another model: {[*missing, *strange][:3]}")


@torch.no_grad()
def merge(model: nn.Module) -> float:
    """Put every update into its frozen weight, so that the model is a plain one again.

    Returns which part of the updates' size was lost to the weights' precision: 0 where they hold it, near 1 where the
    spacing of their numbers is wider than the update.
    """
    lost = size = 0.0
    for name, part in list(low_rank_parts(model)):
        exact = part.merged()
        size += part.change()[0]
        part.linear.weight.copy_(exact)
        lost += float((part.linear.weight.to(exact.dtype) - exact).square().sum())
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, part.linear)
    return (lost / size) ** 0.5 if size else 0.0

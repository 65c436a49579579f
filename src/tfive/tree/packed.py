"""Passes that leave padding out: of a row's nodes only those that exist go through the model.

Thoughts that close early and checkpoints that are not reached leave up to half of a batch empty. Norms, products and
rotations work row by row, so that they need no empty rows; attention gets its tensors spread over the whole layout.
What remains of a batch is computed by the same kernels and, where matrices are 128 wide or more, comes out bit for bit
the same (tried with MKL in float32).

On processors the model's own blocks do so. On a GPU counting nodes waits for it and captured work needs fixed
shapes: there large passes that score or have gradients leave padding out where thoughts may close early, and are
launched (`EngineOptions.packed`); sampling keeps it unless asked not to (`fast/listed.py`). There fewer rows may choose
another kernel, which rounds otherwise. With gradients the sums over nodes that weights' gradients are do so anywhere,
since padding's zeros are not added.

`last_block_for` does the same for the last block of a pass whose result is read at a few nodes: of all others it needs
keys and values alone.

Local shape letters: Y query heads, X key/value heads, E head features, n nodes of a text, x nodes that are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tfive.tree.attention import Attending
from tfive.tree.hf import Backbone, replaced

ROWS = 64
"""At least so many rows are computed, padding included: products of a few rows have kernels that round otherwise."""
WORTH = 0.9
"""More than this share of nodes that exist is not worth the copies."""
LARGE = 8192
"""On a GPU passes over fewer nodes keep their padding: there the host that launches them decides, and they are
captured, for which shapes must be few."""


def packing(exists_Bn: Tensor) -> Tensor | None:
    """int64 `[x]`: the flat nodes to compute, ascending, those that exist and at least `ROWS`; None if nearly all."""
    exists = exists_Bn.flatten()
    count = max(int(exists.sum()), min(ROWS, len(exists)))
    if count > WORTH * len(exists):
        return None
    return (~exists).to(torch.uint8).argsort(stable=True)[:count].sort().values


class PackedPass(Attending):
    """A pass as a model sees it that computes `index_x` of its nodes, as the only row of its batch."""

    def __init__(self, tree: Attending, index_x: Tensor, shape: tuple[int, int]) -> None:
        super().__init__(tree.kernel)
        self.tree, self.index_x, self.shape = tree, index_x, shape

    def spread(self, values_x: Tensor) -> Tensor:
        """`[x, …]` in the places of the layout, `[B, n, …]`, 0 elsewhere."""
        full: Tensor = _Spread.apply(values_x, self.index_x, self.shape[0] * self.shape[1])
        return full.unflatten(0, self.shape)

    def taken(self, values_Bn: Tensor) -> Tensor:
        """Of `[B, n, …]` the computed nodes, `[x, …]`."""
        found: Tensor = _Taken.apply(values_Bn.flatten(0, 1), self.index_x)
        return found

    def attend(
        self,
        layer: int,
        query_BYnE: Tensor,
        key_BXnE: Tensor,
        value_BXnE: Tensor,
        scale: float | None,
        window: int | None = None,
        cap: float | None = None,
    ) -> Tensor:
        given = (query_BYnE, key_BXnE, value_BXnE)
        query, key, value = (self.spread(one[0].transpose(0, 1)).transpose(1, 2) for one in given)
        output_BnYE = self.tree.attend(layer, query, key, value, scale, window, cap)
        return self.taken(output_BnYE)[None]


def run_nodes(
    backbone: Backbone, embeds_BnD: Tensor, position_Bn: Tensor, tree: Attending, index_x: Tensor | None, **given: Any
) -> Tensor:
    """`Backbone.run` of the flat nodes `index_x` alone, or of all: hidden states `[B, n, D]`, 0 elsewhere; what `note`
    takes likewise."""
    if index_x is None:
        return backbone.run(embeds_BnD, position_Bn, tree, **given)
    packed = PackedPass(tree, index_x, (embeds_BnD.shape[0], embeds_BnD.shape[1]))
    embeds_xD, position_x = packed.taken(embeds_BnD), position_Bn.flatten().index_select(0, index_x)
    hidden_xD = backbone.run(embeds_xD[None], position_x[None], packed, **given)[0]
    noted = [] if given.get("note") is None else given["note"][1]
    noted[:] = [packed.spread(entering_1xD[0]) for entering_1xD in noted]
    return packed.spread(hidden_xD)


class _Spread(torch.autograd.Function):
    """Rows put at places of which each is named once; plain indexing would add gradients up with atomics."""

    @staticmethod
    def forward(ctx: Any, values_x: Tensor, index_x: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(index_x)
        return values_x.new_zeros(count, *values_x.shape[1:]).index_copy_(0, index_x, values_x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None]:
        (index_x,) = ctx.saved_tensors
        return slope.index_select(0, index_x), None, None


class _Taken(torch.autograd.Function):
    """The other way round."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, index_x: Tensor) -> Tensor:
        ctx.save_for_backward(index_x)
        ctx.count = len(values)
        return values.index_select(0, index_x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope_x: Tensor) -> tuple[Tensor, None]:
        (index_x,) = ctx.saved_tensors
        return slope_x.new_zeros(ctx.count, *slope_x.shape[1:]).index_copy_(0, index_x, slope_x), None


@contextmanager
def last_block_for(backbone: Backbone, index_x: Tensor, device: torch.device) -> Iterator[None]:
    """Passes in this context compute what follows the keys and values of the last block for the flat nodes `index_x`
    alone, on processors; what they give elsewhere means nothing."""
    with ExitStack() as patches:
        if device.type == "cpu" and len(index_x) >= ROWS:
            for module in _row_by_row(backbone.blocks[-1]):
                patches.enter_context(replaced(module, _for_rows(module.forward, index_x)))
        yield


def _row_by_row(block: nn.Module) -> list[nn.Module]:
    """The parts of a block that work row by row and of which no key or value is made, where they go by their usual
    names."""
    attention = getattr(block, "self_attn", None)
    linear = [getattr(attention, name, None) for name in ("q_proj", "o_proj")]
    dense = getattr(block, "mlp", None)
    plain = [module for module in linear if isinstance(module, nn.Linear)]
    gated = dense is not None and all(isinstance(getattr(dense, name, None), nn.Linear) for name in _GATED)
    return [*plain, dense] if len(plain) == 2 and gated and dense is not None else []


_GATED = ("gate_proj", "up_proj", "down_proj")


def _for_rows(forward: Callable[[Tensor], Tensor], index_x: Tensor) -> Callable[[Tensor], Tensor]:
    def some(hidden: Tensor) -> Tensor:
        found_xD = forward(hidden.flatten(0, -2).index_select(0, index_x))
        full = found_xD.new_zeros(hidden.shape[:-1].numel(), found_xD.shape[-1])
        return full.index_copy_(0, index_x, found_xD).unflatten(0, hidden.shape[:-1])

    return some

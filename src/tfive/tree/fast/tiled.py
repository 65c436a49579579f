"""Attention under any mask by tiles: which tiles are seen is found once a pass, for all layers.

A row of a tree sees its text up to its position and its own thought, about two fifths of all pairs. Masked attention
computes all of them; here the tiles that nobody sees are skipped. `tiled_kernels.py` does the computing; before it is
used on a device it is compared with masked attention, and the reason is kept when it is not used.

Local shape letters: Y query heads, X key/value heads, E head features, n queries, m keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from tfive.tree.fast.agreement import kernel_trouble
from tfive.tree.grow import full_thoughts, grow
from tfive.tree.layout import Layout, TextBatch, ThoughtPlan, moved

_TYPE = torch.bfloat16
"""The one type it is for: in float32 the kernels would have no use for a GPU's matrix units."""

_BITS = 64
"""Keys of a tile, as many as a word has bits."""

Lists = tuple[Tensor, Tensor, Tensor]
"""For every tile of rows: the words by how much of them is seen, `[B, t, w]`; how many are seen by all its rows; how
many by any, each `[B, t]`."""


def words(seen_Bnm: Tensor) -> Tensor:
    """int64 `[B, n, w]`: bit j of word w says whether key 64·w + j is seen."""
    rows, queries, keys = seen_Bnm.shape
    bits = F.pad(seen_Bnm, (0, -keys % _BITS)).view(rows, queries, -1, 8, 8).to(torch.uint8)
    place = torch.arange(8, dtype=torch.uint8, device=seen_Bnm.device)  # not from the host, which would wait
    packed = (bits << place).sum(-1, dtype=torch.uint8)
    return packed.view(torch.int64)[..., 0]


def lists(word_Bnw: Tensor, tile: int) -> Lists:
    """The tiles of `tile` rows, each with its words: those seen whole first, then those seen partly."""
    rows, queries, count = word_Bnw.shape
    more = -queries % tile
    # Rows beyond the last see nothing and keep no tile from being whole.
    some = F.pad(word_Bnw != 0, (0, 0, 0, more)).view(rows, -1, tile, count).any(2)
    whole = F.pad(word_Bnw == -1, (0, 0, 0, more), value=True).view(rows, -1, tile, count).all(2)
    kind = whole.to(torch.int32) + some.to(torch.int32)
    order = kind.argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return order, whole.sum(-1, dtype=torch.int32), some.sum(-1, dtype=torch.int32)


class Tiles:
    """A pass's mask as the kernels read it. What only the backward pass reads is made when it first does."""

    def __init__(self, word_Bnw: Tensor, turn: Callable[[], Tensor], sort: Callable[[Tensor, int], Lists]) -> None:
        """`turn` gives the words of every key, by which queries it is seen; `sort` lists tiles."""
        self.word_Bnw, self._turn, self._sort = word_Bnw, turn, sort
        self._lists: dict[tuple[str, int], Lists] = {}
        self._turned: Tensor | None = None

    @classmethod
    def of(cls, seen_Bnm: Tensor) -> Tiles:
        """Of any mask."""
        return cls(words(seen_Bnm), lambda: words(seen_Bnm.transpose(1, 2)), lists)

    @classmethod
    def between(cls, layout: Layout, start: int, window: int | None = None) -> Tiles:
        """Of the nodes from `start` on and what they see, without the mask; by kernels, which need a device."""
        from tfive.tree.fast import tile_words

        word_Bnw = tile_words.words(layout, start, window)
        return cls(word_Bnw, lambda: tile_words.words(layout, start, window, turned=True), tile_words.lists)

    @property
    def turned_Bmw(self) -> Tensor:
        """The words of every key: by which queries it is seen."""
        if self._turned is None:
            self._turned = self._turn()
        return self._turned

    def queries(self, tile: int) -> Lists:
        """Tiles of queries with the keys they see."""
        if ("queries", tile) not in self._lists:
            self._lists["queries", tile] = self._sort(self.word_Bnw, tile)
        return self._lists["queries", tile]

    def keys(self, tile: int) -> Lists:
        """Tiles of keys with the queries that see them."""
        if ("keys", tile) not in self._lists:
            self._lists["keys", tile] = self._sort(self.turned_Bmw, tile)
        return self._lists["keys", tile]


class Tile(NamedTuple):
    """What a program computes at a time: rows (queries, or keys for their own gradients), and how it is compiled."""

    rows: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Sizes:
    """Tiles of the forward pass, of the queries' gradient and of the keys'."""

    forward: Tile
    queries: Tile
    keys: Tile


SIZES = Sizes(Tile(64, 4, 3), Tile(64, 4, 2), Tile(64, 4, 2))
WIDE_SIZES = Sizes(Tile(64, 4, 2), Tile(64, 8, 1), Tile(64, 8, 1))
"""For heads of more than 128 features."""


def sizes(query: Tensor) -> Sizes:
    """The tiles for heads like these."""
    return WIDE_SIZES if query.shape[-1] > 128 else SIZES


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tiles: Tiles, scale: float, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        from tfive.tree.fast import tiled_kernels

        query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
        size = sizes(query)
        given = (tiles.word_Bnw, tiles.queries(size.forward.rows), scale, size.forward)
        out_BnYE, mass_BYn = tiled_kernels.attend(query, key, value, *given)
        ctx.tiles, ctx.scale = tiles, scale
        ctx.save_for_backward(query, key, value, out_BnYE, mass_BYn)
        return out_BnYE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope_BnYE: Tensor) -> tuple[Any, ...]:
        from tfive.tree.fast import tiled_kernels

        query, key, value, out_BnYE, mass_BYn = ctx.saved_tensors
        tiles, scale, size = ctx.tiles, ctx.scale, sizes(query)
        slope = (slope_BnYE if slope_BnYE.stride(-1) == 1 else slope_BnYE.contiguous()).transpose(1, 2)
        three = (query, key, value)
        given = (tiles.word_Bnw, tiles.queries(size.queries.rows), scale, size.queries)
        of_query, delta_BYn = tiled_kernels.query_slope(three, (out_BnYE, mass_BYn), slope, *given)
        back = (tiles.turned_Bmw, tiles.keys(size.keys.rows), scale, size.keys)
        of_key, of_value = tiled_kernels.key_slope(three, mass_BYn, delta_BYn, slope, *back)
        return None, None, of_query, of_key, of_value


def tiled(query_BYnE: Tensor, key_BXmE: Tensor, value_BXmE: Tensor, tiles: Tiles, scale: float) -> Tensor:
    """Attention output `[B, n, Y, E]`."""
    found: Tensor = _Tiled.apply(tiles, scale, query_BYnE, key_BXmE, value_BXmE)
    return found


def differences(queries: int, keys: int, features: int, device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """How far tiled attention, forward and backward, is from masked attention in float32: |a − b| / |b|; and 1 where
    tiles of layouts are not those of their masks, else 0. The trial rows have whole tiles, tiles seen partly, tiles
    nobody sees, and rows that see one key alone."""
    generator, (nodes, seen_by) = torch.Generator().manual_seed(0), (336, 400)
    shapes = ((2, queries, nodes, features), *((2, keys, seen_by, features),) * 2, (2, nodes, queries, features))
    given = [torch.randn(shape, generator=generator).bfloat16().to(device, dtype) for shape in shapes]
    row, column = torch.arange(nodes)[:, None] + seen_by - nodes, torch.arange(seen_by)[None]
    first = torch.randint(0, 300, (2, nodes, 1), generator=generator)
    seen_Bnm = torch.where(row < 300, column <= row, (column <= first) | ((column > 360) & (column <= row)))
    seen_Bnm = (seen_Bnm & (first % 17 > 0) | (column == row)).to(device)
    found: list[tuple[Tensor, ...]] = []
    for kind in (torch.float32, dtype):
        query, key, value = (x.to(kind, copy=True).requires_grad_() for x in given[:3])
        with torch.enable_grad():
            if len(found) == 1:
                output = tiled(query, key, value, Tiles.of(seen_Bnm), 0.3)
            else:
                k, v = (x.repeat_interleave(queries // keys, 1) for x in (key, value))
                weight = (query @ k.transpose(-1, -2) * 0.3).masked_fill(~seen_Bnm[:, None], float("-inf")).softmax(-1)
                output = (weight @ v).transpose(1, 2)
            slopes = torch.autograd.grad(output, (query, key, value), given[3].to(kind))
        found.append((output, *slopes))
    names = ("attention", "query's gradient", "key's gradient", "value's gradient")
    apart = {
        name: float((got - want).double().norm() / want.double().norm())
        for name, want, got in zip(names, *([part.detach().float() for part in some] for some in found))
    }
    return apart | {"tiles of layouts": float(not _same_tiles(device))}


def trial_layouts(device: torch.device) -> list[Layout]:
    """Layouts with all that nodes may see or not: documents side by side, padding, branches that do not exist, several
    thoughts at a position, continuations read as text and through gates."""
    tokens_BS = torch.arange(2 * 150).view(2, 150)
    document_BS = torch.stack([torch.arange(150) // 90, torch.where(torch.arange(150) < 131, 0, -1)])
    positions_BP = torch.tensor([[5, 40, 89, 140], [0, 77, 130, -1]])
    texts = TextBatch(tokens_BS, document_BS, positions_BP, positions_BP)
    plan = ThoughtPlan(6, (3, 6), 5, (1,), (2, 3), group=2)
    found = [
        grow(texts, one, full_thoughts(texts, one), segments)
        for one in (plan, replace(plan, gated=True))
        for segments in ("none", "all", "first")
    ]
    return [moved(layout, device) for layout in (grow(texts, plan), *found)]


def _same_tiles(device: torch.device) -> bool:
    """Whether kernels find the words and lists of trial layouts that their masks have."""
    found = []
    for layout in trial_layouts(device):
        for start, window in ((0, None), (layout.trunk_width, None), (0, 30)):
            if start < layout.node_count:
                both = (Tiles.of(layout.mask(start, window)[:, 0]), Tiles.between(layout, start, window))
                mine, other = ((one.word_Bnw, one.turned_Bmw, *one.queries(128), *one.keys(64)) for one in both)
                found += [torch.equal(a, b) for a, b in zip(mine, other, strict=True)]
    return all(found)


@cache
def tiled_trouble(queries: int, keys: int, features: int, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why tiled attention is not used for such heads on this device, or None: it agrees with masked attention."""

    def compared() -> dict[str, float]:
        return differences(queries, keys, features, device, dtype)

    return kernel_trouble(compared, (features,), device, dtype, types=(_TYPE,))

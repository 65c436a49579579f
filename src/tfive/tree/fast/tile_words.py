"""Triton kernels that write down which nodes of a layout see which, as words of bits, and sort the tiles by them.

`tiled.words` and `tiled.lists` mean the same and serve any mask; they take a dozen passes over a table of all pairs,
once for queries and once for keys. Here a word is made from what a layout says of its nodes, and no table is.
"""

# mypy: allow-untyped-defs
# (kernel parameters are pointers and compile-time constants, for which there are no Python types)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tfive.tree import layout as nodes
from tfive.tree.layout import Layout

BITS = 64
_ROWS, _TURN = 32, 8
_PADDING, _TEXT, _OPEN = tl.constexpr(nodes.PADDING), tl.constexpr(nodes.TEXT), tl.constexpr(nodes.OPEN)
_THOUGHT, _CLOSE = tl.constexpr(nodes.THOUGHT), tl.constexpr(nodes.CLOSE)


@triton.jit
def _told(ptr, batch, node, keep, TURNED: tl.constexpr):
    """What a layout says of these nodes, across or down."""
    value = tl.load(ptr + batch + node, mask=keep, other=0).to(tl.int32)
    return value[None, :] if TURNED else value[:, None]


@triton.jit
def _words(
    kind_ptr, place_ptr, document_ptr, limit_ptr, branch_ptr, step_ptr, segment_ptr, depth_ptr, half_ptr,
    count, start, rows, words, window,
    R: tl.constexpr, N: tl.constexpr, GATED: tl.constexpr, WINDOW: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """A word of R rows: queries, whose bits are keys, or (`TURNED`) keys, whose bits are queries; as `Layout._sees`."""
    batch = tl.program_id(2).to(tl.int64) * count
    row, bit = tl.program_id(0) * R + tl.arange(0, R), tl.program_id(1) * N + tl.arange(0, N)
    query, key = (start + bit, row) if TURNED else (start + row, bit)
    real_q, real_k = query < count, key < count
    of_q: tl.constexpr = TURNED
    of_k: tl.constexpr = not TURNED
    kind = _told(kind_ptr, batch, key, real_k, of_k)
    place = _told(place_ptr, batch, key, real_k, of_k)
    kind_q = _told(kind_ptr, batch, query, real_q, of_q)
    text = _told(document_ptr, batch, query, real_q, of_q) == _told(document_ptr, batch, key, real_k, of_k)
    text &= place <= _told(limit_ptr, batch, query, real_q, of_q)
    thought = _told(branch_ptr, batch, query, real_q, of_q) == _told(branch_ptr, batch, key, real_k, of_k)
    thought &= place <= _told(step_ptr, batch, query, real_q, of_q)
    segment = _told(segment_ptr, batch, query, real_q, of_q) == _told(segment_ptr, batch, key, real_k, of_k)
    segment &= place <= _told(place_ptr, batch, query, real_q, of_q)
    if GATED:
        segment &= kind == kind_q
    seen = ((kind == _TEXT) & text) | (((kind == _OPEN) | (kind == _THOUGHT)) & thought) | ((kind >= _CLOSE) & segment)
    if WINDOW:
        seen &= _told(depth_ptr, batch, query, real_q, of_q) - _told(depth_ptr, batch, key, real_k, of_k) < window
    if TURNED:
        same, real = query[None, :] == key[:, None], real_q[None, :] & real_k[:, None]
    else:
        same, real = query[:, None] == key[None, :], real_q[:, None] & real_k[None, :]
    seen = ((seen & (kind_q != _PADDING)) | same) & real
    # Every bit is its own, so that the sum of a half is the half, the sign's bit included.
    value = tl.where(seen, 1 << (tl.arange(0, N) % 32)[None, :], 0)
    low = tl.sum(tl.where((tl.arange(0, N) < 32)[None, :], value, 0), 1)
    high = tl.sum(tl.where((tl.arange(0, N) < 32)[None, :], 0, value), 1)
    at = 2 * ((tl.program_id(2).to(tl.int64) * rows + row) * words + tl.program_id(1))
    tl.store(half_ptr + at, low, mask=row < rows)
    tl.store(half_ptr + at + 1, high, mask=row < rows)


def words(layout: Layout, start: int, window: int | None, turned: bool = False) -> Tensor:
    """int64 `[B, n, w]`: for every node from `start` on which nodes it sees, or (`turned`) for every node by which of
    those it is seen; `tiled.words` of the layout's mask."""
    rows, count = layout.kind_BN.shape
    down, across = (count, count - start) if turned else (count - start, count)
    found = torch.empty(rows, down, -(-across // BITS), dtype=torch.int64, device=layout.kind_BN.device)
    told = (
        layout.kind_BN, layout.place_BN, layout.document_BN, layout.trunk_limit_BN, layout.branch_BN,
        layout.step_limit_BN, layout.segment_BN, layout.position_BN,
    )  # fmt: skip
    _words[(triton.cdiv(down, _ROWS), found.shape[2], rows)](
        *(value.contiguous() for value in told), found.view(torch.int32), count, start, down, found.shape[2],
        window or 0, R=_ROWS, N=BITS, GATED=layout.plan.gated, WINDOW=window is not None, TURNED=turned, num_warps=4,
    )  # fmt: skip
    return found


@triton.jit
def _lists(word_ptr, order_ptr, whole_ptr, some_ptr, rows, words, TILE: tl.constexpr, W: tl.constexpr, R: tl.constexpr):
    """The words of a tile of rows: those seen whole first, then those seen partly."""
    tile, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    w = tl.arange(0, W)
    some, whole = tl.zeros([W], tl.int32), tl.full([W], 1, tl.int32)
    for step in range(0, TILE, R):
        row = tile * TILE + step + tl.arange(0, R)
        real = (row < rows)[:, None] & (w < words)[None, :]
        word = tl.load(word_ptr + (batch * rows + row)[:, None] * words + w[None, :], mask=real, other=0)
        some = tl.maximum(some, tl.max((word != 0).to(tl.int32), 0))
        # Rows beyond the last see nothing and keep no tile from being whole.
        whole = tl.minimum(whole, tl.min(((word == -1) | (row >= rows)[:, None]).to(tl.int32), 0))
    real = w < words
    some, whole = tl.where(real, some, 0), tl.where(real, whole, 0)
    first, none = whole * some, tl.where(real, 1 - some, 0)
    partly = some - first
    firsts, seen = tl.sum(first, 0), tl.sum(some, 0)
    place = tl.where(first == 1, tl.cumsum(first, 0), firsts + tl.cumsum(partly, 0))
    place = tl.where(some == 1, place, seen + tl.cumsum(none, 0)) - 1
    listed = batch * tl.num_programs(0) + tile
    tl.store(order_ptr + listed * words + place, w, mask=real)
    tl.store(whole_ptr + listed, firsts)
    tl.store(some_ptr + listed, seen)


def lists(word_Bnw: Tensor, tile: int) -> tuple[Tensor, Tensor, Tensor]:
    """`tiled.lists`."""
    rows, queries, count = word_Bnw.shape
    order = torch.empty(rows, -(-queries // tile), count, dtype=torch.int32, device=word_Bnw.device)
    whole, some = (order.new_empty(order.shape[:2]) for _ in range(2))
    _lists[(order.shape[1], rows)](
        word_Bnw, order, whole, some, queries, count, TILE=tile, W=triton.next_power_of_2(count), R=_TURN, num_warps=4
    )
    return order, whole, some

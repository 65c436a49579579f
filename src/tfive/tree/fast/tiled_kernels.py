"""Triton kernels for attention under any mask, tile by tile: tiles nobody sees are skipped, those that are seen whole
are computed without looking at the mask. Forward and backward; scores are never written to memory.

Which keys a query sees is one bit each: 64 of them make a word, and a word is what a row of a partly seen tile reads.
`tiled.py` makes the words and the lists of tiles, and says when these kernels are trusted.

Local shape letters: Y query heads, X key/value heads, E head features, n queries, m keys, M and N queries and keys of a
tile.
"""

# mypy: allow-untyped-defs
# (kernel parameters are pointers and compile-time constants, for which there are no Python types)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

Tile = tuple[int, int, int]
"""Rows of a tile (queries, or keys for their own gradients), warps, stages; see `tiled.Tile`."""

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _seen(half_ptr, at, keep, BITS: tl.constexpr):
    """bool `[rows, 64]` from a word a row, the `at`-th each. Words are read as two halves: shifting 64 bits takes
    several instructions for every score."""
    bit = tl.arange(0, BITS)
    low = tl.load(half_ptr + 2 * at, mask=keep, other=0)
    high = tl.load(half_ptr + 2 * at + 1, mask=keep, other=0)
    half = tl.where((bit < 32)[None, :], low[:, None], high[:, None])
    return ((half >> (bit % 32)[None, :]) & 1) != 0


@triton.jit
def _attend_tile(
    q, top, total, sums, key_ptr, value_ptr, key_step, value_step, word_ptr, word_step, tile, row, keep_row, keys,
    factor, E: tl.constexpr, N: tl.constexpr, WHOLE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """One tile of keys added to a running softmax; scores are in powers of two."""
    e, at = tl.arange(0, E), tile * N + tl.arange(0, N)
    place_k = at[None, :].to(tl.int64) * key_step + e[:, None]
    place_v = at[:, None].to(tl.int64) * value_step + e[None, :]
    if WHOLE:
        k, v = tl.load(key_ptr + place_k), tl.load(value_ptr + place_v)
    else:
        k = tl.load(key_ptr + place_k, mask=(at < keys)[None, :], other=0.0)
        v = tl.load(value_ptr + place_v, mask=(at < keys)[:, None], other=0.0)
    score = tl.dot(q, k, input_precision="ieee" if EXACT else "tf32")
    if not WHOLE:
        score = tl.where(_seen(word_ptr, row * word_step + tile, keep_row, N), score, float("-inf"))
    # The factor is above 0, so the largest score is found before it: what is left of a score is one instruction.
    higher = tl.maximum(top, tl.max(score, 1) * factor)
    safe = tl.where(higher == float("-inf"), 0.0, higher)
    fade = tl.exp2(top - safe)
    p = tl.exp2(score * factor - safe[:, None])
    sums = tl.dot(p.to(v.dtype), v, sums * fade[:, None], input_precision="ieee" if EXACT else "tf32")
    return higher, total * fade + tl.sum(p, 1), sums


@triton.jit
def _attend(
    q_ptr, k_ptr, v_ptr, word_ptr, order_ptr, whole_ptr, seen_ptr, out_ptr, mass_ptr,
    q_batch, q_head, q_step, k_batch, k_head, k_step, v_batch, v_head, v_step, queries, keys, words, scale,
    Y: tl.constexpr, F: tl.constexpr, E: tl.constexpr, M: tl.constexpr, N: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    # The last tiles of a row see most; they go first, so that none of them is left for the end.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    batch, head = (tl.program_id(1) // Y).to(tl.int64), tl.program_id(1) % Y
    row, e = tile * M + tl.arange(0, M), tl.arange(0, E)
    keep = row < queries
    q_ptr += batch * q_batch + head * q_head
    q = tl.load(q_ptr + row[:, None].to(tl.int64) * q_step + e[None, :], mask=keep[:, None], other=0.0)
    k_ptr += batch * k_batch + (head // F) * k_head
    v_ptr += batch * v_batch + (head // F) * v_head
    word_ptr += 2 * batch * queries * words
    listed = batch * tl.num_programs(0) + tile
    order_ptr += listed * words
    whole, seen = tl.load(whole_ptr + listed), tl.load(seen_ptr + listed)
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    sums = tl.zeros([M, E], tl.float32)
    factor = scale * LOG2E
    for index in range(whole):
        top, total, sums = _attend_tile(
            q, top, total, sums, k_ptr, v_ptr, k_step, v_step, word_ptr, words, tl.load(order_ptr + index), row, keep,
            keys, factor, E, N, True, EXACT,
        )  # fmt: skip
    for index in range(whole, seen):
        top, total, sums = _attend_tile(
            q, top, total, sums, k_ptr, v_ptr, k_step, v_step, word_ptr, words, tl.load(order_ptr + index), row, keep,
            keys, factor, E, N, False, EXACT,
        )  # fmt: skip
    least = tl.where(total == 0.0, 1.0, total)
    place = ((batch * queries + row) * Y + head) * E
    tl.store(out_ptr + place[:, None] + e[None, :], sums / least[:, None], mask=keep[:, None])
    # Rows that see nothing get a mass no score can reach: their weights are 0 in the backward pass.
    mass = tl.where(total == 0.0, float("inf"), top + tl.log2(least))
    tl.store(mass_ptr + (batch * Y + head) * queries + row, mass, mask=keep)


@triton.jit
def _query_tile(
    q, d, dq, mass, delta, key_ptr, value_ptr, key_step, value_step, word_ptr, word_step, tile, row, keep_row, keys,
    factor, E: tl.constexpr, N: tl.constexpr, WHOLE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """What one tile of keys adds to the gradient of queries."""
    e, at = tl.arange(0, E), tile * N + tl.arange(0, N)
    place_k = at[:, None].to(tl.int64) * key_step + e[None, :]
    place_v = at[None, :].to(tl.int64) * value_step + e[:, None]
    if WHOLE:
        k, v = tl.load(key_ptr + place_k), tl.load(value_ptr + place_v)
    else:
        k = tl.load(key_ptr + place_k, mask=(at < keys)[:, None], other=0.0)
        v = tl.load(value_ptr + place_v, mask=(at < keys)[None, :], other=0.0)
    p = tl.exp2(tl.dot(q, tl.trans(k), input_precision="ieee" if EXACT else "tf32") * factor - mass[:, None])
    if not WHOLE:
        p = tl.where(_seen(word_ptr, row * word_step + tile, keep_row, N), p, 0.0)
    slope = p * (tl.dot(d, v, input_precision="ieee" if EXACT else "tf32") - delta[:, None])
    return tl.dot(slope.to(k.dtype), k, dq, input_precision="ieee" if EXACT else "tf32")


@triton.jit
def _query_slope(
    q_ptr, k_ptr, v_ptr, word_ptr, order_ptr, whole_ptr, seen_ptr, out_ptr, mass_ptr, d_ptr, delta_ptr, dq_ptr,
    q_batch, q_head, q_step, k_batch, k_head, k_step, v_batch, v_head, v_step, d_batch, d_head, d_step,
    queries, keys, words, scale,
    Y: tl.constexpr, F: tl.constexpr, E: tl.constexpr, M: tl.constexpr, N: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    batch, head = (tl.program_id(1) // Y).to(tl.int64), tl.program_id(1) % Y
    row, e = tile * M + tl.arange(0, M), tl.arange(0, E)
    keep = row < queries
    far = row[:, None].to(tl.int64)
    q_ptr += batch * q_batch + head * q_head
    q = tl.load(q_ptr + far * q_step + e[None, :], mask=keep[:, None], other=0.0)
    d_ptr += batch * d_batch + head * d_head
    d = tl.load(d_ptr + far * d_step + e[None, :], mask=keep[:, None], other=0.0)
    out_ptr += ((batch * queries) * Y + head) * E
    out = tl.load(out_ptr + far * (Y * E) + e[None, :], mask=keep[:, None], other=0.0)
    delta = tl.sum(out.to(tl.float32) * d.to(tl.float32), 1)
    own = (batch * Y + head) * queries + row
    tl.store(delta_ptr + own, delta, mask=keep)
    mass = tl.load(mass_ptr + own, mask=keep, other=float("inf"))
    k_ptr += batch * k_batch + (head // F) * k_head
    v_ptr += batch * v_batch + (head // F) * v_head
    word_ptr += 2 * batch * queries * words
    listed = batch * tl.num_programs(0) + tile
    order_ptr += listed * words
    whole, seen = tl.load(whole_ptr + listed), tl.load(seen_ptr + listed)
    dq = tl.zeros([M, E], tl.float32)
    factor = scale * LOG2E
    for index in range(whole):
        dq = _query_tile(
            q, d, dq, mass, delta, k_ptr, v_ptr, k_step, v_step, word_ptr, words, tl.load(order_ptr + index), row,
            keep, keys, factor, E, N, True, EXACT,
        )  # fmt: skip
    for index in range(whole, seen):
        dq = _query_tile(
            q, d, dq, mass, delta, k_ptr, v_ptr, k_step, v_step, word_ptr, words, tl.load(order_ptr + index), row,
            keep, keys, factor, E, N, False, EXACT,
        )  # fmt: skip
    dq_ptr += (batch * Y + head) * queries * E
    tl.store(dq_ptr + far * E + e[None, :], dq * scale, mask=keep[:, None])


@triton.jit
def _key_tile(
    k, v, dk, dv, q_ptr, d_ptr, q_step, d_step, mass_ptr, delta_ptr, word_ptr, word_step, tile, column, keep_column,
    queries, factor, E: tl.constexpr, M: tl.constexpr, WHOLE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """What one tile of queries adds to the gradients of keys and values; tiles are transposed, keys down."""
    e, at = tl.arange(0, E), tile * M + tl.arange(0, M)
    keep = at < queries
    far = at[:, None].to(tl.int64)
    if WHOLE:
        q, d = tl.load(q_ptr + far * q_step + e[None, :]), tl.load(d_ptr + far * d_step + e[None, :])
        mass, delta = tl.load(mass_ptr + at), tl.load(delta_ptr + at)
    else:
        q = tl.load(q_ptr + far * q_step + e[None, :], mask=keep[:, None], other=0.0)
        d = tl.load(d_ptr + far * d_step + e[None, :], mask=keep[:, None], other=0.0)
        mass = tl.load(mass_ptr + at, mask=keep, other=float("inf"))
        delta = tl.load(delta_ptr + at, mask=keep, other=0.0)
    p = tl.exp2(tl.dot(k, tl.trans(q), input_precision="ieee" if EXACT else "tf32") * factor - mass[None, :])
    if not WHOLE:
        p = tl.where(_seen(word_ptr, column * word_step + tile, keep_column, M), p, 0.0)
    dv = tl.dot(p.to(d.dtype), d, dv, input_precision="ieee" if EXACT else "tf32")
    slope = p * (tl.dot(v, tl.trans(d), input_precision="ieee" if EXACT else "tf32") - delta[None, :])
    dk = tl.dot(slope.to(q.dtype), q, dk, input_precision="ieee" if EXACT else "tf32")
    return dk, dv


@triton.jit
def _key_slope(
    q_ptr, k_ptr, v_ptr, word_ptr, order_ptr, whole_ptr, seen_ptr, mass_ptr, d_ptr, delta_ptr, dk_ptr, dv_ptr,
    q_batch, q_head, q_step, k_batch, k_head, k_step, v_batch, v_head, v_step, d_batch, d_head, d_step,
    queries, keys, words, scale,
    X: tl.constexpr, F: tl.constexpr, E: tl.constexpr, M: tl.constexpr, N: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    # The first keys are seen by most queries; they go first.
    tile = tl.program_id(0)
    batch, x = (tl.program_id(1) // X).to(tl.int64), tl.program_id(1) % X
    column, e = tile * N + tl.arange(0, N), tl.arange(0, E)
    keep = column < keys
    far = column[:, None].to(tl.int64)
    k = tl.load(k_ptr + batch * k_batch + x * k_head + far * k_step + e[None, :], mask=keep[:, None], other=0.0)
    v = tl.load(v_ptr + batch * v_batch + x * v_head + far * v_step + e[None, :], mask=keep[:, None], other=0.0)
    word_ptr += 2 * batch * keys * words
    listed = batch * tl.num_programs(0) + tile
    order_ptr += listed * words
    whole, seen = tl.load(whole_ptr + listed), tl.load(seen_ptr + listed)
    dk = tl.zeros([N, E], tl.float32)
    dv = tl.zeros([N, E], tl.float32)
    factor = scale * LOG2E
    for f in range(F):
        head = x * F + f
        q_own = q_ptr + batch * q_batch + head * q_head
        d_own = d_ptr + batch * d_batch + head * d_head
        own = (batch * (X * F) + head) * queries
        for index in range(whole):
            dk, dv = _key_tile(
                k, v, dk, dv, q_own, d_own, q_step, d_step, mass_ptr + own, delta_ptr + own, word_ptr, words,
                tl.load(order_ptr + index), column, keep, queries, factor, E, M, True, EXACT,
            )  # fmt: skip
        for index in range(whole, seen):
            dk, dv = _key_tile(
                k, v, dk, dv, q_own, d_own, q_step, d_step, mass_ptr + own, delta_ptr + own, word_ptr, words,
                tl.load(order_ptr + index), column, keep, queries, factor, E, M, False, EXACT,
            )  # fmt: skip
    place = (batch * X + x) * keys * E + far * E + e[None, :]
    tl.store(dk_ptr + place, dk * scale, mask=keep[:, None])
    tl.store(dv_ptr + place, dv, mask=keep[:, None])


def _halves(word: Tensor) -> Tensor:
    return word.view(torch.int32)


def _strides(*tensors: Tensor) -> list[int]:
    return [step for tensor in tensors for step in tensor.stride()[:3]]


def attend(
    query: Tensor, key: Tensor, value: Tensor, word: Tensor, lists: tuple[Tensor, ...], scale: float, tile: Tile
) -> tuple[Tensor, Tensor]:
    """Attention output `[B, n, Y, E]` and the base-2 logarithm of each softmax's sum, `[B, Y, n]`; see `tiled.py`."""
    (batch, heads, queries, features), keys = query.shape, key.shape[2]
    out = torch.empty(batch, queries, heads, features, dtype=query.dtype, device=query.device)
    mass = torch.empty(batch, heads, queries, dtype=torch.float32, device=query.device)
    _attend[(lists[1].shape[1], batch * heads)](
        query, key, value, _halves(word), *lists, out, mass, *_strides(query, key, value), queries, keys,
        word.shape[2], scale, Y=heads, F=heads // key.shape[1], E=features, M=tile[0], N=64,
        EXACT=query.dtype == torch.float32, num_warps=tile[1], num_stages=tile[2],
    )  # fmt: skip
    return out, mass


def query_slope(
    three: tuple[Tensor, Tensor, Tensor], saved: tuple[Tensor, Tensor], slope: Tensor, word: Tensor,
    lists: tuple[Tensor, ...], scale: float, tile: Tile,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradient of the queries, and Σ output · gradient of each row, which that of the keys needs."""
    query, key, value = three
    (batch, heads, queries, features), keys = query.shape, key.shape[2]
    found = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    delta = torch.empty_like(saved[1])
    _query_slope[(lists[1].shape[1], batch * heads)](
        query, key, value, _halves(word), *lists, *saved, slope, delta, found, *_strides(query, key, value, slope),
        queries, keys, word.shape[2], scale, Y=heads, F=heads // key.shape[1], E=features, M=tile[0], N=64,
        EXACT=query.dtype == torch.float32, num_warps=tile[1], num_stages=tile[2],
    )  # fmt: skip
    return found, delta


def key_slope(
    three: tuple[Tensor, Tensor, Tensor], mass: Tensor, delta: Tensor, slope: Tensor, word: Tensor,
    lists: tuple[Tensor, ...], scale: float, tile: Tile,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of keys and values."""
    query, key, value = three
    (batch, heads, _, features), fold = key.shape, query.shape[1] // key.shape[1]
    of_key, of_value = (torch.empty(key.shape, dtype=key.dtype, device=key.device) for _ in range(2))
    _key_slope[(lists[1].shape[1], batch * heads)](
        query, key, value, _halves(word), *lists, mass, slope, delta, of_key, of_value,
        *_strides(query, key, value, slope), query.shape[2], key.shape[2], word.shape[2], scale, X=heads, F=fold,
        E=features, M=64, N=tile[0], EXACT=query.dtype == torch.float32, num_warps=tile[1], num_stages=tile[2],
    )  # fmt: skip
    return of_key, of_value

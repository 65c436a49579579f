"""Triton kernels for what a model does between its matrix products; only this file imports Triton.

Each computes in float32 (the draw in float64) and rounds once, at its end. `fused.py` holds the same functions in plain
PyTorch, says when these are trusted, and is how the rest of the engine calls them.

Local shape letters: Y query heads, X key/value heads, E head features, F = Y / X the fold, m slots, n nodes, w entries
of a vocabulary block, b blocks.
"""

# mypy: allow-untyped-defs
# (kernel parameters are pointers and compile-time constants, for which there are no Python types)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 512
"""Vocabulary entries per block of the two-level draw."""


@triton.jit
def _turned(
    x_ptr, head_H, keep_HE, head_stride, weight_ptr, cos_ptr, sin_ptr, epsilon,
    E: tl.constexpr, TURN: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Heads of one node, normed and rotated, float32 `[H, E]`. Features from TURN on are not rotated."""
    e = tl.arange(0, E)
    half: tl.constexpr = TURN // 2
    other = tl.where(e < half, e + half, tl.where(e < TURN, e - half, e))
    x = tl.load(x_ptr + head_H[:, None] * head_stride + e[None, :], mask=keep_HE, other=0.0).to(tl.float32)
    y = tl.load(x_ptr + head_H[:, None] * head_stride + other[None, :], mask=keep_HE, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / E + epsilon)[:, None]
        x = x * scale * tl.load(weight_ptr + e).to(tl.float32)[None, :]
        y = y * scale * tl.load(weight_ptr + other).to(tl.float32)[None, :]
    cos = tl.load(cos_ptr + e, mask=e < TURN, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + e, mask=e < TURN, other=0.0).to(tl.float32)
    return x * cos[None, :] + y * tl.where(e < half, -sin, sin)[None, :]


@triton.jit
def _rotate(
    q_ptr, k_ptr, v_ptr, q_row, k_row, v_row, q_head, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, slot_ptr,
    q_out_ptr, key_ptr, value_ptr, key_batch, key_head, nodes, epsilon,
    Y: tl.constexpr, X: tl.constexpr, YP: tl.constexpr, XP: tl.constexpr, E: tl.constexpr, TURN: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, E)
    cos_ptr += row * TURN
    sin_ptr += row * TURN
    if tl.program_id(1) == 0:
        y = tl.arange(0, YP)
        kept = (y < Y)[:, None] & (e >= 0)[None, :]
        q = _turned(q_ptr + row * q_row, y, kept, q_head, q_weight_ptr, cos_ptr, sin_ptr, epsilon, E, TURN, NORM)
        tl.store(q_out_ptr + row * (Y * E) + y[:, None] * E + e[None, :], q, mask=kept)
    else:
        x = tl.arange(0, XP)
        keep = (x < X)[:, None] & (e >= 0)[None, :]
        place = (row // nodes) * key_batch + x[:, None] * key_head + tl.load(slot_ptr + row % nodes) * E + e[None, :]
        if tl.program_id(1) == 1:
            k = _turned(k_ptr + row * k_row, x, keep, E, k_weight_ptr, cos_ptr, sin_ptr, epsilon, E, TURN, NORM)
            tl.store(key_ptr + place, k, mask=keep)
        else:
            v = tl.load(v_ptr + row * v_row + x[:, None] * E + e[None, :], mask=keep)
            tl.store(value_ptr + place, v, mask=keep)


def rotate(
    query_xq: Tensor,
    key_xk: Tensor,
    value_xk: Tensor,
    norms: tuple[Tensor, Tensor, float] | None,
    cos_xt: Tensor,
    sin_xt: Tensor,
    gated: bool,
    slot_n: Tensor,
    query_xYE: Tensor,
    key_BXmE: Tensor,
    value_BXmE: Tensor,
) -> None:
    """See `fused.TorchOps.rotate`."""
    (rows, query_heads, features), key_heads = query_xYE.shape, key_BXmE.shape[1]
    query_weight, key_weight, epsilon = norms or (query_xq, key_xk, 0.0)
    _rotate[(rows, 3)](
        query_xq, key_xk, value_xk, query_xq.stride(0), key_xk.stride(0), value_xk.stride(0),
        features * (2 if gated else 1), query_weight, key_weight, cos_xt, sin_xt, slot_n, query_xYE, key_BXmE,
        value_BXmE, key_BXmE.stride(0), key_BXmE.stride(1), len(slot_n), epsilon,
        Y=query_heads, X=key_heads, YP=triton.next_power_of_2(query_heads), XP=triton.next_power_of_2(key_heads),
        E=features, TURN=cos_xt.shape[-1], NORM=norms is not None, num_warps=4,
    )  # fmt: skip


@triton.jit
def _gate(gate_ptr, up_ptr, out_ptr, gate_row, up_row, width, W: tl.constexpr):
    row, at = tl.program_id(0), tl.program_id(1) * W + tl.arange(0, W)
    keep = at < width
    gate = tl.load(gate_ptr + row.to(tl.int64) * gate_row + at, mask=keep, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row.to(tl.int64) * up_row + at, mask=keep, other=0.0).to(tl.float32)
    tl.store(out_ptr + row.to(tl.int64) * width + at, gate / (1.0 + tl.exp(-gate)) * up, mask=keep)


def gate(gate_xI: Tensor, up_xI: Tensor) -> Tensor:
    """See `fused.TorchOps.gate`."""
    rows, width = gate_xI.shape
    out_xI = torch.empty(rows, width, dtype=gate_xI.dtype, device=gate_xI.device)
    _gate[(rows, triton.cdiv(width, 1024))](
        gate_xI, up_xI, out_xI, gate_xI.stride(0), up_xI.stride(0), width, W=1024, num_warps=4
    )
    return out_xI


@triton.jit
def _seen_keys(
    q, top, total, sums, key_ptr, value_ptr, slot_w, real_w, seen_rw, factor, E: tl.constexpr, EXACT: tl.constexpr
):
    """One tile of keys taken into the running softmax of a tile of queries."""
    e = tl.arange(0, E)
    at = slot_w[:, None] * E + e[None, :]
    k = tl.load(key_ptr + at, mask=real_w[:, None], other=0.0)
    v = tl.load(value_ptr + at, mask=real_w[:, None], other=0.0)
    score = tl.dot(q, tl.trans(k), input_precision="ieee" if EXACT else "tf32") * factor
    score = tl.where(seen_rw, score, float("-inf"))
    higher = tl.maximum(top, tl.max(score, 1))
    safe = tl.where(higher == float("-inf"), 0.0, higher)
    fade = tl.exp2(top - safe)
    p = tl.exp2(score - safe[:, None])
    sums = sums * fade[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee" if EXACT else "tf32")
    return higher, total * fade + tl.sum(p, 1), sums


@triton.jit
def _attend(
    q_ptr, key_ptr, value_ptr, first_ptr, stop_ptr, place_ptr, gate_ptr, out_ptr, key_batch, key_head, gate_row,
    trunk, branches, scale,
    X: tl.constexpr, F: tl.constexpr, E: tl.constexpr, A: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    W: tl.constexpr, GATED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    batch, x = tl.program_id(0) // X, tl.program_id(0) % X
    row, e, w = tl.arange(0, ROWS), tl.arange(0, E), tl.arange(0, W)
    branch = tl.program_id(1) * TILE + row // F
    real = (row < TILE * F) & (branch < branches)
    node = batch * branches + branch
    head = x * F + row % F
    at = (node * (X * F) + head)[:, None].to(tl.int64) * E + e[None, :]
    q = tl.load(q_ptr + at, mask=real[:, None], other=0.0)
    first = tl.load(first_ptr + node, mask=real, other=trunk)
    stop = tl.load(stop_ptr + node, mask=real, other=0)
    place = tl.load(place_ptr)
    key_ptr += batch.to(tl.int64) * key_batch + x * key_head
    value_ptr += batch.to(tl.int64) * key_batch + x * key_head
    factor = scale * 1.4426950408889634
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, E], tl.float32)
    end = tl.max(stop, 0)
    for start in range(tl.min(first, 0), end, W):
        slot = start + w
        seen = (slot[None, :] >= first[:, None]) & (slot[None, :] < stop[:, None])
        top, total, sums = _seen_keys(q, top, total, sums, key_ptr, value_ptr, slot, slot < end, seen, factor, E, EXACT)
    own = tl.minimum(TILE, branches - tl.program_id(1) * TILE) * A
    for start in range(0, own, W):
        mine = start + w
        there = (mine < own) & (mine % A <= place)
        seen = there[None, :] & ((tl.program_id(1) * TILE + mine // A)[None, :] == branch[:, None])
        slot = trunk + tl.program_id(1) * (TILE * A) + mine
        top, total, sums = _seen_keys(q, top, total, sums, key_ptr, value_ptr, slot, there, seen, factor, E, EXACT)
    out = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    if GATED:
        logit = tl.load(
            gate_ptr + node[:, None].to(tl.int64) * gate_row + (head * (2 * E) + E)[:, None] + e[None, :],
            mask=real[:, None],
            other=0.0,
        ).to(tl.float32)
        out = out / (1.0 + tl.exp(-logit))
    tl.store(out_ptr + at, out, mask=real[:, None])


def attend(
    query_BRYE: Tensor,
    key_BXmE: Tensor,
    value_BXmE: Tensor,
    first_BR: Tensor,
    stop_BR: Tensor,
    place: Tensor,
    trunk: int,
    scale: float,
    gate_xq: Tensor | None,
    *,
    tile_rows: int = 64,
    keys: int = 64,
    warps: int = 4,
    stages: int = 3,
) -> Tensor:
    """See `fused.TorchOps.attend`. All branches of a text that fit share one reading of its keys."""
    rows, branches, query_heads, features = query_BRYE.shape
    heads = key_BXmE.shape[1]
    fold, own = query_heads // heads, (key_BXmE.shape[2] - trunk) // branches
    wide = features * query_BRYE.element_size() > 256
    most = max(tile_rows // 2 if wide else tile_rows, triton.next_power_of_2(fold))
    size = max(16, min(most, triton.next_power_of_2(branches * fold)))
    tile = size // fold
    out_BRYE = torch.empty_like(query_BRYE)
    gate = query_BRYE if gate_xq is None else gate_xq
    _attend[(rows * heads, triton.cdiv(branches, tile))](
        query_BRYE, key_BXmE, value_BXmE, first_BR, stop_BR, place, gate, out_BRYE, key_BXmE.stride(0),
        key_BXmE.stride(1), gate.stride(0), trunk, branches, scale,
        X=heads, F=fold, E=features, A=own, ROWS=size, TILE=tile, W=keys // 2 if wide else keys,
        GATED=gate_xq is not None, EXACT=query_BRYE.dtype == torch.float32,
        num_warps=warps, num_stages=2 if wide else stages,
    )  # fmt: skip
    return out_BRYE


@triton.jit
def _block_sums(logits_ptr, top_ptr, sum_ptr, vocabulary, blocks, B: tl.constexpr, W: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * B + tl.arange(0, B)
    at = block[:, None] * W + tl.arange(0, W)[None, :]
    logit = tl.load(logits_ptr + row * vocabulary + at, mask=at < vocabulary, other=float("-inf"))
    top = tl.max(logit, 1)
    weight = tl.exp(logit - tl.where(top == float("-inf"), 0.0, top)[:, None])
    tl.store(top_ptr + row * blocks + block, top, mask=block < blocks)
    tl.store(sum_ptr + row * blocks + block, tl.sum(weight, 1), mask=block < blocks)


def block_sums(logits_xV: Tensor) -> tuple[Tensor, Tensor]:
    """See `fused.TorchOps.block_sums`."""
    rows, vocabulary = logits_xV.shape
    blocks = triton.cdiv(vocabulary, BLOCK)
    top_xb, sum_xb = logits_xV.new_empty(rows, blocks), logits_xV.new_empty(rows, blocks)
    _block_sums[(rows, triton.cdiv(blocks, 8))](
        logits_xV, top_xb, sum_xb, vocabulary, blocks, B=8, W=BLOCK, num_warps=4
    )
    return top_xb, sum_xb


@triton.jit
def _passed(weight_w, goal, w, least):
    """Where the running sum of the weights passes `goal`, at most the last entry that can be drawn."""
    passed = tl.sum((tl.cumsum(weight_w, 0) <= goal).to(tl.int32), 0)
    return tl.minimum(passed, tl.max(tl.where(weight_w > 0, w, least), 0))


@triton.jit
def _draw(
    logits_ptr, top_ptr, sum_ptr, uniform_ptr, token_ptr, log_q_ptr, vocabulary, blocks,
    NB: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    b, w = tl.arange(0, NB), tl.arange(0, W)
    top = tl.load(top_ptr + row * blocks + b, mask=b < blocks, other=float("-inf"))
    peak = tl.max(top, 0)
    sums = tl.load(sum_ptr + row * blocks + b, mask=b < blocks, other=0.0) * tl.exp(top - peak)
    wide = sums.to(tl.float64)
    everything = tl.sum(wide, 0)
    goal = tl.load(uniform_ptr + row) * everything
    block = _passed(wide, goal, b, 0)
    rest = goal - tl.sum(tl.where(b < block, wide, 0.0), 0)
    at = block * W + w
    logit = tl.load(logits_ptr + row * vocabulary + at, mask=at < vocabulary, other=float("-inf"))
    place = _passed(tl.exp(logit - peak).to(tl.float64), rest, w, 0)
    chosen = tl.sum(tl.where(w == place, logit, 0.0), 0)
    tl.store(token_ptr + row, (block * W + place).to(tl.int64))
    tl.store(log_q_ptr + row, chosen - peak - tl.log(everything.to(tl.float32)))


def draw(logits_xV: Tensor, uniform_x: Tensor) -> tuple[Tensor, Tensor]:
    """See `law.draw`."""
    top_xb, sum_xb = block_sums(logits_xV)
    rows, blocks = top_xb.shape
    token_x = torch.empty(rows, dtype=torch.int64, device=logits_xV.device)
    log_q_x = logits_xV.new_empty(rows)
    _draw[(rows,)](
        logits_xV, top_xb, sum_xb, uniform_x, token_x, log_q_x, logits_xV.shape[1], blocks,
        NB=triton.next_power_of_2(blocks), W=BLOCK, num_warps=4,
    )  # fmt: skip
    return token_x, log_q_x

"""Triton kernels for what a model does between its matrix products.

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

from tfive.tree.fast.listed import Listed

BLOCK = 512
"""Vocabulary entries per block of the two-level draw."""
_PROGRAMS, _KEYS, _WARPS, _STAGES = 128, 64, 4, 4
"""Keys are split until there are about so many programs, and read so many at a time; found by trial on an H200."""
_ROTATE_WARPS, _GATE_WARPS, _MERGE_WARPS = 4, 4, 8


@triton.jit
def _divisor(rows_ptr, width, epsilon, D: tl.constexpr):
    """One over the root mean square of a row; 1 for D = 0."""
    factor = 1.0
    if D > 0:
        d = tl.arange(0, D)
        x = tl.load(rows_ptr + d, mask=d < width, other=0.0).to(tl.float32)
        factor = tl.rsqrt(tl.sum(x * x, 0) / width + epsilon)
    return factor


@triton.jit
def _turned(
    x_ptr, head_H, keep_HE, head_stride, factor, weight_ptr, cos_ptr, sin_ptr, epsilon,
    E: tl.constexpr, TURN: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Heads of one node times `factor`, normed and rotated, float32 `[H, E]`; features from TURN on stay unrotated."""
    e = tl.arange(0, E)
    half: tl.constexpr = TURN // 2
    other = tl.where(e < half, e + half, tl.where(e < TURN, e - half, e))
    x = tl.load(x_ptr + head_H[:, None] * head_stride + e[None, :], mask=keep_HE, other=0.0).to(tl.float32)
    y = tl.load(x_ptr + head_H[:, None] * head_stride + other[None, :], mask=keep_HE, other=0.0).to(tl.float32)
    x, y = x * factor, y * factor
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
    q_out_ptr, q_out_batch, q_out_node, q_out_head, key_ptr, value_ptr, key_batch, key_head, nodes, epsilon,
    rows_ptr, width, rows_epsilon, angle_row, D: tl.constexpr,
    Y: tl.constexpr, X: tl.constexpr, YP: tl.constexpr, XP: tl.constexpr, E: tl.constexpr, TURN: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, E)
    cos_ptr += row * angle_row
    sin_ptr += row * angle_row
    factor = _divisor(rows_ptr + row * width, width, rows_epsilon, D)
    if tl.program_id(1) == 0:
        y = tl.arange(0, YP)
        kept = (y < Y)[:, None] & (e >= 0)[None, :]
        q = _turned(
            q_ptr + row * q_row, y, kept, q_head, factor, q_weight_ptr, cos_ptr, sin_ptr, epsilon, E, TURN, NORM
        )
        place_q = (row // nodes) * q_out_batch + (row % nodes) * q_out_node + y[:, None] * q_out_head + e[None, :]
        tl.store(q_out_ptr + place_q, q, mask=kept)
    else:
        x = tl.arange(0, XP).to(tl.int64)
        keep = (x < X)[:, None] & (e >= 0)[None, :]
        place = (row // nodes) * key_batch + x[:, None] * key_head + tl.load(slot_ptr + row % nodes) * E + e[None, :]
        if tl.program_id(1) == 1:
            k = _turned(k_ptr + row * k_row, x, keep, E, factor, k_weight_ptr, cos_ptr, sin_ptr, epsilon, E, TURN, NORM)
            tl.store(key_ptr + place, k, mask=keep)
        else:
            v = tl.load(v_ptr + row * v_row + x[:, None] * E + e[None, :], mask=keep)
            tl.store(value_ptr + place, v.to(tl.float32) * factor, mask=keep)


def rotate(
    products: tuple[Tensor, ...],
    division: tuple[Tensor, float] | None,
    norms: tuple[Tensor, Tensor, float] | None,
    angles: tuple[Tensor, Tensor],
    gated: bool,
    slot_n: Tensor,
    query_BnYE: Tensor,
    key_BXmE: Tensor,
    value_BXmE: Tensor,
) -> None:
    """See `fused.TorchOps.rotate`."""
    (query_heads, features), key_heads = query_BnYE.shape[2:], key_BXmE.shape[1]
    query, key, value = products
    query_weight, key_weight, epsilon = norms or (query, key, 0.0)
    if angles[0].stride() != angles[1].stride() or angles[0].stride(1) != 1:
        angles = angles[0].contiguous(), angles[1].contiguous()
    rows_xD, rows_epsilon = division or (query, 0.0)
    _rotate[(len(query), 3)](
        query, key, value, query.stride(0), key.stride(0), value.stride(0), features * (2 if gated else 1),
        query_weight, key_weight, *angles, slot_n, query_BnYE, *query_BnYE.stride()[:3], key_BXmE, value_BXmE,
        *key_BXmE.stride()[:2], len(slot_n), epsilon, rows_xD, rows_xD.shape[1], rows_epsilon,
        angles[0].stride(0), D=_padded(division),
        Y=query_heads, X=key_heads, YP=triton.next_power_of_2(query_heads), XP=triton.next_power_of_2(key_heads),
        E=features, TURN=angles[0].shape[-1], NORM=norms is not None, num_warps=_ROTATE_WARPS,
    )  # fmt: skip


def _padded(division: tuple[Tensor, float] | None) -> int:
    return 0 if division is None else triton.next_power_of_2(division[0].shape[1])


@triton.jit
def _gate(
    gate_ptr, up_ptr, out_ptr, gate_row, up_row, inner, rows_ptr, width, rows_epsilon, D: tl.constexpr, W: tl.constexpr
):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * W + tl.arange(0, W)
    factor = _divisor(rows_ptr + row * width, width, rows_epsilon, D)
    keep = at < inner
    gate = tl.load(gate_ptr + row * gate_row + at, mask=keep, other=0.0).to(tl.float32) * factor
    up = tl.load(up_ptr + row * up_row + at, mask=keep, other=0.0).to(tl.float32) * factor
    tl.store(out_ptr + row * inner + at, gate / (1.0 + tl.exp(-gate)) * up, mask=keep)


def gate(gate_xI: Tensor, up_xI: Tensor, division: tuple[Tensor, float] | None) -> Tensor:
    """See `fused.TorchOps.gate`."""
    rows, inner = gate_xI.shape
    out_xI = torch.empty(rows, inner, dtype=gate_xI.dtype, device=gate_xI.device)
    rows_xD, epsilon = division or (gate_xI, 0.0)
    _gate[(rows, triton.cdiv(inner, 1024))](
        gate_xI, up_xI, out_xI, gate_xI.stride(0), up_xI.stride(0), inner, rows_xD, rows_xD.shape[1], epsilon,
        D=_padded(division), W=1024, num_warps=_GATE_WARPS,
    )  # fmt: skip
    return out_xI


@triton.jit
def _fold(weight_ptr, factor_ptr, out_ptr, rows, width, out_row, R: tl.constexpr, W: tl.constexpr):
    row = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)[:, None]
    at = (tl.program_id(1) * W + tl.arange(0, W))[None, :]
    keep = (row < rows) & (at < width)
    factor = tl.load(factor_ptr + at, mask=at < width, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + row * width + at, mask=keep, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * out_row + at, weight * factor, mask=keep)


def fold(weight_oD: Tensor, factor_D: Tensor, out_oD: Tensor) -> None:
    """See `fused.TorchOps.fold`; the matrix is contiguous, and so is each row of `out_oD`."""
    rows, width = weight_oD.shape
    size = min(2048, triton.next_power_of_2(width))
    _fold[(triton.cdiv(rows, 8), triton.cdiv(width, size))](
        weight_oD.contiguous(), factor_D, out_oD, rows, width, out_oD.stride(0), R=8, W=size, num_warps=8
    )


@triton.jit
def _attend(
    q_ptr, key_ptr, value_ptr, first_ptr, stop_ptr, place_ptr, branch_ptr, begin_ptr, count_ptr, part_ptr, mass_ptr,
    key_batch, key_head, trunk, slots, branches, nodes, scale,
    X: tl.constexpr, F: tl.constexpr, E: tl.constexpr, A: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    W: tl.constexpr, SPLITS: tl.constexpr, EXACT: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """A tile of branches of one text and key head against one share of the keys they may see.

    Keys are counted in steps of W: those of the trunk stretch the branches see, then those of the branches themselves,
    all of them in one stretch or, of listed branches, one branch after the other up to the place.
    """
    batch, x = tl.program_id(0) // X, tl.program_id(0) % X
    base = tl.program_id(1) * TILE
    row, e, w = tl.arange(0, ROWS), tl.arange(0, E), tl.arange(0, W)
    turn = row // F
    count, begin_row = branches, batch * branches
    if LISTED:
        count, begin_row = tl.load(count_ptr + batch), tl.load(begin_ptr + batch)
    real = (row < TILE * F) & (base + turn < count)
    branch = base + turn
    if LISTED:
        branch = tl.load(branch_ptr + batch * branches + branch, mask=real, other=0)
    head = (begin_row + base + turn) * (X * F) + x * F + row % F
    q = tl.load(q_ptr + head[:, None].to(tl.int64) * E + e[None, :], mask=real[:, None], other=0.0)
    # 64-bit arithmetic on tiles of addresses would cost more than reading the keys.
    first = tl.load(first_ptr + batch * branches + branch, mask=real, other=trunk).to(tl.int32)
    stop = tl.load(stop_ptr + batch * branches + branch, mask=real, other=0).to(tl.int32)
    place = tl.load(place_ptr).to(tl.int32)
    key_ptr += batch.to(tl.int64) * key_batch + x.to(tl.int64) * key_head
    value_ptr += batch.to(tl.int64) * key_batch + x.to(tl.int64) * key_head
    start, end = tl.min(first, 0), tl.max(stop, 0)
    shared = tl.maximum(tl.cdiv(end - start, W), 0)
    asked = tl.maximum(tl.minimum(TILE, count - base), 0)
    if LISTED:
        per = tl.cdiv(place + 1, W)
        steps = shared + asked * per
    else:
        per = 1
        steps = shared + tl.cdiv(asked * A, W)
    each = tl.cdiv(steps, SPLITS)
    begin = tl.program_id(2) * each
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, E], tl.float32)
    for step in range(begin, tl.minimum(begin + each, steps)):
        mine = step >= shared
        # Past its end a stretch reads some other slot, which is masked.
        if LISTED:
            whose = tl.where(mine, (step - shared) // per, 0)
            at = tl.where(mine, (step - shared) % per * W, start + step * W) + w
            owner = tl.load(branch_ptr + batch * branches + base + whose, mask=mine, other=0)
            slot = tl.minimum(tl.where(mine, trunk + owner * A, 0) + at, slots - 1)[:, None] * E + e[None, :]
            lower = tl.where(mine, 0, first)
            upper = tl.where(mine, tl.where(turn == whose, place + 1, 0), stop)
        else:
            at = tl.where(mine, (step - shared) * W, start + step * W) + w
            slot = tl.minimum(tl.where(mine, trunk + base * A, 0) + at, slots - 1)[:, None] * E + e[None, :]
            lower = tl.where(mine, turn * A, first)
            upper = tl.where(mine, turn * A + place + 1, stop)
        k = tl.load(key_ptr + slot)
        v = tl.load(value_ptr + slot)
        seen = (at[None, :] >= lower[:, None]) & (at[None, :] < upper[:, None])
        score = tl.dot(q, tl.trans(k), input_precision="ieee" if EXACT else "tf32") * (scale * 1.4426950408889634)
        score = tl.where(seen, score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        fade = tl.exp2(top - safe)
        p = tl.exp2(score - safe[:, None])
        sums = sums * fade[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee" if EXACT else "tf32")
        top, total = higher, total * fade + tl.sum(p, 1)
    least = tl.where(total == 0.0, 1.0, total)
    head += tl.program_id(2) * nodes * (X * F)
    tl.store(part_ptr + head[:, None].to(tl.int64) * E + e[None, :], sums / least[:, None], mask=real[:, None])
    tl.store(mass_ptr + head, tl.where(total == 0.0, float("-inf"), top + tl.log2(least)), mask=real)


@triton.jit
def _merge(
    part_ptr, mass_ptr, gate_ptr, out_ptr, gate_row, nodes,
    Y: tl.constexpr, YP: tl.constexpr, E: tl.constexpr, SPLITS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """The shares of one node's attention, weighted by the mass of softmax each has seen."""
    node = tl.program_id(0).to(tl.int64)
    y, e = tl.arange(0, YP), tl.arange(0, E)
    keep = (y < Y)[:, None] & (e >= 0)[None, :]
    top = tl.full([YP], float("-inf"), tl.float32)
    for split in tl.static_range(SPLITS):
        mass = tl.load(mass_ptr + (split * nodes + node) * Y + y, mask=y < Y, other=float("-inf"))
        top = tl.maximum(top, mass)
    safe = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros([YP], tl.float32)
    sums = tl.zeros([YP, E], tl.float32)
    for split in tl.static_range(SPLITS):
        head = (split * nodes + node) * Y + y
        weight = tl.exp2(tl.load(mass_ptr + head, mask=y < Y, other=float("-inf")) - safe)
        part = tl.load(part_ptr + head[:, None] * E + e[None, :], mask=keep, other=0.0)
        total, sums = total + weight, sums + weight[:, None] * part
    out = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    if GATED:
        logit = tl.load(gate_ptr + node * gate_row + y[:, None] * (2 * E) + E + e[None, :], mask=keep, other=0.0)
        out = out / (1.0 + tl.exp(-logit.to(tl.float32)))
    tl.store(out_ptr + (node * Y + y)[:, None] * E + e[None, :], out, mask=keep)


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
    listed: Listed | None = None,
) -> Tensor:
    """See `fused.TorchOps.attend`. All branches of a text that fit in a tile share one reading of its keys."""
    (query_heads, features), (rows, branches) = query_BRYE.shape[2:], first_BR.shape
    heads, nodes = key_BXmE.shape[1], query_BRYE.shape[0] * query_BRYE.shape[1]
    fold, own = query_heads // heads, (key_BXmE.shape[2] - trunk) // branches
    wide = features * query_BRYE.element_size() > 256
    most = max(32 if wide else 64, triton.next_power_of_2(fold))
    size = max(16, min(most, triton.next_power_of_2(branches * fold)))
    tile = size // fold
    grid = (rows * heads, triton.cdiv(branches, tile))
    splits = max(1, min(8, _PROGRAMS // (grid[0] * grid[1])))
    lists = (place, place, place) if listed is None else (listed.branch_BR, listed.begin_B, listed.count_B)
    part = torch.empty(splits, nodes, query_heads, features, dtype=torch.float32, device=place.device)
    mass = part.new_empty(splits, nodes, query_heads)
    _attend[(*grid, splits)](
        query_BRYE, key_BXmE, value_BXmE, first_BR, stop_BR, place, *lists, part, mass, *key_BXmE.stride()[:2],
        trunk, key_BXmE.shape[2], branches, nodes, scale, X=heads, F=fold, E=features, A=own, ROWS=size, TILE=tile,
        W=_KEYS // 2 if wide else _KEYS, SPLITS=splits, EXACT=query_BRYE.dtype == torch.float32,
        LISTED=listed is not None, num_warps=_WARPS, num_stages=2 if wide else _STAGES,
    )  # fmt: skip
    out_BRYE = torch.empty_like(query_BRYE)
    gate = out_BRYE if gate_xq is None else gate_xq
    _merge[(nodes,)](
        part, mass, gate, out_BRYE, gate.stride(0), nodes, Y=query_heads, YP=triton.next_power_of_2(query_heads),
        E=features, SPLITS=splits, GATED=gate_xq is not None, num_warps=_MERGE_WARPS,
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
    """Largest logit of every block of a row, and the sum of e^(logit − largest) over the block, each `[x, b]`."""
    rows, vocabulary = logits_xV.shape
    blocks = triton.cdiv(vocabulary, BLOCK)
    top_xb, sum_xb = logits_xV.new_empty(rows, blocks), logits_xV.new_empty(rows, blocks)
    _block_sums[(rows, triton.cdiv(blocks, 8))](
        logits_xV, top_xb, sum_xb, vocabulary, blocks, B=8, W=BLOCK, num_warps=4
    )
    return top_xb, sum_xb


def log_normaliser(logits_xV: Tensor) -> Tensor:
    """log Σ exp of each row, from one reading of the logits."""
    top_xb, sum_xb = block_sums(logits_xV)
    return (top_xb + sum_xb.log()).logsumexp(-1)


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

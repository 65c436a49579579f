"""Triton kernels for what trained blocks do between their matrix products, with their backward passes.

Each computes in float32 and rounds once, at its end. `training_ops.py` holds the same functions in plain PyTorch, says
when these are trusted, and is how the rest of the engine calls them. Gradients of a norm's weight are summed in two
steps: every program over the rows it walks, then over the programs, always in the same order.

Local shape letters: Y query heads, X key/value heads, E head features, n nodes of a row, x = B·n, I features inside a
feed-forward layer, V vocabulary.
"""

# mypy: allow-untyped-defs
# (kernel parameters are pointers and compile-time constants, for which there are no Python types)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_PROGRAMS = 528
"""How many programs share the rows of a kernel that sums over them: four for each multiprocessor of an H200."""
_ROTATE_WARPS, _SUMMED = 4, 256
_VOCABULARY_WIDTH = 4096
"""Vocabulary entries a program handles at a time."""


def warps(width: int) -> int:
    """Warps for a row of so many features: about eight features a thread."""
    return max(1, min(16, triton.next_power_of_2(width) // 256))


@triton.jit
def _norm(x_ptr, weight_ptr, out_ptr, scale_ptr, room_ptr, width, epsilon, D: tl.constexpr, COPY: tl.constexpr):
    row, d = tl.program_id(0).to(tl.int64), tl.arange(0, D)
    x = tl.load(x_ptr + row * width + d, mask=d < width, other=0.0)
    if COPY:
        tl.store(room_ptr + row * width + d, x, mask=d < width)
    x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / width + epsilon)
    weight = tl.load(weight_ptr + d, mask=d < width, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + d, x * scale * weight, mask=d < width)
    tl.store(scale_ptr + row, scale)


def norm(hidden_xD: Tensor, weight_D: Tensor, epsilon: float, room_xD: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See `training_ops.TorchTraining.norm`."""
    rows, width = hidden_xD.shape
    out_xD = torch.empty_like(hidden_xD)
    scale_x = torch.empty(rows, dtype=torch.float32, device=hidden_xD.device)
    _norm[(rows,)](
        hidden_xD, weight_D, out_xD, scale_x, out_xD if room_xD is None else room_xD, width, epsilon,
        D=triton.next_power_of_2(width), COPY=room_xD is not None, num_warps=warps(width),
    )  # fmt: skip
    return out_xD, scale_x


@triton.jit
def _add_up(part_ptr, out_ptr, programs, width, P: tl.constexpr, C: tl.constexpr):
    at = tl.program_id(0) * C + tl.arange(0, C)
    total = tl.zeros([C], tl.float32)
    for first in range(0, programs, P):
        row = first + tl.arange(0, P)
        keep = (row < programs)[:, None] & (at < width)[None, :]
        total += tl.sum(tl.load(part_ptr + row[:, None] * width + at[None, :], mask=keep, other=0.0), 0)
    tl.store(out_ptr + at, total, mask=at < width)


def _added_up(part_pc: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum over programs, rounded once. PyTorch's sum takes three times as long for so few columns."""
    programs, width = part_pc.shape
    out = torch.empty(width, dtype=dtype, device=part_pc.device)
    _add_up[(triton.cdiv(width, 16),)](part_pc, out, programs, width, P=_SUMMED, C=16, num_warps=8)
    return out


@triton.jit
def _norm_back(
    slope_ptr, through_ptr, x_ptr, weight_ptr, scale_ptr, out_ptr, part_ptr, rows, width, programs,
    D: tl.constexpr, THROUGH: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, D)
    keep = d < width
    weight = tl.load(weight_ptr + d, mask=keep, other=0.0).to(tl.float32)
    total = tl.zeros([D], tl.float32)
    first = tl.program_id(0).to(tl.int64)
    for lap in range(tl.cdiv(rows - first, programs)):
        row = first + lap * programs
        at = row * width + d
        slope = tl.load(slope_ptr + at, mask=keep, other=0.0).to(tl.float32)
        scale = tl.load(scale_ptr + row)
        unit = tl.load(x_ptr + at, mask=keep, other=0.0).to(tl.float32) * scale
        total += slope * unit
        steep = slope * weight
        back = (steep - unit * (tl.sum(steep * unit, 0) / width)) * scale
        if THROUGH:
            back += tl.load(through_ptr + at, mask=keep, other=0.0).to(tl.float32)
        tl.store(out_ptr + at, back, mask=keep)
    tl.store(part_ptr + tl.program_id(0) * width + d, total, mask=keep)


def norm_back(
    slope_xD: Tensor, through_xD: Tensor | None, hidden_xD: Tensor, weight_D: Tensor, scale_x: Tensor
) -> tuple[Tensor, Tensor]:
    """See `training_ops.TorchTraining.norm_back`."""
    rows, width = hidden_xD.shape
    programs = min(rows, _PROGRAMS)
    out_xD = torch.empty_like(hidden_xD)
    part = torch.empty(programs, width, dtype=torch.float32, device=hidden_xD.device)
    _norm_back[(programs,)](
        slope_xD, slope_xD if through_xD is None else through_xD, hidden_xD, weight_D, scale_x, out_xD, part, rows,
        width, programs, D=triton.next_power_of_2(width), THROUGH=through_xD is not None,
        num_warps=warps(width),
    )  # fmt: skip
    return out_xD, _added_up(part, weight_D.dtype)


@triton.jit
def _turned_back(
    slope_ptr, slope_head, x_ptr, x_head, out_ptr, out_head, head_H, keep_HE, weight_ptr, cos_ptr, sin_ptr, epsilon,
    total_HE, E: tl.constexpr, TURN: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Backward of rotation and norm of one node's heads: writes the gradient of the products, gives `total_HE` with the
    heads' shares of the norm's weight gradient added."""
    e = tl.arange(0, E)
    half: tl.constexpr = TURN // 2
    other = tl.where(e < half, e + half, tl.where(e < TURN, e - half, e))
    mine = tl.load(slope_ptr + head_H[:, None] * slope_head + e[None, :], mask=keep_HE, other=0.0).to(tl.float32)
    theirs = tl.load(slope_ptr + head_H[:, None] * slope_head + other[None, :], mask=keep_HE, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + e, mask=e < TURN, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + other, mask=e < TURN, other=0.0).to(tl.float32)
    slope = mine * cos[None, :] + theirs * tl.where(e < half, sin, -sin)[None, :]
    if NORM:
        x = tl.load(x_ptr + head_H[:, None] * x_head + e[None, :], mask=keep_HE, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, 1) / E + epsilon)[:, None]
        unit = x * scale
        total_HE += slope * unit
        steep = slope * tl.load(weight_ptr + e).to(tl.float32)[None, :]
        slope = (steep - unit * (tl.sum(steep * unit, 1) / E)[:, None]) * scale
    tl.store(out_ptr + head_H[:, None] * out_head + e[None, :], slope, mask=keep_HE)
    return total_HE


@triton.jit
def _half(ptr, head_H, step, at, keep):
    return tl.load(ptr + head_H[:, None] * step + at[None, :], mask=keep, other=0.0).to(tl.float32)


@triton.jit
def _halves_back(
    slope_ptr, slope_head, x_ptr, x_head, out_ptr, out_head, head_H, keep_Hh, weight_ptr, cos_ptr, sin_ptr, epsilon,
    low_Hh, high_Hh, E: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """`_turned_back` where all features of a head are rotated: the halves that are mixed are read whole, each in its
    own order, instead of gathered. Gives both halves of the shares."""
    low, high = tl.arange(0, E // 2), E // 2 + tl.arange(0, E // 2)
    first, second = (
        _half(slope_ptr, head_H, slope_head, low, keep_Hh),
        _half(slope_ptr, head_H, slope_head, high, keep_Hh),
    )
    cos_low, cos_high = tl.load(cos_ptr + low).to(tl.float32), tl.load(cos_ptr + high).to(tl.float32)
    sin_low, sin_high = tl.load(sin_ptr + low).to(tl.float32), tl.load(sin_ptr + high).to(tl.float32)
    slope_low = first * cos_low[None, :] + second * sin_high[None, :]
    slope_high = second * cos_high[None, :] - first * sin_low[None, :]
    if NORM:
        x_low, x_high = _half(x_ptr, head_H, x_head, low, keep_Hh), _half(x_ptr, head_H, x_head, high, keep_Hh)
        scale = tl.rsqrt(tl.sum(x_low * x_low + x_high * x_high, 1) / E + epsilon)[:, None]
        x_low, x_high = x_low * scale, x_high * scale
        low_Hh += slope_low * x_low
        high_Hh += slope_high * x_high
        slope_low *= tl.load(weight_ptr + low).to(tl.float32)[None, :]
        slope_high *= tl.load(weight_ptr + high).to(tl.float32)[None, :]
        along = (tl.sum(slope_low * x_low + slope_high * x_high, 1) / E)[:, None]
        slope_low, slope_high = (slope_low - x_low * along) * scale, (slope_high - x_high * along) * scale
    tl.store(out_ptr + head_H[:, None] * out_head + low[None, :], slope_low, mask=keep_Hh)
    tl.store(out_ptr + head_H[:, None] * out_head + high[None, :], slope_high, mask=keep_Hh)
    return low_Hh, high_Hh


@triton.jit
def _heads_back(
    slope_ptr, slope_batch, slope_node, slope_head, x_ptr, x_row, x_head, out_ptr, out_row, out_head,
    weight_ptr, cos_ptr, sin_ptr, part_ptr, rows, nodes, epsilon, programs,
    H: tl.constexpr, HP: tl.constexpr, E: tl.constexpr, TURN: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Rotation and norm of the queries, or of the keys, backward, for all nodes of this program."""
    h, e = tl.arange(0, HP), tl.arange(0, E)
    keep = (h < H)[:, None] & (e >= 0)[None, :]
    half = (h < H)[:, None] & (tl.arange(0, E // 2) >= 0)[None, :]
    total = tl.zeros([HP, E], tl.float32)
    low = tl.zeros([HP, E // 2], tl.float32)
    high = tl.zeros([HP, E // 2], tl.float32)
    first = tl.program_id(0).to(tl.int64)
    for lap in range(tl.cdiv(rows - first, programs)):
        row = first + lap * programs
        slope = slope_ptr + (row // nodes) * slope_batch + (row % nodes) * slope_node
        x, out, cos, sin = x_ptr + row * x_row, out_ptr + row * out_row, cos_ptr + row * TURN, sin_ptr + row * TURN
        if TURN == E:
            low, high = _halves_back(
                slope, slope_head, x, x_head, out, out_head, h, half, weight_ptr, cos, sin, epsilon, low, high, E, NORM
            )
        else:
            total = _turned_back(
                slope,
                slope_head,
                x,
                x_head,
                out,
                out_head,
                h,
                keep,
                weight_ptr,
                cos,
                sin,
                epsilon,
                total,
                E,
                TURN,
                NORM,
            )
    if NORM:
        if TURN == E:
            tl.store(part_ptr + tl.arange(0, E // 2), tl.sum(low, 0))
            tl.store(part_ptr + E // 2 + tl.arange(0, E // 2), tl.sum(high, 0))
        else:
            tl.store(part_ptr + e, tl.sum(total, 0))


@triton.jit
def _rotate_back(
    dq_ptr, dk_ptr, dv_ptr, dq_batch, dq_head, dq_node, dk_batch, dk_head, dk_node, dv_batch, dv_head, dv_node,
    q_ptr, k_ptr, q_row, k_row, q_head, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr,
    q_out_ptr, k_out_ptr, v_out_ptr, q_out_row, k_out_row, v_out_row, part_ptr, rows, nodes, epsilon, programs,
    Y: tl.constexpr, X: tl.constexpr, YP: tl.constexpr, XP: tl.constexpr, E: tl.constexpr, TURN: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    part_ptr += tl.program_id(0) * 2 * E
    if tl.program_id(1) == 0:
        _heads_back(
            dq_ptr, dq_batch, dq_node, dq_head, q_ptr, q_row, q_head, q_out_ptr, q_out_row, q_head, q_weight_ptr,
            cos_ptr, sin_ptr, part_ptr, rows, nodes, epsilon, programs, Y, YP, E, TURN, NORM,
        )  # fmt: skip
    elif tl.program_id(1) == 1:
        _heads_back(
            dk_ptr, dk_batch, dk_node, dk_head, k_ptr, k_row, E, k_out_ptr, k_out_row, E, k_weight_ptr,
            cos_ptr, sin_ptr, part_ptr + E, rows, nodes, epsilon, programs, X, XP, E, TURN, NORM,
        )  # fmt: skip
    else:
        e, x = tl.arange(0, E), tl.arange(0, XP)
        keep = (x < X)[:, None] & (e >= 0)[None, :]
        first = tl.program_id(0).to(tl.int64)
        for lap in range(tl.cdiv(rows - first, programs)):
            row = first + lap * programs
            place = (row // nodes) * dv_batch + (row % nodes) * dv_node + x[:, None] * dv_head + e[None, :]
            slope = tl.load(dv_ptr + place, mask=keep, other=0.0)
            tl.store(v_out_ptr + row * v_out_row + x[:, None] * E + e[None, :], slope, mask=keep)


def rotate_back(
    slopes: tuple[Tensor, Tensor, Tensor],
    products: tuple[Tensor, Tensor],
    norms: tuple[Tensor, Tensor, float] | None,
    angles: tuple[Tensor, Tensor],
    gated: bool,
) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor] | None]:
    """See `training_ops.TorchTraining.rotate_back`. The three gradients are neighbours in one tensor."""
    (_, queries, nodes, features), keys = slopes[0].shape, slopes[1].shape[1]
    query, key = products
    sizes = [query.shape[1], key.shape[1], key.shape[1]]
    make = torch.zeros if gated else torch.empty
    out = make(len(query), sum(sizes), dtype=query.dtype, device=query.device).split(sizes, 1)
    programs = min(len(query), _PROGRAMS)
    part = torch.empty(programs, 2, features, dtype=torch.float32, device=query.device)
    query_weight, key_weight, epsilon = norms or (query, key, 0.0)
    given = [slope if slope.stride(-1) == 1 else slope.contiguous() for slope in slopes]
    strides = [step for slope in given for step in slope.stride()[:3]]
    _rotate_back[(programs, 3)](
        *given, *strides, query, key, query.stride(0), key.stride(0), features * (2 if gated else 1),
        query_weight, key_weight, *angles, *out, *(o.stride(0) for o in out), part, len(query), nodes, epsilon,
        programs, Y=queries, X=keys, YP=triton.next_power_of_2(queries), XP=triton.next_power_of_2(keys), E=features,
        TURN=angles[0].shape[-1], NORM=norms is not None, num_warps=_ROTATE_WARPS,
    )  # fmt: skip
    found = None
    if norms is not None:
        sums = _added_up(part.view(programs, 2 * features), query_weight.dtype)
        found = (sums[:features], sums[features:])
    return (out[0], out[1], out[2]), found


@triton.jit
def _gate_back(slope_ptr, gate_ptr, up_ptr, gate_out_ptr, up_out_ptr, inner, W: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * W + tl.arange(0, W)
    keep = at < inner
    at += row * inner
    slope = tl.load(slope_ptr + at, mask=keep, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + at, mask=keep, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + at, mask=keep, other=0.0).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-gate))
    tl.store(gate_out_ptr + at, slope * up * share * (1.0 + gate * (1.0 - share)), mask=keep)
    tl.store(up_out_ptr + at, slope * gate * share, mask=keep)


def gate_back(slope_xI: Tensor, gate_xI: Tensor, up_xI: Tensor) -> tuple[Tensor, Tensor]:
    """See `training_ops.TorchTraining.gate_back`."""
    rows, inner = gate_xI.shape
    gate_out, up_out = torch.empty_like(gate_xI), torch.empty_like(up_xI)
    _gate_back[(rows, triton.cdiv(inner, 2048))](slope_xI, gate_xI, up_xI, gate_out, up_out, inner, W=2048, num_warps=8)
    return gate_out, up_out


@triton.jit
def _log_sums(
    logits_ptr, forbidden_ptr, top_ptr, sum_ptr, vocabulary, blocks, fill, BANNED: tl.constexpr, W: tl.constexpr
):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = block * W + tl.arange(0, W)
    logit = tl.load(logits_ptr + row * vocabulary + at, mask=at < vocabulary, other=float("-inf"))
    if BANNED:
        banned = tl.load(forbidden_ptr + at, mask=at < vocabulary, other=0)
        logit = tl.where(banned != 0, fill, logit)
    top = tl.max(logit, 0)
    tl.store(top_ptr + row * blocks + block, top)
    tl.store(sum_ptr + row * blocks + block, tl.sum(tl.exp(logit - top), 0))


@triton.jit
def _choose(
    logits_ptr, forbidden_ptr, target_ptr, top_ptr, sum_ptr, log_prob_ptr, normaliser_ptr, vocabulary, blocks, fill,
    BANNED: tl.constexpr, NB: tl.constexpr,
):  # fmt: skip
    row, b = tl.program_id(0).to(tl.int64), tl.arange(0, NB)
    top = tl.load(top_ptr + row * blocks + b, mask=b < blocks, other=float("-inf"))
    peak = tl.max(top, 0)
    sums = tl.load(sum_ptr + row * blocks + b, mask=b < blocks, other=0.0)
    normaliser = peak + tl.log(tl.sum(sums * tl.exp(top - peak), 0))
    target = tl.load(target_ptr + row)
    chosen = tl.load(logits_ptr + row * vocabulary + target)
    if BANNED:
        chosen = tl.where(tl.load(forbidden_ptr + target) != 0, fill, chosen)
    tl.store(log_prob_ptr + row, chosen - normaliser)
    tl.store(normaliser_ptr + row, normaliser)


def log_prob(logits_xV: Tensor, target_x: Tensor, forbidden_V: Tensor | None, fill: float) -> tuple[Tensor, Tensor]:
    """See `training_ops.TorchTraining.log_prob`."""
    rows, vocabulary = logits_xV.shape
    blocks = triton.cdiv(vocabulary, _VOCABULARY_WIDTH)
    top_xb, sum_xb = logits_xV.new_empty(rows, blocks), logits_xV.new_empty(rows, blocks)
    chosen_x, normaliser_x = logits_xV.new_empty(rows), logits_xV.new_empty(rows)
    banned = _bytes(forbidden_V, target_x)
    _log_sums[(rows, blocks)](
        logits_xV, banned, top_xb, sum_xb, vocabulary, blocks, fill, BANNED=forbidden_V is not None,
        W=_VOCABULARY_WIDTH, num_warps=8,
    )  # fmt: skip
    _choose[(rows,)](
        logits_xV, banned, target_x, top_xb, sum_xb, chosen_x, normaliser_x, vocabulary, blocks, fill,
        BANNED=forbidden_V is not None, NB=triton.next_power_of_2(blocks), num_warps=1,
    )  # fmt: skip
    return chosen_x, normaliser_x


def _bytes(forbidden_V: Tensor | None, otherwise: Tensor) -> Tensor:
    """The mask as bytes; without one, some tensor that is not read."""
    return otherwise if forbidden_V is None else forbidden_V.view(torch.uint8)


@triton.jit
def _log_prob_slope(
    logits_ptr, forbidden_ptr, target_ptr, normaliser_ptr, out_ptr, vocabulary, BANNED: tl.constexpr, W: tl.constexpr
):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * W + tl.arange(0, W)
    keep = at < vocabulary
    logit = tl.load(logits_ptr + row * vocabulary + at, mask=keep, other=float("-inf"))
    slope = tl.where(at == tl.load(target_ptr + row), 1.0, 0.0) - tl.exp(logit - tl.load(normaliser_ptr + row))
    if BANNED:
        slope = tl.where(tl.load(forbidden_ptr + at, mask=keep, other=0) != 0, 0.0, slope)
    tl.store(out_ptr + row * vocabulary + at, slope, mask=keep)


def log_prob_slope(
    logits_xV: Tensor, target_x: Tensor, normaliser_x: Tensor, forbidden_V: Tensor | None, out_xV: Tensor
) -> None:
    """See `training_ops.TorchTraining.log_prob_slope`."""
    rows, vocabulary = logits_xV.shape
    _log_prob_slope[(rows, triton.cdiv(vocabulary, _VOCABULARY_WIDTH))](
        logits_xV, _bytes(forbidden_V, target_x), target_x, normaliser_x, out_xV, vocabulary,
        BANNED=forbidden_V is not None, W=_VOCABULARY_WIDTH, num_warps=8,
    )  # fmt: skip

"""Triton kernels around the delta rule, with their backward passes: convolution and norms before it, the norm after it.

Each computes in float32 and rounds once, at its end. Sums over nodes (gradients of weights) are left in one share a
program, so that no result depends on timing. Letters of tiles: L nodes of a program, W features of a head.
"""

# mypy: allow-untyped-defs
# (kernel parameters are pointers and compile-time constants, for which there are no Python types)
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _convolution(sequence_ptr, taps_ptr, document_ptr, q, t, ok, channel, length, U, J: tl.constexpr,
                 PACKED: tl.constexpr):  # fmt: skip
    """The convolution at some nodes of a path and its SiLU's factor, float32 `[L, W]`."""
    # The newest input is of the node's own document.
    total = _input(sequence_ptr, document_ptr, q, t, ok, channel, length, U, J, J, PACKED)
    total *= tl.load(taps_ptr + channel * (J + 1) + J).to(tl.float32)[None, :]
    for j in tl.static_range(J):
        x = _input(sequence_ptr, document_ptr, q, t, ok, channel, length, U, j, J, PACKED)
        total += x * tl.load(taps_ptr + channel * (J + 1) + j).to(tl.float32)[None, :]
    return total, 1.0 / (1.0 + tl.exp(-total))


@triton.jit
def _input(sequence_ptr, document_ptr, q, t, ok, channel, length, U, j: tl.constexpr, J: tl.constexpr,
           PACKED: tl.constexpr):  # fmt: skip
    """What tap j reads at nodes t: the input J − j places earlier, zero where that is another document."""
    keep = ok
    if PACKED and j < J:
        own = tl.load(document_ptr + q * length + t, mask=ok, other=-1)
        earlier = t - (J - j)
        keep = keep & (tl.load(document_ptr + q * length + earlier, mask=ok & (earlier >= 0), other=-1) == own)
    at = (q * (length + J) + t + j)[:, None] * U + channel[None, :]
    return tl.load(sequence_ptr + at, mask=keep[:, None], other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["length"])
def convolve(
    sequence_ptr, taps_ptr, document_ptr, first_ptr, second_ptr, length, start, U, scale, epsilon,
    N: tl.constexpr, W: tl.constexpr, J: tl.constexpr, L: tl.constexpr, NORM: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Convolved and activated heads. With NORM there are 2N, of unit length, the first N of them times `scale`."""
    blocks = tl.cdiv(length, L)
    q = (tl.program_id(0) // blocks).to(tl.int64)
    t, w, head = (tl.program_id(0) % blocks) * L + tl.arange(0, L), tl.arange(0, W), tl.program_id(1)
    ok = t < length
    y, open_ = _convolution(sequence_ptr, taps_ptr, document_ptr, q, t, ok, start + head * W + w, length, U, J, PACKED)
    y *= open_
    at = (q * length + t)[:, None] * (N * W) + (head % N) * W + w[None, :]
    if NORM:
        y *= tl.rsqrt(tl.sum(y * y, 1) + epsilon)[:, None]
        tl.store(first_ptr + at, y * scale, mask=(ok & (head < N))[:, None])
        tl.store(second_ptr + at, y, mask=(ok & (head >= N))[:, None])
    else:
        tl.store(first_ptr + at, y, mask=ok[:, None])


@triton.jit(do_not_specialize=["length"])
def convolve_back(
    sequence_ptr, taps_ptr, document_ptr, first_grad_ptr, second_grad_ptr, slope_ptr, taps_slope_ptr,
    length, start, U, scale, epsilon,
    N: tl.constexpr, W: tl.constexpr, J: tl.constexpr, L: tl.constexpr, NORM: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Gradients of `convolve` at the convolution's outputs, and a program's share of those of the taps."""
    blocks = tl.cdiv(length, L)
    q = (tl.program_id(0) // blocks).to(tl.int64)
    t, w, head = (tl.program_id(0) % blocks) * L + tl.arange(0, L), tl.arange(0, W), tl.program_id(1)
    ok = t < length
    channel = start + head * W + w
    total, open_ = _convolution(sequence_ptr, taps_ptr, document_ptr, q, t, ok, channel, length, U, J, PACKED)
    at = (q * length + t)[:, None] * (N * W) + (head % N) * W + w[None, :]
    if NORM:
        y = total * open_
        grad = tl.load(first_grad_ptr + at, mask=(ok & (head < N))[:, None], other=0.0).to(tl.float32) * scale
        grad += tl.load(second_grad_ptr + at, mask=(ok & (head >= N))[:, None], other=0.0).to(tl.float32)
        factor = tl.rsqrt(tl.sum(y * y, 1) + epsilon)[:, None]
        y *= factor
        grad = factor * (grad - y * tl.sum(y * grad, 1)[:, None])
    else:
        grad = tl.load(first_grad_ptr + at, mask=ok[:, None], other=0.0).to(tl.float32)
    grad *= open_ * (1.0 + total * (1.0 - open_))
    tl.store(slope_ptr + (q * length + t)[:, None] * U + channel[None, :], grad, mask=ok[:, None])
    for j in tl.static_range(J + 1):
        x = _input(sequence_ptr, document_ptr, q, t, ok, channel, length, U, j, J, PACKED)
        share = tl.program_id(0).to(tl.int64) * U * (J + 1) + channel * (J + 1) + j
        tl.store(taps_slope_ptr + share, tl.sum(x * grad, 0))


@triton.jit(do_not_specialize=["length"])
def spread_back(
    slope_ptr, taps_ptr, document_ptr, out_ptr, length, U,
    W: tl.constexpr, J: tl.constexpr, L: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Gradients of a convolution's inputs from those of its outputs: the same, mirrored."""
    blocks = tl.cdiv(length + J, L)
    q = (tl.program_id(0) // blocks).to(tl.int64)
    p, channel = (tl.program_id(0) % blocks) * L + tl.arange(0, L), tl.program_id(1) * W + tl.arange(0, W)
    there = channel < U
    total = tl.zeros([L, W], tl.float32)
    for j in tl.static_range(J + 1):
        t = p - j
        ok = (t >= 0) & (t < length)
        if PACKED and j < J:
            own = tl.load(document_ptr + q * length + t, mask=ok, other=-1)
            source = p - J
            ok = ok & (source >= 0)
            ok = ok & (tl.load(document_ptr + q * length + source, mask=ok, other=-2) == own)
        at = (q * length + t)[:, None] * U + channel[None, :]
        slope = tl.load(slope_ptr + at, mask=ok[:, None] & there[None, :], other=0.0).to(tl.float32)
        total += slope * tl.load(taps_ptr + channel * (J + 1) + j, mask=there, other=0.0).to(tl.float32)[None, :]
    at = (q * (length + J) + p)[:, None] * U + channel[None, :]
    tl.store(out_ptr + at, total, mask=(p < length + J)[:, None] & there[None, :])


@triton.jit
def gates(
    strength_ptr, rate_ptr, log_rate_ptr, bias_ptr, real_ptr, decay_ptr, beta_ptr, nodes, strength_row, rate_row,
    HEADS: tl.constexpr, IP: tl.constexpr, L: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Decays and write strengths of some nodes, zero where they are not real."""
    x, i = tl.program_id(0) * L + tl.arange(0, L), tl.arange(0, IP)
    ok = (x < nodes)[:, None] & (i < HEADS)[None, :]
    rate = tl.load(rate_ptr + x[:, None].to(tl.int64) * rate_row + i[None, :], mask=ok, other=0.0).to(tl.float32)
    rate += tl.load(bias_ptr + i, mask=i < HEADS, other=0.0).to(tl.float32)[None, :]
    softplus = tl.maximum(rate, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(rate)))
    decay = -tl.exp(tl.load(log_rate_ptr + i, mask=i < HEADS, other=0.0).to(tl.float32))[None, :] * softplus
    at = x[:, None].to(tl.int64) * strength_row + i[None, :]
    beta = 1.0 / (1.0 + tl.exp(-tl.load(strength_ptr + at, mask=ok, other=0.0).to(tl.float32)))
    if MASKED:
        real = tl.load(real_ptr + x, mask=x < nodes, other=0).to(tl.float32)[:, None]
        decay, beta = decay * real, beta * real
    tl.store(decay_ptr + x[:, None] * HEADS + i[None, :], decay, mask=ok)
    tl.store(beta_ptr + x[:, None] * HEADS + i[None, :], beta, mask=ok)


@triton.jit
def gates_back(
    strength_ptr, rate_ptr, log_rate_ptr, bias_ptr, real_ptr, decay_grad_ptr, beta_grad_ptr,
    strength_slope_ptr, rate_slope_ptr, weight_slope_ptr, nodes, strength_row, rate_row,
    HEADS: tl.constexpr, IP: tl.constexpr, L: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Gradients of `gates`, and a program's share of those of log rates and biases, `[program, 2, I]`."""
    x, i = tl.program_id(0) * L + tl.arange(0, L), tl.arange(0, IP)
    ok = (x < nodes)[:, None] & (i < HEADS)[None, :]
    at = x[:, None] * HEADS + i[None, :]
    decay_grad = tl.load(decay_grad_ptr + at, mask=ok, other=0.0)
    beta_grad = tl.load(beta_grad_ptr + at, mask=ok, other=0.0)
    if MASKED:
        real = tl.load(real_ptr + x, mask=x < nodes, other=0).to(tl.float32)[:, None]
        decay_grad, beta_grad = decay_grad * real, beta_grad * real
    rate = tl.load(rate_ptr + x[:, None].to(tl.int64) * rate_row + i[None, :], mask=ok, other=0.0).to(tl.float32)
    rate += tl.load(bias_ptr + i, mask=i < HEADS, other=0.0).to(tl.float32)[None, :]
    softplus = tl.maximum(rate, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(rate)))
    speed = -tl.exp(tl.load(log_rate_ptr + i, mask=i < HEADS, other=0.0).to(tl.float32))[None, :]
    rate_slope = decay_grad * speed / (1.0 + tl.exp(-rate))
    strength = tl.load(strength_ptr + x[:, None].to(tl.int64) * strength_row + i[None, :], mask=ok, other=0.0).to(
        tl.float32
    )
    beta = 1.0 / (1.0 + tl.exp(-strength))
    tl.store(strength_slope_ptr + at, beta_grad * beta * (1.0 - beta), mask=ok)
    tl.store(rate_slope_ptr + at, rate_slope, mask=ok)
    share = weight_slope_ptr + tl.program_id(0) * 2 * HEADS + i
    tl.store(share, tl.sum(decay_grad * speed * softplus, 0), mask=i < HEADS)
    tl.store(share + HEADS, tl.sum(rate_slope, 0), mask=i < HEADS)


@triton.jit
def gated_norm(
    x_ptr, gate_ptr, weight_ptr, out_ptr, rows, gate_row, epsilon, HEADS: tl.constexpr, F: tl.constexpr, L: tl.constexpr
):
    """Heads normed by their root mean square, times the norm's weight and SiLU of the gate."""
    r, f = (tl.program_id(0) * L + tl.arange(0, L)).to(tl.int64), tl.arange(0, F)
    ok = (r < rows)[:, None]
    x = tl.load(x_ptr + r[:, None] * F + f[None, :], mask=ok, other=0.0).to(tl.float32)
    place = (r // HEADS)[:, None] * gate_row + (r % HEADS)[:, None] * F + f[None, :]
    gate = tl.load(gate_ptr + place, mask=ok, other=0.0).to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x, 1) / F + epsilon)[:, None] * tl.load(weight_ptr + f).to(tl.float32)[None, :]
    tl.store(out_ptr + r[:, None] * F + f[None, :], x * gate / (1.0 + tl.exp(-gate)), mask=ok)


@triton.jit
def gated_norm_back(
    x_ptr, gate_ptr, weight_ptr, grad_ptr, x_slope_ptr, gate_slope_ptr, weight_slope_ptr, rows, gate_row, epsilon,
    HEADS: tl.constexpr, F: tl.constexpr, L: tl.constexpr, TIMES: tl.constexpr,
):  # fmt: skip
    """Gradients of `gated_norm`, and a program's share of those of the weight."""
    f = tl.arange(0, F)
    weight = tl.load(weight_ptr + f).to(tl.float32)[None, :]
    weight_slope = tl.zeros([F], tl.float32)
    for turn in range(TIMES):
        r = ((tl.program_id(0) * TIMES + turn) * L + tl.arange(0, L)).to(tl.int64)
        ok = (r < rows)[:, None]
        at = r[:, None] * F + f[None, :]
        place = (r // HEADS)[:, None] * gate_row + (r % HEADS)[:, None] * F + f[None, :]
        x = tl.load(x_ptr + at, mask=ok, other=0.0).to(tl.float32)
        gate = tl.load(gate_ptr + place, mask=ok, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + at, mask=ok, other=0.0).to(tl.float32)
        factor = tl.rsqrt(tl.sum(x * x, 1) / F + epsilon)[:, None]
        x *= factor
        open_ = 1.0 / (1.0 + tl.exp(-gate))
        tl.store(gate_slope_ptr + at, grad * x * weight * open_ * (1.0 + gate * (1.0 - open_)), mask=ok)
        grad *= gate * open_
        weight_slope += tl.sum(grad * x, 0)
        grad *= weight
        tl.store(x_slope_ptr + at, factor * (grad - x * (tl.sum(grad * x, 1) / F)[:, None]), mask=ok)
    tl.store(weight_slope_ptr + tl.program_id(0) * F + f, weight_slope)

"""The Triton kernel of `delta_step.py`: one program a branch and head, from the layer's products to its normed output.

Sums are float32; results are rounded where training rounds them (`StepWeights.once`).
Local shape letters as in `delta_step.py`.
"""

# mypy: allow-untyped-defs
# (kernel parameters are pointers and compile-time constants, for which there are no Python types)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tfive.tree.fast.delta_step import LayerMemory, Products, StepWeights

_WARPS, _PLACES, _ROWS = 4, 16, 64
"""Warps of a program, places of the window and rows of the state that it reads at a time."""


@triton.jit
def _rounded(x, kind: tl.constexpr, NOW: tl.constexpr):
    if NOW:
        x = x.to(kind).to(tl.float32)
    return x


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _convolved(product_ptr, past_ptr, taps_ptr, channel, U, J: tl.constexpr, ONCE: tl.constexpr):
    """SiLU of the convolution of some channels at a node, float32; their inputs are kept. `past_ptr`: J places back."""
    fresh = tl.load(product_ptr + channel)
    kind: tl.constexpr = past_ptr.dtype.element_ty
    tl.store(past_ptr + J * U + channel, fresh)
    total = fresh.to(tl.float32) * tl.load(taps_ptr + channel * (J + 1) + J).to(tl.float32)
    for j in tl.static_range(J):
        tap = tl.load(taps_ptr + channel * (J + 1) + j).to(tl.float32)
        total += tap * tl.load(past_ptr + j * U + channel).to(tl.float32)
    total = _rounded(total, kind, not ONCE)
    return _rounded(total * _sigmoid(total), kind, not ONCE)


@triton.jit
def _step(
    mixed_ptr, gate_ptr, strength_ptr, rate_ptr, mixed_row, gate_row, strength_row, rate_row,
    taps_ptr, log_rate_ptr, rate_bias_ptr, norm_ptr, norm_epsilon,
    state_ptr, past_ptr, key_ptr, write_ptr, sum_ptr, place_ptr, both_ptr, out_ptr, share, slots, window,
    H: tl.constexpr, HEADS: tl.constexpr, E: tl.constexpr, F: tl.constexpr, J: tl.constexpr, P: tl.constexpr,
    K: tl.constexpr, ONCE: tl.constexpr, MATRIX: tl.constexpr,
):  # fmt: skip
    # Branches of one fork state stand beside each other, so that the cache serves all but the first.
    pid = tl.program_id(0)
    i = (pid // share) % HEADS
    q = ((pid // share) // HEADS * share + pid % share).to(tl.int64)
    e, f = tl.arange(0, E), tl.arange(0, F)
    state_ptr += ((q // share) * HEADS + i) * (E * F)
    place = tl.load(place_ptr).to(tl.int32)
    kind: tl.constexpr = out_ptr.dtype.element_ty
    U: tl.constexpr = 2 * H * E + HEADS * F
    h = i // (HEADS // H)
    mixed_ptr += q * mixed_row
    past_ptr += (q * slots + place) * U
    query = _convolved(mixed_ptr, past_ptr, taps_ptr, h * E + e, U, J, ONCE)
    key = _convolved(mixed_ptr, past_ptr, taps_ptr, (H + h) * E + e, U, J, ONCE)
    value = _convolved(mixed_ptr, past_ptr, taps_ptr, 2 * H * E + i * F + f, U, J, ONCE)
    query = _rounded(query * tl.rsqrt(tl.sum(query * query, 0) + 1e-6) * E**-0.5, kind, ONCE)
    key = _rounded(key * tl.rsqrt(tl.sum(key * key, 0) + 1e-6), kind, ONCE)
    value = _rounded(value, kind, ONCE)

    beta = _rounded(_sigmoid(tl.load(strength_ptr + q * strength_row + i).to(tl.float32)), kind, not ONCE)
    rate = tl.load(rate_ptr + q * rate_row + i).to(tl.float32) + tl.load(rate_bias_ptr + i).to(tl.float32)
    softplus = tl.maximum(rate, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(rate)))
    own = (q * HEADS + i) * window
    before = tl.load(sum_ptr + own + tl.maximum(place - 1, 0), mask=place > 0, other=0.0)
    now = before - tl.exp(tl.load(log_rate_ptr + i).to(tl.float32)) * softplus

    carried = tl.exp(now)
    if MATRIX:
        # Both factors are exact in the model's precision, and matrix units add their products in float32. The state
        # comes in tiles, for which key and query are read back from memory: a whole one would fill the registers.
        both_ptr += (q * HEADS + i) * (2 * E)
        tl.store(both_ptr + e, key)
        tl.store(both_ptr + E + e, query)
        tl.debug_barrier()
        row, found = tl.arange(0, 16)[:, None], tl.zeros([16, F], tl.float32)
        for start in tl.range(0, E, K, num_stages=3):
            at = start + tl.arange(0, K)
            both = tl.load(both_ptr + row * E + at[None, :], mask=row < 2, other=0.0)
            found = tl.dot(both, tl.load(state_ptr + at[:, None] * F + f[None, :]), found)
        known = carried * tl.sum(tl.where(row == 0, found, 0.0), 0)
        read = carried * tl.sum(tl.where(row == 1, found, 0.0), 0)
    else:
        wide = tl.load(state_ptr + e[:, None] * F + f[None, :]).to(tl.float32)
        known = carried * tl.sum(wide * key[:, None], 0)
        read = carried * tl.sum(wide * query[:, None], 0)
    for start in range(0, place, P):
        z = start + tl.arange(0, P)
        taken = z < place
        keys = tl.load(key_ptr + (own + z[:, None]) * E + e[None, :], mask=taken[:, None], other=0.0).to(tl.float32)
        writes = tl.load(write_ptr + (own + z[:, None]) * F + f[None, :], mask=taken[:, None], other=0.0)
        fade = tl.where(taken, tl.exp(now - tl.load(sum_ptr + own + z, mask=taken, other=0.0)), 0.0)
        known += tl.sum((tl.sum(keys * key[None, :], 1) * fade)[:, None] * writes, 0)
        read += tl.sum((tl.sum(keys * query[None, :], 1) * fade)[:, None] * writes, 0)

    write = beta * (value - known)
    read += tl.sum(query * key, 0) * write
    tl.store(key_ptr + (own + place) * E + e, key)
    tl.store(write_ptr + (own + place) * F + f, write)
    tl.store(sum_ptr + own + place, now)

    read = _rounded(read, kind, True)
    normed = _rounded(read * tl.rsqrt(tl.sum(read * read, 0) / F + norm_epsilon), kind, not ONCE)
    normed = _rounded(normed * tl.load(norm_ptr + f).to(tl.float32), kind, not ONCE)
    gate = tl.load(gate_ptr + q * gate_row + i * F + f).to(tl.float32)
    tl.store(out_ptr + (q * HEADS + i) * F + f, normed * gate * _sigmoid(gate))


def step(products: Products, weights: StepWeights, memory: LayerMemory, place: Tensor) -> Tensor:
    """See `delta_step.torch_step`."""
    heads, branches = weights.heads, len(memory.sum_QIZ)
    mixed = products[0]
    out_xV = torch.empty(branches, heads.values * heads.value_features, dtype=mixed.dtype, device=mixed.device)
    both_QI2E = mixed.new_empty(branches, heads.values, 2, heads.key_features)
    _step[(branches * heads.values,)](
        *products, *(x.stride(0) for x in products),
        weights.taps_UJ, weights.log_rate_I, weights.rate_bias_I, weights.norm_F, weights.norm_epsilon,
        memory.state_XIEF, memory.past_QLU, memory.key_QIZE, memory.write_QIZF, memory.sum_QIZ, place,
        both_QI2E, out_xV,
        branches // len(memory.state_XIEF), memory.past_QLU.shape[1], memory.sum_QIZ.shape[2],
        H=heads.keys, HEADS=heads.values, E=heads.key_features, F=heads.value_features, J=heads.memory,
        P=_PLACES, K=min(_ROWS, heads.key_features), ONCE=weights.once,
        MATRIX=weights.once and mixed.dtype == torch.bfloat16, num_warps=_WARPS,
    )  # fmt: skip
    return out_xV

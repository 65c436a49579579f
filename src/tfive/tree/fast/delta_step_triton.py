"""The Triton kernel of `delta_step.py`: one program a branch and head, from the layer's products to its normed output.

Sums are float32; inputs, queries, keys, values and writes are rounded to the model's precision, as in all other passes. Local shape letters as in `delta_step.py`.
"""

# mypy: allow-untyped-defs
# (kernel parameters are pointers and compile-time constants, for which there are no Python types)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tfive.tree.fast.delta_step import LayerMemory, Products, StepWeights
from tfive.tree.fast.fused import Division
from tfive.tree.fast.triton_kernels import divisor, padded

_WARPS, _PLACES = 4, 16
"""Warps of a program, and places of the window it reads at a time."""


@triton.jit
def _convolved(product_ptr, past_ptr, taps_ptr, channel, factor, U, J: tl.constexpr):
    """SiLU of the convolution of some channels at a node, float32; their inputs are kept. `past_ptr`: J places back."""
    fresh = tl.load(product_ptr + channel).to(tl.float32) * factor
    fresh = fresh.to(past_ptr.dtype.element_ty)
    tl.store(past_ptr + J * U + channel, fresh)
    total = fresh.to(tl.float32) * tl.load(taps_ptr + channel * (J + 1) + J).to(tl.float32)
    for j in tl.static_range(J):
        tap = tl.load(taps_ptr + channel * (J + 1) + j).to(tl.float32)
        total += tap * tl.load(past_ptr + j * U + channel).to(tl.float32)
    return total / (1.0 + tl.exp(-total))


@triton.jit
def _step(
    mixed_ptr, gate_ptr, strength_ptr, rate_ptr, mixed_row, gate_row, strength_row, rate_row,
    rows_ptr, width, rows_epsilon, taps_ptr, log_rate_ptr, rate_bias_ptr, norm_ptr, norm_epsilon,
    state_ptr, past_ptr, key_ptr, write_ptr, sum_ptr, place_ptr, out_ptr, share, slots, window,
    H: tl.constexpr, I: tl.constexpr, E: tl.constexpr, F: tl.constexpr, J: tl.constexpr, D: tl.constexpr,
    P: tl.constexpr,
):  # fmt: skip
    # Branches of one fork state stand beside each other, so that the cache serves all but the first.
    pid = tl.program_id(0)
    i = (pid // share) % I
    q = ((pid // share) // I * share + pid % share).to(tl.int64)
    e, f = tl.arange(0, E), tl.arange(0, F)
    state = tl.load(state_ptr + ((q // share) * I + i) * (E * F) + e[:, None] * F + f[None, :])
    place = tl.load(place_ptr).to(tl.int32)
    factor = divisor(rows_ptr + q * width, width, rows_epsilon, D)
    U: tl.constexpr = 2 * H * E + I * F
    h = i // (I // H)
    mixed_ptr += q * mixed_row
    past_ptr += (q * slots + place) * U
    query = _convolved(mixed_ptr, past_ptr, taps_ptr, h * E + e, factor, U, J)
    key = _convolved(mixed_ptr, past_ptr, taps_ptr, (H + h) * E + e, factor, U, J)
    value = _convolved(mixed_ptr, past_ptr, taps_ptr, 2 * H * E + i * F + f, factor, U, J)
    query = query * (tl.rsqrt(tl.sum(query * query, 0) + 1e-6) * E**-0.5)
    key = key * tl.rsqrt(tl.sum(key * key, 0) + 1e-6)
    kind = out_ptr.dtype.element_ty
    query, key, value = query.to(kind).to(tl.float32), key.to(kind).to(tl.float32), value.to(kind).to(tl.float32)

    beta = 1.0 / (1.0 + tl.exp(-tl.load(strength_ptr + q * strength_row + i).to(tl.float32) * factor))
    rate = tl.load(rate_ptr + q * rate_row + i).to(tl.float32) * factor + tl.load(rate_bias_ptr + i).to(tl.float32)
    softplus = tl.maximum(rate, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(rate)))
    own = (q * I + i) * window
    before = tl.load(sum_ptr + own + tl.maximum(place - 1, 0), mask=place > 0, other=0.0)
    now = before - tl.exp(tl.load(log_rate_ptr + i).to(tl.float32)) * softplus

    # Row 0 asks for the key, row 1 for the query; products take sixteen rows.
    r = tl.arange(0, 16)
    both = tl.where(r[:, None] == 0, key[None, :], tl.where(r[:, None] == 1, query[None, :], 0.0)).to(kind)
    found = tl.exp(now) * tl.dot(both, state, input_precision="tf32x3")
    for start in range(0, place, P):
        z = start + tl.arange(0, P)
        taken = z < place
        keys = tl.load(key_ptr + (own + z[None, :]) * E + e[:, None], mask=taken[None, :], other=0.0)
        writes = tl.load(write_ptr + (own + z[:, None]) * F + f[None, :], mask=taken[:, None], other=0.0)
        fade = tl.where(taken, tl.exp(now - tl.load(sum_ptr + own + z, mask=taken, other=0.0)), 0.0)
        weight = tl.dot(both, keys, input_precision="tf32x3") * fade[None, :]
        found += tl.dot(weight.to(kind), writes, input_precision="tf32x3")
    known = tl.sum(tl.where(r[:, None] == 0, found, 0.0), 0)
    read = tl.sum(tl.where(r[:, None] == 1, found, 0.0), 0)

    write = beta * (value - known)
    read += tl.sum(query * key, 0) * write
    tl.store(key_ptr + (own + place) * E + e, key)
    tl.store(write_ptr + (own + place) * F + f, write)
    tl.store(sum_ptr + own + place, now)

    gate = tl.load(gate_ptr + q * gate_row + i * F + f).to(tl.float32) * factor
    normed = read * tl.rsqrt(tl.sum(read * read, 0) / F + norm_epsilon) * tl.load(norm_ptr + f).to(tl.float32)
    tl.store(out_ptr + (q * I + i) * F + f, normed * gate / (1.0 + tl.exp(-gate)))


def step(
    products: Products, division: Division | None, weights: StepWeights, memory: LayerMemory, place: Tensor
) -> Tensor:
    """See `delta_step.torch_step`."""
    heads, branches = weights.heads, len(memory.sum_QIZ)
    mixed = products[0]
    out_xV = torch.empty(branches, heads.values * heads.value_features, dtype=mixed.dtype, device=mixed.device)
    rows_xD, rows_epsilon = division or (mixed, 0.0)
    _step[(branches * heads.values,)](
        *products, *(x.stride(0) for x in products), rows_xD, rows_xD.shape[1], rows_epsilon,
        weights.taps_UJ, weights.log_rate_I, weights.rate_bias_I, weights.norm_F, weights.norm_epsilon,
        memory.state_XIEF, memory.past_QLU, memory.key_QIZE, memory.write_QIZF, memory.sum_QIZ, place, out_xV,
        branches // len(memory.state_XIEF), memory.past_QLU.shape[1], memory.sum_QIZ.shape[2],
        H=heads.keys, I=heads.values, E=heads.key_features, F=heads.value_features, J=heads.memory,
        D=padded(division), P=_PLACES, num_warps=_WARPS,
    )  # fmt: skip
    return out_xV

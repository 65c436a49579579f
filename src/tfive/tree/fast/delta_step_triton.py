"""The Triton kernel of `delta_step.py`: one program a branch and head, from the layer's products to its normed output.

Sums are float32; inputs, queries, keys, values and writes are rounded to the model's precision, as in all other passes.
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
from tfive.tree.fast.fused import Division
from tfive.tree.fast.triton_kernels import divisor, padded

_WARPS, _PLACES = 4, 16
"""Warps of a program, and places of the window it reads at a time."""


@triton.jit
def _convolved(product_ptr, past_ptr, taps_ptr, channel, U, J: tl.constexpr):
    """A node's product of some channels, its newest tap, and what the taps before make of the inputs before, float32.
    `past_ptr`: the oldest of these."""
    product = tl.load(product_ptr + channel).to(tl.float32)
    newest = tl.load(taps_ptr + channel * (J + 1) + J).to(tl.float32)
    earlier = tl.load(taps_ptr + channel * (J + 1)).to(tl.float32) * tl.load(past_ptr + channel).to(tl.float32)
    for j in tl.static_range(1, J):
        tap = tl.load(taps_ptr + channel * (J + 1) + j).to(tl.float32)
        earlier += tap * tl.load(past_ptr + j * U + channel).to(tl.float32)
    return product, newest, earlier


@triton.jit
def _window(key_ptr, write_ptr, sum_ptr, own, z, place, e, f, E: tl.constexpr, F: tl.constexpr):
    """Keys `[E, P]`, writes `[P, F]` and running decays of some places, zero for those not taken."""
    taken = z < place
    keys = tl.load(key_ptr + (own + z[None, :]) * E + e[:, None], mask=taken[None, :], other=0.0)
    writes = tl.load(write_ptr + (own + z[:, None]) * F + f[None, :], mask=taken[:, None], other=0.0)
    return keys, writes, tl.load(sum_ptr + own + z, mask=taken, other=0.0)


@triton.jit
def _step(
    mixed_ptr, gate_ptr, strength_ptr, rate_ptr, mixed_row, gate_row, strength_row, rate_row,
    rows_ptr, width, rows_epsilon, taps_ptr, log_rate_ptr, rate_bias_ptr, norm_ptr, norm_epsilon,
    state_ptr, past_ptr, key_ptr, write_ptr, sum_ptr, place_ptr, out_ptr, share, slots, window,
    H: tl.constexpr, HEADS: tl.constexpr, E: tl.constexpr, F: tl.constexpr, J: tl.constexpr, D: tl.constexpr,
    P: tl.constexpr,
):  # fmt: skip
    # Everything is loaded before anything is stored: loads wait for stores that might touch the same memory.
    # Branches of one fork state stand beside each other, so that the cache serves all but the first.
    pid = tl.program_id(0)
    i = (pid // share) % HEADS
    q = ((pid // share) // HEADS * share + pid % share).to(tl.int64)
    e, f = tl.arange(0, E), tl.arange(0, F)
    state = tl.load(state_ptr + ((q // share) * HEADS + i) * (E * F) + e[:, None] * F + f[None, :])
    place = tl.load(place_ptr).to(tl.int32)
    U: tl.constexpr = 2 * H * E + HEADS * F
    query_at = i // (HEADS // H) * E + e
    key_at, value_at = H * E + query_at, 2 * H * E + i * F + f
    mixed_ptr += q * mixed_row
    past_ptr += (q * slots + place) * U
    query, query_tap, query_past = _convolved(mixed_ptr, past_ptr, taps_ptr, query_at, U, J)
    key, key_tap, key_past = _convolved(mixed_ptr, past_ptr, taps_ptr, key_at, U, J)
    value, value_tap, value_past = _convolved(mixed_ptr, past_ptr, taps_ptr, value_at, U, J)
    own = (q * HEADS + i) * window
    keys, writes, sums = _window(key_ptr, write_ptr, sum_ptr, own, tl.arange(0, P), place, e, f, E, F)
    before = tl.load(sum_ptr + own + tl.maximum(place - 1, 0), mask=place > 0, other=0.0)
    strength = tl.load(strength_ptr + q * strength_row + i).to(tl.float32)
    rate, bias = tl.load(rate_ptr + q * rate_row + i).to(tl.float32), tl.load(rate_bias_ptr + i).to(tl.float32)
    speed = tl.exp(tl.load(log_rate_ptr + i).to(tl.float32))
    gate, norm = tl.load(gate_ptr + q * gate_row + i * F + f).to(tl.float32), tl.load(norm_ptr + f).to(tl.float32)
    factor = divisor(rows_ptr + q * width, width, rows_epsilon, D)

    kind = out_ptr.dtype.element_ty
    query_in, key_in, value_in = (query * factor).to(kind), (key * factor).to(kind), (value * factor).to(kind)
    query, key = query_past + query_tap * query_in.to(tl.float32), key_past + key_tap * key_in.to(tl.float32)
    value = value_past + value_tap * value_in.to(tl.float32)
    query, key, value = query * _sigmoid(query), key * _sigmoid(key), (value * _sigmoid(value)).to(kind).to(tl.float32)
    query = (query * (tl.rsqrt(tl.sum(query * query, 0) + 1e-6) * E**-0.5)).to(kind).to(tl.float32)
    key = (key * tl.rsqrt(tl.sum(key * key, 0) + 1e-6)).to(kind).to(tl.float32)
    beta, rate = _sigmoid(strength * factor), rate * factor + bias
    now = before - speed * (tl.maximum(rate, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(rate))))

    # Row 0 asks for the key, row 1 for the query; products take sixteen rows.
    r = tl.arange(0, 16)
    both = tl.where(r[:, None] == 0, key[None, :], tl.where(r[:, None] == 1, query[None, :], 0.0)).to(kind)
    found = tl.exp(now) * tl.dot(both, state, input_precision="tf32x3")
    weight = tl.dot(both, keys, input_precision="tf32x3") * tl.exp(now - sums)[None, :]
    found += tl.dot(weight.to(kind), writes, input_precision="tf32x3")
    for start in range(P, place, P):
        keys, writes, sums = _window(key_ptr, write_ptr, sum_ptr, own, start + tl.arange(0, P), place, e, f, E, F)
        weight = tl.dot(both, keys, input_precision="tf32x3") * tl.exp(now - sums)[None, :]
        found += tl.dot(weight.to(kind), writes, input_precision="tf32x3")
    known = tl.sum(tl.where(r[:, None] == 0, found, 0.0), 0)
    read = tl.sum(tl.where(r[:, None] == 1, found, 0.0), 0)
    write = beta * (value - known)
    read += tl.sum(query * key, 0) * write
    gate *= factor
    normed = read * tl.rsqrt(tl.sum(read * read, 0) / F + norm_epsilon) * norm
    tl.store(out_ptr + (q * HEADS + i) * F + f, normed * gate * _sigmoid(gate))

    # Heads that share a key store the same inputs of it.
    tl.store(past_ptr + J * U + query_at, query_in)
    tl.store(past_ptr + J * U + key_at, key_in)
    tl.store(past_ptr + J * U + value_at, value_in)
    tl.store(key_ptr + (own + place) * E + e, key)
    tl.store(write_ptr + (own + place) * F + f, write)
    tl.store(sum_ptr + own + place, now)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


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
        H=heads.keys, HEADS=heads.values, E=heads.key_features, F=heads.value_features, J=heads.memory,
        D=padded(division), P=_PLACES, num_warps=_WARPS,
    )  # fmt: skip
    return out_xV

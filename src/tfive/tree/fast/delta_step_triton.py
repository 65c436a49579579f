"""The Triton kernels of `delta_step.py`: what a step reads of its node, then what it reads of its memory. One program a
branch and head in both; the second, which moves nearly all the bytes, asks for all it can before it computes.

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

_NODE_WARPS, _WARPS, _PLACES, _ROWS = 1, 4, 16, 64
"""Warps of a program of each kernel; places of the window and rows of the state that the second reads at a time."""


@triton.jit
def _rounded(x, kind: tl.constexpr, NOW: tl.constexpr):
    if NOW:
        x = x.to(kind).to(tl.float32)
    return x


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _convolved(fresh, past_ptr, taps_ptr, channel, U, J: tl.constexpr, kind: tl.constexpr, ONCE: tl.constexpr):
    """SiLU of the convolution of some channels at a node, float32. `fresh`: their inputs there; `past_ptr`: J places
    back."""
    total = fresh.to(tl.float32) * tl.load(taps_ptr + channel * (J + 1) + J).to(tl.float32)
    for j in tl.static_range(J):
        tap = tl.load(taps_ptr + channel * (J + 1) + j).to(tl.float32)
        total += tap * tl.load(past_ptr + j * U + channel).to(tl.float32)
    total = _rounded(total, kind, not ONCE)
    return _rounded(total * _sigmoid(total), kind, not ONCE)


@triton.jit
def _node(
    mixed_ptr, strength_ptr, rate_ptr, mixed_row, strength_row, rate_row,
    taps_ptr, log_rate_ptr, rate_bias_ptr, past_ptr, key_ptr, sum_ptr, place_ptr,
    both_ptr, value_ptr, number_ptr, slots, window,
    H: tl.constexpr, HEADS: tl.constexpr, E: tl.constexpr, F: tl.constexpr, J: tl.constexpr, ONCE: tl.constexpr,
):  # fmt: skip
    """What the rule reads of a branch's newest node: key and query, value, and as two numbers the write's strength and
    the product of key and query. One program a branch and head."""
    # All reads come before the first write, which would wait for what it writes.
    i = tl.program_id(0) % HEADS
    q = (tl.program_id(0) // HEADS).to(tl.int64)
    e, f = tl.arange(0, E), tl.arange(0, F)
    kind: tl.constexpr = key_ptr.dtype.element_ty if ONCE else mixed_ptr.dtype.element_ty
    U: tl.constexpr = 2 * H * E + HEADS * F
    h, head = i // (HEADS // H), q * HEADS + i
    own = head * window
    place = tl.load(place_ptr).to(tl.int32)
    mixed_ptr += q * mixed_row
    past_ptr += (q * slots + place) * U
    at_query, at_key, at_value = h * E + e, (H + h) * E + e, 2 * H * E + i * F + f
    new_query, new_key, new_value = (
        tl.load(mixed_ptr + at_query),
        tl.load(mixed_ptr + at_key),
        tl.load(mixed_ptr + at_value),
    )
    beta = tl.load(strength_ptr + q * strength_row + i).to(tl.float32)
    rate = tl.load(rate_ptr + q * rate_row + i).to(tl.float32) + tl.load(rate_bias_ptr + i).to(tl.float32)
    log_rate = tl.load(log_rate_ptr + i).to(tl.float32)
    before = tl.load(sum_ptr + own + tl.maximum(place - 1, 0), mask=place > 0, other=0.0)
    query = _convolved(new_query, past_ptr, taps_ptr, at_query, U, J, kind, ONCE)
    key = _convolved(new_key, past_ptr, taps_ptr, at_key, U, J, kind, ONCE)
    value = _rounded(_convolved(new_value, past_ptr, taps_ptr, at_value, U, J, kind, ONCE), kind, ONCE)
    query = _rounded(query * tl.rsqrt(tl.sum(query * query, 0) + 1e-6) * E**-0.5, kind, ONCE)
    key = _rounded(key * tl.rsqrt(tl.sum(key * key, 0) + 1e-6), kind, ONCE)
    softplus = tl.maximum(rate, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(rate)))

    tl.store(past_ptr + J * U + at_query, new_query)
    tl.store(past_ptr + J * U + at_key, new_key)
    tl.store(past_ptr + J * U + at_value, new_value)
    tl.store(both_ptr + head * (2 * E) + e, key)
    tl.store(both_ptr + head * (2 * E) + E + e, query)
    tl.store(value_ptr + head * F + f, value)
    tl.store(key_ptr + (own + place) * E + e, key)
    tl.store(sum_ptr + own + place, before - tl.exp(log_rate) * softplus)
    tl.store(number_ptr + head * 2, _rounded(_sigmoid(beta), kind, not ONCE))
    tl.store(number_ptr + head * 2 + 1, tl.sum(query * key, 0))


@triton.jit
def _written(key_ptr, write_ptr, sum_ptr, start, stop, E: tl.constexpr, F: tl.constexpr, P: tl.constexpr):
    """Keys `[E, P]`, writes `[P, F]` and sums of decay of a branch and head at P places. What stands at `stop` and
    after it is not read, and what is returned for it is undefined."""
    e, f, z = tl.arange(0, E), tl.arange(0, F), start + tl.arange(0, P)
    keys = tl.load(key_ptr + z[None, :] * E + e[:, None], mask=z[None, :] < stop)
    writes = tl.load(write_ptr + z[:, None] * F + f[None, :], mask=z[:, None] < stop)
    return keys, writes, tl.load(sum_ptr + z, mask=z < stop)


@triton.jit
def _remember(
    gate_ptr, gate_row, norm_ptr, norm_epsilon, state_ptr, key_ptr, write_ptr, sum_ptr, place_ptr,
    both_ptr, value_ptr, number_ptr, out_ptr, share, window,
    HEADS: tl.constexpr, E: tl.constexpr, F: tl.constexpr, P: tl.constexpr, K: tl.constexpr, ONCE: tl.constexpr,
    MATRIX: tl.constexpr, MORE: tl.constexpr,
):  # fmt: skip
    """The rule of a branch and head: what its fork state and what it wrote since hold for key and query, the write that
    follows, and the gated, normed output."""
    # Branches of one fork state stand beside each other, so that the cache serves all but the first.
    pid = tl.program_id(0)
    i = (pid // share) % HEADS
    q = ((pid // share) // HEADS * share + pid % share).to(tl.int64)
    e, f = tl.arange(0, E), tl.arange(0, F)
    head = q * HEADS + i
    state_ptr += ((q // share) * HEADS + i) * (E * F)
    kind: tl.constexpr = out_ptr.dtype.element_ty
    key_ptr, write_ptr, sum_ptr = key_ptr + head * window * E, write_ptr + head * window * F, sum_ptr + head * window
    both_ptr += head * (2 * E)
    # What does not follow from the state is asked for before the loop over it and used behind it, so that it arrives
    # while the state does.
    gate = tl.load(gate_ptr + q * gate_row + i * F + f)
    norm, beta, product = tl.load(norm_ptr + f), tl.load(number_ptr + head * 2), tl.load(number_ptr + head * 2 + 1)
    value = tl.load(value_ptr + head * F + f)
    place = tl.load(place_ptr).to(tl.int32)
    if MORE or not MATRIX:
        now = tl.load(sum_ptr + place)
    if MATRIX:
        # Keys, queries and states are exact in the model's precision, and matrix units add their products in float32;
        # three products of TF32 are as good as float32 for what was written. Rows: key, query, and nothing.
        row, found = tl.arange(0, 16)[:, None], tl.zeros([16, F], tl.float32)
        both = tl.load(both_ptr + row * E + e[None, :], mask=row < 2)
        # Of a short window all places are read: to wait for the place takes longer.
        keys, writes, sums = _written(key_ptr, write_ptr, sum_ptr, 0, place if MORE else window, E, F, P)
        for start in tl.range(0, E, K, num_stages=3):
            at = start + tl.arange(0, K)
            part = tl.load(both_ptr + row * E + at[None, :], mask=row < 2, other=0.0)
            found = tl.dot(part, tl.load(state_ptr + at[:, None] * F + f[None, :]), found)
        if not MORE:
            now = tl.sum(tl.where(tl.arange(0, P) == place, sums, 0.0), 0)
        found *= tl.exp(now)
        # Zeros are put in here and not by the loads: what a product reads just as it was loaded, the compiler moves
        # into shared memory where it was asked for, and so waits for it before it asks for the state.
        both = tl.where(row < 2, both, 0.0)
        for start in tl.range(0, place if MORE else 1, P, num_stages=1):
            z = start + tl.arange(0, P)
            keys, writes = tl.where(z[None, :] < place, keys, 0.0), tl.where(z[:, None] < place, writes, 0.0)
            fade = tl.where(z < place, tl.exp(now - sums), 0.0)
            found = tl.dot(tl.dot(both, keys) * fade[None, :], writes, found, input_precision="tf32x3")
            if MORE:
                keys, writes, sums = _written(key_ptr, write_ptr, sum_ptr, start + P, place, E, F, P)
        known = tl.sum(tl.where(row == 0, found, 0.0), 0)
        read = tl.sum(tl.where(row == 1, found, 0.0), 0)
    else:
        key = tl.load(both_ptr + e).to(tl.float32)
        query = tl.load(both_ptr + E + e).to(tl.float32)
        wide = tl.load(state_ptr + e[:, None] * F + f[None, :]).to(tl.float32)
        known = tl.exp(now) * tl.sum(wide * key[:, None], 0)
        read = tl.exp(now) * tl.sum(wide * query[:, None], 0)
        for start in range(0, place, P):
            z = start + tl.arange(0, P)
            taken = z < place
            keys = tl.load(key_ptr + z[:, None] * E + e[None, :], mask=taken[:, None], other=0.0).to(tl.float32)
            writes = tl.load(write_ptr + z[:, None] * F + f[None, :], mask=taken[:, None], other=0.0)
            fade = tl.where(taken, tl.exp(now - tl.load(sum_ptr + z, mask=taken, other=0.0)), 0.0)
            known += tl.sum((tl.sum(keys * key[None, :], 1) * fade)[:, None] * writes, 0)
            read += tl.sum((tl.sum(keys * query[None, :], 1) * fade)[:, None] * writes, 0)

    write = beta * (value.to(tl.float32) - known)
    read += product * write
    gate = gate.to(tl.float32)
    tl.store(write_ptr + place * F + f, write)
    read = _rounded(read, kind, True)
    normed = _rounded(read * tl.rsqrt(tl.sum(read * read, 0) / F + norm_epsilon), kind, not ONCE)
    normed = _rounded(normed * norm.to(tl.float32), kind, not ONCE)
    tl.store(out_ptr + head * F + f, normed * gate * _sigmoid(gate))


def step(products: Products, weights: StepWeights, memory: LayerMemory, place: Tensor) -> Tensor:
    """See `delta_step.torch_step`."""
    heads, branches = weights.heads, len(memory.sum_QIZ)
    mixed, gate, strength, rate = products
    count, keys, values = heads.values, heads.key_features, heads.value_features
    exact = memory.key_QIZE.dtype  # the model's precision where values are rounded to it, else float32
    both_QI2E = mixed.new_empty(branches, count, 2, keys, dtype=exact)
    value_QIF = mixed.new_empty(branches, count, values, dtype=exact)
    number_QI2 = mixed.new_empty(branches, count, 2, dtype=torch.float32)
    out_xV = mixed.new_empty(branches, count * values)
    slots, window = memory.past_QLU.shape[1], memory.sum_QIZ.shape[2]
    _node[(branches * count,)](
        mixed, strength, rate, mixed.stride(0), strength.stride(0), rate.stride(0),
        weights.taps_UJ, weights.log_rate_I, weights.rate_bias_I,
        memory.past_QLU, memory.key_QIZE, memory.sum_QIZ, place, both_QI2E, value_QIF, number_QI2, slots, window,
        H=heads.keys, HEADS=count, E=keys, F=values, J=heads.memory, ONCE=weights.once, num_warps=_NODE_WARPS,
    )  # fmt: skip
    _remember[(branches * count,)](
        gate, gate.stride(0), weights.norm_F, weights.norm_epsilon,
        memory.state_XIEF, memory.key_QIZE, memory.write_QIZF, memory.sum_QIZ, place,
        both_QI2E, value_QIF, number_QI2, out_xV, branches // len(memory.state_XIEF), window,
        HEADS=count, E=keys, F=values, P=_PLACES, K=min(_ROWS, keys), ONCE=weights.once,
        MATRIX=weights.once and mixed.dtype == torch.bfloat16, MORE=window > _PLACES, num_warps=_WARPS,
    )  # fmt: skip
    return out_xV

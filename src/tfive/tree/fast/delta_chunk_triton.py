"""Triton kernels of the gated delta rule over chunks: the triangular systems, the reading and its backward pass.

Equations and letters are those of `recurrent/delta_rule.py`. A program of the reading holds a path's state of one head
and some value features (columns of a state do not meet) and goes through the path's chunks; the backward pass goes back
through them. All sums are float32, without atomic additions, so results do not depend on timing. G value features a
program.
"""

# mypy: allow-untyped-defs
# (kernel parameters are pointers and compile-time constants, for which there are no Python types)
from __future__ import annotations

import triton
import triton.language as tl

_ANY = {"do_not_specialize": ["length", "share", "tokens"], "do_not_specialize_on_alignment": ["chunks"]}
"""Numbers that kernels are not compiled anew for, and one whose being 1 alone matters."""


@triton.jit
def _dot(a, b, EXACT: tl.constexpr):
    """A product of float32 tiles in TensorFloat-32, or in three of them, which are as exact as float32."""
    return tl.dot(a, b, input_precision="tf32x3" if EXACT else "tf32")


@triton.jit
def _rows(ptr, token, ok, row, at):
    """float32 `[Z, …]`: entries `at` of a chunk's tokens, zero for tokens past the path's end."""
    return tl.load(ptr + token[:, None] * row + at[None, :], mask=ok[:, None], other=0.0).to(tl.float32)


@triton.jit
def _fades(decay_ptr, starts_ptr, token, ok, head, heads, Z: tl.constexpr, PACKED: tl.constexpr):
    """Running decay, its pairwise fade (the diagonal included), what reaches a token from the chunk's start, what of it
    reaches the chunk's end, and how much of the state does."""
    z = tl.arange(0, Z)
    g = tl.load(decay_ptr + token * heads + head, mask=ok, other=0.0).to(tl.float32)
    c = tl.cumsum(g, 0)
    last = tl.sum(g, 0)
    seen = z[:, None] >= z[None, :]
    carried, leaving, kept = tl.exp(c), tl.exp(last - c), tl.exp(last)
    if PACKED:
        begun = tl.load(starts_ptr + token, mask=ok, other=0).to(tl.int32)
        document = tl.cumsum(begun, 0)
        newest = tl.sum(begun, 0)
        seen = seen & (document[:, None] == document[None, :])
        carried = tl.where(document == 0, carried, 0.0)
        leaving = tl.where(document == newest, leaving, 0.0)
        kept = tl.where(newest == 0, kept, 0.0)
    pair = tl.exp(tl.where(seen, c[:, None] - c[None, :], float("-inf")))
    return c, pair, carried, leaving, kept


@triton.jit(**_ANY)
def invert(
    key_ptr, decay_ptr, beta_ptr, starts_ptr, inverse_ptr, length, chunks,
    HEADS: tl.constexpr, E: tl.constexpr, Z: tl.constexpr, LEVELS: tl.constexpr, PACKED: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """(1 + A)⁻¹ of every chunk: inverted blocks of 1, 2, 4, … tokens are joined in pairs."""
    pid = tl.program_id(0)
    i, m, q = pid % HEADS, (pid // HEADS) % chunks, (pid // HEADS // chunks).to(tl.int64)
    z, e = tl.arange(0, Z), tl.arange(0, E)
    ok = m * Z + z < length
    token = q * length + m * Z + z
    key = _rows(key_ptr, token, ok, HEADS * E, i * E + e)
    beta = tl.load(beta_ptr + token * HEADS + i, mask=ok, other=0.0).to(tl.float32)
    _, pair, _, _, _ = _fades(decay_ptr, starts_ptr, token, ok, i, HEADS, Z, PACKED)
    system = _dot(key, tl.trans(key), EXACT) * pair * beta[:, None]
    inverse = tl.where(z[:, None] == z[None, :], 1.0, 0.0)
    for level in tl.static_range(LEVELS):
        block = z // (1 << level)
        corner = tl.where((block[:, None] == block[None, :] + 1) & (block[:, None] % 2 == 1), system, 0.0)
        if level == 0:
            inverse -= corner
        else:
            inverse -= _dot(_dot(inverse, corner, EXACT), inverse, EXACT)
    tl.store(inverse_ptr + ((q * chunks + m) * HEADS + i) * (Z * Z) + z[:, None] * Z + z[None, :], inverse)


@triton.jit(**_ANY)
def read(
    query_ptr, key_ptr, value_ptr, decay_ptr, beta_ptr, starts_ptr, inverse_ptr, state_ptr,
    out_ptr, write_ptr, sum_ptr, boundary_ptr, length, chunks, share,
    HEADS: tl.constexpr, E: tl.constexpr, F: tl.constexpr, G: tl.constexpr, Z: tl.constexpr, STATE: tl.constexpr,
    PACKED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Outputs, writes and running decays of all tokens, and the states before all chunks but the first."""
    pid = tl.program_id(0)
    i, part, q = pid % HEADS, (pid // HEADS) % (F // G), (pid // HEADS // (F // G)).to(tl.int64)
    z, e, f = tl.arange(0, Z), tl.arange(0, E), part * G + tl.arange(0, G)
    tile = e[:, None] * F + f[None, :]
    state = tl.zeros([E, G], tl.float32)
    if STATE:
        state = tl.load(state_ptr + ((q // share) * HEADS + i) * (E * F) + tile).to(tl.float32)
    for m in range(chunks):
        ok = m * Z + z < length
        token = q * length + m * Z + z
        key = _rows(key_ptr, token, ok, HEADS * E, i * E + e)
        query = _rows(query_ptr, token, ok, HEADS * E, i * E + e)
        value = _rows(value_ptr, token, ok, HEADS * F, i * F + f)
        beta = tl.load(beta_ptr + token * HEADS + i, mask=ok, other=0.0).to(tl.float32)
        c, pair, carried, leaving, kept = _fades(decay_ptr, starts_ptr, token, ok, i, HEADS, Z, PACKED)
        inverse = tl.load(inverse_ptr + ((q * chunks + m) * HEADS + i) * (Z * Z) + z[:, None] * Z + z[None, :])
        right = beta[:, None] * (value - carried[:, None] * _dot(key, state, EXACT))
        write = _dot(inverse, right, EXACT)
        weight = _dot(query, tl.trans(key), EXACT) * pair
        out = carried[:, None] * _dot(query, state, EXACT) + _dot(weight, write, EXACT)
        at = token[:, None] * (HEADS * F) + i * F + f[None, :]
        tl.store(out_ptr + at, out, mask=ok[:, None])
        tl.store(write_ptr + at, write, mask=ok[:, None])
        if part == 0:
            tl.store(sum_ptr + token * HEADS + i, c, mask=ok)
        if m + 1 < chunks:
            state = kept * state + _dot(tl.trans(key * leaving[:, None]), write, EXACT)
            tl.store(boundary_ptr + ((q * (chunks - 1) + m) * HEADS + i) * (E * F) + tile, state)


@triton.jit(**_ANY)
def read_back(
    query_ptr, key_ptr, decay_ptr, beta_ptr, starts_ptr, inverse_ptr, out_grad_ptr, write_grad_ptr, boundary_grad_ptr,
    value_slope_ptr, right_slope_ptr, after_ptr, state_slope_ptr, length, chunks,
    HEADS: tl.constexpr, E: tl.constexpr, F: tl.constexpr, G: tl.constexpr, Z: tl.constexpr, STATE: tl.constexpr,
    PACKED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """What goes back from chunk to chunk: gradients of the states after all chunks but the last, of the initial state,
    of the triangular systems' right sides, and of the values."""
    pid = tl.program_id(0)
    i, part, q = pid % HEADS, (pid // HEADS) % (F // G), (pid // HEADS // (F // G)).to(tl.int64)
    z, e, f = tl.arange(0, Z), tl.arange(0, E), part * G + tl.arange(0, G)
    tile = e[:, None] * F + f[None, :]
    after = tl.zeros([E, G], tl.float32)
    for back in range(chunks):
        m = chunks - 1 - back
        ok = m * Z + z < length
        token = q * length + m * Z + z
        key = _rows(key_ptr, token, ok, HEADS * E, i * E + e)
        query = _rows(query_ptr, token, ok, HEADS * E, i * E + e)
        out_grad = _rows(out_grad_ptr, token, ok, HEADS * F, i * F + f)
        beta = tl.load(beta_ptr + token * HEADS + i, mask=ok, other=0.0).to(tl.float32)
        _, pair, carried, leaving, kept = _fades(decay_ptr, starts_ptr, token, ok, i, HEADS, Z, PACKED)
        write_slope = _rows(write_grad_ptr, token, ok, HEADS * F, i * F + f)
        weight = _dot(key, tl.trans(query), EXACT) * tl.trans(pair)
        write_slope += _dot(weight, out_grad, EXACT)
        if back > 0:
            write_slope += leaving[:, None] * _dot(key, after, EXACT)
        inverse = tl.load(inverse_ptr + ((q * chunks + m) * HEADS + i) * (Z * Z) + z[:, None] * Z + z[None, :])
        right_slope = _dot(tl.trans(inverse), write_slope, EXACT)
        at = token[:, None] * (HEADS * F) + i * F + f[None, :]
        tl.store(right_slope_ptr + at, right_slope, mask=ok[:, None])
        right_slope *= beta[:, None]
        tl.store(value_slope_ptr + at, right_slope, mask=ok[:, None])
        if STATE or m > 0:
            after = kept * after - _dot(tl.trans(key), carried[:, None] * right_slope, EXACT)
            after += _dot(tl.trans(query), carried[:, None] * out_grad, EXACT)
        if m > 0:
            place = ((q * (chunks - 1) + m - 1) * HEADS + i) * (E * F) + tile
            after += tl.load(boundary_grad_ptr + place)
            tl.store(after_ptr + place, after)
    if STATE:
        tl.store(state_slope_ptr + (q * HEADS + i) * (E * F) + tile, after)


@triton.jit(**_ANY)
def slopes_back(
    query_ptr, key_ptr, value_ptr, decay_ptr, beta_ptr, starts_ptr, state_ptr, write_ptr, boundary_ptr,
    out_grad_ptr, sum_grad_ptr, right_slope_ptr, after_ptr,
    query_slope_ptr, key_slope_ptr, decay_slope_ptr, beta_slope_ptr, length, chunks, share, tokens,
    HEADS: tl.constexpr, E: tl.constexpr, F: tl.constexpr, G: tl.constexpr, Z: tl.constexpr, STATE: tl.constexpr,
    PACKED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The gradients that chunks have by themselves, once `read_back` is through: of queries, keys and both gates. They
    are summed over value features; each part of these leaves its share."""
    pid = tl.program_id(0)
    i, part, m = pid % HEADS, (pid // HEADS) % (F // G), (pid // HEADS // (F // G)) % chunks
    q = (pid // HEADS // (F // G) // chunks).to(tl.int64)
    z, e, f = tl.arange(0, Z), tl.arange(0, E), part * G + tl.arange(0, G)
    tile = e[:, None] * F + f[None, :]
    ok = m * Z + z < length
    token = q * length + m * Z + z
    below = z[:, None] > z[None, :]
    key = _rows(key_ptr, token, ok, HEADS * E, i * E + e)
    query = _rows(query_ptr, token, ok, HEADS * E, i * E + e)
    write = _rows(write_ptr, token, ok, HEADS * F, i * F + f)
    out_grad = _rows(out_grad_ptr, token, ok, HEADS * F, i * F + f)
    right_slope = _rows(right_slope_ptr, token, ok, HEADS * F, i * F + f)
    beta = tl.load(beta_ptr + token * HEADS + i, mask=ok, other=0.0).to(tl.float32)
    _, pair, carried, leaving, kept = _fades(decay_ptr, starts_ptr, token, ok, i, HEADS, Z, PACKED)
    # Through the outputs.
    weight_slope = _dot(out_grad, tl.trans(write), EXACT) * pair
    swing = weight_slope * _dot(query, tl.trans(key), EXACT)
    query_slope = _dot(weight_slope, key, EXACT)
    key_slope = _dot(tl.trans(weight_slope), query, EXACT)
    # Through the triangular system.
    system_slope = tl.where(below, -_dot(right_slope, tl.trans(write), EXACT) * pair, 0.0)
    alike = _dot(key, tl.trans(key), EXACT)
    beta_slope = tl.sum(system_slope * alike, 1)
    system_slope *= beta[:, None]
    swing += system_slope * alike
    key_slope += _dot(system_slope + tl.trans(system_slope), key, EXACT)
    rise = tl.sum(swing, 1) - tl.sum(swing, 0)
    # Through the state before the chunk: outputs read it, writes take from it what is known.
    value = _rows(value_ptr, token, ok, HEADS * F, i * F + f)
    beta_slope += tl.sum(right_slope * value, 1)
    end = 0.0
    if STATE or m > 0:
        state = _state_before(state_ptr, boundary_ptr, q, m, i, tile, chunks, share, HEADS, E, F, STATE)
        asked = carried[:, None] * _dot(out_grad, tl.trans(state), EXACT)
        query_slope += asked
        taken = -carried[:, None] * _dot(right_slope, tl.trans(state), EXACT)
        of_beta = tl.sum(taken * key, 1)
        beta_slope += of_beta
        rise += tl.sum(query * asked, 1) + beta * of_beta
        key_slope += beta[:, None] * taken
        if m + 1 < chunks:
            after = tl.load(after_ptr + ((q * (chunks - 1) + m) * HEADS + i) * (E * F) + tile)
            end += kept * tl.sum(tl.sum(state * after, 1), 0)
    # Through the state after it, e^c S + Σ e^(c − c_j) k_j u_j.
    if m + 1 < chunks:
        after = tl.load(after_ptr + ((q * (chunks - 1) + m) * HEADS + i) * (E * F) + tile)
        sent = leaving[:, None] * _dot(write, tl.trans(after), EXACT)
        key_slope += sent
        passed = tl.sum(key * sent, 1)
        rise -= passed
        end += tl.sum(passed, 0)
    if part == 0:
        rise += tl.load(sum_grad_ptr + token * HEADS + i, mask=ok, other=0.0)
    # Each decay acts on its own running sum and on all later ones; the chunk's end is its last.
    decay_slope = tl.sum(rise, 0) - tl.cumsum(rise, 0) + rise + end
    own = part * tokens + token
    tl.store(query_slope_ptr + own[:, None] * (HEADS * E) + i * E + e[None, :], query_slope, mask=ok[:, None])
    tl.store(key_slope_ptr + own[:, None] * (HEADS * E) + i * E + e[None, :], key_slope, mask=ok[:, None])
    tl.store(decay_slope_ptr + own * HEADS + i, decay_slope, mask=ok)
    tl.store(beta_slope_ptr + own * HEADS + i, beta_slope, mask=ok)


@triton.jit
def _state_before(
    state_ptr, boundary_ptr, q, m, i, tile, chunks, share, HEADS: tl.constexpr, E: tl.constexpr, F: tl.constexpr,
    STATE: tl.constexpr,
):  # fmt: skip
    """The state before a chunk, float32; without an initial state the chunk is not the first."""
    place = ((q * (chunks - 1) + m - 1) * HEADS + i) * (E * F) + tile
    if STATE:
        inner = tl.load(boundary_ptr + place, mask=(m > 0) & (tile >= 0), other=0.0)
        first = tl.load(state_ptr + ((q // share) * HEADS + i) * (E * F) + tile, mask=(m == 0) & (tile >= 0), other=0.0)
        return inner + first.to(tl.float32)
    return tl.load(boundary_ptr + place, mask=(m > 0) & (tile >= 0), other=0.0)


@triton.jit(**_ANY)
def fork(
    key_ptr, write_ptr, sum_ptr, starts_ptr, state_ptr, boundary_ptr, path_ptr, count_ptr, out_ptr,
    length, chunks, share,
    HEADS: tl.constexpr, E: tl.constexpr, F: tl.constexpr, G: tl.constexpr, Z: tl.constexpr, STATE: tl.constexpr,
    PACKED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The state of a path after some of its tokens."""
    pid = tl.program_id(0)
    i, part, x = pid % HEADS, (pid // HEADS) % (F // G), (pid // HEADS // (F // G)).to(tl.int64)
    e, f = tl.arange(0, E), part * G + tl.arange(0, G)
    tile = e[:, None] * F + f[None, :]
    q, count = tl.load(path_ptr + x), tl.load(count_ptr + x)
    m = tl.minimum(count // Z, chunks - 1)
    token, ok, fade, kept, _ = _fork_fades(sum_ptr, starts_ptr, q, m, count, length, i, HEADS, Z, PACKED)
    state = _state_before(state_ptr, boundary_ptr, q, m, i, tile, chunks, share, HEADS, E, F, STATE)
    key = _rows(key_ptr, token, ok, HEADS * E, i * E + e) * fade[:, None]
    write = _rows(write_ptr, token, ok, HEADS * F, i * F + f)
    tl.store(out_ptr + (x * HEADS + i) * (E * F) + tile, kept * state + _dot(tl.trans(key), write, EXACT))


@triton.jit
def _fork_fades(
    sum_ptr, starts_ptr, q, m, count, length, i, HEADS: tl.constexpr, Z: tl.constexpr, PACKED: tl.constexpr
):  # fmt: skip
    """A chunk's tokens, which of them are there and before the fork, how much of each and of the state reaches it, and
    the place of the last one."""
    z = tl.arange(0, Z)
    offset = count - m * Z
    token = q * length + m * Z + z
    ok = (m * Z + z < length) & (z < offset)
    last = tl.minimum(offset, length - m * Z) - 1
    c = tl.load(sum_ptr + token * HEADS + i, mask=ok, other=0.0)
    now = tl.sum(tl.where(z == last, c, 0.0), 0)
    fade, kept = tl.exp(tl.where(ok, now - c, float("-inf"))), tl.exp(now)
    if PACKED:
        begun = tl.load(starts_ptr + token, mask=ok, other=0).to(tl.int32)
        newest = tl.sum(begun, 0)
        fade = tl.where(tl.cumsum(begun, 0) == newest, fade, 0.0)
        kept = tl.where(newest == 0, kept, 0.0)
    return token, ok, fade, kept, last


@triton.jit(**_ANY)
def fork_back(
    key_ptr, write_ptr, sum_ptr, starts_ptr, state_ptr, boundary_ptr, order_ptr, first_ptr, count_ptr, grad_ptr,
    key_slope_ptr, write_slope_ptr, sum_slope_ptr, boundary_slope_ptr, state_slope_ptr, length, chunks, share, tokens,
    HEADS: tl.constexpr, E: tl.constexpr, F: tl.constexpr, G: tl.constexpr, Z: tl.constexpr, STATE: tl.constexpr,
    PACKED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Gradients of `fork`, a chunk at a time: its forks are `order[first[chunk] … first[chunk + 1] − 1]`."""
    pid = tl.program_id(0)
    i, part = pid % HEADS, (pid // HEADS) % (F // G)
    chunk = (pid // HEADS // (F // G)).to(tl.int64)
    q, m = chunk // chunks, chunk % chunks
    z, e, f = tl.arange(0, Z), tl.arange(0, E), part * G + tl.arange(0, G)
    tile = e[:, None] * F + f[None, :]
    there = m * Z + z < length
    own = q * length + m * Z + z
    key = _rows(key_ptr, own, there, HEADS * E, i * E + e)
    write = _rows(write_ptr, own, there, HEADS * F, i * F + f)
    state = _state_before(state_ptr, boundary_ptr, q, m, i, tile, chunks, share, HEADS, E, F, STATE)
    key_slope = tl.zeros([Z, E], tl.float32)
    write_slope = tl.zeros([Z, G], tl.float32)
    rise = tl.zeros([Z], tl.float32)
    state_slope = tl.zeros([E, G], tl.float32)
    for at in range(tl.load(first_ptr + chunk), tl.load(first_ptr + chunk + 1)):
        x = tl.load(order_ptr + at)
        count = tl.load(count_ptr + x)
        _, _, fade, kept, last = _fork_fades(sum_ptr, starts_ptr, q, m, count, length, i, HEADS, Z, PACKED)
        grad = tl.load(grad_ptr + (x * HEADS + i) * (E * F) + tile)
        sent = fade[:, None] * _dot(write, tl.trans(grad), EXACT)
        key_slope += sent
        write_slope += fade[:, None] * _dot(key, grad, EXACT)
        passed = tl.sum(key * sent, 1)
        end = tl.sum(passed, 0) + kept * tl.sum(tl.sum(state * grad, 1), 0)
        rise += tl.where(z == last, end, 0.0) - passed
        state_slope += kept * grad
    shared = part * tokens + own
    tl.store(key_slope_ptr + shared[:, None] * (HEADS * E) + i * E + e[None, :], key_slope, mask=there[:, None])
    tl.store(write_slope_ptr + own[:, None] * (HEADS * F) + i * F + f[None, :], write_slope, mask=there[:, None])
    tl.store(sum_slope_ptr + shared * HEADS + i, rise, mask=there)
    if m > 0:
        tl.store(boundary_slope_ptr + ((q * (chunks - 1) + m - 1) * HEADS + i) * (E * F) + tile, state_slope)
    elif STATE:
        tl.store(state_slope_ptr + (q * HEADS + i) * (E * F) + tile, state_slope)

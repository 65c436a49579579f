"""The gated delta rule in plain PyTorch: a chunked reading of paths that remembers enough to fork anywhere.

A head keeps a state S (key features × value features). A token decays it, writes, and reads:

    S ← e^g S        u = β (v − Sᵀk)        S ← S + k uᵀ        o = Sᵀ q

Inside a chunk that starts from state S₀, with c the running sum of g, the writes obey the unit lower triangular system
(1 + A) u = β v − β e^c (K S₀) with A_ij = β_i e^{c_i − c_j} k_i·k_j for j < i; so a chunk is a few matrix products. The
state after *any* token i is e^{c_i} S₀ + Σ_{j ≤ i} e^{c_i − c_j} k_j u_jᵀ: once the writes u are known, a fork needs no
second reading. A padding token is a no-op: β and g are zero.

Local shape letters beside the legend of `layout.py`: L tokens of a path, I heads, E key features, F value features,
M chunks, Z tokens of a chunk (or remembered tokens of a branch), X states or forks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tfive.tree.running_sum import running_sum

CHUNK = 64
_LEAF = 16


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The rule's own precision: float64 for float64 inputs, float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def unit_rows(x: Tensor, eps: float = 1e-6) -> Tensor:
    """`x / |x|` over the last dimension, as gated delta nets normalise queries and keys (by one fused kernel)."""
    features = x.shape[-1]
    return F.rms_norm(x, (features,), eps=eps / features) * features**-0.5


@cache
def _leaf_masks(size: int, device: torch.device) -> tuple[Tensor, ...]:
    """The identity, then for blocks of 1, 2, 4, … the entries that join each pair of neighbours."""
    index = torch.arange(size, device=device)
    masks, width = [index[:, None] == index], 1
    while width < size:
        block = index // width
        masks.append((block[:, None] == block + 1) & (block[:, None] % 2 == 1))
        width *= 2
    return tuple(masks)


@cache
def _future(size: int, device: torch.device) -> Tensor:
    """bool: which tokens of a chunk come after which."""
    index = torch.arange(size, device=device)
    return index[:, None] < index


def _leaf_inverse(system: Tensor) -> Tensor:
    """(1 + A)⁻¹ for blocks of at most 16: pairs of inverted diagonal blocks are joined until one is left."""
    whole, *joins = _leaf_masks(system.shape[-1], system.device)
    inverse = whole.to(system.dtype)
    for width, join in enumerate(joins):
        corner = system * join
        inverse = inverse - (inverse @ corner @ inverse if width else corner)
    return inverse


def _block_inverse(system: Tensor) -> Tensor:
    """(1 + A)⁻¹ by halving: both diagonal halves in one batch, then the corner −B⁻¹ C A⁻¹."""
    size = system.shape[-1]
    if size <= _LEAF:
        return _leaf_inverse(system)
    half = size // 2
    upper, lower = _block_inverse(torch.stack([system[..., :half, :half], system[..., half:, half:]])).unbind()
    corner = -(lower @ (system[..., half:, :half] @ upper))
    return torch.cat([F.pad(upper, (0, half)), torch.cat([corner, lower], -1)], -2)


class UnitLowerInverse(torch.autograd.Function):
    """(1 + A)⁻¹ where only the strictly lower triangle of A is read.

    Joining inverted blocks is as stable as forward substitution (powers of A, the shorter way, overflow when keys
    repeat) and consists of matrix products alone. The backward pass needs nothing but the inverse itself.
    """

    @staticmethod
    def forward(ctx: Any, system: Tensor) -> Tensor:
        inverse = _block_inverse(system.tril(-1))
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        (inverse,) = ctx.saved_tensors
        transposed = inverse.mT
        return -(transposed @ grads[0] @ transposed).tril(-1)


def chunk_length(length: int) -> int:
    """Tokens per chunk for paths of `length` tokens: short paths get a short triangular system."""
    return next((c for c in (16, 32) if length <= c), CHUNK)


def _chunks(x: Tensor, chunk: int, dtype: torch.dtype) -> Tensor:
    """`[Q, L, I, …]` → `[M, Q, I, Z, …]` in the rule's precision, padded with no-ops to whole chunks."""
    x = x.to(dtype)
    padding = -x.shape[1] % chunk
    if padding:
        x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, padding))
    x = x.unflatten(1, (-1, chunk)).transpose(0, 1)
    return x.transpose(2, 3).contiguous()


def _read_state(reader_QIZE: Tensor, state_XIEF: Tensor) -> Tensor:
    """`reader @ state` where each state serves Q / X consecutive paths; the state is never repeated."""
    share = reader_QIZE.shape[0] // state_XIEF.shape[0]
    if share == 1:
        return reader_QIZE @ state_XIEF
    _, heads, tokens, features = reader_QIZE.shape
    folded = reader_QIZE.view(-1, share, heads, tokens, features).transpose(1, 2).flatten(2, 3)
    return (folded @ state_XIEF).unflatten(2, (share, tokens)).transpose(1, 2).flatten(0, 1)


@dataclass(frozen=True)
class DeltaTrace:
    """What a reading leaves behind: chunk-boundary states and every write, hence the state after any token."""

    boundary: tuple[Tensor, ...]
    """State before each chunk, `[Q, I, E, F]`; the first may be `[X, I, E, F]` with Q / X paths sharing each."""
    key_MQIZE: Tensor
    write_MQIZF: Tensor
    decay_MQIZ: Tensor
    """Running sum of g inside the chunk."""
    segment_MQZ: Tensor | None
    """Number of documents that have begun inside the chunk so far, or None when no document begins inside a path."""

    def state_after(self, path_X: Tensor, count_X: Tensor) -> Tensor:
        """State of path `path` after its first `count` tokens (0 … M·Z), `[X, I, E, F]`, with gradients."""
        chunks, paths, heads, chunk, _ = self.key_MQIZE.shape
        chunk_X = (count_X // chunk).clamp(max=chunks - 1)
        offset_X = count_X - chunk_X * chunk
        flat_X = chunk_X * paths + path_X

        decay_XIZ = self.decay_MQIZ.flatten(0, 1).index_select(0, flat_X)
        last_XI1 = (offset_X - 1).clamp(min=0)[:, None, None].expand(-1, heads, 1)
        now_XI1 = decay_XIZ.gather(2, last_XI1) * (offset_X > 0)[:, None, None]
        kept_XZ = torch.arange(chunk, device=count_X.device) < offset_X[:, None]
        holds_X = torch.ones_like(offset_X, dtype=torch.bool)
        if self.segment_MQZ is not None:
            segment_XZ = self.segment_MQZ.flatten(0, 1).index_select(0, flat_X)
            own_X1 = segment_XZ.gather(1, last_XI1[:, 0]) * (offset_X > 0)[:, None]
            kept_XZ, holds_X = kept_XZ & (segment_XZ == own_X1), own_X1[:, 0] == 0

        weight_XIZ = (now_XI1 - decay_XIZ).masked_fill(~kept_XZ[:, None], -torch.inf).exp()
        key_XIZE = self.key_MQIZE.flatten(0, 1).index_select(0, flat_X) * weight_XIZ[..., None]
        write_XIZF = self.write_MQIZF.flatten(0, 1).index_select(0, flat_X)
        carried_XI11 = (now_XI1.exp() * holds_X[:, None, None])[..., None]
        return self._boundary(chunk_X, path_X) * carried_XI11 + key_XIZE.mT @ write_XIZF

    def _boundary(self, chunk_X: Tensor, path_X: Tensor) -> Tensor:
        paths = self.key_MQIZE.shape[1]
        first, share = self.boundary[0], paths // self.boundary[0].shape[0]
        if len(self.boundary) == 1:
            return first.index_select(0, path_X // share)
        stacked = torch.cat([first.repeat_interleave(share, 0) if share > 1 else first, *self.boundary[1:]])
        return stacked.index_select(0, chunk_X * paths + path_X)


def _segments(starts_QL: Tensor, chunk: int) -> Tensor:
    """`[M, Q, Z]`: how many documents have begun inside the chunk, up to and including each token."""
    padded = F.pad(starts_QL.to(torch.int32), (0, -starts_QL.shape[1] % chunk))
    return padded.unflatten(1, (-1, chunk)).transpose(0, 1).cumsum(-1)


def read_paths(
    query_QLIE: Tensor,
    key_QLIE: Tensor,
    value_QLIF: Tensor,
    decay_QLI: Tensor,
    beta_QLI: Tensor,
    state_XIEF: Tensor | None = None,
    starts_QL: Tensor | None = None,
) -> tuple[Tensor, DeltaTrace]:
    """Outputs `[Q, L, I, F]` of every token in the rule's precision, and the trace to fork from.

    Queries and keys come normalised and scaled. `decay` is g ≤ 0. `state` is the initial state (zero when None); with
    X < Q each state serves Q / X consecutive paths. `starts` marks tokens before which the state is emptied, the first
    tokens of packed documents.
    """
    paths, length, heads, features = key_QLIE.shape
    dtype, chunk = wide_dtype(query_QLIE.dtype), chunk_length(length)
    query, key, value = (_chunks(x, chunk, dtype) for x in (query_QLIE, key_QLIE, value_QLIF))
    decay, beta = (_chunks(x, chunk, dtype) for x in (decay_QLI, beta_QLI))
    decay = running_sum(decay)
    segment = None if starts_QL is None else _segments(starts_QL, chunk)

    hidden = _future(chunk, key.device)
    carried, leaving = decay.exp(), (decay[..., -1:] - decay).exp()
    if segment is not None:
        hidden = hidden | (segment[..., :, None] != segment[..., None, :])[:, :, None]
        carried = carried * (segment == 0)[:, :, None]
        leaving = leaving * (segment == segment[..., -1:])[:, :, None]

    pair = (decay[..., :, None] - decay[..., None, :]).masked_fill(hidden, -torch.inf).exp()
    keyed = key * beta[..., None]
    inverse = UnitLowerInverse.apply((keyed @ key.mT) * pair)
    own = inverse @ (value * beta[..., None])
    reader = torch.cat([inverse @ (keyed * carried[..., None]), query * carried[..., None]], -2)
    leaver = (key * leaving[..., None]).mT

    if state_XIEF is None:
        state_XIEF = key.new_zeros(paths, heads, features, value_QLIF.shape[-1])
    boundary, writes, reads = [state_XIEF.to(dtype)], [], []
    for m in range(key.shape[0]):
        taken, read = _read_state(reader[m], boundary[-1]).split(chunk, -2)
        writes.append(own[m] - taken)
        reads.append(read)
        if m + 1 < key.shape[0]:
            share = paths // boundary[-1].shape[0]
            before = boundary[-1].repeat_interleave(share, 0) if share > 1 else boundary[-1]
            boundary.append(before * carried[m, ..., -1:, None] + leaver[m] @ writes[-1])
    write = torch.stack(writes)
    output = torch.stack(reads) + ((query @ key.mT) * pair) @ write
    output_QLIF = output.transpose(2, 3).transpose(0, 1).flatten(1, 2)[:, :length]
    return output_QLIF, DeltaTrace(tuple(boundary), key, write, decay, segment)


class BranchMemory:
    """Static buffers with which all branches advance one token at a time, for sampling without gradients.

    The fork states are read, never rewritten: a branch's own tokens act through their writes, as inside a chunk. So G
    thoughts share one state, a step moves each state through memory once, and a captured graph can replay it.
    When all Z places are taken, `fold` empties them into the states.
    """

    def __init__(self, state_XIEF: Tensor, branches: int, window: int) -> None:
        shared, heads, features, values = state_XIEF.shape
        if branches % shared:
            raise ValueError(f"{branches} branches cannot share {shared} states evenly")
        self.state_XIEF = state_XIEF.clone()
        self.key_QIZE = state_XIEF.new_zeros(branches, heads, window, features)
        self.write_QIZF = state_XIEF.new_zeros(branches, heads, window, values)
        self.sum_QIZ = state_XIEF.new_zeros(branches, heads, window)
        self.now_QI = state_XIEF.new_zeros(branches, heads)

    def begin(self, state_XIEF: Tensor) -> None:
        """Start all branches anew from `state`, in place; shape as given at construction."""
        self.state_XIEF.copy_(state_XIEF)
        for buffer in (self.key_QIZE, self.write_QIZF, self.sum_QIZ, self.now_QI):
            buffer.zero_()

    def step(
        self, query_QIE: Tensor, key_QIE: Tensor, value_QIF: Tensor, decay_QI: Tensor, beta_QI: Tensor, place: Tensor
    ) -> Tensor:
        """Output `[Q, I, F]` of one token per branch, written at `place` (int64 `[1]`, 0 … Z−1, each used once)."""
        query, key, value, decay, beta = (
            x.to(self.now_QI.dtype) for x in (query_QIE, key_QIE, value_QIF, decay_QI, beta_QI)
        )
        self.now_QI.add_(decay)
        both_QI2E = torch.stack([key, query], 2)
        # Places not yet taken hold zero keys and writes, so they need no mask.
        fade_QI1Z = (self.now_QI[..., None] - self.sum_QIZ).exp().unsqueeze(2)
        recent_QI2F = (both_QI2E @ self.key_QIZE.mT * fade_QI1Z) @ self.write_QIZF
        kept_QI2F = _read_state(both_QI2E, self.state_XIEF)
        known_QI2F = torch.addcmul(recent_QI2F, kept_QI2F, self.now_QI.exp()[..., None, None])
        write_QIF = beta[..., None] * (value - known_QI2F[:, :, 0])
        self.key_QIZE.index_copy_(2, place, key.unsqueeze(2))
        self.write_QIZF.index_copy_(2, place, write_QIF.unsqueeze(2))
        self.sum_QIZ.index_copy_(2, place, self.now_QI.unsqueeze(2))
        return torch.addcmul(known_QI2F[:, :, 1], (query * key).sum(-1, keepdim=True), write_QIF)

    def fold(self) -> None:
        """Move all remembered tokens into the states, in place, and free all places; each needs its own state."""
        if len(self.state_XIEF) != len(self.now_QI):
            raise ValueError(
                f"{len(self.now_QI)} branches share {len(self.state_XIEF)} states: give each its own first"
            )
        fade_QIZ1 = (self.now_QI[..., None] - self.sum_QIZ).exp().unsqueeze(-1)
        written = (self.key_QIZE * fade_QIZ1).mT @ self.write_QIZF
        self.state_XIEF.mul_(self.now_QI.exp()[..., None, None]).add_(written)
        for buffer in (self.key_QIZE, self.write_QIZF, self.sum_QIZ, self.now_QI):
            buffer.zero_()

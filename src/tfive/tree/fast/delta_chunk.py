"""The gated delta rule over paths by Triton's kernels, with the contract of `delta_rule.read_paths` and its gradients.

A reading is two kernels (with its backward pass four), whatever the number of chunks; a fork's state is one more.
Nothing is copied into chunks, and nothing but the inverted systems, the writes and the boundary states is kept.
Local shape letters as in `delta_rule.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tfive.tree.fast import delta_chunk_triton as kernels

_FEATURES = 64
"""Value features of one program."""
_WARPS = {16: 4, 32: 8}
"""Warps of a program, by the tokens of a chunk: short chunks keep a program's tiles in registers."""


@dataclass(frozen=True)
class _Shape:
    """Sizes of a reading, as all its kernels are told them."""

    paths: int
    length: int
    heads: int
    key_features: int
    value_features: int
    share: int
    """How many paths start from one state."""
    stated: bool
    packed: bool
    exact: bool

    @property
    def chunk(self) -> int:
        return 16 if self.length <= 16 else 32

    @property
    def chunks(self) -> int:
        return -(-self.length // self.chunk)

    @property
    def width(self) -> int:
        return min(self.value_features, _FEATURES)

    @property
    def parts(self) -> int:
        return self.value_features // self.width

    def constants(self) -> dict[str, Any]:
        return {
            "HEADS": self.heads,
            "E": self.key_features,
            "F": self.value_features,
            "G": self.width,
            "Z": self.chunk,
            "STATE": self.stated,
            "PACKED": self.packed,
            "EXACT": self.exact,
            "num_warps": _WARPS[self.chunk],
            "num_stages": 1,
        }


def _empty(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=like.device)


class _Read(torch.autograd.Function):
    """Outputs and writes `[Q, L, I, F]` in the values' precision, running decays `[Q, L, I]` and the states before all
    chunks but the first `[Q, M − 1, I, E, F]` in float32."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        beta: Tensor,
        state: Tensor | None,
        starts: Tensor | None,
        shape: _Shape,
    ) -> tuple[Tensor, ...]:
        n, heads, chunk = shape, shape.heads, shape.chunk
        inverse = _empty(key, n.paths, n.chunks, heads, chunk, chunk)
        start, begin = (key if x is None else x for x in (state, starts))
        kernels.invert[(n.paths * n.chunks * heads,)](
            key, decay, beta, begin, inverse, n.length, n.chunks, HEADS=heads, E=n.key_features, Z=chunk,
            LEVELS=chunk.bit_length() - 1, PACKED=n.packed, EXACT=n.exact, num_warps=4,
        )  # fmt: skip
        out, write, total = torch.empty_like(value), torch.empty_like(value), _empty(key, *decay.shape)
        boundary = _empty(key, n.paths, n.chunks - 1, heads, n.key_features, n.value_features)
        kernels.read[(n.paths * n.parts * heads,)](
            query, key, value, decay, beta, begin, inverse, start, out, write, total, boundary,
            n.length, n.chunks, n.share, **n.constants(),
        )  # fmt: skip
        ctx.save_for_backward(query, key, value, decay, beta, state, starts, inverse, write, boundary)
        ctx.shape = shape
        return out, write, total, boundary

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        query, key, value, decay, beta, state, starts, inverse, write, boundary = ctx.saved_tensors
        n: _Shape = ctx.shape
        start, begin = (key if x is None else x for x in (state, starts))
        out_grad, write_grad, sum_grad, boundary_grad = (grad.contiguous() for grad in grads)
        value_slope, right_slope, after = (torch.empty_like(x) for x in (value, value, boundary))
        state_slope = _empty(key, n.paths, n.heads, n.key_features, n.value_features) if n.stated else key
        kernels.read_back[(n.paths * n.parts * n.heads,)](
            query, key, decay, beta, begin, inverse, out_grad, write_grad, boundary_grad,
            value_slope, right_slope, after, state_slope, n.length, n.chunks, **n.constants(),
        )  # fmt: skip
        slopes = [_empty(key, n.parts, *x.shape) for x in (query, key)]
        gates = [_empty(key, n.parts, *x.shape) for x in (decay, beta)]
        kernels.slopes_back[(n.paths * n.chunks * n.parts * n.heads,)](
            query, key, value, decay, beta, begin, start, write, boundary, out_grad, sum_grad, right_slope, after,
            *slopes, *gates, n.length, n.chunks, n.share, n.paths * n.length, **n.constants(),
        )  # fmt: skip
        first = [_summed(slope).to(x.dtype) for slope, x in zip(slopes, (query, key))]
        last = [_summed(slope).to(x.dtype) for slope, x in zip(gates, (decay, beta))]
        shared = None if state is None else _of_states(state_slope, n).to(state.dtype)
        return first[0], first[1], value_slope, last[0], last[1], shared, None, None


def _summed(parts: Tensor) -> Tensor:
    return parts[0] if len(parts) == 1 else parts.sum(0)


def _of_states(slope_QIEF: Tensor, shape: _Shape) -> Tensor:
    """Gradients of shared initial states, from those of every path's."""
    return slope_QIEF if shape.share == 1 else slope_QIEF.unflatten(0, (-1, shape.share)).sum(1)


class _Fork(torch.autograd.Function):
    """States of paths after some of their tokens, `[X, I, E, F]`."""

    @staticmethod
    def forward(
        ctx: Any,
        key: Tensor,
        write: Tensor,
        total: Tensor,
        boundary: Tensor,
        state: Tensor | None,
        starts: Tensor | None,
        path: Tensor,
        count: Tensor,
        shape: _Shape,
    ) -> Tensor:
        n = shape
        out = _empty(key, len(path), n.heads, n.key_features, n.value_features)
        start, begin = (key if x is None else x for x in (state, starts))
        kernels.fork[(len(path) * n.parts * n.heads,)](
            key, write, total, begin, start, boundary, path, count, out, n.length, n.chunks, n.share, **n.constants()
        )
        ctx.save_for_backward(key, write, total, boundary, state, starts, path, count)
        ctx.shape = shape
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        key, write, total, boundary, state, starts, path, count = ctx.saved_tensors
        n: _Shape = ctx.shape
        start, begin = (key if x is None else x for x in (state, starts))
        chunk_X = path * n.chunks + (count // n.chunk).clamp(max=n.chunks - 1)
        sorted_X, order_X = chunk_X.sort(stable=True)
        first = torch.searchsorted(sorted_X, torch.arange(n.paths * n.chunks + 1, device=path.device))
        key_slope, sum_slope = (_empty(key, n.parts, *x.shape) for x in (key, total))
        write_slope, boundary_slope = torch.empty_like(write), torch.empty_like(boundary)
        state_slope = _empty(key, n.paths, n.heads, n.key_features, n.value_features) if n.stated else key
        kernels.fork_back[(n.paths * n.chunks * n.parts * n.heads,)](
            key, write, total, begin, start, boundary, order_X, first, count, grads[0].contiguous(),
            key_slope, write_slope, sum_slope, boundary_slope, state_slope,
            n.length, n.chunks, n.share, n.paths * n.length, **n.constants(),
        )  # fmt: skip
        shared = None if state is None else _of_states(state_slope, n).to(state.dtype)
        summed = (_summed(key_slope).to(key.dtype), write_slope, _summed(sum_slope), boundary_slope)
        return *summed, shared, None, None, None, None


@dataclass(frozen=True)
class TritonTrace:
    """What a reading leaves behind; the state after any token follows from it."""

    key_QLIE: Tensor
    write_QLIF: Tensor
    sum_QLI: Tensor
    boundary_QMIEF: Tensor
    state_XIEF: Tensor | None
    starts_QL: Tensor | None
    shape: _Shape

    def state_after(self, path_X: Tensor, count_X: Tensor) -> Tensor:
        """State of path `path` after its first `count` tokens, `[X, I, E, F]`, with gradients."""
        kept = (self.key_QLIE, self.write_QLIF, self.sum_QLI, self.boundary_QMIEF, self.state_XIEF, self.starts_QL)
        state: Tensor = _Fork.apply(*kept, path_X, count_X, self.shape)
        return state


class TritonRule:
    """The contract of `delta_rule.read_paths` in float32 or (not `exact`) with products in TensorFloat-32."""

    def __init__(self, exact: bool) -> None:
        self.exact = exact

    def __call__(
        self,
        query_QLIE: Tensor,
        key_QLIE: Tensor,
        value_QLIF: Tensor,
        decay_QLI: Tensor,
        beta_QLI: Tensor,
        state_XIEF: Tensor | None = None,
        starts_QL: Tensor | None = None,
    ) -> tuple[Tensor, TritonTrace]:
        """Outputs `[Q, L, I, F]` in the values' precision, and the trace to fork from."""
        inputs = [x.contiguous() for x in (query_QLIE, key_QLIE, value_QLIF, decay_QLI, beta_QLI)]
        paths, length, heads, features = key_QLIE.shape
        state = None if state_XIEF is None else state_XIEF.contiguous()
        starts = None if starts_QL is None else starts_QL.to(torch.int8).contiguous()
        share = 1 if state is None else paths // len(state)
        shape = _Shape(
            paths,
            length,
            heads,
            features,
            value_QLIF.shape[-1],
            share,
            state is not None,
            starts is not None,
            self.exact,
        )
        output, write, total, boundary = _Read.apply(*inputs, state, starts, shape)
        return output, TritonTrace(inputs[1], write, total, boundary, state, starts, shape)

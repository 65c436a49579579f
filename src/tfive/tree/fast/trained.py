"""The steps of a trained block as differentiable functions that keep little and launch few kernels.

Products of one input are one function, so that their shares of its gradient are added up inside the products; a norm
hands the residual stream through, so that both of its gradients meet in one kernel. Operations between products come
from `training_ops.py`.

Local shape letters as there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tfive.tree.fast.fused import Angles, Heads, Norms
from tfive.tree.fast.training_ops import Three, TrainingOps


class _Normed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ops: TrainingOps, hidden_xD: Tensor, weight_D: Tensor, epsilon: float, room_xD: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        normed_xD, scale_x = ops.norm(hidden_xD, weight_D, epsilon, room_xD)
        ctx.ops = ops
        ctx.save_for_backward(hidden_xD, weight_D, scale_x)
        ctx.set_materialize_grads(False)
        return hidden_xD, normed_xD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, through_xD: Tensor | None, slope_xD: Tensor | None) -> tuple[Any, ...]:
        hidden_xD, weight_D, scale_x = ctx.saved_tensors
        if slope_xD is None:
            return None, through_xD, None, None, None
        through_xD = None if through_xD is None else through_xD.contiguous()
        back_xD, of_weight = ctx.ops.norm_back(slope_xD.contiguous(), through_xD, hidden_xD, weight_D, scale_x)
        return None, back_xD, of_weight.to(weight_D.dtype), None, None


def normed(
    ops: TrainingOps, hidden_xD: Tensor, weight_D: Tensor, epsilon: float, room_xD: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The residual stream as it came, and normed; use the former afterwards. `room_xD` gets a copy of it, for `onto`:
    it has been read by then, and a copy of its own would read it again."""
    found: tuple[Tensor, Tensor] = _Normed.apply(ops, hidden_xD, weight_D, epsilon, room_xD)
    return found


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, join: bool, inputs_xD: Tensor, *weights: Tensor | None) -> tuple[Tensor, ...]:
        count = len(weights) // 2
        matrices, biases = weights[:count], weights[count:]
        ctx.sizes = [len(matrix) for matrix in matrices if matrix is not None]
        ctx.biased = biases[0] is not None
        if join:
            joined: Tensor = torch.cat(matrices)  # type: ignore[arg-type]
            bias: Tensor | None = torch.cat(biases) if ctx.biased else None  # type: ignore[arg-type]
            ctx.save_for_backward(inputs_xD, joined)
            return F.linear(inputs_xD, joined, bias).split(ctx.sizes, -1)
        ctx.save_for_backward(inputs_xD, *matrices)
        return tuple(F.linear(inputs_xD, w, b) for w, b in zip(matrices, biases) if w is not None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Any, ...]:
        inputs_xD, *matrices = ctx.saved_tensors
        parts = [neighbours(slopes)] if len(matrices) < len(slopes) else [slope.contiguous() for slope in slopes]
        of_inputs = None
        if ctx.needs_input_grad[1]:
            of_inputs = parts[0] @ matrices[0]
            for part, matrix in zip(parts[1:], matrices[1:]):
                of_inputs.addmm_(part, matrix)
        wanted = any(ctx.needs_input_grad[2 : 2 + len(slopes)])
        found = [part.t() @ inputs_xD for part in parts] if wanted else [None] * len(parts)
        if len(parts) < len(slopes):
            found = list(found[0].split(ctx.sizes)) if found[0] is not None else [None] * len(slopes)
        of_biases = [slope.sum(0) if ctx.biased else None for slope in slopes]
        return None, of_inputs, *found, *of_biases


def neighbours(slopes: Sequence[Tensor]) -> Tensor:
    """Tensors `[x, ·]` side by side: without a copy where they already are."""
    first, place = slopes[0], slopes[0].storage_offset()
    for slope in slopes:
        beside = slope.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not beside or slope.storage_offset() != place or slope.stride() != (first.stride(0), 1):
            return torch.cat(list(slopes), 1)
        place += slope.shape[1]
    return first.as_strided((len(first), sum(slope.shape[1] for slope in slopes)), first.stride())


def products(inputs_xD: Tensor, layers: Sequence[nn.Linear], join: bool = False) -> tuple[Tensor, ...]:
    """The layers' products of one input; `join` multiplies once, by all their weights side by side, which small layers
    gain from."""
    weights = [layer.weight for layer in layers] + [layer.bias for layer in layers]
    found: tuple[Tensor, ...] = _Products.apply(join, inputs_xD, *weights)
    return found


class _Onto(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, residual_xD: Tensor, inputs_xI: Tensor, weight_DI: Tensor, bias_D: Tensor | None, room_xD: Tensor
    ) -> Tensor:
        ctx.save_for_backward(inputs_xI, weight_DI)
        ctx.biased = bias_D is not None
        ctx.mark_dirty(room_xD)
        found = room_xD.addmm_(inputs_xI, weight_DI.t())
        return found if bias_D is None else found.add_(bias_D)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope_xD: Tensor) -> tuple[Any, ...]:
        inputs_xI, weight_DI = ctx.saved_tensors
        slope_xD = slope_xD.contiguous()
        of_inputs = slope_xD @ weight_DI if ctx.needs_input_grad[1] else None
        of_weight = slope_xD.t() @ inputs_xI if ctx.needs_input_grad[2] else None
        return slope_xD, of_inputs, of_weight, slope_xD.sum(0) if ctx.biased else None, None


def onto(residual_xD: Tensor, inputs_xI: Tensor, room_xD: Tensor, layer: nn.Linear) -> Tensor:
    """The residual stream plus a layer's product, added inside the product to the copy of the stream that `normed` left
    in `room_xD`."""
    found: Tensor = _Onto.apply(residual_xD, inputs_xI, layer.weight, layer.bias, room_xD)
    return found


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        ops: TrainingOps,
        heads: Heads,
        rows: int,
        angles: Angles,
        epsilon: float,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        query_weight: Tensor | None,
        key_weight: Tensor | None,
    ) -> Three:
        norms: Norms | None = None
        if query_weight is not None and key_weight is not None:
            norms = (query_weight, key_weight, epsilon)
        ctx.ops, ctx.heads, ctx.epsilon = ops, heads, epsilon
        ctx.save_for_backward(query, key, *angles, query_weight, key_weight)
        return ops.rotate((query, key, value), norms, angles, heads, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Any, ...]:
        query, key, cos, sin, query_weight, key_weight = ctx.saved_tensors
        norms = None if query_weight is None else (query_weight, key_weight, ctx.epsilon)
        found, sums = ctx.ops.rotate_back(slopes, (query, key), norms, (cos, sin), ctx.heads.gated)
        of_norms = (None, None) if sums is None else tuple(total.to(query_weight.dtype) for total in sums)
        return None, None, None, None, None, *found, *of_norms


def rotated(ops: TrainingOps, three: Three, norms: Norms | None, angles: Angles, heads: Heads, rows: int) -> Three:
    """Queries `[B, Y, n, E]`, keys and values `[B, X, n, E]` from the products `[x, ·]`, normed and rotated."""
    query_weight, key_weight, epsilon = norms or (None, None, 0.0)
    found: Three = _Rotated.apply(ops, heads, rows, angles, epsilon, *three, query_weight, key_weight)
    return found


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ops: TrainingOps, gate_xI: Tensor, up_xI: Tensor) -> Tensor:
        ctx.ops = ops
        ctx.save_for_backward(gate_xI, up_xI)
        return ops.gate(gate_xI, up_xI)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope_xI: Tensor) -> tuple[Any, ...]:
        return None, *ctx.ops.gate_back(slope_xI.contiguous(), *ctx.saved_tensors)


def gated(ops: TrainingOps, gate_xI: Tensor, up_xI: Tensor) -> Tensor:
    """SiLU of the gate times the rest."""
    found: Tensor = _Gated.apply(ops, gate_xI, up_xI)
    return found

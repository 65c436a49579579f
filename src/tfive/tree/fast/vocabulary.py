"""Log-probabilities of tokens from hidden states through a linear vocabulary head, with few passes over the logits.

`head.reduce_vocabulary` serves any reducer; this is the one that training needs, in the form in which its backward pass
is cheap. The derivative of a row's log-probability by its logits does not depend on what the loss makes of it, except
for one factor a row. So it is written while the logits are there, in the weights' precision, and the backward pass is
two products. Where it would take too much memory, logits are made once more in the backward pass.

Local shape letters: x rows of a chunk, X all rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tfive.tree.fast.training_ops import TrainingOps
from tfive.tree.head import OUT_OF_REACH, VocabularyHead, chunk_rows

SLOPE_BYTES = 1 << 30
"""Bytes of derivatives by logits held at once: with 150,000 entries in bfloat16 about 3,500 rows."""

_TILE = 128
"""Chunks are multiples of this many rows, as matrix products like them."""


@dataclass(frozen=True)
class _Head:
    """What the chunks have in common."""

    ops: TrainingOps
    head: VocabularyHead
    forbidden_V: Tensor | None
    rows: int
    """Rows of a chunk of logits."""

    def chunks(self, start: int, stop: int) -> Iterator[slice]:
        for first in range(start, stop, self.rows):
            yield slice(first, min(first + self.rows, stop))

    def held(self, dtype: torch.dtype) -> int:
        """Rows whose derivatives may be held at once."""
        return max(1, SLOPE_BYTES // (self.head.vocabulary * dtype.itemsize))

    def read(self, hidden_XD: Tensor, target_X: Tensor, at: slice, slope_xV: Tensor | None) -> tuple[Tensor, Tensor]:
        """Log-probabilities and log-normalisers of a chunk; its derivatives where there is room for them."""
        logits_xV = self.head.project(hidden_XD[at])
        found = self.ops.log_prob(logits_xV, target_X[at], self.forbidden_V, OUT_OF_REACH)
        if slope_xV is not None:
            self.ops.log_prob_slope(logits_xV, target_X[at], found[1], self.forbidden_V, slope_xV)
        return found


class _LogProb(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, job: _Head, keep: bool, hidden_XD: Tensor, target_X: Tensor, weight_VD: Tensor) -> Tensor:
        total = len(hidden_XD)
        slope_XV = hidden_XD.new_empty(total, len(weight_VD)) if keep and total <= job.held(hidden_XD.dtype) else None
        parts = [
            job.read(hidden_XD, target_X, at, None if slope_XV is None else slope_XV[at])[0]
            for at in job.chunks(0, total)
        ]
        ctx.job = job
        ctx.save_for_backward(hidden_XD, target_X, weight_VD, slope_XV)
        return torch.cat(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor_X: Tensor) -> tuple[Any, ...]:
        job, (hidden_XD, target_X, weight_VD, slope_XV) = ctx.job, ctx.saved_tensors
        total, most = len(hidden_XD), job.held(hidden_XD.dtype)
        groups = [slice(first, min(first + most, total)) for first in range(0, total, most)]
        of_hidden = torch.empty_like(hidden_XD) if ctx.needs_input_grad[2] else None
        of_weight = None
        for group in groups:
            if slope_XV is None:
                slope = hidden_XD.new_empty(group.stop - group.start, len(weight_VD))
                for at in job.chunks(group.start, group.stop):
                    job.read(hidden_XD, target_X, at, slope[at.start - group.start : at.stop - group.start])
            else:
                slope = slope_XV
            factor = factor_X[group, None]
            if of_hidden is not None:
                of_hidden[group] = (slope @ weight_VD) * factor
            if ctx.needs_input_grad[4]:
                share = slope.t() @ (hidden_XD[group] * factor).to(slope.dtype)
                # Several groups are added up in float32; one needs no such copy of the vocabulary's weights.
                of_weight = share if len(groups) == 1 else _added(of_weight, share)
        return None, None, of_hidden, None, None if of_weight is None else of_weight.to(weight_VD.dtype)


def _added(total: Tensor | None, share: Tensor) -> Tensor:
    wide = torch.promote_types(share.dtype, torch.float32)
    return share.to(wide) if total is None else total.add_(share)


def serves(head: VocabularyHead, hidden_XD: Tensor) -> bool:
    """Whether the head is one plain product, in the type of the hidden states."""
    module: Any = head.module
    return (
        head.is_linear
        and module.bias is None
        and head.cap is None
        and head.factor == 1.0
        and module.weight.dtype == hidden_XD.dtype
        and len(hidden_XD) > 0
    )


def log_prob(
    ops: TrainingOps,
    head: VocabularyHead,
    hidden_XD: Tensor,
    target_X: Tensor,
    forbidden_V: Tensor | None,
    budget: int,
) -> Tensor:
    """Log-probability of each row's target, `[X]`, differentiable in hidden states and the head's weight; `budget`
    bytes of float32 logits are held at once."""
    weight: Any = head.module.weight
    rows = chunk_rows(head.vocabulary, 1, budget)
    job = _Head(ops, head, forbidden_V, rows // _TILE * _TILE or rows)
    keep = torch.is_grad_enabled() and (hidden_XD.requires_grad or weight.requires_grad)
    found: Tensor = _LogProb.apply(job, keep, hidden_XD, target_X, weight)
    return found

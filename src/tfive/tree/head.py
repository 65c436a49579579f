"""The vocabulary head in chunks: logits of vocabulary size exist for a few rows at a time and are never kept.

`reduce_vocabulary` takes hidden states (of one model, or of several read side by side) and a reducer that turns the
logits of a chunk of rows into numbers per row. The backward pass makes the logits of each chunk once more; the weight
gradient is summed over chunks in float32.

Local shape letters: x rows of a chunk, X all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tfive.tree.settings import HEAD_BYTES

OUT_OF_REACH = -1e9
"""Logit of a forbidden entry: its probability is exactly 0, and products with it stay numbers, unlike those with −∞."""

Reduced = dict[str, Tensor]
Reducer = Callable[[Sequence[Tensor], Mapping[str, Tensor]], Reduced]
"""`(logits of each source `[x, V]`, per-row tensors) → named numbers per row `[x]`."""


@dataclass(frozen=True)
class VocabularyHead:
    """From hidden states to logits: a linear layer (tied or not, biased or not) or any module, then transforms."""

    module: nn.Module
    cap: float | None = None
    """Soft cap c: logits become c·tanh(logits / c)."""
    factor: float = 1.0
    """Multiplies the logits, before the cap."""

    @property
    def parameters(self) -> list[Tensor]:
        """Everything the projection depends on."""
        return list(self.module.parameters())

    @property
    def vocabulary(self) -> int:
        """V."""
        size = getattr(self.module, "out_features", None)
        return int(size) if size is not None else int(self.parameters[0].shape[0])

    @property
    def is_linear(self) -> bool:
        """Whether the projection is one matrix product (and may be computed with a float32 result)."""
        return type(self.module) is nn.Linear and not self.module._forward_hooks

    def project(self, hidden_xD: Tensor) -> Tensor:
        """Untransformed logits `[x, V]`, in float32 at least."""
        if not self.is_linear:
            return _widened(self.module(hidden_xD))
        linear: Any = self.module
        bias = linear.bias
        hidden, weight = _computed_in(hidden_xD, linear.weight)
        logits = _product(hidden, weight)
        return logits if bias is None else logits + bias.to(logits.dtype)

    def finish(self, logits_xV: Tensor, forbidden_V: Tensor | None = None) -> Tensor:
        """Logits after the model's own transforms, forbidden entries out of reach."""
        if self.factor != 1.0:
            logits_xV = logits_xV * self.factor
        if self.cap is not None:
            logits_xV = self.cap * torch.tanh(logits_xV / self.cap)
        if forbidden_V is not None:
            logits_xV = logits_xV.masked_fill(forbidden_V, OUT_OF_REACH)
        return logits_xV

    def logits(self, hidden_xD: Tensor, forbidden_V: Tensor | None = None) -> Tensor:
        """Logits `[x, V]` of a few rows, in float32 at least; the caller minds their size."""
        return self.finish(self.project(hidden_xD), forbidden_V)

    def pull_back(self, hidden_xD: Tensor, slope_xV: Tensor, sums: list[Tensor | None]) -> Tensor:
        """Gradient of the hidden states for a gradient of the raw logits; parameter gradients are added to `sums`."""
        if not self.is_linear:
            with torch.enable_grad():
                hidden = hidden_xD.detach().requires_grad_()
                wanted = [p for p, total in zip(self.parameters, sums) if total is not None]
                found = torch.autograd.grad(
                    _widened(self.module(hidden)), [hidden, *wanted], slope_xV, allow_unused=True
                )
            for total, part in zip([s for s in sums if s is not None], found[1:]):
                if part is not None:
                    total += part
            return found[0]
        hidden, weight = _computed_in(hidden_xD, self.module.weight)  # type: ignore[arg-type]
        slope = slope_xV.to(hidden.dtype)
        if sums[0] is not None:
            if hidden.device.type == "cuda" and hidden.dtype != sums[0].dtype:
                sums[0] += torch.mm(slope.t(), hidden, out_dtype=sums[0].dtype)
            else:
                sums[0] += slope.t() @ hidden
        if len(sums) > 1 and sums[1] is not None:
            sums[1] += slope_xV.sum(0)
        return (slope @ weight).to(hidden_xD.dtype)


def _product(hidden_xD: Tensor, weight_VD: Tensor) -> Tensor:
    """`hidden · weightᵀ` in float32 at least; on a GPU, half-precision factors lose nothing on the way."""
    if hidden_xD.device.type != "cuda" or hidden_xD.dtype not in (torch.bfloat16, torch.float16):
        return _widened(hidden_xD @ weight_VD.t())
    if torch.is_grad_enabled() and (hidden_xD.requires_grad or weight_VD.requires_grad):
        # A product with a wider result has no derivative; that of widened factors is the same.
        with torch.autocast("cuda", enabled=False):
            return hidden_xD.float() @ weight_VD.float().t()
    return torch.mm(hidden_xD, weight_VD.t(), out_dtype=torch.float32)


def _widened(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _computed_in(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Both factors of the projection in the type it is computed in: autocast's where that is on."""
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    return hidden.to(dtype), weight.to(dtype)


def _autocast_state(kind: str) -> dict[str, Any]:
    enabled = torch.is_autocast_enabled(kind)
    return {"device_type": kind, "enabled": enabled, "dtype": torch.get_autocast_dtype(kind) if enabled else None}


@dataclass(frozen=True)
class Source:
    """Hidden states of one model, with the head that reads them."""

    head: VocabularyHead
    hidden_XD: Tensor
    forbidden_V: Tensor | None = None


@dataclass(frozen=True)
class _Job:
    """What the chunks have in common. Tensors travel separately, for autograd's sake."""

    heads: tuple[VocabularyHead, ...]
    forbidden: tuple[Tensor | None, ...]
    reducer: Reducer
    row_names: tuple[str, ...]
    chunk: int

    def split(self, tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        hidden = len(self.heads)
        return tensors[:hidden], tensors[hidden : hidden + len(self.row_names)]

    def reduce(self, raw: Sequence[Tensor], rows: Sequence[Tensor]) -> Reduced:
        logits = [head.finish(x, banned) for head, x, banned in zip(self.heads, raw, self.forbidden)]
        return self.reducer(logits, dict(zip(self.row_names, rows)))

    def chunks(self, total: int) -> list[slice]:
        return [slice(start, start + self.chunk) for start in range(0, total, self.chunk)]


class _Reduction(torch.autograd.Function):
    """Reducer outputs over all chunks; inputs are hidden states, per-row tensors, then head parameters."""

    @staticmethod
    def forward(ctx: Any, job: _Job, names: list[str], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.job, ctx.names, ctx.autocast = job, names, _autocast_state(tensors[0].device.type)
        ctx.save_for_backward(*tensors)
        hidden, rows = job.split(tensors)
        parts: list[Reduced] = []
        for at in job.chunks(len(hidden[0])):
            raw = [head.project(h[at]) for head, h in zip(job.heads, hidden)]
            parts.append(job.reduce(raw, [row[at] for row in rows]))
        names[:] = list(parts[0])
        return tuple(torch.cat([part[name] for part in parts]) for name in names)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Any, ...]:
        job, tensors, needed = ctx.job, ctx.saved_tensors, ctx.needs_input_grad[2:]
        hidden, rows = job.split(tensors)
        sums = [_wide_zeros(t) if n else None for t, n in zip(tensors, needed)]
        with torch.autocast(**ctx.autocast):
            for at in job.chunks(len(hidden[0])):
                raw = [head.project(h[at]) for head, h in zip(job.heads, hidden)]
                raw_slopes, row_slopes = _chunk_slopes(job, raw, rows, needed, dict(zip(ctx.names, slopes)), at)
                offset = len(hidden) + len(rows)
                for index, (head, slope) in enumerate(zip(job.heads, raw_slopes)):
                    own = sums[offset : offset + len(head.parameters)]
                    offset += len(own)
                    if slope is not None and any(total is not None for total in (sums[index], *own)):
                        _add(sums[index], at, head.pull_back(hidden[index][at], slope, own))
                for index, found in enumerate(row_slopes, len(hidden)):
                    _add(sums[index], at, found)
        return (None, None, *(None if total is None else total.to(t.dtype) for total, t in zip(sums, tensors)))


def _wide_zeros(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))


def _add(total: Tensor | None, at: slice, part: Tensor | None) -> None:
    if total is not None and part is not None:
        total[at] += part


def _chunk_slopes(
    job: _Job,
    raw: list[Tensor],
    rows: Sequence[Tensor],
    needed: Sequence[bool],
    slopes: Mapping[str, Tensor],
    at: slice,
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Gradients of one chunk's raw logits and per-row tensors."""
    offset = len(raw)
    with torch.enable_grad():
        raw = [x.detach().requires_grad_() for x in raw]
        rows = [r[at].detach().requires_grad_(bool(needed[offset + i])) for i, r in enumerate(rows)]
        reduced = job.reduce(raw, rows)
        outputs = [(out, slopes[name][at]) for name, out in reduced.items() if out.requires_grad]
        leaves = [*raw, *(r for r in rows if r.requires_grad)]
        found = torch.autograd.grad([o for o, _ in outputs], leaves, [s for _, s in outputs], allow_unused=True)
    rest = iter(found[offset:])
    return list(found[:offset]), [next(rest) if r.requires_grad else None for r in rows]


def chunk_rows(vocabulary: int, sources: int, budget: int) -> int:
    """How many rows to take at once: as many as `budget` bytes of float32 logits hold."""
    return max(1, budget // (4 * vocabulary * sources))


def reduce_vocabulary(
    sources: Sequence[Source],
    reducer: Reducer,
    rows: Mapping[str, Tensor] | None = None,
    budget: int = HEAD_BYTES,
) -> Reduced:
    """The reducer's numbers for every row `[X]`, differentiable in hidden states, heads and per-row tensors."""
    rows = rows or {}
    size = chunk_rows(sources[0].head.vocabulary, len(sources), budget)
    job = _Job(tuple(s.head for s in sources), tuple(s.forbidden_V for s in sources), reducer, tuple(rows), size)
    names: list[str] = []
    parameters = [p for source in sources for p in source.head.parameters]
    if len(sources[0].hidden_XD) == 0:
        return reducer([s.head.logits(s.hidden_XD, s.forbidden_V) for s in sources], rows)
    outputs = _Reduction.apply(job, names, *(s.hidden_XD for s in sources), *rows.values(), *parameters)
    return dict(zip(names, outputs))


def log_normaliser(logits_xV: Tensor) -> Tensor:
    """log Σ exp of each row; where nothing asks for gradients a kernel of ours reads the logits once for it."""
    if logits_xV.requires_grad or logits_xV.dtype != torch.float32 or not logits_xV.numel():
        return logits_xV.logsumexp(-1)
    kernel = normaliser_kernel(logits_xV.device)
    return logits_xV.logsumexp(-1) if kernel is None else kernel(logits_xV)


@cache
def normaliser_kernel(device: torch.device) -> Callable[[Tensor], Tensor] | None:
    """The kernel for `log_normaliser`, None where there is none or it is wrong on this device."""
    if device.type != "cuda":
        return None
    try:
        from tfive.tree.fast.triton_kernels import log_normaliser as kernel
    except ImportError:
        return None
    trial_xV = 5 * torch.randn(4, 5000, generator=torch.Generator().manual_seed(0)).to(device)
    trial_xV[:, ::3] = OUT_OF_REACH
    return kernel if torch.allclose(kernel(trial_xV), trial_xV.logsumexp(-1), rtol=1e-5, atol=1e-5) else None


def target_log_prob(logits: Sequence[Tensor], rows: Mapping[str, Tensor]) -> Reduced:
    """`log_prob`: log-probability of `target`, and `log_normaliser`, the log-sum-exp of the logits."""
    normaliser_x = log_normaliser(logits[0])
    chosen_x = logits[0].gather(-1, rows["target"][:, None])[:, 0]
    return {"log_prob": chosen_x - normaliser_x, "log_normaliser": normaliser_x}


def target_log_prob_and_entropy(logits: Sequence[Tensor], rows: Mapping[str, Tensor]) -> Reduced:
    """`log_prob` of `target` and `entropy` of the distribution."""
    found = target_log_prob(logits, rows)
    normaliser_x = found["log_normaliser"]
    mean_x = ((logits[0] - normaliser_x[:, None]).exp() * logits[0]).sum(-1)
    return {"log_prob": found["log_prob"], "entropy": normaliser_x - mean_x}


def divergence(logits: Sequence[Tensor], rows: Mapping[str, Tensor]) -> Reduced:
    """`kl`: KL(first source ‖ second source)."""
    log_p, log_r = F.log_softmax(logits[0], -1), F.log_softmax(logits[1], -1)
    return {"kl": (log_p.exp() * (log_p - log_r)).sum(-1)}


def gate_mixture(logits: Sequence[Tensor], rows: Mapping[str, Tensor]) -> Reduced:
    """`log_prob` of `target` when a `gate` g mixes *probabilities*, (1−g)·first + g·second, and each expert's own."""
    plain, thoughtful = (target_log_prob([expert], rows)["log_prob"] for expert in logits)
    mixed = mix_log_probs(plain, thoughtful, rows["gate"])
    return {"log_prob": mixed, "plain_log_prob": plain, "thoughtful_log_prob": thoughtful}


def mix_log_probs(plain: Tensor, thoughtful: Tensor, gate: Tensor | float) -> Tensor:
    """log((1−g)·e^plain + g·e^thoughtful), with finite gradients at g = 0 and 1."""
    top = torch.maximum(plain, thoughtful).detach()
    return top + ((1 - gate) * (plain - top).exp() + gate * (thoughtful - top).exp()).log()


def score_centre(law: Callable[[Tensor], Tensor], term: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Reducer:
    """`centre`: what `term` makes of the full rows log π_θ, log π_old and log q, for sources (θ, old).

    `law` turns the old policy's logits into those of the sampling law q, recomputed here chunk by chunk.
    """

    def reducer(logits: Sequence[Tensor], rows: Mapping[str, Tensor]) -> Reduced:
        log_new, log_old = F.log_softmax(logits[0], -1), F.log_softmax(logits[1], -1)
        return {"centre": term(log_new, log_old, F.log_softmax(law(logits[1]), -1))}

    return reducer

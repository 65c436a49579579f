"""How far a recurrent layer by kernels is from the plain one on rows as trees make them.

Kernels that agree on whole tensors may still be wrong on a tree's: its documents are columns of a wider table, its
paths start from forks inside chunks, groups share a state, and projections are views of one product.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tfive.tree.fast.delta_step import RecurrentHeads
from tfive.tree.fast.mixer import TorchMixer
from tfive.tree.grow import grow
from tfive.tree.layout import PADDING, Layout, TextBatch, ThoughtPlan, Thoughts
from tfive.tree.recurrent.delta_rule import read_paths
from tfive.tree.recurrent.deltanet import RecurrentParts, TreeRecurrence

_PLAN = ThoughtPlan(length=5, checkpoints=(2, 5), horizon=4, open_ids=(1,), close_ids=(2,), group=2)
_DOCUMENTS = ((20, 47, -3), (33, 10, 27))
"""Lengths of each row's documents; the negative one is padding."""
_POSITIONS = ((2, 31, 32, 60), (32, 33, 50, -1))
"""Around boundaries of chunks and starts of documents; −1: no branch."""


def packed_tree(device: torch.device) -> Layout:
    """Two rows of packed documents, one of them padded, with groups of thoughts and segments behind them."""
    numbers = [[-1 if n < 0 else at for at, n in enumerate(row) for _ in range(abs(n))] for row in _DOCUMENTS]
    document_BS, positions_BP = torch.tensor(numbers, device=device), torch.tensor(_POSITIONS, device=device)
    tokens_BS = torch.zeros_like(document_BS)
    items_BP = torch.arange(positions_BP.numel(), device=device).view_as(positions_BP)
    branch_BR = positions_BP.repeat_interleave(_PLAN.group, 1)
    length_BR = torch.where(branch_BR < 0, 0, _PLAN.length)
    length_BR[:, 1::3] = 3
    tokens_BRT = length_BR[..., None].expand(-1, -1, _PLAN.length).clone()
    none_BR, log_q_BRT = torch.zeros_like(branch_BR, dtype=torch.bool), torch.zeros_like(tokens_BRT).float()
    thoughts = Thoughts(tokens_BRT, length_BR, branch_BR >= 0, none_BR, log_q_BRT)
    return grow(TextBatch(tokens_BS, document_BS, positions_BP, items_BP), _PLAN, thoughts, "all")


def _parts(heads: RecurrentHeads, leaves: list[Tensor]) -> RecurrentParts:
    """A layer whose projections are parts of its input and which ends with the gated norm."""
    _, taps_UJ, log_rate_I, rate_bias_I, norm_F = leaves
    widths = [heads.channels, heads.values * heads.value_features, heads.values, heads.values]

    def project(hidden_BND: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        inputs, gate, strength, rate = hidden_BND.split(widths, -1)
        return inputs, gate, strength, rate

    return RecurrentParts(
        layer=0,
        project=project,
        finish=lambda output, gate: TorchMixer().gated_norm(output, gate, norm_F, 1e-6),
        activate=F.silu,
        taps_UJ=taps_UJ,
        tap_bias_U=None,
        log_rate_I=log_rate_I,
        rate_bias_I=rate_bias_I,
        key_heads=heads.keys,
        key_features=heads.key_features,
        value_features=heads.value_features,
        norm_F=norm_F,
        norm_epsilon=1e-6,
        outward=lambda normed: normed,
    )


@torch.enable_grad()
def recurrence_differences(
    recurrence: Callable[[Layout], TreeRecurrence], heads: RecurrentHeads, device: torch.device, dtype: torch.dtype
) -> dict[str, float]:
    """How far passes by `recurrence` over a packed tree are from those of `deltanet.TreeRecurrence` in float32, for the
    nodes of each part of the tree and for the gradients of everything a layer reads: |a − b| / |b|."""
    layout, generator = packed_tree(device), torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    wide = heads.channels + heads.values * heads.value_features + 2 * heads.values
    # Heads that hardly forget, whose past shows anywhere later, beside some that forget within a few nodes.
    log_rates = torch.linspace(-5.0, 1.0, heads.values)
    norm = 1 + 0.1 * random(heads.value_features)
    drawn = [random(2, layout.node_count, wide), random(heads.channels, heads.memory + 1) / 2, log_rates]
    given = [x.to(device, dtype) for x in (*drawn, random(heads.values), norm)]
    real_BN1 = (layout.kind_BN != PADDING)[..., None]
    aim_BNV = random(2, layout.node_count, heads.values * heads.value_features).to(device) * real_BN1
    cuts = [layout.thought_start, layout.segment_start - layout.thought_start]
    cuts.append(layout.node_count - sum(cuts))
    found: list[list[Tensor]] = []
    plain = (lambda layout: TreeRecurrence(layout, read_paths), torch.float32)
    for make, kind in (plain, (recurrence, dtype)):
        leaves = [x.to(kind).detach().requires_grad_() for x in given]
        output_BNV = make(layout).mix(_parts(heads, leaves), leaves[0])
        grads = torch.autograd.grad((output_BNV.float() * aim_BNV).sum(), leaves)
        found.append([*(output_BNV.detach() * real_BN1).split(cuts, 1), *grads])
    parts = [f"{part} of a packed tree" for part in ("text", "thoughts", "continuations")]
    names = [*parts, *(f"its gradients of {n}" for n in ("inputs", "taps", "log rates", "rate biases", "norm"))]
    return {
        name: float((got.double() - want.double()).norm() / want.double().norm())
        for name, want, got in zip(names, *found, strict=True)
    }

"""Losses beside the policy gradient: next-token anchors, and the prediction gate that mixes two predictions of a
token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


def anchor_loss(log_prob: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Sum and count of ``−log p`` over valid tokens.

    On text log-probabilities this is the next-token anchor; on continuation log-probabilities read after a thought it
    is the conditioned anchor, which teaches the model to read thoughts.
    """
    return -torch.where(mask, log_prob, torch.zeros_like(log_prob)).sum(), mask.sum()


def mixed_log_prob(gate_logit: Tensor, log_with: Tensor, log_without: Tensor) -> Tensor:
    """log(β_g p_thought + (1−β_g) p_no-thought) per predicted token, β_g = sigmoid(gate_logit): probabilities are
    mixed."""
    return torch.logaddexp(F.logsigmoid(gate_logit) + log_with, F.logsigmoid(-gate_logit) + log_without)


@dataclass(frozen=True)
class GateTerms:
    """The prediction gate's loss summed over tokens, its three parts (detached), and the token count."""

    loss_sum: Tensor
    mixed: Tensor
    no_harm: Tensor
    utility: Tensor
    count: Tensor


def gate_terms(
    gate_logit: Tensor,
    log_with: Tensor,
    log_without: Tensor,
    mask: Tensor,
    *,
    no_harm: float = 1.0,
    utility: float = 0.1,
    utility_scale: float = 1.0,
) -> GateTerms:
    """Mixed NLL + no-harm + utility-aware loss (app:gate-behavior), [..., H]; only the gate gets gradients.

    No-harm: how much worse the mixture predicts than the model without the thought. Utility-aware: ``−β_g U/σ_u`` with
    U = log p_thought − log p_no-thought, which opens the gate where thoughts help and shuts it where they hurt.
    """
    if not utility_scale > 0:
        raise ValueError(f"utility_scale must be positive, got {utility_scale}")
    log_with, log_without = log_with.detach(), log_without.detach()
    zero = torch.zeros_like(gate_logit)
    mixed = mixed_log_prob(gate_logit, log_with, log_without)
    nll = torch.where(mask, -mixed, zero).sum()
    harm = torch.where(mask, (log_without - mixed).clamp(min=0), zero).sum()
    gain = torch.where(mask, log_with - log_without, zero) / utility_scale
    useful = -(torch.sigmoid(gate_logit) * gain).sum()
    loss = nll + no_harm * harm + utility * useful
    return GateTerms(loss, nll.detach(), harm.detach(), useful.detach(), mask.sum())


def best_constant_gate(log_with: Tensor, log_without: Tensor, mask: Tensor, iterations: int = 60) -> float:
    """The one β ∈ [0, 1] that minimises the mixed NLL on these tokens; the loss is convex in β, so bisection finds
    it."""
    odds = (log_with - log_without)[mask].double()
    low, high = 0.0, 1.0
    lift = torch.expm1(odds)
    for _ in range(iterations):
        middle = (low + high) / 2
        slope = float((lift / (1 + middle * lift)).mean())
        low, high = (middle, high) if slope > 0 else (low, middle)
    return (low + high) / 2


def oracle_gate_gain(log_with: Tensor, log_without: Tensor, mask: Tensor) -> Tensor:
    """Per token, the gain of a gate that knows the answer: ``max(U, 0)``, zero where masked. An upper bound to aim
    at."""
    return torch.where(mask, (log_with - log_without).clamp(min=0), torch.zeros_like(log_with))


def correlation(left: Tensor, right: Tensor, mask: Tensor) -> float | None:
    """Pearson correlation over valid tokens (the gate's with utility, say); None when one side is constant."""
    a, b = left[mask].double(), right[mask].double()
    a, b = a - a.mean(), b - b.mean()
    scale = float(a.norm() * b.norm())
    return None if scale <= 1e-300 else float(a @ b) / scale

"""Every loss of training: the policy's (clipped PPO), the critics' (value regression), the anchors' (likelihood)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tfive.tree.head import mix_log_probs

Denominator = Literal["recomputed", "scored", "sampler"]
Correction = Literal["none", "truncated", "mask"]
Aggregate = Literal["token", "thought"]
Baseline = Literal["std", "none", "leave_one_out"]

GROUP_EPSILON = 1e-6
"""Added to a group's standard deviation; small beside any that is not rounding."""

_ROUNDING = 64
"""Units of the last place by which equal returns may differ: losses are means of many terms, divided by σ_r."""


def active_mask(ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    """I of eq:clipped-token-gradient: which tokens still push the policy. At ρ = ρ₊ or ρ₋ exactly the coefficient is 0
    on the clipped side (the indicator is strict), and a zero advantage counts as active; its gradient is zero
    anyway."""
    return ((advantage > 0) & (ratio < high)) | ((advantage < 0) & (ratio > low)) | (advantage == 0)


def clipped_surrogate(ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    """``min{ρÃ, clip(ρ, ρ₋, ρ₊)Ã}`` per token (eq:ppo), differentiable in ρ with derivative exactly Ã·I.

    The inactive branch is a constant, so the gradient follows `active_mask` at the boundaries as well, where automatic
    differentiation of min and clip would choose a convention of its own.
    """
    advantage = advantage.detach()
    active = active_mask(ratio.detach(), advantage, low, high)
    return torch.where(active, ratio, ratio.detach().clamp(low, high)) * advantage


def correction_weight(log_old: Tensor, log_sampler: Tensor, correction: Correction, cap: float) -> Tensor:
    """The factor that makes up for sampling from q while dividing by π_old: 1, min(π_old/q, cap), or 1 inside [1/cap,
    cap]."""
    mismatch = (log_old - log_sampler).detach().exp()
    if correction == "none":
        return torch.ones_like(mismatch)
    if cap < 1:
        raise ValueError(f"a ratio correction needs cap ≥ 1, got {cap}")
    if correction == "truncated":
        return mismatch.clamp(max=cap)
    return ((mismatch <= cap) & (mismatch >= 1 / cap)).to(mismatch.dtype)


@dataclass(frozen=True)
class PolicyTerms:
    """One micro-batch's share of the actor step. Only `loss_sum` carries gradients; the rest are sums over valid
    tokens."""

    loss_sum: Tensor
    count: Tensor
    tokens: Tensor
    clipped: Tensor
    kl: Tensor
    kl_positive: Tensor
    mismatch: Tensor
    mismatch_positive: Tensor


def policy_terms(
    log_prob: Tensor,
    log_old: Tensor,
    log_sampler: Tensor,
    advantage: Tensor,
    mask: Tensor,
    *,
    low: float = 0.8,
    high: float = 1.28,
    denominator: Denominator = "recomputed",
    correction: Correction = "none",
    cap: float = 2.0,
    aggregate: Aggregate = "token",
) -> PolicyTerms:
    """The clipped-PPO loss of one micro-batch, all shapes [..., T] (eq:ppo).

    `aggregate = "token"`: every valid token weighs the same and `count` is their number. `"thought"`: the mean over
    each thought's tokens, and `count` is the number of non-empty thoughts. A dropped or truncated token keeps its place
    in the count.
    """
    if not 0 < low <= 1 <= high:
        raise ValueError(f"clip bounds need 0 < low ≤ 1 ≤ high, got {low}, {high}")
    if denominator == "sampler" and correction != "none":
        raise ValueError("with the sampler as denominator the ratio is already exact; use correction = none")
    keep = mask.to(log_prob.dtype)
    log_old, log_sampler = log_old.detach(), log_sampler.detach()
    reference = log_sampler if denominator == "sampler" else log_old
    log_ratio = torch.where(mask, log_prob - reference, torch.zeros_like(log_prob))
    ratio = log_ratio.exp()
    gap = torch.where(mask, log_old - log_sampler, torch.zeros_like(log_prob))
    weight = correction_weight(gap, torch.zeros_like(gap), correction, cap) * keep
    surrogate = clipped_surrogate(ratio, torch.where(mask, advantage, torch.zeros_like(advantage)), low, high)
    fixed = log_ratio.detach()
    active = active_mask(ratio.detach(), advantage.detach(), low, high)
    return PolicyTerms(
        loss_sum=-(surrogate * weight * token_shares(mask, aggregate, log_prob.dtype)).sum(),
        count=policy_count(mask, aggregate),
        tokens=mask.sum(),
        clipped=(~active & mask).sum(),
        kl=(-fixed * keep).sum(),
        kl_positive=(kl_k3(fixed) * keep).sum(),
        mismatch=(-gap * keep).sum(),
        mismatch_positive=(kl_k3(gap) * keep).sum(),
    )


def policy_count(mask: Tensor, aggregate: Aggregate) -> Tensor:
    """What the policy's loss is a mean over: valid tokens, or non-empty thoughts."""
    return mask.any(-1).sum() if aggregate == "thought" else mask.sum()


def token_shares(mask: Tensor, aggregate: Aggregate, dtype: torch.dtype) -> Tensor:
    """What each valid token weighs: 1, or its share of its thought; 0 where masked."""
    keep = mask.to(dtype)
    return keep / keep.sum(-1, keepdim=True).clamp(min=1) if aggregate == "thought" else keep


def kl_k3(log_ratio: Tensor) -> Tensor:
    """Per-sample ``r − 1 − log r`` with r = p/q, x ~ q: nonnegative and unbiased for KL(q‖p) (Schulman's k3)."""
    return log_ratio.expm1() - log_ratio


def centering_term(
    log_prob_V: Tensor,
    log_old_V: Tensor,
    log_sampler_V: Tensor,
    *,
    denominator: Denominator = "recomputed",
    correction: Correction = "none",
    cap: float = 2.0,
) -> Tensor:
    """E_q[cρ·log π_θ | s] with ρ and the correction c held fixed, [...]: its gradient is E_q[cρ∇log π_θ | s].

    Score centering subtracts Ã times this from the surrogate, which removes the mean update factor exactly as long as
    no token is clipped. All three laws are full rows over the vocabulary; tokens that q cannot draw have −inf (or a
    probability of 0) under it and count for nothing.
    """
    support = torch.isfinite(log_sampler_V)
    zero = torch.zeros_like(log_prob_V)
    reference = log_sampler_V if denominator == "sampler" else log_old_V
    log_weight = torch.where(support, log_sampler_V + log_prob_V.detach() - reference, zero)
    gap = torch.where(support, log_old_V - log_sampler_V, zero)
    weight = torch.where(support, log_weight.exp() * correction_weight(gap, zero, correction, cap), zero).detach()
    return (weight * torch.where(support, log_prob_V, zero)).sum(-1)


def centering_loss(centre: Tensor, advantage: Tensor, mask: Tensor, aggregate: Aggregate) -> Tensor:
    """Sum of Ã times the mean score (`centering_term`), to add to the policy's `loss_sum`: the update loses
    Ã·E_q[cρ∇log π | s], whose mean is zero while nothing is clipped."""
    return (advantage.detach() * token_shares(mask, aggregate, centre.dtype) * centre).sum()


def group_advantages(
    return_G: Tensor, baseline: Baseline, mask_G: Tensor | None = None, epsilon: float = GROUP_EPSILON
) -> Tensor:
    """Group-relative advantages over the last dimension, zero where masked.

    `std`: (r − mean)/(std + ε), GRPO. `none`: r − mean. `leave_one_out`: r − mean of the others, which is also RLP's
    G/(G−1)·(r − mean). A group of one has no one to be compared with and gets zero, and so does a group whose returns
    differ by rounding alone: dividing by a deviation of nothing would make that an advantage.
    """
    mask_G = torch.ones_like(return_G, dtype=torch.bool) if mask_G is None else mask_G
    keep = mask_G.to(return_G.dtype)
    size = keep.sum(-1, keepdim=True)
    centred = (return_G - (return_G * keep).sum(-1, keepdim=True) / size.clamp(min=1)) * keep
    if baseline == "none":
        return centred
    if baseline == "leave_one_out":
        return torch.where(size > 1, centred * size / (size - 1).clamp(min=1), torch.zeros_like(centred))
    deviation = ((centred.square()).sum(-1, keepdim=True) / (size - 1).clamp(min=1)).sqrt()
    largest = (return_G * keep).abs().amax(-1, keepdim=True).clamp(min=1)
    differs = deviation > _ROUNDING * torch.finfo(return_G.dtype).eps * largest
    return torch.where((size > 1) & differs, centred / (deviation + epsilon), torch.zeros_like(centred))


def _masked_sum(loss: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    return torch.where(mask, loss, torch.zeros_like(loss)).sum(), mask.sum()


def clipped_value_loss(
    value: Tensor, return_: Tensor, frozen: Tensor, mask: Tensor, clip: float
) -> tuple[Tensor, Tensor]:
    """Sum and count of ``½ max{(V−G)², (V̄−G)²}``, V̄ within ±ε_v of the pre-fit prediction (eq:value-loss)."""
    if not clip > 0:
        raise ValueError(f"the value clip must be positive, got {clip}")
    frozen, return_ = frozen.detach(), return_.detach()
    near = frozen + (value - frozen).clamp(-clip, clip)
    return _masked_sum(0.5 * torch.maximum((value - return_).square(), (near - return_).square()), mask)


def squared_value_loss(value: Tensor, return_: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Sum and count of ``½ (V−G)²`` (app:value-fitting's ordinary half-squared error)."""
    return _masked_sum(0.5 * (value - return_.detach()).square(), mask)


def expectile_value_loss(value: Tensor, return_: Tensor, mask: Tensor, expectile: float) -> tuple[Tensor, Tensor]:
    """Sum and count of ``|τ − 1{G<V}| (V−G)²``; τ = ½ is the half-squared loss. A `bracket` pair uses τ and 1 − τ."""
    if not 0 < expectile < 1:
        raise ValueError(f"an expectile lies strictly between 0 and 1, got {expectile}")
    gap = return_.detach() - value
    below = (gap < 0).to(gap.dtype)
    tilt = expectile + (1 - 2 * expectile) * below
    return _masked_sum(tilt * gap.square(), mask)


def anchor_loss(log_prob: Tensor, mask: Tensor, plain: Tensor | None = None, share: float = 1.0) -> Tensor:
    """Sum of ``−log p`` over valid tokens: the likelihood anchors of the actor step.

    On the text's own next tokens this is the next-token anchor. On continuation tokens after a thought it is the
    conditioned anchor, which teaches the model to read thoughts; with their log-probabilities `plain` without the
    thought it is that of the mixture, p = (1 − share)·p_plain + share·p_after, where p_plain gets no gradients.
    """
    if plain is not None:
        log_prob = mix_log_probs(plain.detach(), log_prob, share)
    return -torch.where(mask, log_prob, torch.zeros_like(log_prob)).sum()


def before_answers(positions_BP: Tensor, width: int, horizon: int) -> Tensor:
    """bool `[B, S]`: tokens of texts of `width` tokens whose next one is among the `horizon` after a selected position,
    which `anchor.answers = false` leaves out of the next-token anchor."""
    ahead_BPH = positions_BP[..., None] + torch.arange(horizon, device=positions_BP.device)
    inside_BPH = (positions_BP >= 0)[..., None] & (ahead_BPH < width)
    found_BS = torch.zeros(len(positions_BP), width, dtype=torch.int64, device=positions_BP.device)
    index_BPH = ahead_BPH.clamp(0, width - 1)
    return found_BS.scatter_add(1, index_BPH.flatten(1), inside_BPH.long().flatten(1)) > 0


def anchor_counts(document_BS: Tensor, positions_BP: Tensor, horizon: int, answers: bool = True) -> tuple[int, int]:
    """Next tokens inside documents, and continuation tokens behind one thought a position: how many tokens the anchors
    of a whole step are means over, known before its first micro-batch is read. Without `answers` the former leave out
    the latter."""
    width = document_BS.shape[1]
    same_BS = (document_BS[:, 1:] == document_BS[:, :-1]) & (document_BS[:, 1:] >= 0)
    if not answers:
        same_BS = same_BS & ~before_answers(positions_BP, width, horizon)[:, :-1]
    ahead_BPH = positions_BP[..., None] + 1 + torch.arange(horizon, device=positions_BP.device)
    inside_BPH = ahead_BPH.clamp(max=width - 1)
    document_BPH = document_BS.gather(1, inside_BPH.flatten(1)).view(inside_BPH.shape)
    own_BP1 = document_BS.gather(1, positions_BP.clamp(min=0))[..., None]
    kept_BPH = (document_BPH == own_BP1) & (ahead_BPH < width) & (positions_BP >= 0)[..., None]
    return int(same_BS.sum()), int(kept_BPH.sum())

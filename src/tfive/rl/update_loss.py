"""The loss of one part of an actor's update, from what its pass gives: clipped PPO and the likelihood anchors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from tfive.rl.losses import Aggregate, PolicyTerms, anchor_loss, centering_loss, policy_terms
from tfive.rl.settings import ActorSettings, AnchorSettings, RatioSettings
from tfive.tree.outputs import PolicyOutput

TERMS = tuple(f.name for f in fields(PolicyTerms))
"""The policy's sums; a part's row of sums ends with the next-token loss and the loss after thoughts."""


@dataclass(frozen=True)
class UpdateLoss:
    """Everything that the loss depends on beside tensors."""

    actor: ActorSettings
    ratio: RatioSettings
    weights: AnchorSettings
    aggregate: Aggregate | None
    """What the policy's loss is a mean over; None without it."""

    def __call__(
        self, output: PolicyOutput, given: Mapping[str, Tensor], totals: Sequence[float | Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The loss, and the row of sums (float64, without gradients).

        `given` has the policy's `log_old_BRT`, `log_q_BRT`, `advantage_BRT` and `mask_BRT`, and the `text_mask_BS` of
        the next-token anchor. `totals`: what each of the three losses is divided by, which the whole step shares.
        """
        total, text_total, after_total = totals
        loss = torch.zeros((), device=output.mask_BRT.device)
        sums = torch.zeros(len(TERMS) + 2, dtype=torch.float64, device=loss.device)
        if self.aggregate is not None:
            terms, own = self._policy(output, given, self.aggregate)
            loss = loss + own / total
            sums[:-2] = torch.stack([getattr(terms, name).detach().double() for name in TERMS])
        if output.text_log_prob_BS is not None:
            text = anchor_loss(output.text_log_prob_BS, given["text_mask_BS"])
            loss = loss + self.weights.next_token * text / text_total
            sums[-2] = text.detach()
        if output.continuation_log_prob_BRH is not None:
            mask_BRH, plain_BRH = output.need("continuation_mask_BRH"), output.no_thought_log_prob_BRH
            after = anchor_loss(output.continuation_log_prob_BRH, mask_BRH, plain_BRH, self.weights.mixture)
            loss = loss + self.weights.conditioned * after / after_total
            sums[-1] = after.detach()
        return loss, sums

    def _policy(
        self, output: PolicyOutput, given: Mapping[str, Tensor], aggregate: Aggregate
    ) -> tuple[PolicyTerms, Tensor]:
        """Clipped PPO's sums, and the loss that they make."""
        terms = policy_terms(
            output.need("log_prob_BRT"),
            given["log_old_BRT"],
            given["log_q_BRT"],
            given["advantage_BRT"],
            given["mask_BRT"],
            low=self.actor.clip_low,
            high=self.actor.clip_high,
            denominator=self.ratio.denominator,
            correction=self.ratio.correction,
            cap=self.ratio.cap,
            aggregate=aggregate,
        )
        if output.centre_BRT is None:
            return terms, terms.loss_sum
        centring = centering_loss(output.centre_BRT, given["advantage_BRT"], given["mask_BRT"], aggregate)
        return terms, terms.loss_sum + centring

"""What the four verbs return."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor


class _Parts:
    """A record some of whose fields are None because nobody asked for them."""

    def need(self, name: str) -> Tensor:
        """A part that was asked for; an error names one that was not."""
        value: Tensor | None = getattr(self, name)
        if value is None:
            raise ValueError(f"{name} was not asked for")
        return value


@dataclass(frozen=True)
class Scores(_Parts):
    """Continuation losses `eq:continuation-ce`, in nats per token."""

    losses_BRK: Tensor
    """ℓ_τ after τ thought tokens and the close (0 where masked)."""
    checkpoint_BRK: Tensor
    """int64 τ: the configured ones below L, then L; 0 where masked."""
    mask_BRK: Tensor
    """bool; which checkpoints exist."""
    token_BRH: Tensor
    """The loss of each continuation token after the whole thought (0 where masked)."""
    token_mask_BRH: Tensor
    """bool; continuation tokens that exist."""
    no_thought_BR: Tensor
    """ℓ_0, read off the trunk."""
    no_thought_token_BRH: Tensor
    """The loss of each continuation token without a thought (0 where masked)."""
    no_thought_features_BRHD: Tensor | None = None
    """Hidden states that predict each continuation token without a thought; when asked for."""
    features_BRHD: Tensor | None = None
    """Hidden states that predict each continuation token after the whole thought; when asked for."""


@dataclass(frozen=True)
class PolicyOutput(_Parts):
    """What the training forward gives; everything carries gradients. Parts that were not asked for are None."""

    mask_BRT: Tensor
    """bool; which actions exist."""
    log_prob_BRT: Tensor | None = None
    """Log-probability of each action under the model's own distribution (0 where masked)."""
    entropy_BRT: Tensor | None = None
    """Entropy of that distribution (0 where masked)."""
    features_BRTD: Tensor | None = None
    """Final hidden states before each action (0 where masked)."""
    centre_BRT: Tensor | None = None
    """A number whose gradient is the mean score E_q[ρ ∇log π_θ] at each action's state."""
    text_loss_sum: Tensor | None = None
    """Summed next-token loss on the text itself."""
    text_token_count: Tensor | None = None
    """How many tokens that sum is over."""
    conditioned_loss_sum: Tensor | None = None
    """Summed next-token loss on the continuations given the whole thought (of the mixture where one was asked for)."""
    conditioned_token_count: Tensor | None = None
    """How many tokens that sum is over."""

    @staticmethod
    def stacked(parts: list[PolicyOutput]) -> PolicyOutput:
        """Outputs of single texts as those of the batch: rows one below the other, sums added."""
        columns = {f.name: [getattr(part, f.name) for part in parts] for f in fields(PolicyOutput)}
        return PolicyOutput(**{name: _stack(some) for name, some in columns.items() if some[0] is not None})


def _stack(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).sum(0) if parts[0].ndim == 0 else torch.cat(parts)


@dataclass(frozen=True)
class Lower:
    """Activations that enter block `block`, for running only the blocks from there on, as often as wanted."""

    hidden_BND: Tensor
    block: int

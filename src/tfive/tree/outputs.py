"""What the four verbs return, and what they share."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from tfive.tree.attention import KeysValues
from tfive.tree.recurrent.deltanet import ForkMemory


class _Parts:
    """A record in which parts that were not asked for are None."""

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
    log_prob_BRT: Tensor | None = None
    """Log-probability of each action under the model's own distribution, as in `PolicyOutput`, by the pass that scores
    (0 where masked, and in texts it was not asked for)."""
    states_BRTD: Tensor | None = None
    """Hidden states before each action, from the same pass (0 likewise)."""
    lower_BND: Tensor | None = None
    """Activations of texts and thoughts that enter the block whose were kept of the reading, as in `Lower`."""


@dataclass(frozen=True)
class PolicyOutput(_Parts):
    """What the training forward gives: log-probabilities and the like, with gradients; losses are made of them in
    `tfive.rl.losses`. Parts that were not asked for are None."""

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
    text_log_prob_BS: Tensor | None = None
    """Log-probability of the text's own next token at each trunk node (0 where masked)."""
    text_mask_BS: Tensor | None = None
    """bool; which trunk nodes have a next token in their document."""
    continuation_log_prob_BRH: Tensor | None = None
    """Log-probability of each continuation token after the whole thought (0 where masked); R counts the thoughts that
    a continuation was asked for."""
    continuation_mask_BRH: Tensor | None = None
    """bool; which of them exist."""
    no_thought_log_prob_BRH: Tensor | None = None
    """Log-probability of the same tokens without the thought, without gradients."""

    @property
    def log_probs(self) -> list[Tensor]:
        """All log-probabilities that were asked for, without gradients."""
        named = (self.log_prob_BRT, self.text_log_prob_BS, self.continuation_log_prob_BRH, self.no_thought_log_prob_BRH)
        return [found.detach() for found in named if found is not None]

    @staticmethod
    def stacked(parts: list[PolicyOutput]) -> PolicyOutput:
        """Outputs of single texts as those of the batch."""
        columns = {f.name: [getattr(part, f.name) for part in parts] for f in fields(PolicyOutput)}
        return PolicyOutput(**{name: torch.cat(some) for name, some in columns.items() if some[0] is not None})


@dataclass(frozen=True)
class Lower:
    """Activations that enter block `block`, for running only the blocks from there on, as often as wanted."""

    hidden_BND: Tensor
    block: int


@dataclass(frozen=True)
class Reading:
    """What one pass over the trunk leaves behind: the text is read once, then sampled from and scored."""

    hidden_BSD: Tensor
    """Final hidden states of the trunk."""
    attention: dict[int, KeysValues]
    """Keys and values of the trunk by layer."""
    recurrent: dict[int, ForkMemory]
    """States of recurrent layers at the positions, by layer."""
    lower: Lower | None = None
    """Activations of the trunk that enter a block, where they are kept."""

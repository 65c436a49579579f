"""The prediction gate β_g: how far to trust the prediction made after a thought (app:gate-behavior, SPEC 5).

One logit per predicted token, from what is visible before that token: the hidden states that predict it with and
without the thought. `learn.anchor.mixed_log_prob` mixes *probabilities* with it, `learn.anchor.gate_terms` is its loss.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tfive.models.heads import dense


class PredictionGate(nn.Module):
    """β_g = sigmoid of the returned logits; starts near ½, with a last layer that is small but not zero.

    Both hidden states are detached (the gate teaches the model nothing), normalised to unit size and projected alike,
    so that the gate sees what the thought changed as well as where it was written.
    """

    def __init__(self, features: int, *, width: int = 64, extras: int = 0, seed: int = 0) -> None:
        """`features` is the width D of the hidden states, `extras` the number of further columns per token."""
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.features, self.extras = features, extras
        self.project = dense(features, width, generator)
        self.join = dense(3 * width + extras + 1, width, generator, gain=2.0**0.5)
        self.last = dense(width, 1, generator, gain=0.01)

    def forward(self, with_thought: Tensor, without_thought: Tensor, extras: Tensor | None = None) -> Tensor:
        """Gate logits `[…, H]` for hidden states `[…, H, D]` with and without the thought.

        `extras` `[…, H, E]` are visible columns such as the two predictions' entropies. The offset j/H of the predicted
        token is added here.
        """
        dtype = self.last.weight.dtype
        pair = torch.stack([with_thought.detach(), without_thought.detach()]).to(dtype)
        thought, plain = self.project(F.layer_norm(pair, (self.features,)))
        horizon = with_thought.shape[-2]
        offset = torch.arange(horizon, dtype=dtype, device=pair.device) / horizon
        columns = [thought, plain, thought - plain, offset.expand(with_thought.shape[:-1]).unsqueeze(-1)]
        if self.extras:
            if extras is None or extras.shape[-1] != self.extras:
                raise ValueError(f"the gate needs {self.extras} extra columns per token")
            columns.append(extras.detach().to(dtype))
        logits: Tensor = self.last(F.silu(self.join(F.silu(torch.cat(columns, dim=-1)))))
        return logits.squeeze(-1)

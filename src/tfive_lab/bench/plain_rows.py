"""The baseline of the engine benchmark: one left-padded row per thought through a stock transformers model.

It is as fast as such rows allow (sorted by length, logits only where they are used, inference mode where no gradient is
needed) and shares no code with the tree engine. All thoughts have full length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from tfive.tree.layout import TextBatch, ThoughtPlan

Rows = list[Tensor]


class PlainRows:
    """Sampling, scoring, log-probabilities and values of thoughts, each thought in a row of its own.

    `rows` is the batch size. Results are in the order of the branches, `[B·R, …]`.
    """

    def __init__(self, model: PreTrainedModel, texts: TextBatch, plan: ThoughtPlan) -> None:
        self.model: Any = model
        self.plan = plan
        self.device = next(model.parameters()).device
        self.prefixes, self.afters = _cut(texts, plan)
        self.banned = torch.tensor(plan.forbidden_ids, dtype=torch.int64, device=self.device)

    def _batches(self, rows: Rows, size: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """`(which rows, tokens, mask)`, longest first: neighbours in length share their padding."""
        order = torch.tensor([len(r) for r in rows]).argsort(descending=True, stable=True)
        for chosen in order.split(size):
            padded = pad_sequence([rows[i] for i in chosen.tolist()], batch_first=True, padding_side="left")
            lengths = torch.tensor([len(rows[i]) for i in chosen.tolist()])
            mask = torch.arange(padded.shape[1]) >= (padded.shape[1] - lengths)[:, None]
            yield chosen, padded.to(self.device), mask.to(self.device)

    def _join(self, parts: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Results of the batches back in the order of the rows."""
        order = torch.cat([chosen for chosen, _ in parts])
        return torch.cat([values for _, values in parts])[order.argsort().to(self.device)]

    def _opened(self, tokens_QT: Tensor | None = None, steps: int | None = None) -> Rows:
        """Rows of text, opening and (the first `steps` tokens of) each thought."""
        opening = torch.tensor(self.plan.open_ids, dtype=torch.int64)
        if tokens_QT is None:
            return [torch.cat([prefix, opening]) for prefix in self.prefixes]
        return [torch.cat([prefix, opening, z[:steps]]) for prefix, z in zip(self.prefixes, tokens_QT.cpu())]

    @torch.inference_mode()
    def sample(self, rows: int) -> Tensor:
        """One thought per row by transformers' `generate`, `[Q, T]`."""
        parts = []
        for chosen, tokens, mask in self._batches(self._opened(), rows):
            written = self.model.generate(
                input_ids=tokens,
                attention_mask=mask.long(),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=self.plan.length,
                min_new_tokens=self.plan.length,
                suppress_tokens=list(self.plan.forbidden_ids) or None,
                pad_token_id=0,
                eos_token_id=None,
            )
            parts.append((chosen, written[:, tokens.shape[1] :]))
        return self._join(parts)

    def _log_prob(self, tokens: Tensor, mask: Tensor, count: int, banned: Tensor | None = None) -> Tensor:
        """Log-probability of the last `count` tokens of each row, `[q, count]`; the very last one is not read."""
        seen = mask[:, :-1].long()
        position = (seen.cumsum(1) - 1).clamp(min=0)
        output = self.model(
            input_ids=tokens[:, :-1], attention_mask=seen, position_ids=position, logits_to_keep=count, use_cache=False
        )
        logits = output.logits.float()
        if banned is not None and len(banned):
            logits = logits.index_fill(-1, banned, torch.finfo(logits.dtype).min)
        return torch.log_softmax(logits, -1).gather(-1, tokens[:, -count:, None])[..., 0]

    @torch.inference_mode()
    def score(self, tokens_QT: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Mean continuation loss without a thought `[Q]` and after each checkpoint `[Q, K]`."""
        closing = torch.tensor(self.plan.close_ids, dtype=torch.int64)
        sets = [[torch.cat([prefix, after]) for prefix, after in zip(self.prefixes, self.afters)]]
        for steps in self.plan.checkpoints:
            opened = self._opened(tokens_QT, steps)
            sets.append([torch.cat([row, closing, after]) for row, after in zip(opened, self.afters)])
        losses = []
        for some in sets:
            batches = self._batches(some, rows)
            parts = [(c, -self._log_prob(t, m, self.plan.horizon).mean(-1)) for c, t, m in batches]
            losses.append(self._join(parts))
        return losses[0], torch.stack(losses[1:], 1)

    def policy(self, tokens_QT: Tensor, rows: int, scale: float | None = None) -> Tensor:
        """Log-probability of every action `[Q, T]`; with `scale`, gradients of −scale · their sum are accumulated."""
        parts = []
        for chosen, tokens, mask in self._batches(self._opened(tokens_QT), rows):
            log_prob = self._log_prob(tokens, mask, self.plan.length, self.banned)
            if scale is not None:
                (-scale * log_prob.sum()).backward()
            parts.append((chosen, log_prob.detach()))
        return self._join(parts)

    @torch.inference_mode()
    def values(self, tokens_QT: Tensor, head: Callable[[Tensor, Tensor], Tensor], rows: int) -> Tensor:
        """V of every prefix before an action, `[Q, T]`."""
        parts = []
        for chosen, tokens, mask in self._batches(self._opened(tokens_QT), rows):
            seen = mask[:, :-1].long()
            position = (seen.cumsum(1) - 1).clamp(min=0)
            output = self.model.base_model(
                input_ids=tokens[:, :-1], attention_mask=seen, position_ids=position, use_cache=False
            )
            features = output.last_hidden_state[:, -self.plan.length :]
            parts.append((chosen, head(features, torch.arange(self.plan.length, device=self.device))))
        return self._join(parts)


def _cut(texts: TextBatch, plan: ThoughtPlan) -> tuple[Rows, Rows]:
    """For every branch the text up to its position and the H tokens after it, inside its document."""
    prefixes, afters = [], []
    for tokens, document, positions in zip(texts.tokens_BS.cpu(), texts.document_BS.cpu(), texts.positions_BP.tolist()):
        for p in (p for p in positions for _ in range(plan.group)):
            own = (document == document[p]).nonzero()[:, 0]
            start, end = int(own[0]), int(own[-1]) + 1
            if p + plan.horizon >= end:
                raise ValueError(f"position {p} has fewer than {plan.horizon} tokens after it in its document")
            prefixes.append(tokens[start : p + 1])
            afters.append(tokens[p + 1 : p + 1 + plan.horizon])
    return prefixes, afters

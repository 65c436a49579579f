"""The independent reference: every thought is a row of its own, read whole by the stock model.

Nothing here knows about trees. A row is literally the text of p's document up to p, the opening, the thought, the close
and the continuation, one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tfive.tree.layout import TextBatch, ThoughtPlan, Thoughts


@dataclass
class Branch:
    """One thought with what surrounds it, as plain lists of ids."""

    prefix: list[int]
    thought: list[int]
    closed: bool
    continuation: list[int]


@dataclass
class Plain:
    """Reference quantities; lists run over the branches that exist, in order (text, branch)."""

    log_prob: list[Tensor] = field(default_factory=list)
    entropy: list[Tensor] = field(default_factory=list)
    features: list[Tensor] = field(default_factory=list)
    no_thought: list[Tensor] = field(default_factory=list)
    losses: list[dict[int, Tensor]] = field(default_factory=list)
    conditioned: list[Tensor] = field(default_factory=list)


def branches_of(texts: TextBatch, plan: ThoughtPlan, thoughts: Thoughts) -> list[Branch]:
    found = []
    for row in range(len(texts.tokens_BS)):
        tokens, documents = texts.tokens_BS[row].tolist(), texts.document_BS[row].tolist()
        for r in range(thoughts.length_BR.shape[1]):
            p = int(texts.positions_BP[row, r // plan.group])
            if p < 0 or not thoughts.valid_BR[row, r]:
                continue
            start = next(i for i in range(len(tokens)) if documents[i] == documents[p])
            length = int(thoughts.length_BR[row, r])
            ahead = [
                tokens[i]
                for i in range(p + 1, p + 1 + plan.horizon)
                if i < len(tokens) and documents[i] == documents[p]
            ]
            found.append(
                Branch(
                    tokens[start : p + 1],
                    thoughts.tokens_BRT[row, r, :length].tolist(),
                    bool(thoughts.closed_BR[row, r]),
                    ahead,
                )
            )
    return found


class PlainModel:
    """The stock model, one row at a time."""

    def __init__(self, model: PreTrainedModel, plan: ThoughtPlan, delimiters: Tensor | None = None) -> None:
        self.model, self.plan, self.delimiters = model, plan, delimiters

    def _delimiter(self, ids: tuple[int, ...], which: int) -> Tensor:
        if self.plan.learned:
            assert self.delimiters is not None
            return self.delimiters[which : which + 1].to(self.model.dtype)
        return self._embed(list(ids))

    def _embed(self, ids: list[int]) -> Tensor:
        table = self.model.get_input_embeddings()
        return table(torch.tensor(ids, dtype=torch.int64))

    def _thought(self, branch: Branch, count: int) -> Tensor:
        if self.plan.learned and branch.closed and count == len(branch.thought):
            return torch.cat([self._embed(branch.thought[: count - 1]), self._delimiter((), 1)])
        return self._embed(branch.thought[:count])

    def _logits(self, row: Tensor) -> Tensor:
        """Logits of one row of embeddings."""
        return self.model(inputs_embeds=row[None], use_cache=False).logits[0]

    def _hidden(self, row: Tensor) -> Tensor:
        """Final hidden states of one row of embeddings."""
        return self.model.base_model(inputs_embeds=row[None], use_cache=False).last_hidden_state[0]

    def _loss(self, row: Tensor, continuation: list[int]) -> Tensor:
        """Loss of each continuation token behind `row` (whose last node predicts the first)."""
        whole = torch.cat([row, self._embed(continuation)])
        log_p = self._logits(whole).double().log_softmax(-1)[len(row) - 1 : len(row) - 1 + len(continuation)]
        return -log_p[torch.arange(len(continuation)), torch.tensor(continuation, dtype=torch.int64)]

    def logits_before_actions(self, texts: TextBatch, thoughts: Thoughts) -> list[Tensor]:
        """Logits that predict each action, forbidden entries at −∞, by branch."""
        found = []
        for branch in branches_of(texts, self.plan, thoughts):
            start = torch.cat([self._embed(branch.prefix), self._delimiter(self.plan.open_ids, 0)])
            with torch.no_grad():
                logits = self._logits(torch.cat([start, self._thought(branch, len(branch.thought))]))
            logits = logits[len(start) - 1 : len(start) - 1 + len(branch.thought)].double()
            logits[:, list(self.plan.forbidden_ids)] = float("-inf")
            found.append(logits)
        return found

    def __call__(self, texts: TextBatch, thoughts: Thoughts) -> Plain:
        found, plan = Plain(), self.plan
        for branch in branches_of(texts, plan, thoughts):
            prefix, length = self._embed(branch.prefix), len(branch.thought)
            start = torch.cat([prefix, self._delimiter(plan.open_ids, 0)])
            whole = torch.cat([start, self._thought(branch, length)])
            before = slice(len(start) - 1, len(start) - 1 + length)
            logits = self._logits(whole)[before].double()
            logits[:, list(plan.forbidden_ids)] = float("-inf")
            log_p = logits.log_softmax(-1)
            found.log_prob.append(log_p[torch.arange(length), torch.tensor(branch.thought, dtype=torch.int64)])
            found.entropy.append(torch.special.entr(log_p.exp()).sum(-1))
            found.features.append(self._hidden(whole)[before])
            found.no_thought.append(self._loss(prefix, branch.continuation).mean())
            losses = {}
            for tau in sorted({t for t in plan.checkpoints if t < length} | {length}):
                row = torch.cat([start, self._thought(branch, tau)])
                if not (branch.closed and tau == length):
                    row = torch.cat([row, self._delimiter(plan.close_ids, 1)])
                tokens = self._loss(row, branch.continuation)
                losses[tau] = tokens.mean()
            found.losses.append(losses)
            found.conditioned.append(tokens)
        return found

    def text_loss(self, texts: TextBatch) -> Tensor:
        """Summed next-token loss of all documents."""
        total = torch.zeros((), dtype=torch.float64)
        for row in range(len(texts.tokens_BS)):
            for document in sorted(set(texts.document_BS[row].tolist()) - {-1}):
                ids = texts.tokens_BS[row][texts.document_BS[row] == document].tolist()
                total = total + self._loss(self._embed(ids[:1]), ids[1:]).sum()
        return total

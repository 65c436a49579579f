"""The independent reference of gated reading: one row per continuation, attention spelled out by hand.

For every branch and checkpoint two plain rows go through the stock model. The first (prefix, opening, thought, close)
leaves the thought's keys and values of every layer. The second is the text alone, prefix and continuation, at its
ordinary positions; from token p on its queries also attend to those keys, by a softmax of their own times tanh(g).
Nothing here knows about trees.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from plain import Branch, PlainModel, branches_of
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from tfive.tree.layout import TextBatch, ThoughtPlan, Thoughts


@dataclass
class Spelled:
    """What the attention function below is to do at this moment."""

    gate_LY: Tensor
    thought: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    note_from: int | None = None
    """First row whose keys and values are noted."""
    read_from: int | None = None
    """First row whose query reads the noted keys."""


_now: list[Spelled] = []


def _spelled_out(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float | None = None, **given: Any
) -> tuple[Tensor, None]:
    now, heads, layer = _now[-1], query.shape[1], module.layer_idx
    window, cap = given.get("sliding_window"), given.get("softcap")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    share, rows = heads // key.shape[1], query.shape[2]
    if now.note_from is not None:
        now.thought[layer] = (key[0, :, now.note_from :], value[0, :, now.note_from :])
    outputs = []
    for head in range(heads):
        own_key, own_value = key[0, head // share], value[0, head // share]
        lines = []
        for row in range(rows):
            first = 0 if window is None else max(0, row - window + 1)
            line = _softly(query[0, head, row], own_key[first : row + 1], own_value[first : row + 1], scale, cap)
            if now.read_from is not None and row >= now.read_from:
                keys, values = (x[head // share] for x in now.thought[layer])
                if len(keys):
                    line = line + now.gate_LY[layer, head].tanh() * _softly(
                        query[0, head, row], keys, values, scale, cap
                    )
            lines.append(line)
        outputs.append(torch.stack(lines))
    return torch.stack(outputs, 1)[None], None


def _softly(query: Tensor, keys: Tensor, values: Tensor, scale: float, cap: float | None) -> Tensor:
    scores = keys @ query * scale
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    return scores.softmax(-1) @ values


AttentionInterface.register("spelled_out", _spelled_out)
AttentionMaskInterface.register("spelled_out", sdpa_mask)


@contextmanager
def _spelling(model: PreTrainedModel, now: Spelled) -> Iterator[None]:
    config: Any = model.base_model.config
    before = config._attn_implementation
    config._attn_implementation = "spelled_out"
    _now.append(now)
    try:
        yield
    finally:
        _now.pop()
        config._attn_implementation = before


class PlainGatedModel(PlainModel):
    """The stock model with gated reading, one continuation at a time."""

    def __init__(
        self, model: PreTrainedModel, plan: ThoughtPlan, gate_LY: Tensor, delimiters: Tensor | None = None
    ) -> None:
        super().__init__(model, plan, delimiters)
        self.gate_LY = gate_LY

    def losses(self, texts: TextBatch, thoughts: Thoughts) -> list[list[Tensor]]:
        """Loss of each continuation token by branch and checkpoint, `[H]` each."""
        return [
            [self._gated_loss(branch, tau) for tau in self._checkpoints(branch)]
            for branch in branches_of(texts, self.plan, thoughts)
        ]

    def _checkpoints(self, branch: Branch) -> list[int]:
        length = len(branch.thought)
        return sorted({tau for tau in self.plan.checkpoints if tau < length} | {length})

    def _gated_loss(self, branch: Branch, tau: int) -> Tensor:
        prefix = self._embed(branch.prefix)
        thought = [self._delimiter(self.plan.open_ids, 0), self._thought(branch, tau)]
        if not (branch.closed and tau == len(branch.thought)):
            thought.append(self._delimiter(self.plan.close_ids, 1))
        now = Spelled(self.gate_LY, note_from=len(prefix))
        with _spelling(self.model, now):
            self._logits(torch.cat([prefix, *thought]))
            now.note_from, now.read_from = None, len(prefix) - 1
            return self._loss(prefix, branch.continuation)


class HandWrittenLlama:
    """A Llama's blocks from their weights: not one line of transformers runs. Same contract as `_logits` above."""

    def __init__(self, model: PreTrainedModel, gate_LY: Tensor) -> None:
        self.model, self.config, self.gate_LY = model, model.config, gate_LY
        self.body: Any = model.base_model

    def _norm(self, module: nn.Module, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps).rsqrt() * module.weight

    def _turn(self, heads_nYE: Tensor, position_n: Tensor) -> Tensor:
        half = heads_nYE.shape[-1] // 2
        angle = position_n[:, None] * self.body.rotary_emb.inv_freq  # rounded to float32 when the model was made
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        low, high = heads_nYE[..., :half], heads_nYE[..., half:]
        return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)

    def read(
        self, ids: list[int], noted: list[tuple[Tensor, Tensor]] | None = None, read_from: int = 0
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Logits of a row and its keys and values by layer; from `read_from` on it reads the `noted` ones."""
        config, position = self.config, torch.arange(len(ids), dtype=torch.float64)
        size, heads, shared = config.head_dim, config.num_attention_heads, config.num_key_value_heads
        x, kept = self.body.embed_tokens.weight[torch.tensor(ids)], []
        for number, block in enumerate(self.body.layers):
            normed, own = self._norm(block.input_layernorm, x), block.self_attn
            query = self._turn((normed @ own.q_proj.weight.T).view(-1, heads, size), position)
            key = self._turn((normed @ own.k_proj.weight.T).view(-1, shared, size), position)
            value = (normed @ own.v_proj.weight.T).view(-1, shared, size)
            kept.append((key, value))
            attended = []
            for head in range(heads):
                mine = head * shared // heads
                scores = query[:, head] @ key[:, mine].T / size**0.5
                scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), float("-inf"))
                output = scores.softmax(-1) @ value[:, mine]
                if noted is not None:
                    far_key, far_value = (part[:, mine] for part in noted[number])
                    extra = (query[:, head] @ far_key.T / size**0.5).softmax(-1) @ far_value
                    reads = (torch.arange(len(ids)) >= read_from)[:, None]
                    output = output + self.gate_LY[number, head].tanh() * extra * reads
                attended.append(output)
            x = x + torch.cat(attended, -1) @ own.o_proj.weight.T
            normed, mlp = self._norm(block.post_attention_layernorm, x), block.mlp
            gated = nn.functional.silu(normed @ mlp.gate_proj.weight.T) * (normed @ mlp.up_proj.weight.T)
            x = x + gated @ mlp.down_proj.weight.T
        return self._norm(self.body.norm, x) @ self.model.get_output_embeddings().weight.T, kept

    def losses(self, plan: ThoughtPlan, texts: TextBatch, thoughts: Thoughts) -> list[list[Tensor]]:
        """Loss of each continuation token by branch and checkpoint, `[H]` each; delimiters are text."""
        found = []
        for branch in branches_of(texts, plan, thoughts):
            length, start = len(branch.thought), len(branch.prefix)
            own = []
            for tau in sorted({t for t in plan.checkpoints if t < length} | {length}):
                close = () if branch.closed and tau == length else plan.close_ids
                _, kept = self.read([*branch.prefix, *plan.open_ids, *branch.thought[:tau], *close])
                noted = [(key[start:], value[start:]) for key, value in kept]
                logits, _ = self.read(branch.prefix + branch.continuation[:-1], noted, start - 1)
                log_p = logits[start - 1 :].log_softmax(-1)
                own.append(-log_p[torch.arange(len(branch.continuation)), torch.tensor(branch.continuation)])
            found.append(own)
        return found

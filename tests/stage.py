"""The smallest stage for the parts of a window: tiny models, made-up packed texts, and a reference that knows no trees.

Everything is small enough for a test to compute again by a plain loop, one row per thought.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tfive.models.load import load_model
from tfive.rl.rollout import Rollout
from tfive.rl.settings import RewardSettings
from tfive.rl.snapshots import Snapshots
from tfive.rl.trajectory import Trajectories
from tfive.telemetry import Silent
from tfive.training.build import Assembly, build
from tfive.training.corpus import corpus_of
from tfive.tree.forward import TreeModel
from tfive.tree.layout import TextBatch, ThoughtPlan, Thoughts
from tfive.tree.settings import SamplingSettings
from tiny import configure

V, OPEN, CLOSE = 41, 7, 9
PLAN = ThoughtPlan(
    length=4, checkpoints=(2, 4), horizon=3, open_ids=(OPEN,), close_ids=(CLOSE,), variable_length=True,
    special_ids=(0, 1),
)  # fmt: skip
FIXED = replace(PLAN, variable_length=False)
LAW = SamplingSettings()


def gpt2(dtype: torch.dtype = torch.float64, seed: int = 0, tied: bool = True, closing: float = 0.0) -> GPT2LMHeadModel:
    """A model without casts to float32 inside, so that float64 means float64; `closing` is added to the close's logit.

    With `closing` it ends many thoughts early (and its head is not tied).
    """
    config = GPT2Config(
        vocab_size=V, n_embd=16, n_layer=2, n_head=2, n_positions=64, bos_token_id=None, eos_token_id=None,
        tie_word_embeddings=tied and not closing,
    )  # fmt: skip
    model = _filled(GPT2LMHeadModel(config), seed, 0.3)
    if closing:
        with torch.no_grad():
            model.transformer.ln_f.weight[0], model.transformer.ln_f.bias[0] = 0.0, 1.0
            model.lm_head.weight[:, 0] = 0.0
            model.lm_head.weight[CLOSE, 0] = closing
    return model.to(dtype).eval()


def llama(dtype: torch.dtype = torch.float32, seed: int = 0, blocks: int = 3) -> LlamaForCausalLM:
    """Blocks enough that some can be adapted and some stay frozen."""
    config = LlamaConfig(
        vocab_size=V, hidden_size=16, intermediate_size=24, num_hidden_layers=blocks, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    model = _filled(LlamaForCausalLM(config), seed, 0.4)
    return model.to(dtype).eval()


def _filled(model: Any, seed: int, deviation: float) -> Any:
    draw = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=draw)
        parameter.data = deviation * noise if parameter.ndim > 1 else parameter.data + 0.1 * noise
    return model


def say_only(token: int) -> GPT2LMHeadModel:
    """A model that predicts one token with certainty, whatever came before."""
    model = gpt2(torch.float32, tied=False)
    with torch.no_grad():
        model.transformer.ln_f.weight.zero_()
        model.transformer.ln_f.bias.fill_(1.0)
        model.lm_head.weight.zero_()
        model.lm_head.weight[token] = 10.0
    return model


def texts(rows: int = 4, count: int = 2, width: int = 20, horizon: int = 3, seed: int = 1) -> TextBatch:
    """Packed rows: every second has two documents, the first ends in padding, the last lacks an item."""
    draw = torch.Generator().manual_seed(seed)
    tokens_BS = torch.randint(10, V, (rows, width), generator=draw)
    document_BS = torch.zeros(rows, width, dtype=torch.int64)
    document_BS[::2, width // 2 :] = 1
    document_BS[0, -1] = -1
    positions_BP = torch.full((rows, count), -1)
    for row in range(rows):
        legal = [
            p
            for p in range(1, width - horizon)
            if document_BS[row, p] >= 0 and document_BS[row, p] == document_BS[row, p + horizon]
        ]
        chosen = torch.tensor(legal)[torch.randperm(len(legal), generator=draw)[:count]]
        positions_BP[row] = chosen.sort().values
    if count > 1 and rows > 1:
        positions_BP[-1, -1] = -1
    items_BP = torch.arange(rows * count).view(rows, count)
    return TextBatch(tokens_BS, document_BS, positions_BP, torch.where(positions_BP >= 0, items_BP, -1))


def thoughts_for(some: TextBatch, plan: ThoughtPlan = PLAN, seed: int = 2) -> Thoughts:
    """Random legal thoughts of every length from 1 on; those that end early end by a sampled close."""
    draw = torch.Generator().manual_seed(seed)
    valid_BR = some.positions_BP >= 0
    tokens_BRT = torch.randint(10, V, (*valid_BR.shape, plan.length), generator=draw)
    length_BR = torch.full(valid_BR.shape, plan.length)
    if plan.variable_length:
        length_BR = torch.randint(1, plan.length + 1, valid_BR.shape, generator=draw)
    closed_BR = (length_BR < plan.length) & valid_BR
    step_T = torch.arange(plan.length)
    tokens_BRT = torch.where(closed_BR[..., None] & (step_T == length_BR[..., None] - 1), CLOSE, tokens_BRT)
    length_BR = torch.where(valid_BR, length_BR, 0)
    tokens_BRT = torch.where(step_T < length_BR[..., None], tokens_BRT, 0)
    return Thoughts(tokens_BRT, length_BR, valid_BR, closed_BR, torch.zeros(tokens_BRT.shape))


@dataclass
class Tally(Silent):
    """A telemetry that keeps what it is told."""

    amounts: dict[str, Counter[str]] = field(default_factory=dict)
    events: list[tuple[str, str]] = field(default_factory=list)

    def count(self, role: str, **amounts: int) -> None:
        self.amounts.setdefault(role, Counter()).update(amounts)

    def event(self, what: str, detail: str, window: int | None = None) -> None:
        self.events.append((what, detail))


class Shelf:
    """A ledger that hands out one made-up batch per role, window and attempt, all with different items."""

    def __init__(self, make: Callable[[int], TextBatch]) -> None:
        self.make = make
        self.drawn: dict[tuple[str, int, int], TextBatch] = {}

    def draw(self, role: str, window: int, attempt: int = 0) -> TextBatch:
        number = len(self.drawn) + 1
        batch = self.make(number)
        apart = torch.where(batch.items_BP >= 0, batch.items_BP + 1000 * number, -1)
        self.drawn[role, window, attempt] = replace(batch, items_BP=apart)
        return self.drawn[role, window, attempt]


def rollout_of(
    engine: TreeModel,
    make: Callable[[int], TextBatch] | None = None,
    *,
    law: SamplingSettings = LAW,
    rows: int = 3,
    seed: int = 8,
    telemetry: Any = None,
) -> Rollout:
    """A rollout on made-up texts, its scale already set to 0.5."""
    shelf: Any = Shelf(make or (lambda number: texts(seed=number)))
    found = Rollout(
        engine, lambda batch: batch, shelf, Snapshots(), law, RewardSettings(), telemetry or Tally(), seed=seed,
        rows=rows,
    )  # fmt: skip
    found.scale.update(torch.tensor([0.5]))
    return found


@dataclass(frozen=True)
class Item:
    """One thought and what surrounds it, as lists of ids."""

    row: int
    branch: int
    prefix: list[int]
    thought: list[int]
    closed: bool
    continuation: list[int]


def items_of(batch: TextBatch, thoughts: Thoughts, plan: ThoughtPlan = PLAN) -> Iterator[Item]:
    """Every existing thought, in the order `thoughts.valid_BR` gives."""
    for row in range(len(batch.tokens_BS)):
        tokens, documents = batch.tokens_BS[row].tolist(), batch.document_BS[row].tolist()
        for branch in range(thoughts.length_BR.shape[1]):
            p = int(batch.positions_BP[row, branch // plan.group])
            if p < 0:
                continue
            own = [i for i in range(len(tokens)) if documents[i] == documents[p]]
            ahead = [tokens[i] for i in own if p < i <= p + plan.horizon]
            length = int(thoughts.length_BR[row, branch])
            thought = thoughts.tokens_BRT[row, branch, :length].tolist()
            yield Item(
                row, branch, [tokens[i] for i in own if i <= p], thought, bool(thoughts.closed_BR[row, branch]), ahead
            )


class PlainModel:
    """The stock model on one literal row per thought."""

    def __init__(self, model: PreTrainedModel, plan: ThoughtPlan = PLAN) -> None:
        self.model, self.plan = model, plan

    def log_probs(self, row: list[int], start: int, forbidden: bool = False) -> Tensor:
        """log p of `row[start:]`, each token given all before it."""
        logits = self.model(torch.tensor([row]), use_cache=False).logits[0]
        if forbidden:
            logits = logits.index_fill(1, torch.tensor(self.plan.forbidden_ids), float("-inf"))
        log_p = logits.log_softmax(-1)[start - 1 : len(row) - 1]
        return log_p.gather(1, torch.tensor(row[start:])[:, None])[:, 0]

    def actions(self, item: Item) -> Tensor:
        """log π of every action."""
        start = [*item.prefix, *self.plan.open_ids]
        return self.log_probs([*start, *item.thought], len(start), forbidden=True)

    def without(self, item: Item) -> Tensor:
        """log p of the continuation without a thought."""
        return self.log_probs([*item.prefix, *item.continuation], len(item.prefix))

    def after(self, item: Item, steps: int | None = None) -> Tensor:
        """log p of the continuation after `steps` thought tokens (all by default) and the close."""
        steps = len(item.thought) if steps is None else steps
        row = [*item.prefix, *self.plan.open_ids, *item.thought[:steps]]
        if not (item.closed and steps == len(item.thought)):
            row += self.plan.close_ids
        return self.log_probs([*row, *item.continuation], len(row))

    def checkpoints(self, item: Item) -> dict[int, float]:
        """Mean loss of the continuation at each checkpoint of the thought."""
        length = len(item.thought)
        return {tau: float(-self.after(item, tau).mean().detach()) for tau in
                sorted({t for t in self.plan.checkpoints if t < length} | {length})}  # fmt: skip


def flat(trajectories: Trajectories, tensor: Tensor) -> Tensor:
    """The entries of existing thoughts."""
    return tensor[trajectories.thoughts.valid_BR]


def assembled(home: Path, *overrides: str, telemetry: Any = None) -> Assembly:
    """All parts of the smallest whole run, ready to advance."""
    config = configure(home, *overrides)
    loaded = load_model(config.model.name, device="cpu", dtype=torch.float32)
    return build(config, loaded, corpus_of(config, loaded=loaded), telemetry or Tally())

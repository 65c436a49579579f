"""Log-likelihood of options after a context: the context is read once, its options are branches of a tree.

With thoughts every option is a text of its own: thoughts are written at the end of the context and inside the option as
in generation, each serves the next H tokens, and the gate mixes the two predictions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tfive.distributed.world import SINGLE, World
from tfive.errors import UserError
from tfive.evaluate.generate import encoded
from tfive.inference.places import uncertain_places
from tfive.inference.requests import NEVER, When
from tfive.inference.thought_model import ThoughtModel
from tfive.telemetry import Silent, Telemetry
from tfive.tree.forward import TreeModel
from tfive.tree.head import Reduced, Source, reduce_vocabulary, target_log_prob
from tfive.tree.layout import TextBatch, ThoughtPlan, Thoughts

_NODES = {"cuda": 16384, "cpu": 2048}
"""Tokens read in one pass, padding included, by device."""

Options = Sequence[tuple[str, str]]
"""Context and continuation of every option of one question."""


@dataclass(frozen=True)
class Likelihood:
    """How likely one option is."""

    total: float
    """Log-likelihood of its tokens, in nats."""
    tokens: int
    characters: int
    """Of the continuation without its leading space, by which `acc_norm` of lm-evaluation-harness divides."""
    bytes: int
    likeliest: bool
    """Whether every token is the likeliest one (without thoughts; False with them, where it is not computed)."""
    thoughts: int = 0
    thought_tokens: int = 0

    @property
    def per_character(self) -> float:
        """Length-normalised log-likelihood."""
        return self.total / max(1, self.characters)

    @property
    def per_byte(self) -> float:
        """Log-likelihood per byte of UTF-8."""
        return self.total / max(1, self.bytes)


@dataclass(frozen=True)
class _ContextRow:
    """One context of a question in tokens, with the options that follow it."""

    question: int
    context: tuple[int, ...]
    options: tuple[int, ...]
    continuations: tuple[tuple[int, ...], ...]

    @property
    def nodes(self) -> int:
        """Tokens of its row."""
        return len(self.context) + len(self.options) * max(map(len, self.continuations))


def encoded_pair(tokenizer: object, context: str, continuation: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Context and continuation in tokens as lm-evaluation-harness splits them.

    Spaces at the context's end belong to the continuation; both are encoded together and cut where the context alone
    ends. An empty context is the token that begins a text.
    """
    kept = context.rstrip()
    continuation, context = context[len(kept) :] + continuation, kept
    if not context:
        begin = next((i for n in ("bos", "eos") if (i := getattr(tokenizer, f"{n}_token_id", None)) is not None), None)
        if begin is None:
            raise UserError("an empty context, and the tokenizer has no token that begins a text; give a context")
        whole = encoded(tokenizer, continuation)
        return (begin,), tuple(whole[1:] if whole[:1] == [begin] else whole)
    before = encoded(tokenizer, context)
    return tuple(before), tuple(encoded(tokenizer, context + continuation)[len(before) :])


@torch.no_grad()
def log_likelihoods(
    model: ThoughtModel,
    questions: Sequence[Options],
    *,
    when: When = NEVER,
    seed: int = 0,
    numbers: Sequence[int] | None = None,
    parity: bool = False,
    nodes: int = 0,
    telemetry: Telemetry | None = None,
    label: str = "log-likelihood",
    world: World = SINGLE,
) -> Iterator[tuple[int, list[Likelihood]]]:
    """Every question's options in their order, as passes are done; `numbers` say which random numbers thoughts get.

    In parity mode every question is a pass of its own. A process of `world` gives a sign of life with every pass.
    """
    rows = [row for number, options in enumerate(questions) for row in _context_rows(model, number, options, when)]
    budget = 1 if parity else nodes or _NODES.get(model.model.device.type, 2048)
    batches = list(_batches(rows, budget, model.plan.reach if when.ever else 0))
    missing = {number: len(options) for number, options in enumerate(questions)}
    found: dict[int, dict[int, Likelihood]] = {number: {} for number in missing}
    for batch in (telemetry or Silent()).progress(world.beating(batches), label, len(batches)):
        scored = (
            _score_with_thoughts(model, batch, when, seed, numbers)
            if when.ever
            else _score_without_thoughts(model, batch)
        )
        for row, values in zip(batch, scored):
            for option, (total, likeliest, thoughts, thought_tokens) in zip(row.options, values):
                text = questions[row.question][option][1].removeprefix(" ")
                size = len(row.continuations[row.options.index(option)])
                found[row.question][option] = Likelihood(
                    total, size, len(text), len(text.encode()), likeliest, thoughts, thought_tokens
                )
            if len(found[row.question]) == missing[row.question]:
                options = found.pop(row.question)
                yield row.question, [options[number] for number in sorted(options)]


def _context_rows(model: ThoughtModel, question: int, options: Options, when: When) -> list[_ContextRow]:
    """The rows of a question: one per distinct context."""
    by_context: dict[tuple[int, ...], list[tuple[int, tuple[int, ...]]]] = {}
    for number, (context, continuation) in enumerate(options):
        before, after = encoded_pair(model.tokenizer, context, continuation)
        if not after:
            raise UserError(f"question {question + 1}, option {number + 1}: no text to score; give every option a text")
        if model.limit is not None:
            room = model.limit - len(after) - (model.plan.reach if when.ever else 1)
            if room < 1:
                raise UserError(
                    f"question {question + 1}, option {number + 1}: {len(after)} tokens, the model has {model.limit}"
                )
            before = before[-room:]
        by_context.setdefault(before, []).append((number, after))
    return [
        _ContextRow(question, context, tuple(n for n, _ in own), tuple(ids for _, ids in own))
        for context, own in by_context.items()
    ]


def _batches(rows: list[_ContextRow], budget: int, reach: int) -> Iterator[list[_ContextRow]]:
    """Rows of similar size together, so that little of a pass is padding; the longest first."""
    batch: list[_ContextRow] = []
    size = 0
    for row in sorted(rows, key=lambda row: (-row.nodes, row.question)):
        longest = max(size, row.nodes + reach * max(map(len, row.continuations)))
        if batch and longest * (len(batch) + 1) > budget:
            yield batch
            batch, longest = [], row.nodes + reach * max(map(len, row.continuations))
        batch.append(row)
        size = longest
    if batch:
        yield batch


def _log_prob_and_likeliest(logits: Sequence[Tensor], rows: Mapping[str, Tensor]) -> Reduced:
    return target_log_prob(logits, rows) | {"likeliest": logits[0].argmax(-1) == rows["target"]}


Scored = list[tuple[float, bool, int, int]]
"""Of every option: log-likelihood, whether its tokens are the likeliest, thoughts, thought tokens."""


def _score_without_thoughts(model: ThoughtModel, batch: list[_ContextRow]) -> list[Scored]:
    """Options as branches at the end of their context; a branch's tokens are predicted by the nodes before them."""
    group, length = max(len(row.options) for row in batch), max(len(c) for row in batch for c in row.continuations)
    plan = ThoughtPlan(length=length, checkpoints=(length,), horizon=1, group=group)
    # Unfused: this engine lives for one pass, and fused modules would be checked against plain ones each time.
    engine = TreeModel(model.model, plan, replace(model.settings, fused_norms="off", fused_blocks="off"))
    device = engine.device
    width = max(len(row.context) for row in batch)
    tokens_BS = torch.tensor([[*row.context, *[0] * (width - len(row.context))] for row in batch], device=device)
    last_B1 = torch.tensor([[len(row.context) - 1] for row in batch], device=device)
    document_BS = torch.where(torch.arange(width, device=device) <= last_B1, 0, -1)
    tokens_BRT = torch.zeros(len(batch), group, length, dtype=torch.int64)
    length_BR = torch.zeros(len(batch), group, dtype=torch.int64)
    for b, row in enumerate(batch):
        for r, ids in enumerate(row.continuations):
            tokens_BRT[b, r, : len(ids)], length_BR[b, r] = torch.tensor(ids), len(ids)
    tokens_BRT, length_BR = tokens_BRT.to(device), length_BR.to(device)
    zeros_BRT = torch.zeros(tokens_BRT.shape, device=device)
    thoughts = Thoughts(tokens_BRT, length_BR, length_BR > 0, length_BR < 0, zeros_BRT)
    mask_BRT = thoughts.mask_BRT
    hidden_BRTD = engine.features(TextBatch(tokens_BS, document_BS, last_B1, last_B1), thoughts)
    source = Source(engine.head, hidden_BRTD[mask_BRT])
    reduced = reduce_vocabulary(
        [source], _log_prob_and_likeliest, {"target": tokens_BRT[mask_BRT]}, engine.engine.head_bytes
    )
    log_BRT, best_BRT = zeros_BRT.double(), torch.ones_like(mask_BRT)
    log_BRT[mask_BRT] = reduced["log_prob"].double()
    best_BRT[mask_BRT] = reduced["likeliest"]
    total, best = log_BRT.sum(-1).tolist(), best_BRT.all(-1).tolist()
    return [[(total[b][r], best[b][r], 0, 0) for r in range(len(row.options))] for b, row in enumerate(batch)]


def _score_with_thoughts(
    model: ThoughtModel, batch: list[_ContextRow], when: When, seed: int, numbers: Sequence[int] | None
) -> list[Scored]:
    """Every option as a text of its own, with thoughts where generation would write them."""
    flat = [(row, ids) for row in batch for ids in row.continuations]
    rows = [[*row.context, *ids] for row, ids in flat]
    first = [len(row.context) - 1 for row, _ in flat]
    items = [0 if numbers is None else numbers[row.question] for row, _ in flat]

    def uncertain(n: int, entropy: Tensor) -> list[int]:
        places = uncertain_places(entropy[first[n] :], when.entropy_above or 0.0, model.plan.horizon)
        return [first[n] + place for place in places]

    strides = [max(1, when.every) if not when.at_answer else len(ids) for ids in rows]
    fixed = [list(range(start, len(ids) - 1, stride)) for start, ids, stride in zip(first, rows, strides)]
    scores = model.score(rows, fixed if when.entropy_above is None else uncertain, seed=seed, items=items)
    values = iter(
        (float(s.mixed[start:].double().sum()), False, len(s.thoughts), sum(len(t.ids) for t in s.thoughts))
        for s, start in zip(scores, first)
    )
    return [[next(values) for _ in row.options] for row in batch]


def chosen(likelihoods: Sequence[Likelihood]) -> dict[str, int]:
    """Which option each way of comparing takes: raw, per character and per byte; the first of equals."""
    ways = {
        "raw": [x.total for x in likelihoods],
        "per_character": [x.per_character for x in likelihoods],
        "per_byte": [x.per_byte for x in likelihoods],
    }
    return {way: max(range(len(values)), key=values.__getitem__) for way, values in ways.items()}

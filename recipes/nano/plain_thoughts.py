"""Thoughts the plain way: one row a thought, the stock model, nothing shared. Slow and easy to trust.

A row is `text up to p` + ` (` + thought + `)` + `next H tokens`; a loss is the mean over those H tokens, in nats.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

ROWS_AT_ONCE = {"cpu": 64, "cuda": 512}


@dataclass(frozen=True)
class Place:
    """A place in a text where a thought may stand, and what is known about it."""

    text: int
    kind: str
    before: tuple[int, ...]
    after: tuple[int, ...]  # the next H tokens
    working: tuple[int, ...] = ()


@dataclass(frozen=True)
class Law:
    """How thoughts are sampled: their longest length, the delimiters, and what may never be written inside."""

    longest: int
    open: int
    close: int
    forbidden: tuple[int, ...]


def _row_losses(model: PreTrainedModel, rows: list[list[int]], tails: list[int]) -> Tensor:
    """Mean loss over the last `tail` tokens of each row (right-padded; a causal model cannot see the padding)."""
    device = next(model.parameters()).device
    width = max(map(len, rows))
    tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=device)
    ends = torch.tensor([len(row) for row in rows], device=device)
    counts = torch.tensor(tails, device=device)
    mask = torch.arange(width, device=device)[None] < ends[:, None]
    logits = model(input_ids=tokens, attention_mask=mask.long(), use_cache=False).logits.float()
    target = tokens[:, 1:, None]
    losses = -logits[:, :-1].log_softmax(-1).gather(-1, target)[..., 0]
    index = torch.arange(1, width, device=device)[None]
    scored = (index >= (ends - counts)[:, None]) & (index < ends[:, None])
    return (losses * scored).sum(1) / counts


def losses(model: PreTrainedModel, places: list[Place], thoughts: list[list[int]] | None, law: Law) -> Tensor:
    """Continuation loss of every place, after its thought (a list of tokens without delimiters) or without any."""
    rows = []
    for number, place in enumerate(places):
        inner = [] if thoughts is None else [law.open, *thoughts[number], law.close]
        rows.append([*place.before, *inner, *place.after])
    tails = [len(place.after) for place in places]
    order = sorted(range(len(rows)), key=lambda number: len(rows[number]))
    device = next(model.parameters()).device
    out = torch.zeros(len(rows), device=device)
    step = ROWS_AT_ONCE[device.type]
    for start in range(0, len(rows), step):
        chosen = order[start : start + step]
        out[chosen] = _row_losses(model, [rows[i] for i in chosen], [tails[i] for i in chosen])
    return out


@torch.no_grad()
def sample(model: PreTrainedModel, places: list[Place], law: Law, generator: torch.Generator) -> list[list[int]]:
    """One thought a place from the model's own law (temperature 1), without delimiters; a sampled close ends it."""
    found: list[list[int]] = [[] for _ in places]
    order = sorted(range(len(places)), key=lambda number: len(places[number].before))
    step = ROWS_AT_ONCE[next(model.parameters()).device.type]
    for start in range(0, len(places), step):
        chosen = order[start : start + step]
        for number, thought in zip(
            chosen, _sample_chunk(model, [places[i] for i in chosen], law, generator), strict=True
        ):
            found[number] = thought
    return found


def _sample_chunk(model: PreTrainedModel, places: list[Place], law: Law, generator: torch.Generator) -> list[list[int]]:
    device = next(model.parameters()).device
    rows = [[*place.before, law.open] for place in places]
    width = max(map(len, rows))
    tokens = torch.tensor([[0] * (width - len(row)) + row for row in rows], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
    written: list[Tensor] = []
    cache = None
    for _ in range(law.longest):
        positions = (mask.cumsum(1) - 1).clamp_min(0)[:, -tokens.shape[1] :]
        out = model(
            input_ids=tokens, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
        )
        cache = out.past_key_values
        logits = out.logits[:, -1].float()
        logits[:, list(law.forbidden)] = -torch.inf
        drawn = torch.multinomial(logits.softmax(-1).cpu(), 1, generator=generator).to(device)
        written.append(drawn[:, 0])
        tokens = drawn
        mask = torch.cat([mask, torch.ones_like(drawn)], 1)
    thoughts = torch.stack(written, 1).tolist()
    return [thought[: thought.index(law.close)] if law.close in thought else thought for thought in thoughts]

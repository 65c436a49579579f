"""Hindsight: thoughts drawn with the continuation in sight, and which of them are worth learning without it.

At a position p the model reads its text up to p, then a note with what follows, then the opening, and draws several
thoughts, and others without the note. Those that copy the continuation are dropped. The rest are scored where they will
stand, without the note: a position's best is kept if it helps more than the best of as many thoughts of other texts,
and more than none; of what is kept, the half that helps most is learned.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tfive.distributed.world import SINGLE, World
from tfive.rl.actor import under
from tfive.rl.gains import foreign
from tfive.rl.sampling import micro_batches, sample
from tfive.rl.trajectory import last_loss
from tfive.tree.forward import TreeModel
from tfive.tree.layout import TextBatch, Thoughts
from tfive.tree.settings import SamplingSettings

NOTE = (" [next: ", "]\n")
"""What stands before and after the continuation in a note."""

RUN = 5
"""Words in a row that a thought may not share with the continuation."""

_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Learnable:
    """Texts with at most one thought a position that is worth learning (branches without one do not exist)."""

    texts: TextBatch
    thoughts: Thoughts
    drawn: int = 0
    """Thoughts that were drawn."""
    tokens: int = 0
    """Their tokens."""
    leaked: int = 0
    """How many of them copied the continuation."""
    content_gain: float = 0.0
    """Mean of others' loss minus own, over the kept ones."""
    informed: float = 0.0
    """Share of the kept ones that were drawn with the note."""

    @property
    def kept(self) -> int:
        """How many thoughts there are to learn."""
        return int(self.thoughts.valid_BR.sum())


def leaks(thought: str, continuation: str) -> bool:
    """Whether a thought gives the continuation away instead of leading to it: it begins with its first word, shares
    `RUN` words in a row (all, if there are fewer, but three at least), or repeats the note."""
    said, next_ = ([word.lower() for word in _WORD.findall(text)] for text in (thought, continuation))
    if NOTE[0].strip() in thought or (said and next_ and said[0] == next_[0]):
        return True
    run = min(RUN, len(next_))
    if run < 3:
        return False
    pieces = {tuple(next_[start : start + run]) for start in range(len(next_) - run + 1)}
    return any(tuple(said[start : start + run]) in pieces for start in range(len(said) - run + 1))


def first_line(tokens: Sequence[int], decode: Callable[[list[int]], str]) -> list[int]:
    """Tokens up to the first that breaks the line behind some text; all of them where none does. What follows the line
    says that the passage is over, and a model that reads so thinks about the next one."""
    for end in range(1, len(tokens)):
        if decode(list(tokens[:end])).strip() and "\n" in decode([tokens[end]]):
            return list(tokens[:end])
    return list(tokens)


def noted(
    texts: TextBatch, horizon: int, note: tuple[Sequence[int], Sequence[int]], decode: Callable[[list[int]], str]
) -> tuple[TextBatch, list[tuple[int, int]], list[list[int]]]:
    """One row per item: its document up to its position, then the note with the first line of its continuation, at
    whose end the thought stands; the row and slot each came from, and the whole continuations."""
    rows, places, continuations = [], [], []
    everything = zip(texts.tokens_BS.tolist(), texts.document_BS.tolist(), texts.positions_BP.tolist())
    for row, (tokens, document, positions) in enumerate(everything):
        for slot, p in enumerate(positions):
            if p < 0:
                continue
            own = [token for token, number in zip(tokens[: p + 1], document) if number == document[p]]
            after = range(p + 1, min(p + 1 + horizon, len(tokens)))
            continuation = [tokens[at] for at in after if document[at] == document[p]]
            rows.append([*own, *note[0], *first_line(continuation, decode), *note[1]])
            places.append((row, slot))
            continuations.append(continuation)
    width, device = max(map(len, rows), default=1), texts.tokens_BS.device
    tokens_BS = torch.tensor([[*ids, *[0] * (width - len(ids))] for ids in rows], device=device)
    last_B1 = torch.tensor([[len(ids) - 1] for ids in rows], device=device)
    document_BS = torch.where(torch.arange(width, device=device) <= last_B1, 0, -1)
    items_B1 = torch.stack([texts.items_BP[row, slot] for row, slot in places])[:, None]
    return TextBatch(tokens_BS, document_BS, last_B1, items_B1), places, continuations


@torch.no_grad()
def learnable(
    engine: TreeModel,
    texts: TextBatch,
    law: SamplingSettings,
    *,
    note: tuple[Sequence[int], Sequence[int]],
    decode: Callable[[list[int]], str],
    seed: int,
    stream: str,
    rows: int,
    informed: int,
    world: World = SINGLE,
) -> Learnable:
    """The best thought of every position that has a useful one; `engine`'s group says how many are drawn.

    The first `informed` of them are drawn with the note, the others without: no model has been taught what such a note
    is for. `rows` texts are scored in a pass; noted rows have one position each, so more of them are drawn in one.
    """
    plan, group = engine.plan, engine.plan.group
    asked, places, continuations = noted(texts, plan.horizon, note, decode)
    each, alone = texts.positions_BP.shape[1], group - informed
    asking: dict[str, Any] = {"seed": seed, "window": 0, "world": world, "record_old": False}
    with_note = _drawn(engine, informed, asked, law, role=stream, rows=rows * each, **asking)
    drawn = [_drawn(engine, alone, texts, law, role=f"{stream}/alone", rows=rows, **asking)] if alone else []
    row_N, slot_N = (torch.tensor(index, dtype=torch.int64, device=engine.device) for index in zip(*places))
    spread = {}
    for name in ("tokens_BRT", "length_BR", "valid_BR", "closed_BR", "log_q_BRT"):
        source = getattr(with_note, name)
        noted_BPG = source.new_zeros(len(texts.tokens_BS), each, *source.shape[1:])
        noted_BPG[row_N, slot_N] = source
        parts = (getattr(one, name).unflatten(1, (each, alone)) for one in drawn)
        spread[name] = torch.cat([noted_BPG, *parts], 2).flatten(1, 2)
    thoughts = Thoughts(**spread)
    leak_BR = torch.zeros_like(thoughts.valid_BR)
    for (row, slot), continuation in zip(places, continuations):
        told = decode(continuation)
        for branch in range(slot * group, (slot + 1) * group):
            ids = thoughts.tokens_BRT[row, branch, : int(thoughts.length_BR[row, branch])].tolist()
            leak_BR[row, branch] = leaks(decode(ids), told)
    own_BR, none_BR = _losses(engine, texts, thoughts, rows, world)
    other_BR, _ = _losses(engine, texts, foreign(thoughts, near=True), rows, world)
    best, gain_BP, useful_BP = chosen(own_BR, other_BR, none_BR, thoughts.valid_BR & ~leak_BR, group)
    single = Thoughts(**{name: value.gather(1, _like(best, value)) for name, value in spread.items()})
    single = replace(single, valid_BR=useful_BP)
    kept = int(useful_BP.sum())
    from_note_BP = useful_BP & (best % group < informed)
    return Learnable(
        texts,
        single,
        drawn=int(thoughts.valid_BR.sum()),
        tokens=int(thoughts.mask_BRT.sum()),
        leaked=int((leak_BR & thoughts.valid_BR).sum()),
        content_gain=float(gain_BP[useful_BP].mean()) if kept else 0.0,
        informed=float(from_note_BP.sum()) / kept if kept else 0.0,
    )


def chosen(
    own_BR: Tensor, other_BR: Tensor, none_BR: Tensor, allowed_BR: Tensor, group: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Per position: the branch `[B, P]` whose thought leaves the least loss among those allowed, how much less that is
    than the mean after thoughts of other texts there, and whether it is less than the least of those and than without a
    thought, by at least as much as half of those that are. (The best of several is nearly always better than others'
    mean, by chance alone: as many of other texts have the same chance. What is worse than none teaches harm, and what
    is hardly better teaches little but the form that thoughts happen to have.)
    """
    own_BPG, other_BPG, none_BPG, allowed_BPG = (
        x.unflatten(1, (-1, group)) for x in (own_BR, other_BR, none_BR, allowed_BR)
    )
    least_BP, member_BP = own_BPG.masked_fill(~allowed_BPG, torch.inf).min(-1)
    bar_BP = torch.minimum(other_BPG.min(-1).values, none_BPG[..., 0])
    helps_BP, margin_BP = allowed_BPG.any(-1) & (least_BP < bar_BP), bar_BP - least_BP
    useful_BP = helps_BP & (margin_BP >= margin_BP[helps_BP].median()) if bool(helps_BP.any()) else helps_BP
    first_P = torch.arange(own_BPG.shape[1], device=own_BR.device) * group
    return first_P + member_BP, other_BPG.mean(-1) - least_BP, useful_BP


def _drawn(engine: TreeModel, group: int, texts: TextBatch, law: SamplingSettings, **asking: Any) -> Thoughts:
    """So many thoughts of each position by the same model; nothing of the engine that draws them stays."""
    drawer = under(engine, replace(engine.plan, group=group))
    try:
        return sample(drawer, texts, law, **asking).thoughts
    finally:
        drawer.forget_samplers()


def _like(index_BP: Tensor, value: Tensor) -> Tensor:
    return index_BP if value.ndim == 2 else index_BP[..., None].expand(*index_BP.shape, value.shape[-1])


def _losses(engine: TreeModel, texts: TextBatch, thoughts: Thoughts, rows: int, world: World) -> tuple[Tensor, Tensor]:
    """`[B, R]`: what the continuation costs after whole thoughts, and without one."""
    after, without, count = [], [], len(texts.tokens_BS)
    for part in world.beating(micro_batches(world.computed(count), rows)):
        scores = engine.score(texts.rows(part.start, part.stop), thoughts.rows(part.start, part.stop), whole=True)
        after.append(last_loss(scores.losses_BRK, scores.mask_BRK).float())
        without.append(scores.no_thought_BR.float())
    return world.gather(torch.cat(after), count), world.gather(torch.cat(without), count)

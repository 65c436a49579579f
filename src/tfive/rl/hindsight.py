"""Hindsight: which of a model's own thoughts are worth learning, told by the text that follows.

Several thoughts are drawn at each position as always, with the text before it alone in sight, and scored by what really
follows. A position's best is kept if it helps more than the best of as many thoughts of other texts, and more than
none; of what is kept, the half that helps most is learned.

No thought is drawn with the continuation in sight: a model that has read it can write what it could not find without,
and thoughts drawn so taught less wherever it was tried (docs/howto/tune.md and docs/studies/answers-hindsight.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tfive import rng
from tfive.distributed.world import SINGLE, World
from tfive.rl.gains import foreign
from tfive.rl.sampling import micro_batches, sample
from tfive.rl.trajectory import last_loss
from tfive.tree.forward import TreeModel
from tfive.tree.layout import TextBatch, Thoughts
from tfive.tree.settings import SamplingSettings

Choice = Callable[[Tensor, Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor, Tensor]]
"""What `chosen` is: of the losses after own and others' thoughts and without one, which thoughts are learned."""


@dataclass(frozen=True)
class Learnable:
    """Texts with at most one thought a position that is worth learning (branches without one do not exist)."""

    texts: TextBatch
    thoughts: Thoughts
    drawn: int = 0
    """Thoughts that were drawn."""
    tokens: int = 0
    """Their tokens."""
    content_gain: float = 0.0
    """Mean of others' loss minus own, over the kept ones."""

    @property
    def kept(self) -> int:
        """How many thoughts there are to learn."""
        return int(self.thoughts.valid_BR.sum())


def chosen(
    own_BR: Tensor, other_BR: Tensor, none_BR: Tensor, valid_BR: Tensor, group: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Per position: the branch `[B, P]` whose thought leaves the least loss, how much less that is than the mean after
    thoughts of other texts there, and whether it is less than the least of those and than without a thought, by at
    least as much as half of those that are. (The best of several is nearly always better than others' mean, by chance
    alone: as many of other texts have the same chance. What is worse than none teaches harm, and what is hardly better
    teaches little but the form that thoughts happen to have.)
    """
    own_BPG, other_BPG, none_BPG, valid_BPG = (
        x.unflatten(1, (-1, group)) for x in (own_BR, other_BR, none_BR, valid_BR)
    )
    least_BP, member_BP = own_BPG.masked_fill(~valid_BPG, torch.inf).min(-1)
    bar_BP = torch.minimum(other_BPG.min(-1).values, none_BPG[..., 0])
    helps_BP, margin_BP = valid_BPG.any(-1) & (least_BP < bar_BP), bar_BP - least_BP
    useful_BP = helps_BP & (margin_BP >= margin_BP[helps_BP].median()) if bool(helps_BP.any()) else helps_BP
    first_P = torch.arange(own_BPG.shape[1], device=own_BR.device) * group
    return first_P + member_BP, other_BPG.mean(-1) - least_BP, useful_BP


def texts_of_round(items: npt.NDArray[np.int64], number: int, wanted: int) -> tuple[npt.NDArray[np.int64], int]:
    """Of a pool's texts, by how many items each holds: the places of those in which round `number` draws at `wanted`
    items, and how many of them earlier rounds have drawn. Behind the last text stands the first."""
    before, held, count = number * wanted, int(items.sum()), len(items)
    start = int((items.cumsum() <= before % held).sum()) if before % held else 0
    ahead = np.arange(start, start + count) % count
    enough = min(int((items[ahead].cumsum() < wanted).sum()) + 1, count)
    return ahead[:enough], enough if before >= held else max(0, start + enough - count)


@torch.no_grad()
def learnable(
    engine: TreeModel, texts: TextBatch, law: SamplingSettings, *, seed: int, stream: str, rows: int,
    world: World = SINGLE, choose: Choice | None = None,
) -> Learnable:  # fmt: skip
    """The best thought of every position that has one worth learning, as `choose` has it (`chosen` unless given).
    `engine`'s group says how many are drawn, `rows` how many texts are drawn and scored in a pass."""
    thoughts = sample(
        engine, texts, law, seed=seed, role=stream, window=0, rows=rows, record_old=False, world=world
    ).thoughts
    own_BR, none_BR = _losses(engine, texts, thoughts, rows, world)
    group = engine.plan.group
    other_BR, _ = _losses(engine, texts, foreign(thoughts, near=True, group=group), rows, world)
    best_BP, gain_BP, useful_BP = (choose or chosen)(own_BR, other_BR, none_BR, thoughts.valid_BR, group)
    fields = {name: getattr(thoughts, name) for name in Thoughts.__dataclass_fields__}
    single = Thoughts(**{name: value.gather(1, _like(best_BP, value)) for name, value in fields.items()})
    return Learnable(
        texts,
        replace(single, valid_BR=useful_BP),
        drawn=int(thoughts.valid_BR.sum()),
        tokens=int(thoughts.mask_BRT.sum()),
        content_gain=float(gain_BP[useful_BP].mean()) if bool(useful_BP.any()) else 0.0,
    )


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


def as_rewarded(thoughts: Thoughts, checkpoints: Sequence[int], seed: int) -> Thoughts:
    """Thoughts as rewards will read them: of those that go on behind a checkpoint half are cut, each at one of the
    checkpoints it goes on behind. A reader that knows finished thoughts alone takes what an unfinished one holds for
    its result, and rewards on the way would tell little."""
    length_N = thoughts.length_BR.flatten().cpu().numpy()
    passed_N = (np.asarray(checkpoints)[None] < length_N[:, None]).sum(1)
    chance_N = rng.uniforms(seed, "warmstart/cut", 0, np.arange(len(length_N)))
    cut_N = (passed_N > 0) & (chance_N < 0.5)
    step_N = np.asarray(checkpoints)[np.where(cut_N, (2 * chance_N * passed_N).astype(np.int64), 0)]
    shape, device = thoughts.length_BR.shape, thoughts.length_BR.device
    kept_BR = torch.from_numpy(np.where(cut_N, step_N, length_N)).view(shape).to(device)
    whole_BR = torch.from_numpy(~cut_N).view(shape).to(device)
    cut = replace(thoughts, length_BR=kept_BR, closed_BR=thoughts.closed_BR & whole_BR)
    return replace(cut, log_q_BRT=cut.log_q_BRT * cut.mask_BRT)

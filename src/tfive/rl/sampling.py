"""Sampling and scoring thoughts: random numbers, actions, log q and log π_old, and the continuation losses.

Plain functions of an engine and a batch of texts; `rl/rollout.py` adds roles, rewards and token counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tfive import rng
from tfive.distributed.world import SINGLE, World
from tfive.rl.settings import OldLaw
from tfive.rl.trajectory import Trajectories
from tfive.tree.forward import TreeModel
from tfive.tree.layout import TextBatch, Thoughts
from tfive.tree.outputs import Reading, Scores
from tfive.tree.settings import SamplingSettings

OnReading = Callable[[Reading], None]


def branch_uniforms(texts: TextBatch, *, group: int, steps: int, seed: int, role: str, window: int) -> Tensor:
    """A uniform number in (0, 1) per branch and step, float64 `[B, R, T]`, by (seed, role, window, item, member, step).

    Branches without an item get ½, which nothing reads.
    """
    items_BP = texts.items_BP.cpu().numpy()
    items_BR = np.repeat(items_BP, group, axis=1)
    member_R = np.tile(np.arange(group), items_BP.shape[1])
    numbers = rng.uniforms(
        seed, role, window, np.maximum(items_BR, 0)[..., None], member_R[None, :, None], np.arange(steps)
    )
    numbers[items_BR < 0] = 0.5
    return torch.from_numpy(numbers).to(texts.tokens_BS.device)


def micro_batches(rows: int | slice, size: int) -> Iterator[slice]:
    """Slices of at most `size` rows that cover so many of them, or a slice of them."""
    begin, end = (rows.start, rows.stop) if isinstance(rows, slice) else (0, rows)
    for start in range(begin, end, size):
        yield slice(start, min(start + size, end))


def join_thoughts(parts: list[Thoughts]) -> Thoughts:
    """Thoughts of several micro-batches as one."""
    names = ("tokens_BRT", "length_BR", "valid_BR", "closed_BR", "log_q_BRT")
    return Thoughts(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})


@dataclass(frozen=True)
class Wanted:
    """A set of thoughts to draw: for which texts, by which random numbers, and what is kept of it."""

    texts: TextBatch
    role: str
    window: int
    old: OldLaw = "recorded"
    states: bool = False
    """Whether the features are kept that the calibration heads read."""
    lower: bool = False
    """Whether the activations are kept that enter the block asked for."""
    longest: int | None = None
    """Tokens of a thought at most; the plan's length if None."""

    @property
    def kept(self) -> tuple[str, bool, bool]:
        """What is kept of it."""
        return self.old, self.states, self.lower

    def shape(self, engine: TreeModel) -> tuple[int, int, int]:
        """Sets of the same shape can be drawn together: tokens and positions of a text, steps of a thought."""
        longest = self.longest or engine.plan.length
        return self.texts.tokens_BS.shape[1], self.texts.positions_BP.shape[1], longest


def sample(
    engine: TreeModel,
    texts: TextBatch,
    law: SamplingSettings,
    *,
    seed: int,
    role: str,
    window: int,
    rows: int,
    record_old: bool = True,
    scored: bool = False,
    states: bool = False,
    snapshots: dict[str, str] | None = None,
    world: World = SINGLE,
    longest: int | None = None,
    on_reading: OnReading | None = None,
) -> Trajectories:
    """Thoughts for every item of `texts`, as `sample_sets` draws those of several sets."""
    wanted = Wanted(texts, role, window, "recorded" if record_old else "none", states, longest=longest)
    given: dict[str, Any] = {"scored": scored, "snapshots": snapshots, "world": world, "on_reading": on_reading}
    return sample_sets(engine, [wanted], law, seed=seed, rows=rows, **given)[0]


def sample_sets(
    engine: TreeModel,
    sets: Sequence[Wanted],
    law: SamplingSettings,
    *,
    seed: int,
    rows: int,
    scored: bool = True,
    below: int | None = None,
    snapshots: dict[str, str] | None = None,
    world: World = SINGLE,
    on_reading: OnReading | None = None,
) -> list[Trajectories]:
    """Thoughts for every item of every set, `rows` texts at a time whichever set they are of: small sets fill a pass
    together. A thought depends on its item alone, so which sets are drawn together changes nothing but rounding.

    With `scored` the same weights also score the thoughts, sharing the forward pass over the text. log π_old is
    recomputed by the training forward on the weights that sampled, so that the gap between the two is measured and not
    assumed to be zero; where the set says `scored`, it is read off the scoring pass (in parity mode never). Sets that
    ask for `lower` activations get those that enter block `below` from the same passes. The processes of `world` draw
    for a share of the texts each, and every one gets all thoughts. `on_reading` is called with every reading of this
    process, in the order of its texts.
    """
    found: dict[int, Trajectories] = {}
    # Several processes send one another what is kept of all texts of a draw: sets of which other things are kept would
    # only be filled up.
    kinds = [one.shape(engine) if world.size == 1 else (one.shape(engine), one.kept) for one in sets]
    for kind in dict.fromkeys(kinds):
        alike = [number for number, other in enumerate(kinds) if other == kind]
        drawn = _drawn(engine, [sets[number] for number in alike], law, seed, rows, scored, below, world, on_reading)
        found |= dict(zip(alike, drawn))
    named = [found[number].having(snapshots=snapshots) for number in range(len(sets))]
    return [_recorded(engine, one, wanted, law, rows, world) for one, wanted in zip(named, sets)]


def _drawn(
    engine: TreeModel,
    sets: list[Wanted],
    law: SamplingSettings,
    seed: int,
    rows: int,
    scored: bool,
    below: int | None,
    world: World,
    on_reading: OnReading | None,
) -> list[Trajectories]:
    """The sets, which are of one shape, with thoughts and scores; log π_old and states where scoring gives them."""
    everything = TextBatch.joined([one.texts for one in sets])
    own = world.computed(len(everything.tokens_BS))
    texts, device = everything.rows(own.start, own.stop), everything.tokens_BS.device
    steps = sets[0].shape(engine)[-1]
    numbers_BRT = torch.cat(
        [
            branch_uniforms(
                one.texts, group=engine.plan.group, steps=steps, seed=seed, role=one.role, window=one.window
            )
            for one in sets
        ]
    )[own]
    sizes = [len(one.texts.tokens_BS) for one in sets]
    # Parity is about the training forward. Behind shut gates scoring reads no thought, and only processes that have the
    # actor know whether they are shut; all must do alike.
    gives = scored and not law.parity and not engine.plan.gated
    given = [gives and one.old == "scored" for one in sets]
    given_B = torch.tensor(given, device=device).repeat_interleave(torch.tensor(sizes, device=device))[own]
    thoughts, scores, states = [], list[Scores](), any(one.states for one in sets)
    below = below if gives and any(one.lower for one in sets) else None
    for part in world.beating(micro_batches(len(texts.tokens_BS), rows)):
        some = texts.rows(part.start, part.stop)
        reading = engine.read(some, below)
        if on_reading is not None:
            on_reading(reading)
        thoughts.append(engine.sample(some, numbers_BRT[part], law, reading))
        if scored:
            actions_B = given_B[part] if any(given) else None
            scores.append(engine.score(some, thoughts[-1], reading, features=states, actions_B=actions_B))
    drawn = Trajectories("", 0, texts, join_thoughts(thoughts))
    if scored:
        drawn = with_scores(drawn, scores)
    if states:
        drawn = drawn.having(scoring_BRF=torch.cat([scoring_features(p) for p in scores]))
    if any(given):
        drawn = drawn.having(log_old_BRT=torch.cat([p.need("log_prob_BRT").float() for p in scores]))
        if states:
            drawn = drawn.having(states_BRTD=torch.cat([p.need("states_BRTD") for p in scores]))
    if below is not None:
        drawn = drawn.having(lower_BND=torch.cat([p.need("lower_BND") for p in scores]))
    drawn = drawn.gathered(world, everything)
    ends = list(accumulate(sizes))
    return [
        _part(drawn, one, slice(end - size, end), law_given)
        for one, size, end, law_given in zip(sets, sizes, ends, given)
    ]


def _part(drawn: Trajectories, wanted: Wanted, rows: slice, law_given: bool) -> Trajectories:
    """The set that stands in these rows, on memory of its own, with what was asked for it alone."""
    whole = rows.stop - rows.start == len(drawn.texts.tokens_BS)
    found = drawn if whole else drawn.rows(torch.arange(rows.start, rows.stop, device=drawn.texts.tokens_BS.device))
    return replace(
        found,
        role=wanted.role,
        window=wanted.window,
        texts=wanted.texts,
        log_old_BRT=found.log_old_BRT if law_given else None,
        states_BRTD=found.states_BRTD if law_given and wanted.states else None,
        scoring_BRF=found.scoring_BRF if wanted.states else None,
        lower_BND=found.lower_BND if wanted.lower else None,
    )


@torch.no_grad()
def _recorded(
    engine: TreeModel, found: Trajectories, wanted: Wanted, law: SamplingSettings, rows: int, world: World
) -> Trajectories:
    """The set with log π_old (and states) by the training forward, if these are wanted and not there yet."""
    if wanted.old == "none" or found.log_old_BRT is not None:
        return found
    count = len(found.texts.tokens_BS)
    passes = []
    for part in world.beating(micro_batches(world.computed(count), rows)):
        some = found.texts.rows(part.start, part.stop), found.thoughts.rows(part.start, part.stop)
        passes.append(engine.policy(*some, features=wanted.states, parity=law.parity))
    own = [(torch.cat([p.need("log_prob_BRT").float() for p in passes]), 0)]
    if wanted.states:
        own.append((torch.cat([p.need("features_BRTD") for p in passes]), 0))
    law_BRT, *states = world.gather_all(own, count)
    found = found.having(log_old_BRT=law_BRT)
    return found.having(states_BRTD=states[0]) if states else found


def scoring_features(read: Scores) -> Tensor:
    """`[B, R, F]`: the scorer's state at the end of the continuation on the trunk, its token losses there, and ℓ_0.

    None of it depends on the thought, so no action and nothing after it can leak into the mean head.
    """
    last_BRD = read.need("no_thought_features_BRHD")[:, :, -1]
    return torch.cat([last_BRD.float(), read.no_thought_token_BRH, read.no_thought_BR[..., None]], dim=-1)


def with_scores(
    trajectories: Trajectories, parts: list[Scores], snapshots: dict[str, str] | None = None
) -> Trajectories:
    """The trajectories with ℓ_0 and ℓ_τ of every checkpoint, from the scores of their micro-batches in order."""
    return trajectories.having(
        no_thought_BR=torch.cat([p.no_thought_BR for p in parts]),
        no_thought_token_BRH=torch.cat([p.no_thought_token_BRH for p in parts]),
        losses_BRK=torch.cat([p.losses_BRK for p in parts]),
        checkpoint_BRK=torch.cat([p.checkpoint_BRK for p in parts]),
        checkpoint_mask_BRK=torch.cat([p.mask_BRK for p in parts]),
        snapshots=snapshots,
    )


def score(
    engine: TreeModel,
    trajectories: Trajectories,
    *,
    rows: int,
    snapshots: dict[str, str] | None = None,
    world: World = SINGLE,
) -> Trajectories:
    """The trajectories with ℓ_0 and ℓ_τ of every checkpoint under the scorer `engine` (eq:continuation-ce): of this
    process's own rows, as one of `world`."""
    parts = []
    for part in world.beating(micro_batches(len(trajectories.texts.tokens_BS), rows)):
        some = trajectories.rows(part)
        parts.append(engine.score(some.texts, some.thoughts))
    return with_scores(trajectories, parts, snapshots)

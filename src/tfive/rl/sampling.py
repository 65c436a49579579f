"""Sampling and scoring thoughts: random numbers, actions, log q and log π_old, and the continuation losses.

Plain functions of an engine and a batch of texts; `rl/rollout.py` adds roles, rewards and token counts.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from tfive import rng
from tfive.distributed.world import SINGLE, World
from tfive.rl.trajectory import Trajectories
from tfive.tree.forward import TreeModel
from tfive.tree.layout import TextBatch, Thoughts
from tfive.tree.outputs import Scores
from tfive.tree.settings import SamplingSettings


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
) -> Trajectories:
    """Thoughts for every item of `texts`, `rows` texts at a time, with log q and log π_old recorded; of `longest`
    tokens at most, of the plan's length if None.

    log π_old is recomputed by the training forward on the weights that sampled, so that the gap between the two is
    measured and not assumed to be zero. With `scored` the same weights also score the thoughts, sharing the forward
    pass over the text. With `states` both passes keep the features that the calibration heads read. The processes of
    `world` draw for a share of the texts each, and every one gets all thoughts.
    """
    everything, own = texts, world.computed(len(texts.tokens_BS))
    texts = texts.rows(own.start, own.stop)
    numbers_BRT = branch_uniforms(
        texts, group=engine.plan.group, steps=longest or engine.plan.length, seed=seed, role=role, window=window
    )
    thoughts, recorded, scores = [], [], []
    for part in micro_batches(len(texts.tokens_BS), rows):
        some = texts.rows(part.start, part.stop)
        reading = engine.read(some)
        thoughts.append(engine.sample(some, numbers_BRT[part], law, reading))
        if scored:
            scores.append(engine.score(some, thoughts[-1], reading, features=states))
        if record_old:
            with torch.no_grad():
                recorded.append(engine.policy(some, thoughts[-1], features=states, parity=law.parity))
    drawn = Trajectories(
        role,
        window,
        texts,
        join_thoughts(thoughts),
        log_old_BRT=torch.cat([p.need("log_prob_BRT").float() for p in recorded]) if record_old else None,
        snapshots=snapshots or {},
    )
    if states:
        drawn = drawn.having(
            states_BRTD=torch.cat([p.need("features_BRTD") for p in recorded]),
            scoring_BRF=torch.cat([scoring_features(p) for p in scores]),
        )
    return (with_scores(drawn, scores) if scored else drawn).gathered(world, everything)


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
        losses_BRK=torch.cat([p.losses_BRK for p in parts]),
        checkpoint_BRK=torch.cat([p.checkpoint_BRK for p in parts]),
        checkpoint_mask_BRK=torch.cat([p.mask_BRK for p in parts]),
        snapshots=snapshots,
    )


def score(
    engine: TreeModel, trajectories: Trajectories, *, rows: int, snapshots: dict[str, str] | None = None
) -> Trajectories:
    """The trajectories with ℓ_0 and ℓ_τ of every checkpoint under the scorer `engine` (eq:continuation-ce)."""
    parts = []
    for part in micro_batches(len(trajectories.texts.tokens_BS), rows):
        some = trajectories.rows(part)
        parts.append(engine.score(some.texts, some.thoughts))
    return with_scores(trajectories, parts, snapshots)

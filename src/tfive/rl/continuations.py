"""Several independent continuations of one prefix, for unbiased estimates of a conditional mean without a mean head.

A random prefix of each given thought is kept. Its length is drawn uniformly from 0 … T_max − 1, and thoughts that end
earlier are not continued, so that averages over contexts follow the occupation measure (eq:trajectory-occupation):
exactly if unreached contexts count as zero, up to a constant factor if they are left out.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from tfive import rng
from tfive.rl.rollout import Rollout
from tfive.rl.sampling import branch_uniforms, join_thoughts, micro_batches, score
from tfive.rl.trajectory import Trajectories


def continued(rollout: Rollout, begun: Trajectories, count: int) -> Trajectories:
    """`count` rewarded continuations of each prefix, as neighbouring branches; `probe_step_BR` is the step of the first
    action that is sampled anew. They are counted under the role of `begun`, without the tokens of the prefix.

    A context that was not reached keeps its item number but has no position, hence no valid branch.
    """
    engine, texts = rollout.engine, begun.texts
    length, seed, window = engine.plan.length, rollout.seed, begun.window
    number = rng.uniforms(seed, f"{begun.role}/step", window, np.maximum(texts.items_BP.cpu().numpy(), 0))
    step_BP = torch.from_numpy((number * length).astype(np.int64)).to(texts.items_BP.device)
    reached_BP = begun.thoughts.valid_BR & (step_BP < begun.thoughts.length_BR)
    numbers_BRT = branch_uniforms(
        texts, group=count, steps=rollout.longest(window), seed=seed, role=f"{begun.role}/continuation", window=window
    )
    # Every position is repeated `count` times: to the engine, continuations are branches like any other.
    texts = replace(
        texts,
        positions_BP=torch.where(reached_BP, texts.positions_BP, -1).repeat_interleave(count, 1),
        items_BP=texts.items_BP.repeat_interleave(count, 1),
    )
    step_BR = step_BP.repeat_interleave(count, 1)
    tokens_BRT = begun.thoughts.tokens_BRT.repeat_interleave(count, 1)
    own = rollout.world.computed(len(texts.tokens_BS))

    def drawn() -> Trajectories:
        thoughts, log_old = [], []
        for part in rollout.world.beating(micro_batches(own, rollout.rows)):
            some = texts.rows(part.start, part.stop)
            new = engine.sample(some, numbers_BRT[part], rollout.law, prefix=(tokens_BRT[part], step_BR[part]))
            with torch.no_grad():
                log_old.append(engine.policy(some, new).need("log_prob_BRT").float())
            thoughts.append(new)
        found = Trajectories(
            begun.role,
            window,
            texts.rows(own.start, own.stop),
            join_thoughts(thoughts),
            log_old_BRT=torch.cat(log_old),
            snapshots=rollout.snapshots.current("policy"),
        )
        scorer = rollout.snapshots.current("scorer")
        return score(engine, found, rows=rollout.rows, snapshots=scorer, world=rollout.world)

    scored = rollout.passes.fit(drawn, engine.let_go)
    scored = scored.gathered(rollout.world, texts).having(probe_step_BR=step_BR)
    if begun.foreign_BR is not None:
        scored = scored.having(foreign_BR=begun.foreign_BR.repeat_interleave(count, 1))
    rollout.count_tokens(begun.role, scored, given=int(step_BR[scored.thoughts.valid_BR].sum()))
    return rollout.rewarded(scored)


def at_step(trajectories: Trajectories, value_BRT: Tensor) -> Tensor:
    """The entry at each branch's probed step, `[B, R]` (further dimensions stay)."""
    step_BR = trajectories.need("probe_step_BR")
    index = step_BR[..., None]
    for _ in range(value_BRT.ndim - 3):
        index = index[..., None]
    return value_BRT.take_along_dim(index.expand(*step_BR.shape, 1, *value_BRT.shape[3:]), dim=2).squeeze(2)


def side_by_side(trajectories: Trajectories, value_BR: Tensor, count: int, *, reached: bool = True) -> Tensor:
    """`[N, M, …]`: the `count` branches of each context on an axis of their own, for contexts reached or for all
    drawn."""
    rows, branches = value_BR.shape[:2]
    grouped = value_BR.view(rows, branches // count, count, *value_BR.shape[2:])
    exists_BR = trajectories.thoughts.valid_BR if reached else trajectories.texts.items_BP >= 0
    return grouped[exists_BR.view(rows, -1, count)[..., 0]]

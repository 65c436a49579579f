"""A frozen window for the tests of calibration, and the changes that its heads must or must not notice."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from stage import PLAN, V, llama, rollout_of, texts
from tfive.rl.calibration.calibrator import Calibrator
from tfive.rl.calibration.moments import CalibrationData
from tfive.rl.calibration.settings import CalibrationSettings
from tfive.rl.critic import FrozenBase, build_pair
from tfive.rl.critics import Critics, CriticValues
from tfive.rl.gae import PilotNormaliser
from tfive.rl.rollout import Rollout
from tfive.rl.sampling import score
from tfive.rl.settings import CriticSettings
from tfive.rl.trajectory import Trajectories
from tfive.tree.forward import TreeModel
from tfive.tree.layout import TextBatch, Thoughts

ROWS = 10
NORMALISER = PilotNormaliser(mean=0.1, deviation=0.7, tokens=10)
QUICK = {
    "steps": 6, "warm_steps": 6, "evaluate_every": 2, "batch": 16, "width": 6, "kappa": 0.5,
    "weight_lr": 3e-2, "dropout": 0.0,
}  # fmt: skip


@dataclass
class World:
    """A frozen window: policy, scorer, critics, one set of head-training thoughts."""

    rollout: Rollout
    critics: Critics
    texts: TextBatch
    thoughts: Thoughts

    def calibrator(self, **changes: Any) -> Calibrator:
        settings = CalibrationSettings(**(QUICK | changes))
        return Calibrator(self.rollout.engine, 8, settings, seed=4, rows=3, action_width=3)

    def made(
        self, batch: TextBatch | None = None, thoughts: Thoughts | None = None
    ) -> tuple[Trajectories, CriticValues]:
        """Everything that a window computes from these texts and thoughts."""
        batch, thoughts = batch or self.texts, thoughts or self.thoughts
        engine, snapshots = self.rollout.engine, self.rollout.snapshots.current("policy", "scorer")
        with torch.no_grad():
            log_old = engine.policy(batch, thoughts).need("log_prob_BRT")
        record = Trajectories("head_train", 1, batch, thoughts, log_old_BRT=log_old, snapshots=snapshots)
        rewarded = self.rollout.rewarded(score(engine, record, rows=3))
        judged = self.critics.evaluate(rewarded)
        return self.critics.advantages(rewarded, judged), judged


def equal(left: Any, right: Any, until: int | None = None) -> dict[str, bool]:
    """Which tensors of two bundles of inputs are the same bit for bit, up to step `until` (not included)."""
    return {name: getattr(left, name)[:, :until].equal(getattr(right, name)[:, :until]) for name in vars(left)}


def all_data(world: World, calibrator: Calibrator, *arguments: Any) -> CalibrationData:
    return calibrator.data(*world.made(*arguments), NORMALISER)


def other_actions(world: World, step: int) -> Thoughts:
    """The same thoughts up to `step` (not included), other actions from there on; lengths stay."""
    old = world.thoughts
    other_BRT = torch.where(old.tokens_BRT < V - 1, old.tokens_BRT + 1, 10)
    steps_T = torch.arange(PLAN.length)
    changed_BRT = (
        (steps_T >= step) & old.mask_BRT & ~(old.closed_BR[..., None] & (steps_T == old.length_BR[..., None] - 1))
    )
    return replace(old, tokens_BRT=torch.where(changed_BRT, other_BRT, old.tokens_BRT))


def shorter(world: World, step: int) -> Thoughts:
    """Thoughts that reach action `step` end with it, by a sampled close."""
    old, steps_T = world.thoughts, torch.arange(PLAN.length)
    reach_BR = old.valid_BR & (old.length_BR > step)
    tokens_BRT = torch.where(reach_BR[..., None] & (steps_T == step), PLAN.close_ids[0], old.tokens_BRT)
    tokens_BRT = torch.where(reach_BR[..., None] & (steps_T > step), 0, tokens_BRT)
    return replace(
        old,
        tokens_BRT=tokens_BRT,
        length_BR=torch.where(reach_BR, step + 1, old.length_BR),
        closed_BR=old.closed_BR | reach_BR,
    )


def other_scoring_text(world: World) -> TextBatch:
    """Other text behind the last position of every row: no thought stands after it, every continuation meets it."""
    batch = world.texts
    place_S = torch.arange(batch.tokens_BS.shape[1])
    behind_BS = place_S > batch.positions_BP.amax(1, keepdim=True)
    tokens_BS = torch.where(behind_BS, (batch.tokens_BS - 10 + 7) % (V - 10) + 10, batch.tokens_BS)
    assert (tokens_BS != batch.tokens_BS).any(1).all()
    return replace(batch, tokens_BS=tokens_BS)


def other_outcomes(record: Trajectories) -> Trajectories:
    """All that is only known after the thought: losses, potentials, rewards, returns, GAEs."""
    names = ("no_thought_BR", "losses_BRK", "potentials_BRT", "rewards_BRT", "returns_BRT", "gae_2BRT")
    changes: dict[str, Any] = {name: record.need(name) * -3 + 1 for name in names}
    return record.having(**changes)


@pytest.fixture(scope="module")
def world() -> World:
    rollout = rollout_of(TreeModel(llama(seed=4), PLAN), lambda number: texts(rows=ROWS, seed=number))
    base, settings = llama().requires_grad_(False), CriticSettings(adapt="top", blocks=1, width=8)
    critics = Critics(
        FrozenBase(base, PLAN, settings), build_pair(base, PLAN, settings, seed=1), settings, alpha=1.0, seed=2, rows=3
    )
    drawn = rollout.collect("head_train", 1)
    return World(rollout, critics, drawn.texts, drawn.thoughts)


@pytest.fixture(scope="module")
def data(world: World) -> CalibrationData:
    """What the heads read of the undisturbed set."""
    return all_data(world, world.calibrator())


@pytest.fixture(scope="module")
def easy(data: CalibrationData) -> CalibrationData:
    """The same inputs with advantages whose average is off by 0.3, which any weight a little below ½ makes better."""
    draw = torch.Generator().manual_seed(0)
    first, second = (offset + 0.1 * torch.randn(data.first_NT.shape, generator=draw) for offset in (1.0, -0.4))
    return replace(data, first_NT=first, second_NT=second)

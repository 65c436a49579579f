"""One frozen window for all tests of calibration."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from calibration_world import ROWS, World, all_data

from stage import PLAN, llama, rollout_of, texts
from tfive.rl.calibration.moments import CalibrationData
from tfive.rl.critic import FrozenBase, build_pair
from tfive.rl.critics import Critics
from tfive.rl.settings import CriticSettings
from tfive.tree.forward import TreeModel


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

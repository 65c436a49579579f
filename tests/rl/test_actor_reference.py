"""Which laws a ratio compares, against plain rows; in parity mode anchors leave it alone to the last bit."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from test_actor import BATCH, BOTH, NOTHING, acting, actor_on, anchor_pass, close, gradients, policy_pass
from transformers import PreTrainedModel

from stage import PLAN, PlainModel, gpt2, items_of
from tfive.rl.sampling import sample
from tfive.rl.settings import RatioSettings
from tfive.rl.trajectory import Trajectories
from tfive.tree.forward import TreeModel
from tfive.tree.settings import SamplingSettings

pytestmark = pytest.mark.model


def sampled_in_parity(model: PreTrainedModel) -> Trajectories:
    """Thoughts drawn one text at a time, with advantages of both signs."""
    law = SamplingSettings(parity=True)
    drawn = sample(TreeModel(model, PLAN), BATCH, law, seed=1, role="actor", window=1, rows=8)
    noise = torch.randn(drawn.mask_BRT.shape, generator=torch.Generator().manual_seed(2))
    return drawn.having(advantage_BRT=noise * drawn.mask_BRT)


def test_anchors_do_not_touch_the_ratios_of_parity_mode() -> None:
    """The first step's ratios are one to the last bit with anchors on, and the loss is that of the policy alone."""
    model = gpt2(torch.float32)
    record = sampled_in_parity(model)
    anchored = actor_on(model, anchor=BOTH, parity=True).step(record)
    alone = actor_on(gpt2(torch.float32), anchor=NOTHING, parity=True).step(record)
    assert anchored.policy_kl == anchored.mismatch_kl == 0.0
    assert anchored.policy_loss == alone.policy_loss
    assert anchored.anchor_loss > 0
    assert anchored.conditioned_loss > 0
    assert alone.anchor_loss == alone.conditioned_loss == 0.0


def test_a_step_in_parity_mode_sums_the_gradients_of_policy_and_anchors() -> None:
    """The gradient that the optimizer receives, against one pass per loss."""
    model = gpt2()
    record = sampled_in_parity(model)
    record = record.having(log_old_BRT=(record.need("log_old_BRT").double() + 0.1) * record.mask_BRT)
    actor = actor_on(model, rows=3, anchor=BOTH, parity=True)
    policy_pass(actor, record)
    anchor_pass(actor, record)
    wanted = gradients(actor)
    found: dict[str, torch.Tensor] = {}
    step = actor.optimizer.step

    def keep(*, counted: bool = True) -> Any:
        found.update({name: gradient.clone() for name, gradient in actor.optimizer.gradients()})
        return step(counted=counted)

    actor.optimizer.step = keep  # type: ignore[method-assign, assignment]
    actor.step(record)
    close(found, wanted)


@pytest.mark.parametrize("denominator", ["recomputed", "sampler"])
def test_the_ratio_is_taken_against_the_law_that_the_settings_name(
    denominator: Literal["recomputed", "sampler"],
) -> None:
    """Both recorded laws differ from the policy and from each other; the loss is that of a loop over plain rows."""
    model = gpt2()
    record = acting(model, distance=0.4)
    noise = 0.4 * torch.randn(record.mask_BRT.shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    log_q = (record.need("log_old_BRT") + noise) * record.mask_BRT
    record = replace(record, thoughts=replace(record.thoughts, log_q_BRT=log_q))
    plain, loss, tokens = PlainModel(gpt2()), 0.0, 0
    below_BRT = log_q if denominator == "sampler" else record.need("log_old_BRT")
    for item in items_of(BATCH, record.thoughts):
        for step, log_now in enumerate(plain.actions(item).tolist()):
            at = (item.row, item.branch, step)
            ratio, advantage = math.exp(log_now - float(below_BRT[at])), float(record.need("advantage_BRT")[at])
            loss -= min(ratio * advantage, min(max(ratio, 0.8), 1.28) * advantage)
            tokens += 1
    stats = actor_on(model, rows=3, ratio=RatioSettings(denominator=denominator)).step(record)
    assert stats.tokens == tokens
    assert stats.policy_loss == pytest.approx(loss / tokens, rel=1e-9)

"""What parity mode is for: ratios read from rows as they were sampled, whatever the anchors read beside them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_actor import BATCH, BOTH, NOTHING, actor_on, anchor_pass, close, gradients, policy_pass

from stage import PLAN, gpt2
from tfive.rl.sampling import sample
from tfive.rl.trajectory import Trajectories
from tfive.tree.forward import TreeModel
from tfive.tree.settings import SamplingSettings

pytestmark = pytest.mark.model


def sampled_in_parity(model: torch.nn.Module) -> Trajectories:
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

    def keep() -> Any:
        found.update({name: gradient.clone() for name, gradient in actor.optimizer.gradients()})
        return step()

    actor.optimizer.step = keep  # type: ignore[method-assign]
    actor.step(record)
    close(found, wanted)

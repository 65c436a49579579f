"""Policy and anchors with rates of their own, against two AdamW optimisers on one weight; and the range of the policy's
movement."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import tiny
from tfive.errors import UserError
from tfive.rl.diagnosis import rates_outside
from tfive.rl.optimizer import MasterOptimizer
from tfive.training.start import train


def gradients() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [tuple(torch.randn(4, 3, generator=generator, dtype=torch.float64) for _ in range(2)) for _ in range(5)]  # type: ignore[misc]


def fresh() -> tuple[nn.Parameter, MasterOptimizer]:
    weight = nn.Parameter(torch.ones(4, 3, dtype=torch.float64))
    return weight, MasterOptimizer([("w", weight)], lr=0.1, clip_norm=None, warmup_steps=3)


def taught(optimizer: MasterOptimizer, weight: nn.Parameter, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for policy, anchor in pairs:
        (weight * policy).sum().backward()
        assert optimizer.step(counted=False).applied
        (weight * anchor).sum().backward()
        with optimizer.apart(0.02):
            optimizer.step()


def test_each_loss_has_moments_and_a_rate_of_its_own() -> None:
    weight, optimizer = fresh()
    taught(optimizer, weight, gradients())
    assert optimizer.steps == 5
    plain = nn.Parameter(torch.ones(4, 3, dtype=torch.float64))
    both = [torch.optim.AdamW([plain], lr=rate, betas=(0.9, 0.95), weight_decay=0.0) for rate in (0.1, 0.02)]
    for step, pair in enumerate(gradients()):
        for rate, one, gradient in zip((0.1, 0.02), both, pair):
            one.param_groups[0]["lr"] = rate * min(1, (step + 1) / 3)
            plain.grad = gradient.clone()
            one.step()
    torch.testing.assert_close(weight.detach(), plain.detach())


def test_both_sets_of_moments_are_saved() -> None:
    weight, optimizer = fresh()
    taught(optimizer, weight, gradients()[:2])
    other, again = fresh()
    other.data.copy_(weight.data)
    state = optimizer.state_dict()
    again.load_state_dict(state)
    for one, its in ((optimizer, weight), (again, other)):
        taught(one, its, gradients()[2:])
    assert torch.equal(weight, other)


def test_movement_outside_its_range_is_told() -> None:
    assert rates_outside({"policy_kl_last": 0.01, "clip_fraction": 0.05}) == []
    high = rates_outside({"policy_kl_last": 0.2, "clip_fraction": 0.3})
    assert [line.split(" = ")[0] for line in high] == ["policy_kl_last", "clip_fraction"]
    assert "lower optimizer.lr" in high[0]
    assert "raise optimizer.lr" in rates_outside({"policy_kl_last": 0.0, "clip_fraction": 0.0})[0]


@pytest.mark.model
def test_a_run_with_two_rates_and_too_large_a_step(tmp_path: Path) -> None:
    asked = ("method=quiet-star-grpo", "thought.group=2", "window.windows=1", "anchor.conditioned=0.1")
    config = tiny.configure(tmp_path, *asked, "optimizer.lr=0.1", "anchor.lr=1e-4")
    train(config, tmp_path / "run", quiet=True)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text("utf-8")
    assert '"event": "rates", "detail": "policy_kl_last' in lines
    assert '"rate_alarms": ' in lines
    with pytest.raises(UserError, match=r"anchor\.lr = 0\.1: both anchors are 0"):
        tiny.configure(tmp_path, *asked[:3], "anchor.lr=0.1", "anchor.next_token=0")

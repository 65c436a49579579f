"""Moments in bfloat16: what they change is noise without a direction, and a run goes on from them bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from tfive.rl import optimizer as module
from tfive.rl.optimizer import MasterOptimizer, Moments


def trained(moments: Moments, steps: int, dtype: torch.dtype = torch.float32, **more: Any) -> MasterOptimizer:
    """4,096 weights pulled by gradients of one size, each with its own."""
    weight = nn.Parameter(torch.zeros(4096, dtype=dtype))
    optimizer = MasterOptimizer([("w", weight)], lr=1e-3, clip_norm=None, moments=moments, seed=3, **more)
    for _ in range(steps):
        step(optimizer, weight)
    return optimizer


def step(optimizer: MasterOptimizer, weight: nn.Parameter) -> None:
    size = torch.logspace(-6, 2, 4096)
    (weight.float() * size).sum().backward()
    optimizer.step()


def state_of(optimizer: MasterOptimizer) -> dict[str, Any]:
    found: dict[str, Any] = optimizer.state_dict()["parameters"]["w"]
    return found


def test_an_average_comes_to_its_limit_where_rounding_to_nearest_stops_short() -> None:
    found, exact = (state_of(trained(moments, 200)) for moments in ("bfloat16", "float32"))
    nearest = torch.zeros(4096, dtype=torch.bfloat16)
    for _ in range(200):
        nearest = (0.95 * nearest.float() + 0.05 * torch.logspace(-6, 2, 4096) ** 2).to(torch.bfloat16)
    for name in ("first", "second"):
        assert found[name].dtype == torch.bfloat16
        assert exact[name].dtype == torch.float32
        assert float((found[name].float() / exact[name]).mean()) == pytest.approx(1.0, abs=1e-3)
    assert float((nearest.float() / exact["second"]).mean()) < 0.98


def test_updates_are_as_long_as_those_of_exact_moments() -> None:
    found, exact = (trained(moments, 100).masters()["w"] for moments in ("bfloat16", "float32"))
    assert float((found / exact).mean()) == pytest.approx(1.0, abs=1e-3)
    assert float((found / exact).std()) < 0.01


@pytest.mark.parametrize("update", ["master", "stochastic"])
def test_a_saved_state_goes_on_bit_for_bit(update: Any) -> None:
    whole = trained("bfloat16", 9, torch.bfloat16, bf16_update=update)
    half = trained("bfloat16", 4, torch.bfloat16, bf16_update=update)
    weight = nn.Parameter(half._slots[0].parameter.detach().clone())
    again = MasterOptimizer([("w", weight)], lr=1e-3, clip_norm=None, moments="bfloat16", seed=3, bf16_update=update)
    again.load_state_dict(copy.deepcopy(half.state_dict()))
    for _ in range(5):
        step(again, weight)
    assert weight.equal(whole._slots[0].parameter)
    for name in ("first", "second"):
        assert state_of(again)[name].equal(state_of(whole)[name])


def test_moments_of_another_precision_are_refused() -> None:
    with pytest.raises(ValueError, match="another precision"):
        trained("bfloat16", 1).load_state_dict(trained("float32", 1).state_dict())


def test_large_tensors_are_updated_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = trained("bfloat16", 1)
    monkeypatch.setattr(module, "CHUNK", 1000)
    parts = trained("bfloat16", 1)
    # The noise is that of the element's place in the whole.
    assert parts.masters()["w"].equal(whole.masters()["w"])
    assert state_of(parts)["steps"] == state_of(whole)["steps"] == 1
    assert state_of(parts)["first"].equal(state_of(whole)["first"])

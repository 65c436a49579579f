"""The pilot normaliser pools both critics, is frozen, and never looks at the batch it normalises."""

import dataclasses
import math

import pytest
import torch

from tfive.rl.gae import PilotNormaliser


def test_pools_both_critics_on_valid_tokens_only() -> None:
    first = torch.tensor([[1.0, 2.0, 99.0], [3.0, 99.0, 99.0]])
    second = torch.tensor([[-1.0, 0.0, 99.0], [5.0, 99.0, 99.0]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    pilot = PilotNormaliser.fit(first, second, mask, epsilon=0.25)
    pooled = [1.0, 2.0, 3.0, -1.0, 0.0, 5.0]
    mean = sum(pooled) / 6
    variance = sum((x - mean) ** 2 for x in pooled) / 6
    assert pilot.mean == pytest.approx(mean, rel=1e-12)
    assert pilot.deviation == pytest.approx(math.sqrt(variance + 0.25), rel=1e-12)
    assert pilot.tokens == 3
    other = pilot.normalise(torch.tensor([[10.0, 7.0]]), torch.tensor([[True, False]]))
    assert float(other[0, 0]) == pytest.approx((10 - mean) / pilot.deviation, rel=1e-6)
    assert float(other[0, 1]) == 0.0
    with pytest.raises(dataclasses.FrozenInstanceError):
        pilot.mean = 0.0  # type: ignore[misc]
    assert PilotNormaliser.from_state_dict(pilot.state_dict()) == pilot


def test_identical_advantages_stay_finite_and_bad_ones_are_named() -> None:
    flat = torch.ones(2, 2)
    mask = torch.ones(2, 2, dtype=torch.bool)
    assert PilotNormaliser.fit(flat, flat, mask, epsilon=1e-6).deviation == pytest.approx(1e-3)
    with pytest.raises(ValueError, match="not finite"):
        PilotNormaliser.fit(flat * math.inf, flat, mask, epsilon=1e-6)
    with pytest.raises(ValueError, match="at least one"):
        PilotNormaliser.fit(flat, flat, ~mask, epsilon=1e-6)

"""Value losses against a loop."""

import pytest
import torch
from torch import Tensor

from tfive.rl.losses import clipped_value_loss, expectile_value_loss, squared_value_loss


def _case() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    value, target, frozen = (torch.randn(6, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    mask = torch.rand(6, 4, generator=generator) < 0.6
    return value.requires_grad_(True), target, frozen, mask


def test_clipped_loss_value_and_gradient() -> None:
    value, target, frozen, mask = _case()
    total, count = clipped_value_loss(value, target, frozen, mask, 0.2)
    (gradient,) = torch.autograd.grad(total, value)
    want, slope = 0.0, torch.zeros_like(gradient)
    for i in range(6):
        for t in range(4):
            if not mask[i, t]:
                continue
            v, g, f = float(value[i, t].detach()), float(target[i, t]), float(frozen[i, t])
            near = f + max(-0.2, min(0.2, v - f))
            plain, held = (v - g) ** 2, (near - g) ** 2
            want += 0.5 * max(plain, held)
            # Where the held value is the worse one, only an unclipped distance still moves it.
            slope[i, t] = v - g if plain > held or abs(v - f) < 0.2 else 0.0
    assert float(total.detach()) == pytest.approx(want, abs=1e-12)
    assert int(count) == int(mask.sum())
    torch.testing.assert_close(gradient, slope, atol=1e-12, rtol=0)
    assert (slope[mask] == 0).any()


def test_half_squared_and_expectile() -> None:
    value, target, _, mask = _case()
    half, _ = squared_value_loss(value, target, mask)
    middle, _ = expectile_value_loss(value, target, mask, 0.5)
    assert float(half.detach()) == pytest.approx(float(middle.detach()), abs=1e-12)
    want = 0.0
    for i in range(6):
        for t in range(4):
            if mask[i, t]:
                gap = float(target[i, t] - value[i, t].detach())
                want += (0.7 if gap >= 0 else 0.3) * gap**2
    got, _ = expectile_value_loss(value, target, mask, 0.7)
    assert float(got.detach()) == pytest.approx(want, abs=1e-12)


def test_expectiles_bracket_the_mean() -> None:
    """Minimisers of the 0.3, 0.5 and 0.7 losses on one sample are ordered, and 0.5 is its mean."""
    target = torch.tensor([0.0, 0.0, 0.0, 1.0, 5.0], dtype=torch.float64)
    mask = torch.ones(5, dtype=torch.bool)
    found = []
    for level in (0.3, 0.5, 0.7):
        low, high = 0.0, 5.0
        for _ in range(60):
            middle = torch.tensor((low + high) / 2, dtype=torch.float64, requires_grad=True)
            loss, _ = expectile_value_loss(middle.expand(5), target, mask, level)
            (slope,) = torch.autograd.grad(loss, middle)
            low, high = (float(middle.detach()), high) if slope < 0 else (low, float(middle.detach()))
        found.append(low)
    assert found[0] < found[1] < found[2]
    assert found[1] == pytest.approx(float(target.mean()), abs=1e-9)


def test_bad_arguments() -> None:
    value, target, frozen, mask = _case()
    with pytest.raises(ValueError, match="clip"):
        clipped_value_loss(value, target, frozen, mask, 0.0)
    with pytest.raises(ValueError, match="expectile"):
        expectile_value_loss(value, target, mask, 1.0)

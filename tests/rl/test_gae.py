"""Masked, length-adaptive GAE against the plain recursion on one trajectory."""

import pytest
import torch

from tfive.rl.gae import adaptive_gae, masked_gae, trace
from tfive.rl.reward import returns_to_go


def _reference(reward: list[float], value: list[float], length: int, lam: float, gamma: float) -> list[float]:
    advantage = [0.0] * len(reward)
    for t in range(length):
        total, weight = 0.0, 1.0
        for k in range(t, length):
            bootstrap = gamma * value[k + 1] if k + 1 < length else 0.0
            total += weight * (reward[k] + bootstrap - value[k])
            weight *= gamma * lam
        advantage[t] = total
    return advantage


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_matches_the_explicit_sum(gamma: float) -> None:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([[12, 1, 7], [3, 0, 2]])
    reward = torch.randn(2, 3, 12, generator=generator, dtype=torch.float64)
    value = torch.randn(2, 3, 12, generator=generator, dtype=torch.float64)
    mask = torch.arange(1, 13) <= lengths.unsqueeze(-1)
    lam = trace(lengths, 1.5)
    got = masked_gae(reward, value, mask, lam, gamma)
    for b in range(2):
        for r in range(3):
            want = _reference(reward[b, r].tolist(), value[b, r].tolist(), int(lengths[b, r]), float(lam[b, r]), gamma)
            torch.testing.assert_close(got[b, r], torch.tensor(want, dtype=torch.float64), atol=1e-12, rtol=0)


def test_adaptive_trace_uses_each_realised_length() -> None:
    lengths = torch.tensor([4, 2])
    mask = torch.arange(1, 5) <= lengths.unsqueeze(-1)
    reward, value = torch.zeros(2, 4), torch.tensor([[0.0, 1.0, 0.0, 0.0], [0.0, 1.0, 5.0, 5.0]])
    got = adaptive_gae(reward, value, mask, alpha=1.0)
    # λ(4) = ¾: δ = (1, −1, 0, 0) gives A_1 = 1 − ¾; λ(2) = ½, and the masked values beyond the end do not exist.
    torch.testing.assert_close(got, torch.tensor([[0.25, -1.0, 0.0, 0.0], [0.5, -1.0, 0.0, 0.0]]))


def test_trace_one_is_the_monte_carlo_residual() -> None:
    generator = torch.Generator().manual_seed(2)
    reward, value = (torch.randn(5, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    mask = torch.arange(1, 7) <= torch.tensor([6, 3, 1, 5, 2]).unsqueeze(-1)
    got = masked_gae(reward, value, mask, 1.0)
    want = torch.where(mask, returns_to_go(reward, mask) - value, torch.zeros_like(value))
    torch.testing.assert_close(got, want, atol=1e-12, rtol=0)


def test_a_mask_with_a_hole_is_refused() -> None:
    mask = torch.tensor([[True, False, True]])
    with pytest.raises(ValueError, match="contiguous"):
        masked_gae(torch.zeros(1, 3), torch.zeros(1, 3), mask, 0.5)

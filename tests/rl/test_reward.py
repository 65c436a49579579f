"""Rewards against a direct reading of the paper's definitions, one trajectory and one step at a time."""

import pytest
import torch
from torch import Tensor

from tfive.rl.reward import (
    RewardScale,
    carried_potential,
    checkpoint_rewards,
    final_gain,
    potentials,
    returns_to_go,
)


def _ragged(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Thoughts of lengths 0 … 12 with checkpoints 4, 8, 12 below the length, then the length itself."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([[12, 4, 5], [1, 0, 9]])
    checkpoint = torch.zeros(2, 3, 3, dtype=torch.long)
    mask = torch.zeros(2, 3, 3, dtype=torch.bool)
    for b in range(2):
        for r in range(3):
            length = int(lengths[b, r])
            steps = [tau for tau in (4, 8, 12) if tau < length] + ([length] if length else [])
            for k, tau in enumerate(steps):
                checkpoint[b, r, k], mask[b, r, k] = tau, True
    no_thought = torch.rand(2, 3, generator=generator, dtype=torch.float64) * 4
    losses = torch.rand(2, 3, 3, generator=generator, dtype=torch.float64) * 6
    return lengths, checkpoint, mask, no_thought, losses


def _reference(
    no_thought: Tensor, losses: Tensor, checkpoint: Tensor, mask: Tensor, scale: float, clip: float, steps: int
) -> tuple[Tensor, Tensor]:
    """Φ_t step by step, carried forward, then differences."""
    reward = torch.zeros(*no_thought.shape, steps, dtype=torch.float64)
    before = torch.zeros_like(reward)
    for b in range(no_thought.shape[0]):
        for r in range(no_thought.shape[1]):
            phi = 0.0
            for t in range(1, steps + 1):
                before[b, r, t - 1] = phi
                new = phi
                for k in range(checkpoint.shape[-1]):
                    if mask[b, r, k] and int(checkpoint[b, r, k]) == t:
                        raw = float(no_thought[b, r] - losses[b, r, k]) / scale
                        new = max(-clip, min(clip, raw))
                reward[b, r, t - 1] = new - phi
                phi = new
    return reward, before


def test_rewards_potentials_and_returns_match_the_definition() -> None:
    lengths, checkpoint, mask, no_thought, losses = _ragged()
    scale, clip = 0.7, 3.0
    phi = potentials(no_thought, losses, mask, scale, clip)
    reward = checkpoint_rewards(phi, checkpoint, mask, 12)
    want, before = _reference(no_thought, losses, checkpoint, mask, scale, clip, 12)
    torch.testing.assert_close(reward, want, atol=1e-12, rtol=0)
    torch.testing.assert_close(carried_potential(reward), before, atol=1e-12, rtol=0)
    valid = torch.arange(1, 13) <= lengths.unsqueeze(-1)
    got = returns_to_go(reward, valid)
    for b in range(2):
        for r in range(3):
            for t in range(12):
                expected = float(want[b, r, t:].sum()) if valid[b, r, t] else 0.0
                assert float(got[b, r, t]) == pytest.approx(expected, abs=1e-12)
    # The last valid checkpoint's clipped gain is the whole return; an empty thought earns nothing.
    whole = (final_gain(no_thought, losses, mask) / scale).clamp(-clip, clip)
    torch.testing.assert_close(reward.sum(-1), whole, atol=1e-12, rtol=0)
    assert float(reward[1, 1].abs().sum()) == 0.0
    assert (reward.abs() > 0).sum() <= mask.sum()
    assert float(potentials(no_thought, losses, mask, 0.01, clip).abs().max()) == clip


def test_clipping_and_scale_are_used() -> None:
    _, checkpoint, mask, no_thought, losses = _ragged(3)
    small = checkpoint_rewards(potentials(no_thought, losses, mask, 0.1, 3.0), checkpoint, mask, 12)
    large = checkpoint_rewards(potentials(no_thought, losses, mask, 10.0, 3.0), checkpoint, mask, 12)
    assert not torch.allclose(small, large)
    with pytest.raises(ValueError, match="positive"):
        potentials(no_thought, losses, mask, 0.0, 3.0)


def test_bad_checkpoints_are_refused() -> None:
    phi, mask = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match="increase strictly"):
        checkpoint_rewards(phi, torch.tensor([[4, 4]]), mask, 12)
    with pytest.raises(ValueError, match="lie in"):
        checkpoint_rewards(phi, torch.tensor([[4, 13]]), mask, 12)


def test_reward_scale_follows_the_recursion_and_survives_a_checkpoint() -> None:
    scale = RewardScale(decay=0.9, epsilon=1e-8)
    with pytest.raises(ValueError, match="no trajectory"):
        _ = scale.value
    first, second = torch.tensor([1.0, -2.0]), torch.tensor([0.5, 0.5, 9.0])
    scale.update(first)
    assert scale.value == pytest.approx((2.5 + 1e-8) ** 0.5, rel=1e-12)
    restored = RewardScale(decay=0.9, epsilon=1e-8)
    restored.load_state_dict(scale.state_dict())
    mask = torch.tensor([True, True, False])
    want = (0.9 * 2.5 + 0.1 * 0.25 + 1e-8) ** 0.5
    assert scale.update(second, mask) == pytest.approx(want, rel=1e-12)
    assert restored.update(second, mask) == scale.value
    assert not scale.is_flat
    flat = RewardScale(decay=0.9, epsilon=1e-8)
    flat.update(torch.zeros(4))
    assert flat.is_flat
    with pytest.raises(ValueError, match="not finite"):
        scale.update(torch.tensor([float("nan")]))

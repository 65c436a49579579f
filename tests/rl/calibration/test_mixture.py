"""Mixtures hand the actor a number: no gradient flows to the weight head or to the critics behind the advantages."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tfive.rl.calibration.mixture import FixedWeight, LearnedWeight, Minimum, Mixture, WeightInputs

N, T = 5, 3


class _Head(nn.Module):
    """A weight that depends on the state and on the action, with one parameter each."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.tensor([0.7, -1.3]))

    def forward(self, inputs: WeightInputs) -> Tensor:
        return torch.sigmoid(self.slope[0] * inputs.value_NT2[..., 0] + self.slope[1] * inputs.log_prob_NT)


def _inputs() -> WeightInputs:
    draw = torch.Generator().manual_seed(2)
    return WeightInputs(
        prefix_NTD=torch.randn(N, T, 4, generator=draw),
        value_NT2=torch.randn(N, T, 2, generator=draw),
        time_NT=torch.rand(N, T, generator=draw),
        action_NTE=torch.randn(N, T, 3, generator=draw),
        log_prob_NT=-torch.rand(N, T, generator=draw),
    )


@pytest.mark.parametrize("mixture", [FixedWeight(), Minimum(), LearnedWeight(_Head())], ids=lambda one: one.name)
def test_a_mixed_advantage_passes_no_gradient_on(mixture: Mixture) -> None:
    draw = torch.Generator().manual_seed(3)
    first, second = (torch.randn(N, T, generator=draw).requires_grad_() for _ in range(2))
    mixed = mixture.mixed(_inputs(), first, second)
    assert not mixed.requires_grad
    weight = mixture.weight(_inputs())
    assert weight is None or not weight.requires_grad


def test_a_state_only_weight_does_not_see_the_action() -> None:
    one, other = _inputs(), _inputs()
    other.log_prob_NT.mul_(3.0)
    seeing, blind = LearnedWeight(_Head()), LearnedWeight(_Head(), state_only=True)
    assert not seeing.weight(one).equal(seeing.weight(other))
    assert blind.weight(one).equal(blind.weight(other))
    torch.testing.assert_close(blind.weight(one), torch.sigmoid(0.7 * one.value_NT2[..., 0]).detach())

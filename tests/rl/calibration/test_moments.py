"""The saddle's integrand, its single-rollout gradients and the occupation measure against loops."""

import pytest
import torch
from torch import Tensor

from tfive.rl.calibration.mixture import FixedWeight, MeanInputs, Minimum, Mixture, WeightInputs, fixed_mixture, mix
from tfive.rl.calibration.moments import (
    CalibrationData,
    Occupation,
    displacement,
    energy,
    moment,
    saddle_integrand,
    split_by_text,
)

KAPPA, BETA, HORIZON = 0.1, 0.7, 6


def _case(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    first, second, mean = (torch.randn(5, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    logit = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    mask = torch.arange(4) < torch.tensor([4, 1, 0, 3, 2])[:, None]
    return first, second, mean, logit, mask


def _loop(first: Tensor, second: Tensor, mean: Tensor, weight: Tensor, mask: Tensor) -> float:
    total = 0.0
    for i in range(5):
        for t in range(4):
            if mask[i, t]:
                a, b, h, w = (float(x[i, t]) for x in (first, second, mean, weight))
                mixed = w * a + (1 - w) * b
                average = (a + b) / 2
                total += 2 * h * mixed - h * h + BETA * ((mixed - average) ** 2 - KAPPA * average**2)
    return total / HORIZON / 5


def test_integrand_on_the_occupation_measure_and_its_gradients() -> None:
    first, second, mean, logit, mask = _case()
    logit.requires_grad_(True)
    mean.requires_grad_(True)
    beta = torch.tensor(BETA, dtype=torch.float64, requires_grad=True)
    weight = logit.sigmoid()
    occupation = Occupation(mask, torch.arange(5), HORIZON)
    value = occupation.mean(saddle_integrand(weight, mean, first, second, beta, KAPPA))
    assert float(value.detach()) == pytest.approx(_loop(first, second, mean.detach(), weight.detach(), mask), abs=1e-12)
    by_weight, by_mean, by_beta = torch.autograd.grad(value, (logit, mean, beta))
    slope = (weight * (1 - weight)).detach()
    scale = mask.double() / (HORIZON * 5)
    gap = first - second
    # eq:main-head-gradients and eq:single-rollout-gradients, written out.
    want_weight = (2 * mean * gap + BETA * 2 * (weight - 0.5) * gap**2).detach() * slope * scale
    want_mean = (2 * (mix(weight, first, second) - mean)).detach() * scale
    want_beta = ((weight - 0.5) ** 2 * gap**2 - KAPPA * ((first + second) / 2) ** 2).detach() * scale
    torch.testing.assert_close(by_weight, want_weight, atol=1e-12, rtol=0)
    torch.testing.assert_close(by_mean, want_mean, atol=1e-12, rtol=0)
    assert float(by_beta) == pytest.approx(float(want_beta.sum()), abs=1e-12)


def test_parts_agree_with_the_whole() -> None:
    first, second, mean, logit, _ = _case(1)
    weight = logit.sigmoid()
    whole = saddle_integrand(weight, mean, first, second, BETA, KAPPA)
    parts = moment(mean, mix(weight, first, second)) + BETA * (
        displacement(weight, first, second) - KAPPA * energy(first, second)
    )
    torch.testing.assert_close(whole, parts, atol=1e-12, rtol=0)
    torch.testing.assert_close(
        displacement(weight, first, second), (mix(weight, first, second) - (first + second) / 2) ** 2
    )


def test_importance_weighs_trajectories_and_the_denominator_is_fixed() -> None:
    first, _, _, _, mask = _case(2)
    occupation = Occupation(mask, torch.arange(5), HORIZON, torch.tensor([2.0, 0.5, 0.5, 1.0, 1.0]))
    importance_N = occupation.importance_N
    assert importance_N is not None
    want = sum(float(importance_N[i]) * sum(float(first[i, t]) for t in range(4) if mask[i, t]) for i in range(5))
    assert float(occupation.mean(first)) == pytest.approx(want / 5 / HORIZON, abs=1e-12)
    assert float(Occupation(mask, torch.arange(5), HORIZON).mean(torch.ones(5, 4))) == pytest.approx(10 / 30)
    with pytest.raises(ValueError, match="longer than the horizon"):
        Occupation(mask, torch.arange(5), 3)


def test_split_keeps_texts_whole() -> None:
    text = torch.tensor([4, 4, 9, 9, 9, 1, 7, 7])
    parts = split_by_text(text, [0.5, 0.5], torch.tensor([2, 0, 3, 1]))
    owners = [set(text[part].tolist()) for part in parts]
    assert owners == [{7, 1}, {9, 4}]
    assert sorted(torch.cat(parts).tolist()) == list(range(8))
    everything, nothing = split_by_text(text, [1.0, 0.0], torch.arange(4))
    assert everything.numel() == 8
    assert nothing.numel() == 0


def _inputs(rows: int, steps: int) -> WeightInputs:
    zero = torch.zeros(rows, steps)
    return WeightInputs(zero[..., None], torch.zeros(rows, steps, 2), zero, zero[..., None], zero)


def test_fixed_mixtures() -> None:
    first, second, *_ = _case(3)
    inputs = _inputs(5, 4)
    assert torch.equal(FixedWeight().mixed(inputs, first, second), (first + second) / 2)
    single = fixed_mixture("single")
    assert single is not None
    torch.testing.assert_close(single.mixed(inputs, first, second), first, atol=1e-12, rtol=0)
    assert torch.equal(Minimum().mixed(inputs, first, second), torch.minimum(first, second))
    smaller: Mixture = Minimum()
    assert smaller.weight(inputs) is None
    assert fixed_mixture("learned") is None


def test_rows_gather_a_shared_tensor_once() -> None:
    shared = torch.arange(10.0).view(5, 1, 2)
    zero, values = torch.zeros(5, 1), torch.zeros(5, 1, 2)
    data = CalibrationData(
        WeightInputs(shared, values, zero, zero[..., None], zero),
        MeanInputs(shared, values, zero, zero, zero, zero[..., None]),
        zero,
        zero,
        Occupation(torch.ones(5, 1, dtype=torch.bool), torch.arange(5), 1),
    )
    some = data.rows(torch.tensor([3, 1]))
    assert torch.equal(some.weight_inputs.prefix_NTD, shared[[3, 1]])
    assert some.weight_inputs.prefix_NTD is some.mean_inputs.prefix_NTD
    assert some.occupation.text_N.tolist() == [3, 1]


@pytest.mark.parametrize(
    ("count", "shares"), [(2, [0.75, 0.25]), (4, [0.9, 0.1]), (3, [1.0, 1.0, 1.0]), (5, [0.98, 0.01, 0.01])]
)
def test_every_part_with_a_share_gets_a_text_when_there_are_enough(count: int, shares: list[float]) -> None:
    parts = split_by_text(torch.arange(count).repeat_interleave(3), shares, torch.arange(count))
    assert all(len(part) >= 3 for part in parts)
    assert sorted(torch.cat(parts).tolist()) == list(range(3 * count))
    without = split_by_text(torch.arange(count), [*shares, 0.0], torch.arange(count))
    assert [len(part) for part in without] == [*(len(part) // 3 for part in parts), 0]
    one = split_by_text(torch.zeros(2, dtype=torch.long), [0.75, 0.25], torch.arange(1))
    assert [len(part) for part in one] == [2, 0]

"""Head learning against the exact optimum of finite worlds, and its manners on sampled data."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tfive.errors import UserError
from tfive.rl.calibration.mean import MeanResponse, cross_fit_offset, regress_mean
from tfive.rl.calibration.mixture import FixedWeight, LearnedWeight, MeanInputs, WeightInputs, mix
from tfive.rl.calibration.moments import CalibrationData, Occupation, displacement, moment, offset_change
from tfive.rl.calibration.repeated import calibrate_repeated, mean_of_others
from tfive.rl.calibration.saddle import CalibrationPlan, calibrate
from tfive.rl.calibration.settings import CalibrationSettings
from tfive.rl.calibration.validation import SignalBounds, Validator
from tfive.rl.drift import offset_products
from tfive_lab.theory.examples import centred_mixture, collapse, harmful, identical_critics, lengths_matter, wide_open
from tfive_lab.theory.saddle import solve
from tfive_lab.theory.tables import table_heads
from tfive_lab.theory.worlds import World, random_world


def _plan(**numbers: Any) -> CalibrationPlan:
    """The settings' defaults, but for what is named."""
    return dataclasses.replace(CalibrationPlan.of(CalibrationSettings()), **numbers)


KAPPA = 0.1
EXACT = _plan(
    kappa=KAPPA,
    steps=200,
    batch=10**6,
    weight_lr=0.1,
    mean_lr=0.1,
    multiplier_lr=1.0,
    mean_steps=1,
    warm_steps=80,
    weight_decay=0.0,
    stop_share=0.0,
    evaluate_every=10**6,
)
NAMED = [centred_mixture(), collapse(1.0), lengths_matter(), wide_open(), identical_critics(), harmful()]
RANDOM = [random_world(1, number) for number in range(20)]


@pytest.mark.parametrize("world", NAMED + RANDOM, ids=lambda world: world.name)
def test_learned_weight_approaches_the_exact_optimum(world: World) -> None:
    best = solve(world, KAPPA)
    weight_head, mean_head = table_heads(world)
    data = world.calibration_data()
    candidate = calibrate(weight_head, mean_head, data, EXACT, seed=0)
    first, second = world.pair()
    weight = candidate.mixture.weight(data.weight_inputs)
    mean = world.mean_given_context(mix(weight, first, second))
    risk = float(world.integral(mean.square()))
    moved = float(world.integral(displacement(weight, first, second)))
    attainable = best.reference_risk - best.risk
    assert moved <= (KAPPA + 0.005) * best.signal
    assert risk <= best.risk + 0.2 * best.risk + 1e-4 * best.signal
    assert best.reference_risk - risk >= 0.95 * attainable - 1e-9
    # The weight itself, in the norm in which it matters, and the multiplier at its complementary-slackness value.
    energy = float(world.integral(displacement(best.weight_NT, first, second)))
    distance = float(world.integral((mix(weight, first, second) - mix(best.weight_NT, first, second)).square()))
    assert distance <= 0.05 * energy + 1e-6 * best.signal
    assert candidate.multiplier == pytest.approx(best.multiplier, abs=0.08 * (1 + best.multiplier))
    assert candidate.multiplier * abs(moved - KAPPA * best.signal) <= 0.01 * best.signal


class _LinearWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        nn.init.normal_(self.layer.weight, std=1e-2, generator=torch.Generator().manual_seed(0))
        nn.init.zeros_(self.layer.bias)

    def forward(self, inputs: WeightInputs) -> Tensor:
        return torch.sigmoid(self.layer(torch.cat([inputs.prefix_NTD, inputs.action_NTE], -1)).squeeze(-1))


class _MeanNet(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.first, self.last = nn.Linear(2, width), nn.Linear(width, 1)
        self.drop = nn.Dropout(0.1)
        for layer in (self.first, self.last):
            nn.init.normal_(layer.weight, std=0.3, generator=generator)
            nn.init.zeros_(layer.bias)

    def forward(self, inputs: MeanInputs) -> Tensor:
        features = torch.cat([inputs.prefix_NTD, inputs.scoring_NTF], -1)
        return self.last(self.drop(torch.tanh(self.first(features)))).squeeze(-1)


def _sampled(texts: int, per_text: int = 4, seed: int = 0) -> CalibrationData:
    """One-step thoughts: a visible number and a text-wide hidden number shift the advantages; the critics disagree by
    it."""
    generator = torch.Generator().manual_seed(seed)
    count = texts * per_text
    visible = torch.randn(count, 1, 1, generator=generator)
    hidden = torch.randn(texts, 1, generator=generator).repeat_interleave(per_text, 0).view(count, 1, 1)
    action = torch.randint(0, 2, (count, 1, 1), generator=generator).float()
    noise = torch.randn(count, 1, generator=generator)
    offset = 0.5 * visible[..., 0] + 0.3 * hidden[..., 0]
    average = offset + (action[..., 0] - 0.5) + 0.5 * noise
    gap = 1.0 + 0.2 * torch.randn(count, 1, generator=generator)
    zero, values = torch.zeros(count, 1), torch.zeros(count, 1, 2)
    occupation = Occupation(
        torch.ones(count, 1, dtype=torch.bool), torch.arange(texts).repeat_interleave(per_text), horizon=1
    )
    return CalibrationData(
        WeightInputs(visible, values, zero, action, zero),
        MeanInputs(visible, values, zero, zero, zero, hidden),
        average + gap / 2,
        average - gap / 2,
        occupation,
    )


def _risk(mixed: Tensor, data: CalibrationData) -> float:
    """E[μ²] by design: the mixed advantage's mean given the visible and hidden numbers is known up to the weight."""
    shift = 0.5 * data.mean_inputs.prefix_NTD[..., 0] + 0.3 * data.mean_inputs.scoring_NTF[..., 0]
    extra = mixed - (data.first_NT + data.second_NT) / 2
    return float((shift + extra).square().mean())


def test_sampled_calibration_lowers_the_offset_on_fresh_texts_and_respects_retention() -> None:
    plan = _plan(kappa=0.2, steps=200, weight_lr=2e-2, mean_lr=1e-2, multiplier_lr=0.5, warm_steps=100)
    candidate = calibrate(_LinearWeight(), _MeanNet(), _sampled(300), plan, seed=3)
    fresh = _sampled(400, seed=9)
    weight = candidate.mixture.weight(fresh.weight_inputs)
    mixed = mix(weight, fresh.first_NT, fresh.second_NT)
    average = (fresh.first_NT + fresh.second_NT) / 2
    assert _risk(mixed, fresh) < 0.75 * _risk(average, fresh)
    moved = float(displacement(weight, fresh.first_NT, fresh.second_NT).mean())
    assert moved <= 0.25 * float(average.square().mean())
    assert isinstance(candidate.mixture, LearnedWeight)
    assert not any(p.requires_grad for p in candidate.mixture.head.parameters())
    assert candidate.trace[0]["step"] == 0


def test_calibration_repeats_exactly_and_leaves_global_randomness_alone() -> None:
    plan = _plan(steps=12, warm_steps=20, evaluate_every=4)
    states = []
    for _ in range(2):
        weight_head, mean_head = _LinearWeight(), _MeanNet()
        torch.manual_seed(123)
        candidate = calibrate(weight_head, mean_head, _sampled(40), plan, seed=5, window=2)
        assert isinstance(candidate.mixture, LearnedWeight)
        states.append((candidate.mixture.head.state_dict(), float(torch.rand(()))))
    assert all(torch.equal(states[0][0][name], states[1][0][name]) for name in states[0][0])
    torch.manual_seed(123)
    assert states[0][1] == states[1][1] == float(torch.rand(()))


def test_state_only_weight_cannot_see_the_action() -> None:
    data = _sampled(60)
    plan = _plan(steps=20, warm_steps=20)
    candidate = calibrate(_LinearWeight(), _MeanNet(), data, plan, seed=0, state_only=True)
    other = dataclasses.replace(data.weight_inputs, action_NTE=1 - data.weight_inputs.action_NTE)
    assert torch.equal(candidate.mixture.weight(data.weight_inputs), candidate.mixture.weight(other))
    assert candidate.mixture.name == "state"


class _Wide(nn.Module):
    """As many features as it takes to remember every text."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(120, 1)
        nn.init.zeros_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)

    def forward(self, inputs: MeanInputs) -> Tensor:
        return self.layer(inputs.prefix_NTD).squeeze(-1)


def test_mean_regression_stops_before_it_memorises() -> None:
    """Pure noise labels: without other texts to stop it, the head remembers its own; with them it stays near zero."""
    generator = torch.Generator().manual_seed(4)
    features = torch.randn(160, 1, 120, generator=generator)
    noise = torch.randn(160, 1, generator=generator)
    zero = torch.zeros(160, 1)
    inputs = MeanInputs(features, torch.zeros(160, 1, 2), zero, zero, zero, zero[..., None])
    occupation = Occupation(torch.ones(160, 1, dtype=torch.bool), torch.arange(40).repeat_interleave(4), 1)
    energies = []
    for share in (0.25, 0.0):
        head = _Wide()
        plan = _plan(warm_steps=200, mean_lr=1e-2, weight_decay=0.0, patience=3, stop_share=share).mean_plan()
        best = regress_mean(head, inputs, noise, occupation, plan, seed=0, role="test").value
        with torch.no_grad():
            energies.append(float(head(inputs).square().mean()))
        assert best <= 0.05 or share == 0.0
    assert energies[0] < 0.1 * energies[1]


def test_cross_fitted_offset_is_a_lower_bound_that_sees_hidden_and_visible_parts() -> None:
    data = _sampled(400, seed=2)
    average = (data.first_NT + data.second_NT) / 2
    plan = _plan(warm_steps=200, mean_lr=1e-2, patience=5).mean_plan()
    whole = cross_fit_offset(_MeanNet, data.mean_inputs, average, data.occupation, plan, folds=2, seed=0)
    visible = cross_fit_offset(_MeanNet, data.mean_inputs.visible(), average, data.occupation, plan, folds=2, seed=0)
    truth = 0.5**2 + 0.3**2
    assert whole.estimate.mean < truth + 3 * whole.estimate.error
    assert whole.estimate.mean > 0.8 * truth
    assert visible.estimate.mean == pytest.approx(0.5**2, abs=0.06)
    assert whole.estimate.units == 400


def _anchors(count: int = 150, continuations: int = 4, seed: int = 0) -> CalibrationData:
    """Anchors whose average is off by half of what the weight sees; the critics are 1 apart."""
    generator = torch.Generator().manual_seed(seed)
    visible = torch.randn(count, 1, 1, generator=generator).expand(count, continuations, 1)
    average = 0.5 * visible[..., 0] + 0.5 * torch.randn(count, continuations, generator=generator)
    zero, values = torch.zeros(count, continuations), torch.zeros(count, continuations, 2)
    return CalibrationData(
        WeightInputs(visible, values, zero, zero[..., None], zero),
        MeanInputs(visible, values, zero, zero, zero, zero[..., None]),
        average + 0.5,
        average - 0.5,
        Occupation(torch.ones_like(zero, dtype=torch.bool), torch.arange(count), continuations),
    )


def test_repeated_prefix_calibration_finds_the_same_direction() -> None:
    data, fresh = _anchors(), _anchors(seed=1)
    plan = _plan(kappa=0.3, steps=150, weight_lr=3e-2, multiplier_lr=0.5)
    candidate = calibrate_repeated(_LinearWeight(), data, plan, seed=0)
    weight = candidate.mixture.weight(data.weight_inputs)
    # Where the average is too high the weight must lean to the lower critic (w < ½), and the other way round.
    assert float(((weight - 0.5) * data.weight_inputs.prefix_NTD[..., 0]).mean()) < -0.02
    assert candidate.trace[-1]["retention"] <= 0.35
    assert (candidate.mixture.name, candidate.mean_head) == ("repeated", None)
    verdict = Validator(0.4, 0.05).validate(candidate, fresh, "fresh")
    assert verdict.accepted
    # The moment of a candidate without a mean head is the unbiased offset: below that of the average, 0.25.
    mixed = candidate.mixture.mixed(fresh.weight_inputs, fresh.first_NT, fresh.second_NT)
    assert verdict.moment.mean == pytest.approx(float(offset_products(mixed).double().mean()), rel=1e-6)
    assert verdict.moment.mean < 0.25 - 3 * verdict.moment.error
    with pytest.raises(UserError, match="need a mean head"):
        Validator(0.4, 0.05).validate(candidate, fresh, "fresh", SignalBounds(9.0, 1.0))


def test_the_other_continuations_take_the_place_of_the_mean_head() -> None:
    """With h the mean of the others, the saddle's gradient in w is the unbiased offset's, and its change is too."""
    data = _anchors(30, 3)
    first, second = data.first_NT.double(), data.second_NT.double()
    weight = torch.rand(30, 3, generator=torch.Generator().manual_seed(4), dtype=torch.float64).requires_grad_()
    mixed = mix(weight, first, second)
    (wanted,) = torch.autograd.grad(offset_products(mixed).mean(), weight, retain_graph=True)
    mean = mean_of_others(mixed.detach())
    (found,) = torch.autograd.grad(data.occupation.mean(moment(mean, mixed)), weight)
    torch.testing.assert_close(found, wanted)
    moved = mean_of_others((weight.detach() - 0.5) * (first - second))
    change = data.occupation.mean(offset_change(moved, weight.detach(), first, second))
    average = offset_products((first + second) / 2)
    assert float(change) == pytest.approx(float((offset_products(mixed.detach()) - average).mean()), abs=1e-12)
    with pytest.raises(ValueError, match="at least 2"):
        mean_of_others(first[:, :1])


def test_repeated_calibration_without_an_offset_keeps_the_average() -> None:
    """Pure noise: no evaluation on held-out anchors may be taken for an improvement that other anchors deny."""
    data = _anchors(400, 4)
    noise = torch.randn(400, 4, generator=torch.Generator().manual_seed(9))
    silent = dataclasses.replace(data, first_NT=noise + 0.5, second_NT=noise - 0.5)
    plan = _plan(kappa=0.3, steps=60, weight_lr=3e-2)
    candidate = calibrate_repeated(_LinearWeight(), silent, plan, seed=0)
    weight = candidate.mixture.weight(silent.weight_inputs)
    assert float((weight - 0.5).abs().max()) < 0.1


def test_a_fixed_average_comes_with_the_shrunk_mean_of_the_average() -> None:
    """Where the weight stays at ½ the response is s·h̄, and nothing of what a moving weight would add."""
    data = _sampled(60)
    worse = _plan(steps=4, warm_steps=40, kappa=0.0)
    for seed in range(8):
        head = _MeanNet()
        candidate = calibrate(_LinearWeight(), head, data, worse, seed=seed)
        if isinstance(candidate.mixture, FixedWeight):
            break
    assert isinstance(candidate.mixture, FixedWeight)
    response = candidate.mean_head
    assert isinstance(response, MeanResponse)
    response.share = 0.3
    torch.testing.assert_close(response(data.mean_inputs), 0.3 * head.eval()(data.mean_inputs))
    response.still = False
    assert not response.eval()(data.mean_inputs).allclose(0.3 * head(data.mean_inputs))


def test_no_room_means_no_move_and_bad_kappa_is_refused() -> None:
    data = _sampled(60)
    same = dataclasses.replace(data, second_NT=data.first_NT)
    candidate = calibrate(_LinearWeight(), _MeanNet(), same, _plan(steps=20, warm_steps=20), seed=0)
    mixed = candidate.mixture.mixed(same.weight_inputs, same.first_NT, same.second_NT)
    assert torch.equal(mixed, same.first_NT)
    with pytest.raises(ValueError, match="kappa"):
        calibrate(_LinearWeight(), _MeanNet(), data, dataclasses.replace(EXACT, kappa=1.0), seed=0)
    assert math.isfinite(candidate.risk)


def test_a_bounded_mean_head_bounds_the_response() -> None:
    class Bounded(_MeanNet):
        bound = 0.05

    candidate = calibrate(_LinearWeight(), Bounded(), _sampled(60), _plan(steps=20, warm_steps=40), seed=0)
    assert candidate.mean_head is not None
    with torch.no_grad():
        found = candidate.mean_head(_sampled(60, seed=5).mean_inputs)
    assert candidate.change < 0
    assert float(found.abs().max()) == pytest.approx(0.05)

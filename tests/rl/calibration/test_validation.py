"""Validation of frozen candidates: retention, fallback, freshness, concentration bounds, the δ budget, certificates."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor, nn

from tfive.errors import UserError
from tfive.rl.calibration.mixture import FixedWeight, MeanInputs, WeightInputs, mix
from tfive.rl.calibration.moments import CalibrationData, Occupation
from tfive.rl.calibration.settings import CalibrationSettings
from tfive.rl.calibration.validation import (
    ErrorBudget,
    SignalBounds,
    Validator,
    certify,
    effective_units,
    learned,
    moment_slack,
    retention_slack,
)


class _Constant(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def forward(self, inputs: WeightInputs | MeanInputs) -> Tensor:
        return torch.full_like(inputs.time_NT, self.value)


def _data(seed: int = 0) -> CalibrationData:
    generator = torch.Generator().manual_seed(seed)
    first, second = (torch.rand(12, 3, generator=generator, dtype=torch.float64) * 2 - 1 for _ in range(2))
    zero = torch.zeros(12, 3, dtype=torch.float64)
    values = torch.zeros(12, 3, 2, dtype=torch.float64)
    mask = torch.arange(3) < torch.tensor([3, 2, 1, 3, 3, 3, 2, 1, 3, 3, 2, 2])[:, None]
    occupation = Occupation(mask, torch.arange(6).repeat_interleave(2), horizon=4)
    weight_inputs = WeightInputs(zero[..., None], values, zero, zero[..., None], zero)
    mean_inputs = MeanInputs(zero[..., None], values, zero, zero, zero, zero[..., None])
    return CalibrationData(weight_inputs, mean_inputs, first, second, occupation)


def _loop(data: CalibrationData, weight: float, mean: float) -> tuple[float, float, float]:
    moved = signal = value = 0.0
    mask = data.occupation.mask_NT
    for n in range(12):
        for t in range(3):
            if mask[n, t]:
                a, b = float(data.first_NT[n, t]), float(data.second_NT[n, t])
                mixed = weight * a + (1 - weight) * b
                moved += (mixed - (a + b) / 2) ** 2
                signal += ((a + b) / 2) ** 2
                value += 2 * mean * mixed - mean**2
    return moved / 48, signal / 48, value / 48


@pytest.mark.parametrize(("weight", "accepted"), [(0.6, True), (0.95, False)])
def test_retention_check_and_fallback(weight: float, accepted: bool) -> None:
    data = _data()
    verdict = Validator(kappa=0.1, delta=0.05).validate(learned(_Constant(weight), _Constant(0.2)), data, "window 1")
    moved, signal, value = _loop(data, weight, 0.2)
    assert verdict.displacement.mean == pytest.approx(moved, abs=1e-12)
    assert verdict.signal.mean == pytest.approx(signal, abs=1e-12)
    assert verdict.moment.mean == pytest.approx(value, abs=1e-12)
    assert verdict.retention == pytest.approx(moved / signal, abs=1e-12)
    assert (moved <= 0.1 * signal) is accepted is verdict.accepted
    assert verdict.reason == ("retained" if accepted else "retention")
    mixed = verdict.mixture.mixed(data.weight_inputs, data.first_NT, data.second_NT)
    want = mix(torch.full_like(data.first_NT, weight if accepted else 0.5), data.first_NT, data.second_NT)
    torch.testing.assert_close(mixed, want, atol=1e-12, rtol=0)


def test_no_reference_signal_is_its_own_diagnosis() -> None:
    data = _data()
    silent = dataclasses.replace(
        data, first_NT=torch.zeros_like(data.first_NT), second_NT=torch.zeros_like(data.first_NT)
    )
    verdict = Validator(0.1, 0.05).validate(learned(_Constant(0.6), _Constant(0.0)), silent, "a")
    assert (verdict.reason, verdict.accepted, verdict.retention) == ("no_signal", False, None)
    assert isinstance(verdict.mixture, FixedWeight)


def test_a_signal_of_rounding_alone_is_none() -> None:
    """Advantages that should all be equal and differ by float32's rounding: Q̂ is 1.9e-8, not 0, and no signal."""
    data = _data()
    noise = 1.4e-4 * torch.sign(data.first_NT)
    rounded = dataclasses.replace(data, first_NT=noise, second_NT=noise)
    candidate = learned(_Constant(0.6), _Constant(0.0))
    verdict = Validator(0.1, 0.05).validate(candidate, rounded, "a", rounding=2e-4)
    assert 0 < verdict.signal.mean < 2e-8
    assert (verdict.reason, verdict.accepted, verdict.retention) == ("no_signal", False, None)
    assert Validator(0.1, 0.05).validate(candidate, rounded, "a", rounding=1e-6).reason == "retained"


def test_a_candidate_that_fell_back_by_itself_is_not_accepted() -> None:
    candidate = dataclasses.replace(learned(_Constant(0.5), _Constant(0.1)), mixture=FixedWeight())
    verdict = Validator(0.1, 0.05).validate(candidate, _data(), "a")
    assert (verdict.reason, verdict.accepted, verdict.mixture) == ("no_improvement", False, FixedWeight())
    assert verdict.retention == 0


def test_each_candidate_needs_fresh_texts_also_after_a_restart() -> None:
    validator = Validator(0.1, 0.05)
    candidate = learned(_Constant(0.6), _Constant(0.0))
    validator.validate(candidate, _data(), "window 1")
    restored = Validator(0.5, 0.5)
    restored.load_state_dict(validator.state_dict())
    assert restored.state_dict() == validator.state_dict()
    for machine in (validator, restored):
        with pytest.raises(ValueError, match="fresh texts"):
            machine.validate(candidate, _data(1), "window 1")


def test_hoeffding_terms_and_the_budget() -> None:
    assert moment_slack(2.0, 0.5, 100, 0.05) == pytest.approx((2 * 0.5 * 2 + 0.25) * math.sqrt(2 * math.log(20) / 100))
    assert retention_slack(2.0, 0.1, 100, 0.05) == pytest.approx(1.1 * 4 * math.sqrt(math.log(20) / 200))
    budget = ErrorBudget(0.05)
    shares = [budget.take() for _ in range(1000)]
    assert shares[0] == pytest.approx(0.025)
    assert sum(shares) == pytest.approx(0.05 * 1000 / 1001)
    assert budget.spent < 0.05
    copy = ErrorBudget(0.5)
    copy.load_state_dict(budget.state_dict())
    assert copy.take() == budget.take()
    assert effective_units(_data().occupation) == pytest.approx(6)
    uneven = Occupation(torch.ones(4, 1, dtype=torch.bool), torch.tensor([0, 0, 0, 1]), 1)
    assert effective_units(uneven) == pytest.approx(1 / (0.75**2 + 0.25**2))


def test_bounds_are_reported_enforced_and_refused_when_false() -> None:
    candidate = learned(_Constant(0.6), _Constant(0.2))
    report = Validator(0.1, 0.05).validate(candidate, _data(), "a", SignalBounds(1.0, 0.2))
    assert report.accepted
    assert report.bounds is not None
    moved, signal, value = _loop(_data(), 0.6, 0.2)
    assert report.bounds.moment_upper == pytest.approx(value + moment_slack(1.0, 0.2, 6, 0.0125))
    assert report.bounds.retention_upper == pytest.approx(moved - 0.1 * signal + retention_slack(1.0, 0.1, 6, 0.0125))
    enforced = Validator(0.1, 0.05).validate(candidate, _data(), "a", SignalBounds(1.0, 0.2), enforce=True)
    assert enforced.reason == "population"
    with pytest.raises(UserError, match="exceeds its stated bound"):
        Validator(0.1, 0.05).validate(candidate, _data(), "a", SignalBounds(0.5, 0.2))
    with pytest.raises(UserError, match="needs bounds"):
        Validator(0.1, 0.05).validate(candidate, _data(), "a", enforce=True)


def test_certified_mode_refuses_without_error_bounds() -> None:
    verdict = Validator(0.1, 0.05).validate(
        learned(_Constant(0.6), _Constant(0.2)), _data(), "a", SignalBounds(1.0, 0.2)
    )
    with pytest.raises(UserError, match="certified mode needs"):
        certify(verdict.bounds, None, 0.1, 1.0)
    with pytest.raises(UserError, match="certified mode needs"):
        certify(None, 0.1, 0.1, 1.0)
    certificate = certify(verdict.bounds, 0.01, 0.02, 3.0)
    assert verdict.bounds is not None
    assert certificate.risk_upper == pytest.approx(verdict.bounds.moment_upper + 0.03)
    assert certificate.drift_upper == pytest.approx(3 * math.sqrt(certificate.risk_upper))
    with pytest.raises(ValueError, match="certified = true needs approximation_bound"):
        CalibrationSettings(certified=True)


def test_a_weight_that_is_no_number_falls_back() -> None:
    verdict = Validator(0.1, 0.05).validate(learned(_Constant(math.nan), _Constant(0.0)), _data(), "a")
    assert (verdict.accepted, verdict.reason, verdict.mixture) == (False, "retention", FixedWeight())

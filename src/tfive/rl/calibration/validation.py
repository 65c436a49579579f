"""Validation of a frozen candidate on texts it never saw (app:moment-validation): signal retention, the fallback to the
fixed average, concentration bounds, and the budget of failure probability they share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tfive.errors import UserError
from tfive.rl.calibration.mixture import FixedWeight, LearnedWeight, Mixture, mix
from tfive.rl.calibration.moments import CalibrationData, Occupation, displacement, energy, moment
from tfive.rl.calibration.saddle import Candidate
from tfive.rl.clusters import Estimate
from tfive.rl.drift import offset


class ErrorBudget:
    """A declared total failure probability δ for any number of checks: check k gets δ/(k(k+1)), and these sum to δ."""

    def __init__(self, total: float) -> None:
        if not 0 < total < 1:
            raise UserError(f"calibration.delta = {total} must lie strictly between 0 and 1")
        self.total = total
        self.checks = 0
        self.spent = 0.0

    def take(self) -> float:
        """The share of the next check."""
        self.checks += 1
        share = self.total / (self.checks * (self.checks + 1))
        self.spent += share
        return share

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, "checks": self.checks, "spent": self.spent}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total, self.checks, self.spent = float(state["total"]), int(state["checks"]), float(state["spent"])


def effective_units(occupation: Occupation) -> float:
    """The number of independent units in Hoeffding's bound: texts, or 1/Σw² of their trajectory shares w if unequal."""
    _, count = torch.unique(occupation.text_N, return_counts=True)
    share = count.double() / count.sum()
    return float(1 / share.square().sum())


def moment_slack(signal_bound: float, mean_bound: float, units: float, delta: float) -> float:
    """ε_stat = C_L √(2 log(1/δ)/n) with C_L = 2K_hK + K_h² (eq:moment-statistical-bound)."""
    return (2 * mean_bound * signal_bound + mean_bound**2) * math.sqrt(2 * math.log(1 / delta) / units)


def retention_slack(signal_bound: float, kappa: float, units: float, delta: float) -> float:
    """(1+κ)K² √(log(1/δ)/(2n)), the slack added to the empirical C − κQ (app:moment-validation)."""
    return (1 + kappa) * signal_bound**2 * math.sqrt(math.log(1 / delta) / (2 * units))


@dataclass(frozen=True)
class SignalBounds:
    """Bounds that hold by construction: |Ã_i| ≤ K and |h| ≤ K_h."""

    signal: float
    mean: float

    def check(self, data: CalibrationData, mean_NT: Tensor) -> None:
        """Refuse bounds that the data already break: clipping in validation alone would certify a different signal."""
        mask = data.occupation.mask_NT
        for name, value, bound in (
            ("advantage", data.first_NT, self.signal),
            ("advantage", data.second_NT, self.signal),
            ("mean head", mean_NT, self.mean),
        ):
            if float(value[mask].abs().max()) > bound * (1 + 1e-6):
                raise UserError(f"the {name} exceeds its stated bound {bound:g}; enforce it by construction or drop it")


@dataclass(frozen=True)
class HoeffdingReport:
    """Upper bounds that hold together with probability ≥ 1 − δ over fresh texts (eq:moment-statistical-bound)."""

    delta: float
    units: float
    moment_upper: float
    retention_upper: float


@dataclass(frozen=True)
class Certificate:
    """U_R and the drift bound B√U_R (cor:admission-budget)."""

    risk_upper: float
    drift_upper: float


@dataclass(frozen=True)
class ValidationResult:
    """What validation measured, and the mixture the actor uses: the candidate's, or the fixed average."""

    mixture: Mixture
    accepted: bool
    reason: str
    """`retained`; or why the fixed average is used: `retention` (Ĉ > κQ̂), `population` (bound not met),
    `no_improvement` (calibration itself found no better weight) or `no_signal` (Q̂ = 0 up to rounding)."""
    moment: Estimate
    displacement: Estimate
    signal: Estimate
    bounds: HoeffdingReport | None

    @property
    def retention(self) -> float | None:
        """Ĉ/Q̂; None without a reference signal."""
        return None if self.reason == "no_signal" else self.displacement.mean / self.signal.mean


class Validator:
    """Validates candidates one by one, each on data (texts and window) that validated no earlier candidate."""

    def __init__(self, kappa: float, delta: float) -> None:
        if not 0 <= kappa < 1:
            raise UserError(f"calibration.kappa = {kappa} must lie in [0, 1)")
        self.kappa = kappa
        self.budget = ErrorBudget(delta)
        self.used: list[str] = []

    def validate(
        self,
        candidate: Candidate,
        data: CalibrationData,
        data_id: str,
        bounds: SignalBounds | None = None,
        enforce: bool = False,
        rounding: float = 0.0,
    ) -> ValidationResult:
        """Accept the candidate if it has a weight and Ĉ ≤ κQ̂ (the constraint of eq:calibrated-weight), else fall back
        to the fixed average.

        Without any signal, Q̂ = 0, the reason is `no_signal`. Advantages are exact up to `rounding` only, so a Q̂ of at
        most its square is none.

        `bounds` adds Hoeffding's upper bounds, spending from δ; with `enforce` the bound on the *population's* C − κQ
        must hold too. A candidate without a mean head needs anchors (`CalibrationData.anchored`): its moment is the
        unbiased offset itself.
        """
        if data_id in self.used:
            raise ValueError(f"validation data {data_id!r} validated an earlier candidate; a new one needs fresh texts")
        if enforce and bounds is None:
            raise UserError("enforcing a population bound needs bounds on the signal and the mean head")
        self.used.append(data_id)
        weight = candidate.mixture.weight(data.weight_inputs).to(data.first_NT.dtype)
        first, second, occupation = data.first_NT, data.second_NT, data.occupation
        moved = occupation.estimate(displacement(weight, first, second))
        signal = occupation.estimate(energy(first, second))
        mixed, mean = mix(weight, first, second), _mean(candidate, data)
        value = offset(mixed, occupation.text_N) if mean is None else occupation.estimate(moment(mean, mixed))
        report = None
        if bounds is not None:
            if mean is None:
                raise UserError("limits on the moment need a mean head; repeated-prefix calibration has none")
            bounds.check(data, mean)
            report = self._report(occupation, value.mean, moved.mean - self.kappa * signal.mean, bounds)
        silent = signal.mean <= rounding**2
        reason = (
            "no_signal" if silent else self._reason(candidate, moved.mean, signal.mean, report if enforce else None)
        )
        accepted = reason == "retained"
        mixture: Mixture = candidate.mixture if accepted else FixedWeight()
        return ValidationResult(mixture, accepted, reason, value, moved, signal, report)

    def _report(self, occupation: Occupation, value: float, excess: float, bounds: SignalBounds) -> HoeffdingReport:
        delta = self.budget.take()
        units = effective_units(occupation)
        # Two one-sided statements share this check's δ.
        moment_upper = value + moment_slack(bounds.signal, bounds.mean, units, delta / 2)
        return HoeffdingReport(
            delta, units, moment_upper, excess + retention_slack(bounds.signal, self.kappa, units, delta / 2)
        )

    def _reason(self, candidate: Candidate, moved: float, signal: float, enforced: HoeffdingReport | None) -> str:
        if not candidate.improved:
            return "no_improvement"
        # Written so that a displacement of NaN fails as well.
        if not moved <= self.kappa * signal:
            return "retention"
        return "population" if enforced is not None and enforced.retention_upper > 0 else "retained"

    def state_dict(self) -> dict[str, Any]:
        return {"kappa": self.kappa, "used": list(self.used), "budget": self.budget.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kappa = float(state["kappa"])
        self.used = [str(name) for name in state["used"]]
        self.budget.load_state_dict(state["budget"])


def _mean(candidate: Candidate, data: CalibrationData) -> Tensor | None:
    """The candidate's frozen mean response on the data; None in repeated-prefix calibration."""
    if candidate.mean_head is None:
        return None
    with torch.no_grad():
        mean: Tensor = candidate.mean_head(data.mean_inputs).to(data.first_NT.dtype)
    return mean


def certify(
    report: HoeffdingReport | None, approximation: float | None, optimisation: float | None, sensitivity: float | None
) -> Certificate:
    """U_R = max{0, L̂_val + ε_stat + a + o} and B√U_R (cor:admission-budget).

    Refused unless bounds a, o on the mean head's approximation and optimisation errors and a bound B on the update
    factor are supplied: a small saddle value alone implies nothing about them.
    """
    if report is None or approximation is None or optimisation is None or sensitivity is None:
        raise UserError(
            "certified mode needs Hoeffding bounds and upper bounds on the approximation error, the optimisation error "
            "and the update factor; supply all of them or use the report-only mode"
        )
    if min(approximation, optimisation, sensitivity) < 0:
        raise UserError("certified mode: error bounds and the update factor's bound cannot be negative")
    upper = max(0.0, report.moment_upper + approximation + optimisation)
    return Certificate(upper, sensitivity * math.sqrt(upper))


def learned(head: torch.nn.Module, mean_head: torch.nn.Module, state_only: bool = False) -> Candidate:
    """A candidate from heads frozen elsewhere (loaded from a checkpoint, or handed in by a caller)."""
    return Candidate(LearnedWeight(head.eval(), state_only), mean_head.eval(), 0.0, math.nan, 0)

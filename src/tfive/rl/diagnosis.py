"""Diagnostics of a window as plain floats for the log: critics, calibration, and the actor's steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from tfive.rl.actor import StepStats
from tfive.rl.calibration.moments import CalibrationData
from tfive.rl.calibration.saddle import Candidate
from tfive.rl.calibration.validation import ValidationResult
from tfive.rl.qualify import r_squared, r_squared_per_step, r_squared_within, value_risk_bound
from tfive.rl.trajectory import Trajectories


def step_scores(returns_BRT: Tensor, values_2BRT: Tensor, mask_BRT: Tensor) -> dict[str, Any]:
    """Each critic's R² within every step of a thought (eq:holdout-r2), and over all steps against each step's mean."""
    steps = [r_squared_per_step(returns_BRT, values, mask_BRT) for values in values_2BRT]
    each = [[None if score is None else score.r2 for score in one] for one in steps]
    return {"r2_per_step": each, "r2_within": [r_squared_within(one) for one in steps]}


def others_score(tested: Trajectories) -> dict[str, Any]:
    """R² of a baseline that nobody fits, where critics see what the others of a position came to: their mean, less the
    potential so far."""
    if tested.others_BRN is None:
        return {}
    plain_BRT = tested.others_BRN[..., :1] - tested.need("potentials_BRT")
    return {"r2_of_others": r_squared(tested.need("returns_BRT"), plain_BRT, tested.mask_BRT).r2}


def agreement(values_2BRT: Tensor, mask_BRT: Tensor) -> dict[str, Any]:
    """Standard deviation of each critic's predictions, and the root mean square of their difference."""
    first, second = (values[mask_BRT].double() for values in values_2BRT)
    spread = [float(v.std()) if v.numel() > 1 else 0.0 for v in (first, second)]
    gap = float((first - second).square().mean().sqrt())
    return {"value_spread": spread, "value_disagreement": gap}


def value_risks(tested: Trajectories, values_2BRT: Tensor, clip: float, delta: float) -> dict[str, Any]:
    """E(G − V)² of each critic on a test's texts, and the upper bound that holds for both with probability ≥ 1 − δ
    (eq:value-risk-confidence).

    Returns lie in ±2c_r by construction. Values are clipped to the same range first, since no such bound exists without
    one: for critics that are not bounded the numbers are those of the clipped critics, and `value_clipped` is the share
    of values that this changed.
    """
    valid_BR, largest = tested.thoughts.valid_BR, 2 * clip
    mask, returns = tested.mask_BRT[valid_BR], tested.need("returns_BRT")[valid_BR]
    text_BR = torch.arange(len(valid_BR), device=valid_BR.device)[:, None].expand_as(valid_BR)
    bounds = [
        value_risk_bound(
            returns, values[valid_BR].clamp(-largest, largest), mask, text_BR[valid_BR], largest, largest, delta
        )
        for values in values_2BRT
    ]
    outside = [float((values[tested.mask_BRT].abs() > largest).double().mean()) for values in values_2BRT]
    return {
        "value_risk": [bound.empirical for bound in bounds],
        "value_risk_upper": [bound.upper for bound in bounds],
        "value_clipped": max(outside),
    }


def twins(data: CalibrationData) -> dict[str, float | None]:
    """Agreement of the two advantages: their correlation, and the mean square of their difference relative to Q."""
    mask = data.occupation.mask_NT
    first, second = data.first_NT[mask].double(), data.second_NT[mask].double()
    signal = (first + second).square().mean() / 4
    correlation = torch.corrcoef(torch.stack([first, second]))[0, 1] if first.numel() > 1 else float("nan")
    return {
        "twin_correlation": float(correlation),
        "twin_disagreement": float((first - second).square().mean() / signal) if signal > 0 else None,
    }


def calibration_numbers(result: ValidationResult, candidate: Candidate, data: CalibrationData) -> dict[str, Any]:
    """Results of validation: L̂ with its error, Ĉ/Q̂, the advantages' correlation and disagreement, the weight's mean and
    deviation."""
    mask = data.occupation.mask_NT
    weight = candidate.mixture.weight(data.weight_inputs)[mask].double()
    out = {
        "moment": result.moment.mean,
        "moment_error": result.moment.error,
        "retention": result.retention,
        "signal": result.signal.mean,
        "accepted": result.accepted,
        **twins(data),
        "weight_mean": float(weight.mean()),
        "weight_deviation": float(weight.std()) if weight.numel() > 1 else 0.0,
    }
    if result.bounds is not None:
        out |= {
            "moment_upper": result.bounds.moment_upper,
            "retention_upper": result.bounds.retention_upper,
            "delta_spent": result.bounds.delta,
        }
    return out


def mean_numbers(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Numbers of several candidates of one window as one: the largest of upper bounds, the sum of what was spent, the
    standard error of a mean of independent ones, else the mean of those that have a number; None where none has."""
    out = dict[str, Any]()
    for name in dict.fromkeys(name for one in found for name in one):
        known = [float(one[name]) for one in found if one.get(name) is not None]
        if not known:
            out[name] = None
        elif name.endswith("_upper"):
            out[name] = max(known)
        elif name.endswith("_error"):
            out[name] = math.hypot(*known) / len(known)
        else:
            out[name] = sum(known) / (1 if name.endswith("_spent") else len(known))
    return out


KL_RANGE = (1e-5, 0.05)
"""KL(π_old‖π_θ) per token after a window's last step: below, the policy hardly moves; above, its thoughts are no longer
those that were rewarded."""

CLIP_RANGE = (0.0, 0.15)
"""Share of tokens on the clipped side in a window: above, most of what a step asks for is thrown away."""


def rates_outside(report: dict[str, Any]) -> list[str]:
    """A sentence for each measure of the policy's movement that leaves its range: key, value, range, remedy."""
    found = []
    for key, (low, high) in (("policy_kl_last", KL_RANGE), ("clip_fraction", CLIP_RANGE)):
        value = report[key]
        if value > high:
            found.append(f"{key} = {value:.3g} is above {high:g}; lower optimizer.lr or window.actor_steps")
        elif value < low:
            found.append(f"{key} = {value:.3g} is below {low:g}; raise optimizer.lr")
    return found


def mean_stats(steps: list[StepStats]) -> dict[str, Any]:
    """Means over a window's PPO steps, and the policy KL after the last one."""
    names = [f.name for f in fields(StepStats) if f.name not in ("skipped", "tokens")]
    out: dict[str, Any] = {name: sum(getattr(step, name) for step in steps) / len(steps) for name in names}
    out["policy_kl_last"] = steps[-1].policy_kl
    out["clip_fraction_last"] = steps[-1].clip_fraction
    out["skipped_updates"] = sum(step.skipped for step in steps)
    return out

"""Each check fails when what it checks is broken: one deliberate fault per statement, most of them in the trainer's
code."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tfive.rl import drift, gae, losses, qualify, reward, roles
from tfive.rl.calibration import mixture, moments, validation
from tfive_lab.theory import (
    claims_gae,
    claims_mixture,
    claims_policy,
    claims_prediction,
    claims_saddle,
    claims_scope,
    statement,
    worlds,
)
from tfive_lab.theory.run import run
from tfive_lab.theory.statements import statements
from tfive_lab.theory.worlds import World

Fault = Callable[[pytest.MonkeyPatch], None]


def _patch(target: object, name: str, value: object) -> Fault:
    return lambda monkeypatch: monkeypatch.setattr(target, name, value)


def _undifferenced_rewards(phi: Tensor, checkpoint: Tensor, mask: Tensor, steps: int) -> Tensor:
    """Pays the whole potential at every checkpoint."""
    good = reward.checkpoint_rewards(phi, checkpoint, mask, steps)
    return good.cumsum(-1) * (good != 0)


def _return_so_far(rewards: Tensor, mask: Tensor) -> Tensor:
    """Sums rewards up to t instead of from t."""
    return torch.where(mask, rewards.cumsum(-1), torch.zeros_like(rewards))


def _peeking_critic(self: World, which: int) -> torch.Tensor:
    """A value that depends on the action it should precede."""
    return torch.where(self.mask_NT, self.value_S2[self.state_NT, which] + self.token_NT, 0.0)


def _all_seeing_pair(self: World, monte_carlo: bool = False, trace: float | None = None) -> tuple[Tensor, Tensor]:
    """Critics that read the scoring text."""
    exact = self.pilot.normalise(self.return_NT - self.true_value_NT, self.mask_NT)
    centred = exact + self.pilot.mean / self.pilot.deviation
    return centred, centred


def _unweighted_r_squared(target: Tensor, guess: Tensor, mask: Tensor, weight: Tensor | None = None) -> qualify.Score:
    return qualify.r_squared(target, guess + 0.1, mask, None)


def _unclipped(ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    return ratio * advantage


def _always_clipped(ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    """Clips both signs on both sides."""
    return ratio.clamp(low, high) * advantage


def _lopsided(ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    """Positive advantages count twice."""
    return losses.clipped_surrogate(ratio, torch.where(advantage > 0, 2 * advantage, advantage), low, high)


def _loud(ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    return 25 * losses.clipped_surrogate(ratio, advantage, low, high)


def _factor_without_ratio(ratio: Tensor, advantage: Tensor, score: Tensor, low: float, high: float) -> Tensor:
    return drift.update_factor(torch.ones_like(ratio), advantage, score, low, high)


def _factor_of_another_mask(ratio: Tensor, advantage: Tensor, score: Tensor, low: float, high: float) -> Tensor:
    """The mask of the opposite advantage, three times too large."""
    return 3 * drift.update_factor(ratio, -advantage, score, low, high)


def _trace_ignored(rewards: Tensor, values: Tensor, mask: Tensor, lam: Any, discount: float = 1.0) -> Tensor:
    return gae.masked_gae(rewards, values, mask, 1.0, discount)


def _amplified_gae(rewards: Tensor, values: Tensor, mask: Tensor, lam: Any, discount: float = 1.0) -> Tensor:
    return 3 * gae.masked_gae(rewards, values, mask, lam, discount)


def _maximum(self: object, inputs: object, first: Tensor, second: Tensor) -> Tensor:
    return torch.maximum(first, second)


def _swapped_mix(weight: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return mixture.mix(1 - weight, first, second)


def _naive_parts(advantage: Tensor, factor: Tensor) -> drift.DriftParts:
    """The product of two sample means over the same continuations."""
    good = drift.drift_parts(advantage, factor)
    induced = advantage.mean(-1, keepdim=True) * factor.mean(-2)
    return dataclasses.replace(good, mean_induced_ND=induced, covariance_ND=good.total_ND - induced)


def _heavy_moment(mean: Tensor, mixed: Tensor) -> Tensor:
    return 2 * mean * mixed - 2 * mean.square()


def _unweighted_mean(self: World, value: torch.Tensor) -> torch.Tensor:
    """Forgets the probabilities of continuations."""
    even = self.change(weight_N=torch.ones_like(self.weight_N), log_q_SA=torch.zeros_like(self.log_q_SA))
    return even.given(value, self.context_NT)


def _per_token_mean(self: World, value: Tensor) -> Tensor:
    """Divides by each trajectory's own length instead of T_max."""
    length = self.mask_NT.sum(-1).clamp(min=1)
    return torch.where(self.mask_NT, value, torch.zeros_like(value)).sum(-1) / length


def _free_displacement(weight: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return 0.02 * moments.displacement(weight, first, second)


def _unconstrained_saddle(
    weight: Tensor, mean: Tensor, first: Tensor, second: Tensor, multiplier: float, kappa: float
) -> Tensor:
    return moments.saddle_integrand(weight, mean, first, second, -multiplier, kappa)


def _optimistic_certificate(
    report: Any, approximation: float, optimisation: float, sensitivity: float
) -> validation.Certificate:
    return validation.certify(report, 0.0, 0.0, sensitivity)


def _thin_risk_bound(*arguments: Any) -> qualify.RiskBound:
    bound = qualify.value_risk_bound(*arguments)
    return dataclasses.replace(bound, slack=0.1 * bound.slack)


_SLACK, _SHIFT = validation.moment_slack, claims_scope._shift


def _thin_slack(*arguments: Any) -> float:
    return 0.1 * _SLACK(*arguments)


def _small_shift(world: World) -> tuple[Tensor, Tensor, Tensor]:
    local, kl, risk = _SHIFT(world)
    return 0.01 * local, kl, risk


def _small_divergence(world: World) -> tuple[Tensor, Tensor, Tensor]:
    local, kl, risk = _SHIFT(world)
    return local, 0.01 * kl, risk


FAULTS: dict[str, Fault] = {
    "prop:checkpoint-decomposition": _patch(worlds, "checkpoint_rewards", _undifferenced_rewards),
    "eq:prediction-risk-split": _patch(World, "critic_NT", _peeking_critic),
    "lem:return-risk": _patch(claims_prediction, "r_squared", _unweighted_r_squared),
    "eq:population-prediction-transfer": _patch(claims_prediction, "r_squared", _unweighted_r_squared),
    "eq:critic-collapse-example": _patch(claims_prediction, "r_squared", _unweighted_r_squared),
    "eq:value-risk-confidence": _patch(claims_prediction, "value_risk_bound", _thin_risk_bound),
    "eq:rare-state-predictive-score": _patch(claims_prediction, "r_squared", _unweighted_r_squared),
    "lem:visible-floor": _patch(World, "pair", _all_seeing_pair),
    "eq:harmful-ppo-example": _patch(statement, "clipped_surrogate", _unclipped),
    "lem:trajectory-policy-gradient": _patch(worlds, "returns_to_go", _return_so_far),
    "eq:trajectory-importance-gradient": _patch(worlds, "returns_to_go", _return_so_far),
    "prop:surrogate-tangency": _patch(statement, "clipped_surrogate", _lopsided),
    "eq:offpolicy-baseline-cancellation": _patch(claims_policy, "update_factor", _factor_without_ratio),
    "lem:ppo-nonexpansive": _patch(claims_policy, "clipped_surrogate", _lopsided),
    "eq:pointwise-regularization": _patch(claims_policy, "clipped_surrogate", _always_clipped),
    "prop:value-gradient-bound": _patch(statement, "clipped_surrogate", _loud),
    "prop:two-cancellation-conditions": _patch(claims_policy, "update_factor", _factor_without_ratio),
    "prop:fisher-amplification": _patch(claims_policy, "update_factor", _factor_of_another_mask),
    "cor:fisher-clipping": _patch(claims_policy, "update_factor", _factor_of_another_mask),
    "eq:fisher-drift-bound": _patch(claims_policy, "update_factor", _factor_of_another_mask),
    "prop:gae-propagation": _patch(claims_gae, "masked_gae", _trace_ignored),
    "eq:gae-error-moment": _patch(claims_gae, "masked_gae", _amplified_gae),
    "eq:gae-gradient-bound": _patch(statement, "clipped_surrogate", _loud),
    "eq:td-mean-bellman": _patch(claims_gae, "masked_gae", _trace_ignored),
    "eq:td-action-weighted-mean": _patch(claims_gae, "masked_gae", _trace_ignored),
    "eq:twin-drift-coefficient": _patch(mixture.Minimum, "mixed", _maximum),
    "eq:twin-mc-special-case": _patch(mixture.Minimum, "mixed", _maximum),
    "eq:twin-mixture-example-weights": _patch(claims_mixture, "mix", _swapped_mix),
    "eq:ppo-drift-decomposition": _patch(claims_mixture, "drift_parts", _naive_parts),
    "eq:mixture-conditional-mean": _patch(claims_mixture, "mix", _swapped_mix),
    "prop:signal-retention": _patch(claims_mixture, "displacement", _free_displacement),
    "lem:moment-duality": _patch(claims_saddle, "moment", _heavy_moment),
    "eq:sample-square-is-not-mean-square": _patch(World, "mean_given_context", _unweighted_mean),
    "eq:mean-prediction-residual": _patch(claims_saddle, "moment", _heavy_moment),
    "eq:auxiliary-information-gap": _patch(claims_saddle, "moment", _heavy_moment),
    "eq:single-rollout-gradients": _patch(moments.Occupation, "per_trajectory", _per_token_mean),
    "prop:population-saddle": _patch(claims_saddle, "saddle_integrand", _unconstrained_saddle),
    "prop:population-mixture-comparison": _patch(claims_saddle, "moment", _heavy_moment),
    "thm:complementary-drift": _patch(claims_saddle, "moment", _heavy_moment),
    "cor:admission-budget": _patch(claims_saddle, "certify", _optimistic_certificate),
    "eq:moment-statistical-bound": _patch(validation, "moment_slack", _thin_slack),
    "prop:prefix-transfer": _patch(claims_scope, "_shift", _small_shift),
    "eq:prefix-kl-control": _patch(claims_scope, "_shift", _small_divergence),
    "eq:grpo-rollout-threshold": _patch(
        claims_scope, "fewer_than_groups", lambda c, g: roles.auxiliary_rollouts(c) <= (g - 1) * c["actor"]
    ),
    "eq:total-rollout-budget": _patch(
        claims_scope, "auxiliary_rollouts", lambda c: sum(n for role, n in c.items() if role not in ("actor", "scale"))
    ),
    "eq:repeated-rollout-budget": _patch(
        claims_scope, "repeated_rollouts", lambda n, c, a, m, b: 2 * n * (c + a + m) + b
    ),
}


def test_every_statement_has_its_fault() -> None:
    assert set(FAULTS) == set(statements())


@pytest.mark.parametrize("label", FAULTS)
def test_check_fails_on_the_broken_variant(label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (sound,) = run([label], worlds=12)
    assert sound.passed, f"margin {sound.margin} at {sound.tightest}"
    FAULTS[label](monkeypatch)
    (broken,) = run([label], worlds=12)
    assert not broken.passed
    # Not a matter of rounding: the fault shows far beyond the tolerance.
    assert broken.margin < -1e-6

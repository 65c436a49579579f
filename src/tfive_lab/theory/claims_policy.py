"""Policy gradients, old-policy surrogates, clipping, and when a common offset cancels."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tfive.rl.calibration.mixture import mix
from tfive.rl.drift import update_factor
from tfive.rl.losses import active_mask, clipped_surrogate
from tfive_lab.theory.examples import harmful, lengths_matter
from tfive_lab.theory.statement import actor_gradient, at_most, equal, exact, examples, exceeds, matched, statement
from tfive_lab.theory.worlds import World

OPEN = (0.0, float("inf"))
"""Clip bounds that clip nothing."""


def true_gradient(world: World) -> Tensor:
    """∇J(θ) = ∇E_{π_θ}[G₁] by differentiating the enumerated expectation."""
    theta = world.theta_P.clone().requires_grad_(True)
    probability = world.trajectory_probability(world.log_policy_SA(theta))
    (gradient,) = torch.autograd.grad((probability * world.return_NT[:, 0]).sum(), theta)
    return gradient


def score_sum(world: World, probability_N: Tensor, coefficient_NT: Tensor) -> Tensor:
    """Σ_τ p(τ) Σ_t f_t u_t."""
    return torch.einsum("n,nt,ntp->p", probability_N, coefficient_NT * world.mask_NT, world.score_NTP)


@statement("lem:trajectory-policy-gradient", "∇J is the score weighted by the whole return, or by the return to go")
def trajectory_policy_gradient(world: World) -> Iterator[float]:
    probability = world.trajectory_probability(world.log_policy_SA(world.theta_P))
    gradient = true_gradient(world)
    yield equal(score_sum(world, probability, world.return_NT[:, :1].expand_as(world.return_NT)), gradient)
    yield equal(score_sum(world, probability, world.return_NT), gradient)


@statement("eq:trajectory-importance-gradient", "full trajectory ratios restore ∇J from old rollouts")
def trajectory_importance_gradient(world: World) -> Iterator[float]:
    log_ratio = world.taken(world.log_policy_SA(world.theta_P)) - world.taken(world.log_q_SA)
    weighted = world.probability_N * log_ratio.sum(-1).exp()
    yield equal(score_sum(world, weighted, world.return_NT), true_gradient(world))


@statement("prop:surrogate-tangency", "the old-policy surrogate has the true gradient at its origin")
def surrogate_tangency(world: World) -> Iterator[float]:
    origin = matched(world).change(theta_P=torch.zeros_like(world.theta_P))
    with_action = origin.context_NT * origin.log_q_SA.shape[1] + origin.token_NT
    best = origin.given(origin.return_NT, with_action) - origin.true_value_NT
    for advantage in (best, origin.return_NT - origin.true_value_NT):
        # The occupation measure divides by T_max, the paper's sum does not.
        yield equal(origin.horizon * actor_gradient(origin, advantage, *OPEN), true_gradient(origin))
        # At the origin every ratio is 1, inside the clip range, so clipping changes nothing.
        yield equal(actor_gradient(origin, advantage), actor_gradient(origin, advantage, *OPEN))


_CANCELS = "a visible baseline cancels under exact unclipped ratios, whatever q is"


@statement("eq:offpolicy-baseline-cancellation", _CANCELS)
def offpolicy_baseline_cancellation(world: World) -> Iterator[float]:
    baseline = world.draws().normal("baseline", world.value_S2.shape[0])[world.state_NT]
    exact_ratio = (world.taken(world.log_policy_SA(world.theta_P)) - world.taken(world.log_q_SA)).exp()
    factor = update_factor(exact_ratio, baseline, world.score_NTP, *OPEN)
    yield equal(world.mean_given_context(baseline.unsqueeze(-1) * factor), torch.zeros_like(factor))
    # With the recorded denominator the remaining action weight is q/π_old (eq:denominator-mismatch-score).
    recorded = update_factor(world.ratio_NT, baseline, world.score_NTP, *OPEN)
    weight = (world.taken(world.log_q_SA) - world.taken(world.log_old_SA)).exp().unsqueeze(-1)
    yield equal(world.mean_given_context(recorded), world.mean_given_context(weight * factor))
    # With clipping the mask joins it (eq:effective-action-score).
    clipped = update_factor(world.ratio_NT, baseline, world.score_NTP, world.low, world.high)
    active = active_mask(world.ratio_NT, baseline, world.low, world.high).double().unsqueeze(-1)
    yield equal(world.mean_given_context(clipped), world.mean_given_context(weight * active * factor))


@examples("eq:offpolicy-baseline-cancellation", _CANCELS)
def baseline_cancellation_breaks() -> Iterator[float]:
    world = harmful()
    constant = torch.ones(2, 1, dtype=torch.float64)
    yield exceeds(float(actor_gradient(world, -constant).norm()), 0.2)
    wrong = world.change(log_q_SA=exact([[0.6, 0.4]]).log())
    yield exceeds(float(actor_gradient(wrong, constant, *OPEN).norm()), 0.05)
    yield equal(actor_gradient(world, constant, *OPEN), torch.zeros(1))


@statement("lem:ppo-nonexpansive", "the clipped advantage never moves further than the advantage")
def ppo_nonexpansive(world: World) -> Iterator[float]:
    draws = world.draws()
    ratio = torch.cat([world.ratio_NT.flatten(), exact([world.low, world.high, 1.0, 0.01, 9.0])])
    x, y = draws.normal("left", ratio.numel()), draws.normal("right", ratio.numel())
    yield at_most((_slope(ratio, x, world) - _slope(ratio, y, world)).abs(), (x - y).abs())


def _slope(ratio: Tensor, advantage: Tensor, world: World) -> Tensor:
    """H_ρ(x): the derivative of the trainer's surrogate in ρ."""
    ratio = ratio.clone().requires_grad_(True)
    (slope,) = torch.autograd.grad(clipped_surrogate(ratio, advantage, world.low, world.high).sum(), ratio)
    return slope


@statement("eq:pointwise-regularization", "the clipped surrogate is ρÃ minus what each one-sided bound cuts off")
def pointwise_regularization(world: World) -> Iterator[float]:
    first, second = world.pair()
    x, ratio = mix(world.gate_weight_NT, first, second), world.ratio_NT
    over, under = (ratio - world.high).clamp(min=0), (world.low - ratio).clamp(min=0)
    want = ratio * x - x.clamp(min=0) * over - (-x).clamp(min=0) * under
    yield equal(clipped_surrogate(ratio, x, world.low, world.high), want)
    edges = exact([world.low, world.high])
    for value in (-1.3, 0.0, 0.7):
        yield equal(clipped_surrogate(edges, torch.full_like(edges, value), world.low, world.high), edges * value)


def sensitivity(world: World) -> Tensor:
    """C_ρ² = E_{d,q}[ρ²‖u‖²]."""
    return world.integral(world.ratio_NT.square() * world.score_NTP.square().sum(-1))


@statement("prop:value-gradient-bound", "value error bounds the update error of the mixed Monte Carlo advantage")
def value_gradient_bound(world: World) -> Iterator[float]:
    first, second = world.pair(monte_carlo=True)
    oracle = world.pilot.normalise(world.advantage_NT(world.true_value_NT, monte_carlo=True), world.mask_NT)
    twin = actor_gradient(world, mix(world.gate_weight_NT, first, second))
    errors = sum((world.critic_NT(i) - world.true_value_NT).square() for i in (0, 1))
    bound = (sensitivity(world) * world.integral(torch.as_tensor(errors))).sqrt() / world.pilot.deviation
    yield at_most((twin - actor_gradient(world, oracle)).norm(), bound)


_EITHER = "the mean-induced term vanishes if either of its two factors does"


@statement("prop:two-cancellation-conditions", _EITHER)
def two_cancellation_conditions(world: World) -> Iterator[float]:
    fair = matched(world)
    ones = torch.ones_like(fair.ratio_NT)
    zero = torch.zeros_like(fair.score_NTP)
    yield equal(fair.mean_given_context(update_factor(fair.ratio_NT, ones, fair.score_NTP, *OPEN)), zero)
    with_action = world.context_NT * world.log_q_SA.shape[1] + world.token_NT
    advantage = world.given(world.return_NT, with_action) - world.true_value_NT
    yield equal(world.mean_given_context(advantage), torch.zeros_like(advantage))
    mask = world.mask_NT
    for which, normalised in enumerate(world.pair(monte_carlo=True)):
        # eq:mc-conditional-offset
        want = (world.true_value_NT - world.critic_NT(which) - world.pilot.mean) / world.pilot.deviation
        yield equal(world.mean_given_context(normalised)[mask], want[mask])
    # A centred signal has no mean-induced term under any mismatch, lag or clipping.
    factor = update_factor(world.ratio_NT, advantage, world.score_NTP, world.low, world.high)
    induced = world.mean_given_context(advantage).unsqueeze(-1) * world.mean_given_context(factor)
    yield equal(induced, torch.zeros_like(induced))


@examples("prop:two-cancellation-conditions", _EITHER)
def exact_values_and_traces() -> Iterator[float]:
    """Exact values centre the GAE of a fixed trace; a trace chosen by the realised length leaves an offset even
    then."""
    world = lengths_matter()
    values = world.true_value_NT * world.mask_NT
    fixed = world.mean_given_context(world.advantage_NT(values, trace=0.7))
    adaptive = world.mean_given_context(world.advantage_NT(values))
    yield equal(fixed, torch.zeros_like(fixed))
    yield exceeds(float(world.integral(adaptive.square())), 1e-5)


def _under_actor(world: World, value: Tensor) -> Tensor:
    """E_ν[f | c] with ν = π_θ(a|s)·q(ξ|s,a): only the current action is reweighted (eq:current-action-law)."""
    ratio = (world.taken(world.log_policy_SA(world.theta_P)) - world.taken(world.log_q_SA)).exp()
    return world.mean_given_context(ratio.view(*ratio.shape, *([1] * (value.dim() - 2))) * value)


def _fisher(world: World, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """‖Δ_μ‖, |μ_Ã|, F and the action weight ωI of a signal, on every step."""
    active = active_mask(world.ratio_NT, mixed, world.low, world.high).double()
    mismatch = (world.taken(world.log_q_SA) - world.taken(world.log_old_SA)).exp()
    factor = update_factor(world.ratio_NT, mixed, world.score_NTP, world.low, world.high)
    offset = world.mean_given_context(mixed)
    induced = offset.unsqueeze(-1) * world.mean_given_context(factor)
    fisher = _under_actor(world, world.score_NTP.square().sum(-1))
    return induced.norm(dim=-1), offset.abs(), fisher, mismatch * active


def _mixed(world: World) -> Tensor:
    return mix(world.gate_weight_NT, *world.pair())


@statement("prop:fisher-amplification", "‖Δ_μ‖ ≤ |offset|·√(policy sensitivity × variance of the action weight)")
def fisher_amplification(world: World) -> Iterator[float]:
    induced, offset, fisher, weight = _fisher(world, _mixed(world))
    variance = _under_actor(world, weight.square()) - _under_actor(world, weight).square()
    yield at_most(induced, offset * (fisher * variance).clamp(min=0).sqrt())


@statement("cor:fisher-clipping", "with exact ratios the amplifier is the imbalance of clipping, p_c(1 − p_c)")
def fisher_clipping(world: World) -> Iterator[float]:
    fair = matched(world)
    induced, offset, fisher, weight = _fisher(fair, _mixed(fair))
    clipped = 1 - _under_actor(fair, weight)
    imbalance = clipped * (1 - clipped)
    mask = fair.mask_NT
    yield equal((_under_actor(fair, weight.square()) - (1 - clipped).square())[mask], imbalance[mask])
    yield at_most(induced, offset * (fisher * imbalance).clamp(min=0).sqrt())


@examples("cor:fisher-clipping", "with exact ratios the amplifier is the imbalance of clipping, p_c(1 − p_c)")
def fisher_is_tight() -> Iterator[float]:
    """eq:fisher-toy-tightness: the harmful example reaches the bound."""
    world = harmful()
    first, second = world.pair(monte_carlo=True)
    induced, offset, fisher, weight = _fisher(world, torch.minimum(first, second))
    clipped = 1 - _under_actor(world, weight)
    yield equal(fisher.flatten(), torch.full((2,), 0.21, dtype=torch.float64))
    yield equal(clipped.flatten(), torch.full((2,), 0.3, dtype=torch.float64))
    yield equal(induced.flatten(), torch.full((2,), 0.21, dtype=torch.float64))
    yield equal(induced, offset * (fisher * clipped * (1 - clipped)).sqrt())


@statement("eq:fisher-drift-bound", "E‖Δ_μ‖ ≤ √(R·E[F p_c(1 − p_c)]) over the occupation measure")
def fisher_drift_bound(world: World) -> Iterator[float]:
    fair = matched(world)
    induced, offset, fisher, weight = _fisher(fair, _mixed(fair))
    clipped = 1 - _under_actor(fair, weight)
    bound = (fair.integral(offset.square()) * fair.integral(fisher * clipped * (1 - clipped))).clamp(min=0).sqrt()
    yield at_most(fair.integral(induced), bound)

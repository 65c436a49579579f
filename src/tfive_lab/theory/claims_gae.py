"""How value errors enter GAE, and why one-step TD errors cannot replace it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tfive.rl.calibration.mixture import mix
from tfive.rl.calibration.moments import moment
from tfive.rl.gae import masked_gae, trace
from tfive_lab.theory.claims_policy import sensitivity
from tfive_lab.theory.examples import lengths_matter
from tfive_lab.theory.statement import actor_gradient, at_most, equal, examples, exceeds, statement
from tfive_lab.theory.worlds import World


def _propagation(world: World, which: int, discount: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """ζ by subtracting two GAEs, ζ by the suffix formula, its squared-error bound, and the value error."""
    lam = trace(world.mask_NT.sum(-1), world.alpha)
    values = world.critic_NT(which), world.true_value_NT * world.mask_NT
    learned, oracle = (masked_gae(world.reward_NT, v, world.mask_NT, lam, discount) for v in values)
    error = values[0] - values[1]
    formula, squares, mass = -error, error.square(), torch.ones_like(error)
    for k in range(1, world.horizon):
        later = torch.zeros_like(error)
        later[:, :-k] = error[:, k:]
        reaches = torch.zeros_like(error)
        reaches[:, :-k] = world.mask_NT[:, k:].double()
        weight = (discount * (1 - lam) * (discount * lam) ** (k - 1)).unsqueeze(-1)
        formula = formula + weight * later
        squares = squares + weight * later.square()
        mass = mass + weight * reaches
    return learned - oracle, formula * world.mask_NT, mass * squares * world.mask_NT, error


@statement("prop:gae-propagation", "a GAE's error is minus the current value error plus decaying later ones")
def gae_propagation(world: World) -> Iterator[float]:
    for which in (0, 1):
        for discount in (1.0, 0.9):
            difference, formula, _, error = _propagation(world, which, discount)
            yield equal(difference, formula)
            yield at_most(difference.abs().max(), 2 * error.abs().max())


@statement("eq:gae-error-moment", "its square is at most (1 + W_t) times the weighted squared errors")
def gae_error_moment(world: World) -> Iterator[float]:
    for which in (0, 1):
        for discount in (1.0, 0.9):
            difference, _, bound, _ = _propagation(world, which, discount)
            yield at_most(difference.square(), bound)


@statement("eq:gae-gradient-bound", "GAE errors of both critics bound the mixed update error")
def gae_gradient_bound(world: World) -> Iterator[float]:
    oracle = world.advantage_NT(world.true_value_NT * world.mask_NT)
    twin = actor_gradient(world, mix(world.gate_weight_NT, *world.pair()))
    ideal = actor_gradient(world, world.pilot.normalise(oracle, world.mask_NT))
    errors = [(world.advantage_NT(world.critic_NT(i)) - oracle).square() for i in (0, 1)]
    bound = (sensitivity(world) * world.integral(errors[0] + errors[1])).sqrt() / world.pilot.deviation
    yield at_most((twin - ideal).norm(), bound)


TRACE = 0.7


def _next(value_NT: Tensor, mask_NT: Tensor) -> Tensor:
    """The following step's value on the same trajectory, zero at the end."""
    later = torch.zeros_like(value_NT)
    later[:, :-1] = torch.where(mask_NT[:, 1:], value_NT[:, 1:], torch.zeros_like(value_NT[:, 1:]))
    return later


def _bellman_gap(world: World, which: int, fixed: bool) -> tuple[Tensor, Tensor]:
    """E[A|c] and the Bellman recursion built from TD errors and the next context's mean."""
    value = world.critic_NT(which)
    lam = torch.full((value.shape[0],), TRACE).double() if fixed else trace(world.mask_NT.sum(-1), world.alpha)
    advantage = masked_gae(world.reward_NT, value, world.mask_NT, lam)
    residual = masked_gae(world.reward_NT, value, world.mask_NT, 0.0)
    mean = world.mean_given_context(advantage)
    target = residual + lam.unsqueeze(-1) * _next(mean, world.mask_NT)
    return mean, world.mean_given_context(target)


@statement("eq:td-mean-bellman", "with a fixed trace the GAE's conditional mean solves a Bellman equation in TD errors")
def td_mean_bellman(world: World) -> Iterator[float]:
    for which in (0, 1):
        mean, recursion = _bellman_gap(world, which, fixed=True)
        yield equal(recursion, mean)


@examples("eq:td-mean-bellman", "with a fixed trace the GAE's conditional mean solves a Bellman equation in TD errors")
def td_mean_breaks_with_adaptive_traces() -> Iterator[float]:
    world = lengths_matter()
    mean, recursion = _bellman_gap(world, 0, fixed=False)
    yield exceeds(float((mean - recursion).abs().max()), 1e-3)
    # The moment objective needs no such recursion: its maximiser is the mean of the actual, length-adaptive GAE.
    advantage = world.advantage_NT(world.critic_NT(0))
    actual = world.mean_given_context(advantage)
    best = world.occupation.mean(moment(actual, advantage))
    yield equal(best, world.integral(actual.square()))
    yield exceeds(float(best - world.occupation.mean(moment(recursion, advantage))), 1e-9)


def _weighted_recursion(world: World, current_weight: bool) -> tuple[Tensor, Tensor]:
    """E[w A₁ + (1−w) A₂ | c], and the recursion that keeps (or wrongly re-draws) the weight for the next context."""
    w = world.gate_weight_NT
    pairs = [
        (masked_gae(world.reward_NT, v, world.mask_NT, TRACE), masked_gae(world.reward_NT, v, world.mask_NT, 0.0))
        for v in (world.critic_NT(0), world.critic_NT(1))
    ]
    mixed = mix(w, pairs[0][0], pairs[1][0])
    first, second = (_next(world.mean_given_context(a), world.mask_NT) for a, _ in pairs)
    if current_weight:
        later = mix(w, first, second)
    else:
        later = _next(world.mean_given_context(mixed), world.mask_NT)
    target = mix(w, pairs[0][1], pairs[1][1]) + TRACE * later
    return world.mean_given_context(mixed), world.mean_given_context(target)


_WEIGHTED = "the mixed mean's recursion keeps the current action's weight on both next means"


@statement("eq:td-action-weighted-mean", _WEIGHTED)
def td_action_weighted_mean(world: World) -> Iterator[float]:
    mean, recursion = _weighted_recursion(world, current_weight=True)
    yield equal(recursion, mean)


@examples("eq:td-action-weighted-mean", _WEIGHTED)
def td_next_mixture_is_wrong() -> Iterator[float]:
    mean, recursion = _weighted_recursion(lengths_matter(), current_weight=False)
    yield exceeds(float((mean - recursion).abs().max()), 1e-3)

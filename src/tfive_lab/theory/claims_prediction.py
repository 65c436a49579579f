"""Rewards, return prediction, and what qualification of a critic does and does not guarantee."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tfive.rl.calibration.mixture import mix
from tfive.rl.qualify import r_squared, value_risk_bound
from tfive.rl.reward import checkpoint_rewards, final_gain, potentials
from tfive_lab.theory.examples import collapse, harmful, one_step, rare_state
from tfive_lab.theory.statement import actor_gradient, at_most, equal, exact, examples, exceeds, statement
from tfive_lab.theory.worlds import World


@statement("prop:checkpoint-decomposition", "checkpoint rewards sum to the final potential")
def checkpoint_decomposition(world: World) -> Iterator[float]:
    gain = final_gain(world.no_thought_N, world.loss_NK, world.scored_NK)
    yield equal(world.reward_NT.sum(-1), (gain / world.scale).clamp(-world.reward_clip, world.reward_clip))
    raw = potentials(world.no_thought_N, world.loss_NK, world.scored_NK, 1.0, 1e9)
    rewards = checkpoint_rewards(raw, world.checkpoint_NK, world.scored_NK, world.horizon)
    yield equal(rewards.sum(-1), gain)
    steps = torch.arange(1, world.horizon + 1)
    scored = ((world.checkpoint_NK.unsqueeze(-1) == steps) & world.scored_NK.unsqueeze(-1)).any(1)
    yield equal(torch.where(scored, torch.zeros_like(rewards), rewards), torch.zeros_like(rewards))


def _variance(world: World, value: Tensor, number: Tensor) -> Tensor:
    return world.given((value - world.given(value, number)).square(), number)


@statement("eq:prediction-risk-split", "at each context: return risk = continuation variance + value error²")
def prediction_risk_split(world: World) -> Iterator[float]:
    noise = _variance(world, world.return_NT, world.context_NT)
    for which in (0, 1):
        critic = world.critic_NT(which)
        risk = world.mean_given_context((world.return_NT - critic).square())
        mask = world.mask_NT
        yield equal(risk[mask], (noise + (critic - world.true_value_NT).square())[mask])


@statement("lem:return-risk", "population return risk = mean squared value error + mean continuation variance")
def return_risk(world: World) -> Iterator[float]:
    share = world.mass_NT / world.mass_NT.sum()
    noise = float((share * _variance(world, world.return_NT, world.context_NT)).sum())
    for which in (0, 1):
        critic = world.critic_NT(which)
        score = r_squared(world.return_NT, critic, world.mask_NT, world.mass_NT)
        yield equal(score.squared_error, float((share * (critic - world.true_value_NT).square()).sum()) + noise)


@statement("eq:population-prediction-transfer", "value error of both critics is at most S²_G(2 − R²₁ − R²₂)")
def population_prediction_transfer(world: World) -> Iterator[float]:
    share = world.mass_NT / world.mass_NT.sum()
    noise = float((share * _variance(world, world.return_NT, world.context_NT)).sum())
    scores = [r_squared(world.return_NT, world.critic_NT(i), world.mask_NT, world.mass_NT) for i in (0, 1)]
    if scores[0].r2 is None or scores[1].r2 is None:
        return
    errors = sum(float((share * (world.critic_NT(i) - world.true_value_NT).square()).sum()) for i in (0, 1))
    bound = scores[0].return_variance * (2 - scores[0].r2 - scores[1].r2)
    yield equal(errors, bound - 2 * noise)
    yield at_most(errors, bound)


@examples("eq:critic-collapse-example", "a collapsed critic hides behind a good one unless both are tested")
def critic_collapse() -> Iterator[float]:
    for size in (1.0, 1e-3):
        world = collapse(size)
        scores = [r_squared(world.return_NT, world.critic_NT(i), world.mask_NT, world.mass_NT) for i in (0, 1)]
        average = (world.critic_NT(0) + world.critic_NT(1)) / 2
        both = r_squared(world.return_NT, average, world.mask_NT, world.mass_NT)
        for score, r2, risk in ((scores[0], 1.0, 0.0), (scores[1], 0.0, size**2), (both, 0.75, size**2 / 4)):
            yield equal(score.r2 if score.r2 is not None else 9.0, r2)
            yield equal(score.squared_error, risk)


def _samples(world: World, name: str, repeats: int, size: int) -> Tensor:
    """Row numbers of `repeats` independent samples of trajectories from q, [repeats, size]."""
    edges = world.probability_N.cumsum(0)
    rows = torch.searchsorted(edges, world.draws().uniform(name, repeats, size) * edges[-1])
    return rows.clamp(max=edges.numel() - 1)


def _risk_failures(world: World, critics: list[Tensor], bound: float, delta: float, repeats: int, size: int) -> float:
    """How often a critic's population risk exceeds its bound, over independent holdouts. `bound` limits G and V."""
    text = torch.arange(size)
    length = world.mask_NT.sum(-1).clamp(min=1)
    errors = [((world.return_NT - v).square() * world.mask_NT).sum(-1) / length for v in critics]
    truth = [float((world.probability_N * error).sum()) for error in errors]
    failed = 0
    for rows in _samples(world, "holdout", repeats, size):
        uppers = [
            value_risk_bound(world.return_NT[rows], v[rows], world.mask_NT[rows], text, bound, bound, delta).upper
            for v in critics
        ]
        failed += any(t > u for t, u in zip(truth, uppers))
    return failed / repeats


_COVERAGE = "the held-out bound on both critics' risk fails at most a share δ of the time"


@statement("eq:value-risk-confidence", _COVERAGE)
def value_risk_confidence(world: World) -> Iterator[float]:
    bound = 2 * world.reward_clip
    critics = [world.critic_NT(i).clamp(-bound, bound) for i in (0, 1)]
    yield at_most(_risk_failures(world, critics, bound, delta=0.25, repeats=4, size=12), 0.25)


@examples("eq:value-risk-confidence", _COVERAGE)
def value_risk_confidence_is_not_vacuous() -> Iterator[float]:
    """Residuals that are 0 or as large as the bound allows, the hardest case for Hoeffding."""
    world = one_step("coin", [1.0], [[3.0, -3.0]], [[-3.0, 3.0]])
    yield at_most(_risk_failures(world, [world.critic_NT(0), world.critic_NT(1)], 3.0, 0.2, 300, 40), 0.2)


@examples("eq:rare-state-predictive-score", "both critics can score near 1 while a rare state keeps its harmful update")
def rare_state_scores() -> Iterator[float]:
    for omega in (0.2, 0.05, 0.001):
        world = rare_state(omega)
        want = 1 - (5 * omega / 4) / (1 - omega / 2 - omega**2 / 4)
        for which in (0, 1):
            score = r_squared(world.return_NT, world.critic_NT(which), world.mask_NT, world.mass_NT)
            yield equal(score.r2 if score.r2 is not None else 9.0, want)
        first, second = world.pair(monte_carlo=True)
        update = actor_gradient(world, torch.minimum(first, second))
        # The other two states have exact critics and zero advantages, so the harmful state alone moves the actor.
        yield equal(update, exact([-0.105 * omega]))
    yield exceeds(want, 0.99)


@statement("lem:visible-floor", "a visible baseline leaves at least the hidden variance of the value")
def visible_floor(world: World) -> Iterator[float]:
    value = world.true_value_NT
    floor = world.integral(_variance(world, value, world.state_NT))
    baseline = world.draws().normal("baseline", world.value_S2.shape[0])[world.state_NT]
    best = world.given(value, world.state_NT)
    yield at_most(floor, world.integral((value - baseline).square()))
    yield equal(world.integral((value - best).square()), floor)
    # The mixture of two Monte Carlo advantages under a state-only weight is such a baseline.
    first, second = world.pair(monte_carlo=True)
    weight = world.draws().uniform("state weight", world.value_S2.shape[0])[world.state_NT]
    mean = world.mean_given_context(mix(weight, first, second))
    yield at_most(floor / world.pilot.deviation**2, world.integral(mean.square()))


@examples("eq:harmful-ppo-example", "minimum aggregation turns a true gradient of 0.21 into −0.105")
def harmful_update() -> Iterator[float]:
    world = harmful()
    first, second = world.pair(monte_carlo=True)
    lowest = torch.minimum(first, second)
    yield equal(lowest.flatten(), exact([-0.5, -1.5]))
    yield equal(actor_gradient(world, lowest), exact([-0.105]))
    chance = world.log_policy_SA(world.theta_P).exp()
    yield equal(chance[0], exact([0.7, 0.3]))
    theta = world.theta_P.clone().requires_grad_(True)
    value = (world.trajectory_probability(world.log_policy_SA(theta)) * world.return_NT[:, 0]).sum()
    (true_gradient,) = torch.autograd.grad(value, theta)
    yield equal(true_gradient, exact([0.21]))
    # The average of the two critics is centred; what remains is clipped away, and nothing pushes the wrong way.
    average = (first + second) / 2
    yield equal(world.mean_given_context(average), torch.zeros_like(average))
    yield equal(actor_gradient(world, average), torch.zeros(1))

"""Mixtures of two advantages: their conditional means, their signal, and the parts of the update they make."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tfive.rl.calibration.mixture import Minimum, mix
from tfive.rl.calibration.moments import displacement, energy
from tfive.rl.drift import drift_parts, update_factor
from tfive_lab.theory.examples import centred_mixture
from tfive_lab.theory.statement import actor_gradient, at_most, equal, exact, examples, exceeds, statement
from tfive_lab.theory.worlds import World


def _minimum(world: World, first: Tensor, second: Tensor) -> Tensor:
    return Minimum().mixed(world.calibration_data().weight_inputs, first, second)


@statement("eq:twin-drift-coefficient", "the minimum lowers the conditional mean by half the mean disagreement")
def twin_drift_coefficient(world: World) -> Iterator[float]:
    raw = [world.advantage_NT(world.critic_NT(i)) for i in (0, 1)]
    average, half = (raw[0] + raw[1]) / 2, (raw[0] - raw[1]).abs() / 2
    shifted = world.mean_given_context(average) - world.mean_given_context(half)
    want = (shifted - world.pilot.mean) / world.pilot.deviation
    mask = world.mask_NT
    yield equal(world.mean_given_context(_minimum(world, *world.pair()))[mask], want[mask])


@statement("eq:twin-mc-special-case", "with Monte Carlo advantages the minimum follows the larger value")
def twin_mc_special_case(world: World) -> Iterator[float]:
    larger = torch.maximum(world.critic_NT(0), world.critic_NT(1))
    want = (world.true_value_NT - larger - world.pilot.mean) / world.pilot.deviation
    mask = world.mask_NT
    yield equal(world.mean_given_context(_minimum(world, *world.pair(monte_carlo=True)))[mask], want[mask])


@examples("eq:twin-mixture-example-weights", "weights ½ and 1/6 centre the example at C/Q = 1/13 and keep its contrast")
def centred_example() -> Iterator[float]:
    world = centred_mixture()
    first, second = world.pair(monte_carlo=True)
    mixed = mix(world.gate_weight_NT, first, second)
    yield equal(first.flatten(), exact([0.9, -0.1]))
    yield equal(second.flatten(), exact([0.3, -0.7]))
    yield equal(mixed.flatten(), exact([0.6, -0.6]))
    yield equal(world.mean_given_context((first + second) / 2).flatten(), torch.full((2,), 0.1, dtype=torch.float64))
    yield equal(world.mean_given_context(mixed), torch.zeros_like(mixed))
    moved = world.occupation.mean(displacement(world.gate_weight_NT, first, second))
    signal = world.occupation.mean(energy(first, second))
    yield equal(moved, 0.02)
    yield equal(signal, 0.26)
    yield equal(moved / signal, 1 / 13)


@statement("eq:ppo-drift-decomposition", "the conditional clipped update is a covariance plus offset × mean factor")
def ppo_drift_decomposition(world: World) -> Iterator[float]:
    mixed = mix(world.gate_weight_NT, *world.pair())
    factor = update_factor(world.ratio_NT, mixed, world.score_NTP, world.low, world.high)
    offset, mean_factor = world.mean_given_context(mixed), world.mean_given_context(factor)
    centred = (mixed - offset).unsqueeze(-1) * (factor - mean_factor)
    covariance, induced = world.mean_given_context(centred), offset.unsqueeze(-1) * mean_factor
    yield equal(world.mean_given_context(mixed.unsqueeze(-1) * factor), covariance + induced)
    # Summed over contexts this is the gradient automatic differentiation finds in the trainer's loss.
    yield equal(world.integral(covariance + induced), actor_gradient(world, mixed))
    yield from _estimator_is_unbiased(world, mixed, factor, induced, covariance)


def _estimator_is_unbiased(
    world: World, mixed: Tensor, factor: Tensor, induced: Tensor, covariance: Tensor
) -> Iterator[float]:
    """The trainer's split of two continuations, averaged over every pair that can occur at one first-step context."""
    rows = torch.nonzero(world.context_NT[:, 0] == world.context_NT[0, 0]).flatten()
    chance = world.probability_N[rows] / world.probability_N[rows].sum()
    left, right = (index.flatten() for index in torch.meshgrid(rows, rows, indexing="ij"))
    pair = torch.stack([left, right], -1)
    parts = drift_parts(mixed[pair, 0], factor[pair, 0])
    weight = (chance[:, None] * chance).flatten().unsqueeze(-1)
    yield equal((weight * parts.mean_induced_ND).sum(0), induced[0, 0])
    yield equal((weight * parts.covariance_ND).sum(0), covariance[0, 0])


@statement("eq:mixture-conditional-mean", "an action-dependent weight adds Cov(w, ΔÃ) to the mean")
def mixture_conditional_mean(world: World) -> Iterator[float]:
    first, second = world.pair()
    w, gap = world.gate_weight_NT, first - second
    mean = world.mean_given_context
    covariance = mean(w * gap) - mean(w) * mean(gap)
    mask = world.mask_NT
    want = mean(w) * mean(first) + (1 - mean(w)) * mean(second) + covariance
    yield equal(mean(mix(w, first, second))[mask], want[mask])
    spread = (mean(w.square()) - mean(w).square()) * (mean(gap.square()) - mean(gap).square())
    yield at_most(covariance.abs(), spread.clamp(min=0).sqrt())
    # Monte Carlo advantages differ by a visible number, so there the covariance vanishes.
    first, second = world.pair(monte_carlo=True)
    gap = first - second
    yield equal(mean(w * gap) - mean(w) * mean(gap), torch.zeros_like(gap))


@statement("prop:signal-retention", "a feasible mixture keeps energy (1 − √κ)²Q and alignment (1 − √κ)Q")
def signal_retention(world: World) -> Iterator[float]:
    first, second = world.pair()
    average = (first + second) / 2
    signal = float(world.occupation.mean(energy(first, second)))
    for kappa in (0.0, 0.1, 0.9):
        w = world.gate_weight_NT
        moved = float(world.occupation.mean(displacement(w, first, second)))
        shrink = min(1.0, (kappa * signal / moved) ** 0.5) if moved > 0 else 1.0
        mixed = mix(0.5 + shrink * (w - 0.5), first, second)
        keep = 1 - kappa**0.5
        yield at_most(keep * signal**0.5, world.integral(mixed.square()).sqrt())
        yield at_most(keep * signal, world.integral(mixed * average))


@examples("prop:signal-retention", "a feasible mixture keeps energy (1 − √κ)²Q and alignment (1 − √κ)Q")
def unconstrained_mixing_can_erase_the_signal() -> Iterator[float]:
    """Without the constraint a mixture can be zero everywhere: critics ±1 around no signal at all."""
    world = centred_mixture()
    first = exact([[0.5], [-0.5]])
    second = exact([[-0.7], [0.7]])
    weight = torch.full((2, 1), 0.7 / 1.2, dtype=torch.float64)
    erased = mix(weight, first, second)
    yield equal(erased, torch.zeros_like(erased))
    signal = float(world.occupation.mean(energy(first, second)))
    yield exceeds(float(world.occupation.mean(displacement(weight, first, second))), 0.99 * signal)

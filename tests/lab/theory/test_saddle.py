"""The exact saddle solver against brute force and against optimality conditions."""

import itertools

import numpy as np
import pytest
import torch

from tfive.rl.calibration.mixture import mix
from tfive_lab.theory.examples import centred_mixture, collapse
from tfive_lab.theory.saddle import box_least_squares, solve
from tfive_lab.theory.worlds import World, random_world


@pytest.mark.parametrize("seed", range(8))
def test_box_least_squares_meets_its_optimality_conditions(seed: int) -> None:
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 12))
    A = rng.normal(size=(int(rng.integers(1, 9)), size))
    gram, linear, bound = A.T @ A, rng.normal(size=size) * 3, rng.uniform(0, 1.0, size)
    bound[rng.uniform(size=size) < 0.2] = 0.0
    y = box_least_squares(gram, linear, 1e-3, bound, np.zeros(size))
    slope = gram @ y + 1e-3 * y + linear
    assert np.all(np.abs(y) <= bound + 1e-15)
    inside = np.abs(y) < bound
    assert np.abs(slope[inside]).max(initial=0) < 1e-10
    pinned = ~inside & (bound > 0)
    assert np.all(slope[pinned] * np.sign(y[pinned]) <= 1e-10)


@pytest.mark.parametrize("world", [centred_mixture(), collapse(1.0)], ids=lambda w: w.name)
@pytest.mark.parametrize("kappa", [0.02, 0.1, 0.8])
def test_no_grid_point_is_better(world: World, kappa: float) -> None:
    best = solve(world, kappa)
    first, second = world.pair()
    gates = len(np.unique(world.gate_NT))
    values = np.linspace(0, 1, 21 if gates == 2 else 5)
    lowest = np.inf
    for combination in itertools.product(values, repeat=gates):
        w = torch.tensor(combination, dtype=torch.float64)[world.gate_NT]
        if float(world.integral((w - 0.5).square() * (first - second).square())) <= kappa * best.signal:
            mean = world.mean_given_context(mix(w, first, second))
            lowest = min(lowest, float(world.integral(mean.square())))
    assert best.risk <= lowest + 1e-12
    assert lowest <= best.risk + (0.01 if gates == 2 else 0.1)


@pytest.mark.parametrize("number", range(12))
def test_budget_is_respected_and_monotone(number: int) -> None:
    world = random_world(7, number)
    risks, multipliers = [], []
    for kappa in (0.01, 0.05, 0.2, 0.6):
        best = solve(world, kappa)
        assert best.displacement <= kappa * best.signal * (1 + 1e-12)
        assert float(best.weight_NT.min()) >= 0
        assert float(best.weight_NT.max()) <= 1
        if best.multiplier > 0:
            assert best.displacement == pytest.approx(kappa * best.signal, rel=1e-10)
        risks.append(best.risk)
        multipliers.append(best.multiplier)
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(risks))
    assert all(a >= b - 1e-9 for a, b in itertools.pairwise(multipliers))

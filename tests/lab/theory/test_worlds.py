"""Worlds: probabilities, conditional means and scores against loops and automatic differentiation."""

import math

import pytest
import torch

from tfive_lab.theory.examples import named, silent
from tfive_lab.theory.worlds import Shape, World, random_shape, random_world, sequences


def test_sequences_cover_every_complete_thought_once() -> None:
    assert len(sequences(3, 2, False)) == 9
    found = sequences(3, 3, True)
    assert len(set(found)) == len(found)
    # Token 2 closes: 1 of length 1, 2 of length 2, and 4·3 that fill the horizon.
    assert sorted(len(z) for z in found) == [1, 2, 2, *([3] * 12)]
    assert all(2 not in z[:-1] for z in found)


@pytest.mark.parametrize("number", range(6))
def test_probabilities_sum_to_one_under_every_law(number: int) -> None:
    world = random_world(3, number)
    for table in (world.log_q_SA, world.log_old_SA, world.log_policy_SA(world.theta_P)):
        assert float(world.trajectory_probability(table).sum()) == pytest.approx(1.0, abs=1e-12)


def _loop_mean(world: World, value: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    want = torch.zeros_like(value)
    for n in range(value.shape[0]):
        for t in range(value.shape[1]):
            if not world.mask_NT[n, t]:
                continue
            same = [
                (float(world.probability_N[m]), float(value[m, u]))
                for m in range(value.shape[0])
                for u in range(value.shape[1])
                if world.mask_NT[m, u] and number[m, u] == number[n, t]
            ]
            want[n, t] = sum(p * v for p, v in same) / sum(p for p, _ in same)
    return want


def test_conditional_means_match_a_loop() -> None:
    world = random_world(3, 1, Shape(texts=1, hidden=2, actions=2, horizon=2, variable_length=True, checkpoints=(1, 2)))
    for number in (world.context_NT, world.state_NT, world.gate_NT):
        got = world.given(world.return_NT, number)
        torch.testing.assert_close(
            got[world.mask_NT], _loop_mean(world, world.return_NT, number)[world.mask_NT], atol=1e-12, rtol=0
        )
    assert float(world.integral(torch.ones_like(world.return_NT))) <= 1.0


def test_scores_are_gradients_of_log_probabilities() -> None:
    world = random_world(3, 2)
    theta = world.theta_P.clone().requires_grad_(True)
    log_prob = world.taken(world.log_policy_SA(theta))
    for n, t in [(0, 0), (3, 0), (5, world.horizon - 1)]:
        (want,) = torch.autograd.grad(log_prob[n, t], theta, retain_graph=True)
        torch.testing.assert_close(world.score_NTP[n, t], want, atol=1e-12, rtol=0)


def test_random_worlds_repeat_and_differ() -> None:
    assert torch.equal(random_world(0, 4).loss_NK, random_world(0, 4).loss_NK)
    assert not torch.equal(random_world(0, 4).value_S2[:1], random_world(1, 4).value_S2[:1])
    shapes = [random_shape(0, k) for k in range(60)]
    assert {s.horizon for s in shapes} == {1, 2, 3}
    assert {s.mismatch for s in shapes} == {0.0, 0.1, 0.5}
    assert {s.variable_length for s in shapes} == {True, False}


def test_hidden_items_are_hidden() -> None:
    """Contexts split states exactly by the hidden item, and the laws know states only."""
    world = random_world(3, 0, Shape(texts=2, hidden=3, actions=2, horizon=2, checkpoints=(2,)))
    assert int(world.context_NT.max()) + 1 == 3 * (int(world.state_NT.max()) + 1)
    assert world.log_q_SA.shape[0] == int(world.state_NT.max()) + 1


def test_named_worlds() -> None:
    worlds = named()
    assert {"harmful", "centred mixture", "lengths matter", "identical critics", "wide open"} <= set(worlds)
    first, second = worlds["identical critics"].pair()
    assert torch.equal(first, second)
    assert math.isclose(float(silent().integral(silent().return_NT.square())), 0.0, abs_tol=1e-30)

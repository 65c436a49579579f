"""The map of when calibration helps: limits in which rules must coincide, and updates that must climb."""

import pytest
import torch

from tfive_lab.theory.claims_policy import true_gradient
from tfive_lab.theory.landscape import (
    MATCHED,
    RULES,
    Setting,
    advantage,
    expected_return,
    learned_from,
    make_world,
    point,
    refresh,
    return_after,
    update,
)


def test_without_room_the_calibrated_rule_is_the_average() -> None:
    world = make_world(Setting(kappa=0.0), 0, 0)
    torch.testing.assert_close(advantage(world, "t5"), advantage(world, "average"), atol=1e-12, rtol=0)


def test_centering_changes_nothing_when_laws_match_and_removes_offsets_when_they_do_not() -> None:
    matched = make_world(MATCHED, 0, 1)
    signal = advantage(matched, "average")
    torch.testing.assert_close(
        update(matched, "centering", signal), update(matched, "average", signal), atol=1e-12, rtol=0
    )
    # Unclipped, a constant signal has no business moving the actor: centering sees to it, plain PPO does not.
    world = make_world(Setting(mismatch=0.8), 0, 1).change(low=0.0, high=float("inf"))
    constant = world.mask_NT.double()
    assert float(update(world, "centering", constant).norm()) < 1e-12
    assert float(update(world, "average", constant).norm()) > 1e-3


def test_matched_monte_carlo_update_is_the_true_gradient() -> None:
    world = make_world(MATCHED, 0, 2)
    first, _ = world.pair(monte_carlo=True)
    torch.testing.assert_close(update(world, "single", first), true_gradient(world), atol=1e-9, rtol=0)


def test_refresh_keeps_the_policy_and_the_errors() -> None:
    world = make_world(Setting(), 0, 3)
    noise, error = world.log_q_SA - world.log_old_SA, torch.zeros_like(world.value_S2)
    fresh = refresh(world, noise, error)
    torch.testing.assert_close(
        fresh.log_policy_SA(fresh.theta_P), world.log_policy_SA(world.theta_P), atol=1e-12, rtol=0
    )
    assert expected_return(fresh) == pytest.approx(expected_return(world), abs=1e-12)
    torch.testing.assert_close(
        fresh.critic_NT(0)[fresh.mask_NT], fresh.given(fresh.return_NT, fresh.state_NT)[fresh.mask_NT]
    )


def test_true_updates_climb() -> None:
    world = make_world(Setting(), 0, 4)
    start = expected_return(world.change(theta_P=torch.zeros_like(world.theta_P)))
    assert return_after(world, "true", windows=2, steps=2, rate=0.5) > start


def test_a_point_holds_every_rule() -> None:
    found = point("kappa", 0.1, worlds=1, updates=1)
    assert set(found.gradient_error) == set(found.error_wins) == set(RULES)
    assert set(found.gain) == {*RULES, "true"}
    assert 0 <= found.offset_removed <= 1
    assert found.signal_moved <= 0.1 + 1e-9


def test_heads_learn_more_from_more_rollouts() -> None:
    few, many = learned_from(24, worlds=1), learned_from(1500, worlds=1)
    assert many.attained > max(0.9, few.attained)
    assert many.attained <= 1.2

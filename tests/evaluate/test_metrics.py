"""Scores against enumeration and simulation."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from tfive.evaluate.metrics import ScoreInterval, mcnemar, mean_with_interval, paired_bootstrap, pass_at_k, suite_mean
from tfive.rng import uniforms


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_output(n: int) -> None:
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        outputs = [True] * c + [False] * (n - c)
        subsets = list(itertools.combinations(outputs, k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_of_many_samples_is_exact_and_one_is_the_mean() -> None:
    assert pass_at_k(1000, 300, 1) == pytest.approx(0.3, abs=1e-15)
    assert pass_at_k(2000, 1, 1000) == pytest.approx(0.5)
    assert pass_at_k(4, 4, 4) == 1


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0)])
def test_pass_at_k_refuses_impossible_counts(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="needs 0"):
        pass_at_k(n, c, k)


def scores(trial: int, items: int, samples: int, mean: float) -> list[float]:
    """Shares of right outputs of items whose difficulties spread evenly around `mean`."""
    difficulty = mean + 0.5 * (uniforms(0, "difficulty", trial, np.arange(items)) - 0.5)
    drawn = uniforms(0, "sample", trial, np.arange(items)[:, None], np.arange(samples)[None])
    shares: list[float] = (drawn < difficulty[:, None]).mean(axis=1).tolist()
    return shares


@pytest.mark.parametrize(("items", "samples", "mean"), [(30, 4, 0.35), (100, 1, 0.5), (200, 1, 0.7)])
def test_intervals_hold_the_true_mean_as_often_as_they_say(items: int, samples: int, mean: float) -> None:
    trials = 600
    found = [
        mean_with_interval(scores(trial, items, samples, mean), resamples=600, seed=trial) for trial in range(trials)
    ]
    coverage = sum(one.low <= mean <= one.high for one in found) / trials
    assert 0.925 <= coverage <= 0.975


def test_a_lower_confidence_is_held_as_well() -> None:
    found = [mean_with_interval(scores(t, 60, 4, 0.4), confidence=0.8, resamples=600, seed=t) for t in range(600)]
    assert 0.76 <= sum(one.low <= 0.4 <= one.high for one in found) / 600 <= 0.84


def test_paired_and_suite_intervals_hold_the_truth_as_often_as_they_say() -> None:
    trials = range(400)
    paired = [
        paired_bootstrap(scores(t, 80, 1, 0.6), scores(t + 1000, 80, 1, 0.5), resamples=600, seed=t) for t in trials
    ]
    assert 0.92 <= np.mean([one.low <= 0.1 <= one.high for one in paired]) <= 0.98
    suites = [
        suite_mean({"a": scores(t, 30, 4, 0.3), "b": scores(t + 1000, 150, 1, 0.6)}, resamples=600, seed=t)
        for t in trials
    ]
    assert 0.92 <= np.mean([one.low <= 0.45 <= one.high for one in suites]) <= 0.98


def test_samples_of_one_item_are_no_new_items() -> None:
    values = [float(n % 2) for n in range(40)]
    few = mean_with_interval(values)
    many = mean_with_interval([value for value in values for _ in range(4)])
    assert few.high - few.low > 1.9 * (many.high - many.low)


def test_intervals_are_repeatable_and_change_with_the_seed() -> None:
    values = uniforms(0, "length", 0, np.arange(50)).tolist()
    assert mean_with_interval(values, seed=1) == mean_with_interval(values, seed=1)
    assert mean_with_interval(values, seed=1) != mean_with_interval(values, seed=2)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_items_that_all_agree_still_leave_room(value: float) -> None:
    found = mean_with_interval([value] * 30)
    inner = found.high if value == 0 else 1 - found.low
    assert math.isclose((1 - inner) ** 30, 0.025)
    assert found.mean == value
    assert found.low == 0.0 if value == 0 else found.high == 1.0


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_suite_of_items_that_all_agree_leaves_room_too(value: float) -> None:
    alone, own = suite_mean({"a": [value] * 30}), mean_with_interval([value] * 30)
    assert (alone.mean, alone.low, alone.high) == pytest.approx((own.mean, own.low, own.high), abs=0.01)
    mixed = suite_mean({"a": [0.0] * 10, "b": [1.0] * 10})
    assert mixed.low < 0.4
    assert mixed.high > 0.6


def test_runs_that_agree_everywhere_may_differ_either_way() -> None:
    right = [1.0] * 10 + [0.0] * 20
    same = paired_bootstrap(right, right)
    assert (same.mean, same.low) == (0.0, -same.high)
    assert math.isclose((1 - same.high) ** 30, 0.025)
    # One item more than the other has: nothing cuts the interval off at zero.
    above, below = paired_bootstrap(right, [1.0] * 9 + [0.0] * 21), paired_bootstrap([1.0] * 9 + [0.0] * 21, right)
    assert (above.low, above.high) == pytest.approx((-below.high, -below.low), abs=0.02)
    assert above.low < 0


def test_lengths_have_intervals_too() -> None:
    found = mean_with_interval([100.0, 300.0, 200.0, 400.0], bounds=None)
    assert found.low < found.mean == 250 < found.high
    assert mean_with_interval([7.0], bounds=None) == ScoreInterval(7.0, 7.0, 7.0, 1)
    assert mean_with_interval([0.0] * 9, bounds=None) == ScoreInterval(0.0, 0.0, 0.0, 9)
    with pytest.raises(ValueError, match="should lie in 0 … 1"):
        mean_with_interval([7.0])


@pytest.mark.parametrize("values", [[], [float("nan")], [[1.0]]])
def test_values_must_be_finite_numbers_of_items(values: list[float]) -> None:
    with pytest.raises(ValueError, match="at least one item"):
        mean_with_interval(values)


def test_mcnemar_is_the_exact_sign_test() -> None:
    a = [True] * 8 + [False] * 2 + [True, False] * 5
    b = [False] * 8 + [True] * 2 + [True, False] * 5
    found = mcnemar(a, b)
    flips = list(itertools.product([0, 1], repeat=10))
    as_uneven = sum(abs(sum(flip) - 5) >= 3 for flip in flips) / len(flips)
    assert (found.only_a, found.only_b) == (8, 2)
    assert found.p_value == pytest.approx(as_uneven)
    assert mcnemar([True, False], [True, False]).p_value == 1.0
    assert mcnemar([True] * 3000, [False] * 3000).p_value == 0.0
    with pytest.raises(ValueError, match="same items"):
        mcnemar([True], [True, False])


def test_a_suite_mean_weighs_tasks_and_not_items() -> None:
    found = suite_mean({"small": [1.0] * 10 + [0.0] * 10, "large": [0.0, 1.0, 0.0, 0.0] * 500})
    assert found.mean == pytest.approx((0.5 + 0.25) / 2)
    assert found.items == 2020
    with pytest.raises(ValueError, match="no tasks"):
        suite_mean({})
    with pytest.raises(ValueError, match="same items"):
        paired_bootstrap([1.0], [1.0, 0.0])

"""The bootstrap over seeds and texts: what it must give where the answer is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tfive.report.statistics import mean_interval, rolling_median, student_widening, worst_interval

TEXT = np.repeat(np.arange(40), 3)


def test_constant_numbers_have_no_width() -> None:
    found = mean_interval(np.full((3, len(TEXT)), 0.25), TEXT)
    assert (found.mean, found.low, found.high) == pytest.approx((0.25, 0.25, 0.25))
    assert (found.seeds, found.texts) == (3, 40)


def test_texts_alone_give_the_normal_interval() -> None:
    by_text = np.random.default_rng(0).normal(0, 1, 40)[TEXT]
    found = mean_interval(np.stack([by_text, by_text]), TEXT)
    error = by_text.reshape(40, 3)[:, 0].std(ddof=1) / 40**0.5
    assert found.high - found.low == pytest.approx(2 * 1.96 * error, rel=0.1)
    assert found.mean == pytest.approx(by_text.mean())


@pytest.mark.parametrize(("count", "student"), [(4, 3.182), (5, 2.776), (12, 2.201)])
def test_seeds_alone_give_the_interval_of_students_law(count: int, student: float) -> None:
    seeds = np.random.default_rng(1).normal(0, 1, count)
    found = mean_interval(np.repeat(seeds[:, None], len(TEXT), 1), TEXT)
    assert found.high - found.low == pytest.approx(2 * student * seeds.std(ddof=1) / count**0.5, rel=0.1)


@pytest.mark.parametrize(
    ("seeds", "student"), [(2, math.tan(math.pi * 0.95 / 2)), (3, 0.95 * math.sqrt(2 / (1 - 0.95**2)))]
)
def test_the_widening_of_two_and_three_seeds_has_a_closed_form(seeds: int, student: float) -> None:
    normal = 1.959963984540054
    assert student_widening(seeds) == pytest.approx(math.sqrt(seeds / (seeds - 1)) * student / normal, rel=1e-12)


@pytest.mark.parametrize("seeds", [3, 5])
@pytest.mark.parametrize(("by_seed", "by_text"), [(0.3, 0.5), (1.0, 0.1), (0.05, 1.0)])
def test_intervals_of_few_seeds_hold_the_truth_as_often_as_they_say(seeds: int, by_seed: float, by_text: float) -> None:
    trials, held = 200, 0
    for trial in range(trials):
        draw = np.random.default_rng(trial)
        value = draw.normal(0, by_seed, (seeds, 1)) + draw.normal(0, by_text, 40)[TEXT] + draw.normal(0, 0.3, len(TEXT))
        found = mean_interval(value, TEXT, 300)
        held += found.low <= 0 <= found.high
    assert held / trials >= 0.9


def test_one_seed_is_an_interval_over_texts() -> None:
    value = np.random.default_rng(5).normal(0, 1, (1, len(TEXT)))
    one, twice = mean_interval(value, TEXT), mean_interval(np.repeat(value, 2, 0), TEXT)
    assert (one.low, one.high) == pytest.approx((twice.low, twice.high))


def test_both_sources_add_up() -> None:
    rng = np.random.default_rng(2)
    seeds, texts = rng.normal(0, 1, 12), rng.normal(0, 2, 40)
    both = mean_interval(seeds[:, None] + texts[TEXT][None], TEXT)
    variance = (2.201 / 1.96) ** 2 * (seeds.var(ddof=1) / 12) + (texts.var() / 40)
    assert both.high - both.low == pytest.approx(2 * 1.96 * variance**0.5, rel=0.1)


def test_unequal_texts_count_by_their_items() -> None:
    text = np.array([0, 1, 1, 1])
    value = np.array([[4.0, 0.0, 0.0, 0.0]])
    assert mean_interval(value, text).mean == 1.0
    assert mean_interval(value, text).high == 4.0


def test_the_worst_hundredth_is_the_mean_of_the_lowest_items() -> None:
    value = np.random.default_rng(3).normal(0, 1, (2, 400))
    found = worst_interval(value, np.arange(400))
    assert found.mean == pytest.approx(np.sort(value, axis=1)[:, :4].mean())
    assert found.low < found.mean < found.high
    assert worst_interval(value[:, :30], np.arange(30)).mean == pytest.approx(value[:, :30].min(1).mean())


def test_the_same_data_give_the_same_interval() -> None:
    value = np.random.default_rng(4).normal(0, 1, (3, len(TEXT)))
    assert mean_interval(value, TEXT) == mean_interval(value.copy(), TEXT)


def test_rolling_median_looks_back_only() -> None:
    assert rolling_median([5.0, 1.0, 3.0, 100.0], 3) == [5.0, 3.0, 3.0, 3.0]

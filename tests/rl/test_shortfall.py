"""What failed attempts suggest, case by case, and the batch baseline by a loop."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from stage import PLAN, texts, thoughts_for
from tfive.rl.batch_baseline import with_batch_advantages
from tfive.rl.qualify import r_squared, r_squared_error
from tfive.rl.shortfall import Attempt, findings
from tfive.rl.trajectory import Trajectories

PLAIN = Attempt(
    r2=[0.3, -0.1], r2_error=[0.01, 0.01], fit_r2=[0.4, 0.08], texts=100, return_deviation=1.0, return_size=1.1,
    reward_scale=0.5, no_thought_loss=2.0,
)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "reason", "remedy"),
    [
        ({"r2": [None, None]}, "returns without spread", "window.reading"),
        ({"return_deviation": 0.05}, "returns without spread", "window.reading"),
        ({"r2_error": [0.01, 0.2]}, "too few items to tell", "window.qualify"),
        ({"texts": 3}, "too few items to tell", "window.qualify"),
        ({"fit_r2": [0.4, 0.3]}, "too few items to learn from", "window.critic_fit"),
        ({}, "text without headroom at these positions", "text.positions"),
        ({"fit_r2": None, "no_thought_loss": 0.05}, "text without headroom", "text.positions.entropy"),
        ({"fit_r2": None}, "the numbers do not point to one reason", "window.items"),
    ],
)
def test_the_numbers_choose_the_reason(change: dict[str, object], reason: str, remedy: str) -> None:
    (found,) = findings([replace(PLAIN, **change)], eta=0.1)  # type: ignore[arg-type]
    assert found.suggests.partition(":")[0] == reason
    assert remedy in found.remedy


def test_a_score_that_rises_asks_for_more_fitting() -> None:
    rising = [replace(PLAIN, r2=[0.3, score], fit_r2=None) for score in (-0.4, -0.2, 0.02)]
    assert [one.suggests.partition(":")[0] for one in findings(rising, eta=0.1)] == ["too little fitting"]
    assert "qualify.attempts" in findings(rising, eta=0.1)[0].remedy
    noisy = [replace(one, r2_error=[0.01, 0.2]) for one in rising]
    assert [one.suggests.partition(":")[0] for one in findings(noisy, eta=0.1)] == ["too few items to tell"]


def test_the_error_of_r_squared_is_what_redrawn_texts_show() -> None:
    draw = torch.Generator().manual_seed(0)
    count, steps, scores, errors = 80, 3, [], []
    text = torch.arange(count)[:, None]
    mask = torch.ones(count, steps, dtype=torch.bool)
    for _ in range(300):
        level = torch.randn(count, 1, generator=draw, dtype=torch.float64)
        target = level + 0.5 * torch.randn(count, steps, generator=draw, dtype=torch.float64)
        guess = (0.4 * level).expand_as(target)
        scores.append(float(r_squared(target, guess, mask).r2 or 0.0))
        errors.append(r_squared_error(target, guess, mask, text))
    spread = torch.tensor(scores).std()
    assert sum(errors) / len(errors) == pytest.approx(float(spread), rel=0.15)


def test_each_return_is_held_against_the_other_thoughts_of_its_step() -> None:
    some = texts()
    thoughts = thoughts_for(some)
    returns_BRT = torch.randn(thoughts.tokens_BRT.shape, generator=torch.Generator().manual_seed(0)) * thoughts.mask_BRT
    found = with_batch_advantages(Trajectories("actor", 1, some, thoughts, returns_BRT=returns_BRT))
    raw = torch.zeros_like(returns_BRT, dtype=torch.float64)
    for t in range(PLAN.length):
        there = thoughts.mask_BRT[..., t].nonzero().tolist()
        for b, r in there:
            others = [float(returns_BRT[i, j, t]) for i, j in there if [i, j] != [b, r]]
            raw[b, r, t] = float(returns_BRT[b, r, t]) - sum(others) / len(others) if others else 0.0
    scale = math.sqrt(float(raw[thoughts.mask_BRT].var(unbiased=False)) + 1e-6)
    torch.testing.assert_close(found.need("advantage_BRT").double(), raw / scale, rtol=1e-5, atol=1e-6)

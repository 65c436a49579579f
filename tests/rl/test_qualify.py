"""R², the qualifier's rules one by one, and the value-risk bound."""

import math

import pytest
import torch

from tfive.errors import UserError
from tfive.rl.qualify import (
    Qualifier,
    Score,
    r_squared,
    r_squared_per_step,
    r_squared_within,
    value_risk_bound,
)


def _score(r2: float | None) -> Score:
    return Score(r2, 0.0, 1.0, 10)


def _run(qualifier: Qualifier, *scores: float | None) -> list[str]:
    kinds = []
    for r2 in scores:
        events = qualifier.test(f"data {qualifier.tests}", _score(r2), _score(1.0))
        kinds.append("+".join(event.kind for event in events))
    return kinds


def test_r_squared_matches_sums_written_out() -> None:
    generator = torch.Generator().manual_seed(0)
    target, guess = (torch.randn(7, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    mask = torch.rand(7, 5, generator=generator) < 0.7
    mask[:, 4] = False
    pairs = [(float(target[i, t]), float(guess[i, t])) for i in range(7) for t in range(5) if mask[i, t]]
    mean = sum(g for g, _ in pairs) / len(pairs)
    want = 1 - sum((g - v) ** 2 for g, v in pairs) / sum((g - mean) ** 2 for g, _ in pairs)
    got = r_squared(target, guess, mask)
    assert got.r2 == pytest.approx(want, abs=1e-12)
    assert got.count == len(pairs)
    steps = r_squared_per_step(target, guess, mask)
    assert steps[4] is None
    column = [(float(target[i, 1]), float(guess[i, 1])) for i in range(7) if mask[i, 1]]
    mean = sum(g for g, _ in column) / len(column)
    want = 1 - sum((g - v) ** 2 for g, v in column) / sum((g - mean) ** 2 for g, _ in column)
    assert steps[1] is not None
    assert steps[1].r2 == pytest.approx(want, abs=1e-12)


def test_knowing_the_step_alone_is_nothing_within_it() -> None:
    """Returns 10t + noise: a critic that says 10t scores well pooled and nothing within a step; half the noise, ¾."""
    noise = torch.randn(400, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    noise = noise - noise.mean(0)
    level = 10.0 * torch.arange(3, dtype=torch.float64).expand(400, 3)
    mask = torch.ones(400, 3, dtype=torch.bool)
    for share, want in ((0.0, 0.0), (0.5, 0.75), (-1.0, -3.0)):
        guess = level + share * noise
        assert r_squared_within(r_squared_per_step(level + noise, guess, mask)) == pytest.approx(want, abs=1e-12)
        pooled = r_squared(level + noise, guess, mask).r2
        assert pooled is not None
        assert pooled > 0.9
    flat = r_squared_per_step(level, level, mask)
    assert r_squared_within([*flat, None]) is None


def test_zero_variance_is_its_own_diagnosis() -> None:
    target = torch.full((6,), 0.3)
    score = r_squared(target, target, torch.ones(6, dtype=torch.bool))
    assert score.r2 is None
    assert score.flat
    qualifier = Qualifier(eta=0.0, consecutive=1, patience=2, attempts=5, rule="sustained")
    events = qualifier.test("a", score, _score(0.9))
    assert [event.kind for event in events] == ["failed", "no_variance"]
    assert not qualifier.admitted


def test_admission_needs_consecutive_passes_of_the_weaker_critic() -> None:
    qualifier = Qualifier(eta=0.1, consecutive=2, patience=2, attempts=5, rule="sustained")
    assert _run(qualifier, 0.2, 0.05, 0.2, 0.1) == ["passed", "failed", "passed", "passed+admitted"]
    assert qualifier.admitted
    weak_second = Qualifier(eta=0.1, consecutive=1, patience=2, attempts=5, rule="sustained")
    weak_second.test("x", _score(0.9), _score(0.09))
    assert not weak_second.admitted


def test_patience_pauses_and_recovery_needs_the_full_row_again() -> None:
    qualifier = Qualifier(eta=0.1, consecutive=2, patience=2, attempts=2, rule="sustained")
    _run(qualifier, 0.5, 0.5)
    assert _run(qualifier, 0.0, 0.5, 0.0, 0.0) == ["failed+slipped", "passed", "failed+slipped", "failed+paused"]
    assert qualifier.paused
    assert not qualifier.admitted
    assert _run(qualifier, 0.5, 0.5) == ["passed", "passed+admitted"]
    assert not qualifier.paused


def test_the_attempt_budget_ends() -> None:
    qualifier = Qualifier(eta=0.1, consecutive=1, patience=2, attempts=3, rule="sustained")
    assert _run(qualifier, 0.0, math.nan, -1.0) == ["failed", "failed", "failed+exhausted"]
    assert qualifier.exhausted
    with pytest.raises(ValueError, match="exhausted"):
        qualifier.test("more", _score(1.0), _score(1.0))


def test_data_are_never_reused_even_after_a_reset_or_a_restart() -> None:
    qualifier = Qualifier(eta=0.1, consecutive=1, patience=2, attempts=3, rule="sustained")
    _run(qualifier, 0.5)
    assert qualifier.reset("backbones unfrozen")[0].kind == "reset"
    assert not qualifier.admitted
    restored = Qualifier(eta=0.5, consecutive=1, patience=1, attempts=1, rule="sustained")
    restored.load_state_dict(qualifier.state_dict())
    assert restored.state_dict() == qualifier.state_dict()
    assert restored.attempts == 3
    for machine in (qualifier, restored):
        with pytest.raises(ValueError, match="fresh data"):
            machine.test("data 0", _score(0.5), _score(0.5))


def test_zero_threshold_is_allowed_and_one_is_not() -> None:
    assert _run(Qualifier(eta=0.0, consecutive=1, patience=2, attempts=5, rule="sustained"), 0.0) == ["passed+admitted"]
    with pytest.raises(UserError, match="eta"):
        Qualifier(eta=1.0, consecutive=2, patience=2, attempts=5, rule="sustained")


def test_value_risk_bound_follows_the_formula_and_refuses_unbounded_heads() -> None:
    target = torch.tensor([[1.0, 0.0], [2.0, 9.0], [-1.0, 1.0]], dtype=torch.float64)
    guess = torch.zeros(3, 2, dtype=torch.float64)
    mask = torch.tensor([[True, True], [True, False], [True, True]])
    text = torch.tensor([7, 7, 3])
    bound = value_risk_bound(target, guess, mask, text, return_bound=6.0, value_bound=6.0, delta=0.05)
    # Text 7 holds three prefixes with squares 1, 0, 4; text 3 holds 1, 1.
    assert bound.empirical == pytest.approx((5 / 3 + 1) / 2, abs=1e-12)
    assert bound.slack == pytest.approx(144 * math.sqrt(math.log(40) / 4), rel=1e-12)
    assert bound.upper == bound.empirical + bound.slack
    with pytest.raises(UserError, match="bounded value head"):
        value_risk_bound(target, guess, mask, text, 6.0, None, 0.05)
    with pytest.raises(ValueError, match="exceeds the bound"):
        value_risk_bound(target, guess + 7, mask, text, 6.0, 6.0, 0.05)


def test_steps_are_scored_as_each_alone_and_fetched_together(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    target, guess = (torch.randn(9, 4, 6, generator=generator) for _ in range(2))
    mask = torch.rand(9, 4, 6, generator=generator) < 0.7
    mask[..., 5] = False
    alone = [r_squared(target[..., t], guess[..., t], mask[..., t]) for t in range(5)]
    fetched, plain = list[int](), torch.Tensor.tolist

    def tolist(tensor: torch.Tensor) -> object:
        fetched.append(tensor.numel())
        return plain(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", tolist)
    assert r_squared_per_step(target, guess, mask) == [*alone, None]
    assert fetched == [15]
    assert r_squared_per_step(target, guess, torch.zeros_like(mask)) == [None] * 6

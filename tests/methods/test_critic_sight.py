"""Critics that see the text that scores a thought: what they learn by it, and that no action reaches them through
it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from t5_window import QUICK, advance_to, same, t5_of, window

from stage import PLAN, assembled, llama, texts, thoughts_for
from tfive.errors import UserError
from tfive.models.shape import shape_from
from tfive.rl.critic import FrozenBase, build_pair, scoring_numbers
from tfive.rl.critic_files import load_critics, save_critics
from tfive.rl.critics import Critics
from tfive.rl.sampling import score
from tfive.rl.settings import CriticSettings
from tfive.rl.trajectory import Trajectories
from tfive.training.memory import trained_by_critic
from tfive.tree.forward import TreeModel

pytestmark = pytest.mark.model
SEES = "critic.sees=continuation"


def twins(sees: str, width: int = 16) -> Critics:
    base = llama(torch.float32).requires_grad_(False)
    settings = CriticSettings(adapt="head", sees=sees, width=width, head_lr=3e-2, minibatches=4)
    pair = build_pair(base, PLAN, settings, seed=1)
    return Critics(FrozenBase(base, PLAN, settings), pair, settings, alpha=1.0, seed=2, rows=3)


def surprising(rows: int = 8, seed: int = 1) -> Trajectories:
    """Returns that only the scoring text tells: its loss without a thought, of one kind or of the other."""
    batch = texts(rows=rows, seed=seed)
    thoughts = thoughts_for(batch, seed=seed + 1)
    tree = TreeModel(llama(torch.float32).requires_grad_(False), PLAN)
    scored = score(tree, Trajectories("critic_fit", 1, batch, thoughts), rows=4)
    coin = torch.rand(scored.thoughts.valid_BR.shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    loss_BR = torch.where(coin, 1.0, 4.0)
    returns_BRT = ((loss_BR - 2.5) / 1.5)[..., None] * scored.mask_BRT
    nothing = torch.zeros_like(returns_BRT)
    return scored.having(no_thought_BR=loss_BR, potentials_BRT=nothing, returns_BRT=returns_BRT, rewards_BRT=nothing)


def left_of_the_variance(sees: str, width: int) -> float:
    """Mean squared error on other texts after fitting; the returns are ±1."""
    critics, fitted, other = twins(sees, width), surprising(48), surprising(16, seed=40)
    for number in range(12):
        critics.fit_pass(fitted, None, 1, number, warmup=True)
    wrong = critics.evaluate(other).values_2BRT - other.need("returns_BRT")
    return float(wrong[:, other.mask_BRT].square().mean())


@pytest.mark.parametrize("width", [16, 0])
def test_it_learns_what_only_the_scoring_text_tells(width: int) -> None:
    assert left_of_the_variance("continuation", width) < 0.2
    assert left_of_the_variance("prefix", width) > 0.7


def test_what_it_sees_is_the_same_whatever_was_thought() -> None:
    batch = texts(rows=4)
    tree = TreeModel(llama(torch.float64).requires_grad_(False), PLAN)
    one, other = (thoughts_for(batch, seed=seed) for seed in (2, 3))
    assert not one.tokens_BRT.equal(other.tokens_BRT)
    nothing = torch.zeros(one.mask_BRT.shape)
    seen = [
        scoring_numbers(score(tree, Trajectories("actor", 1, batch, thoughts), rows=2).having(potentials_BRT=nothing))
        for thoughts in (one, other)
    ]
    assert seen[0].equal(seen[1])
    assert seen[0].abs().sum() > 0


def test_potentials_are_those_before_the_action(home: Path) -> None:
    """What the checkpoints after an action say is the action's own doing, and must not reach its baseline."""
    run = assembled(home, SEES, *QUICK)
    method = t5_of(run)
    advance_to(method, "qualify")
    fitted = method.parts.rollout.collect("qualify", method.window)
    numbers_BRTN = scoring_numbers(fitted)
    reference_BRT, before_BRT = numbers_BRTN[..., -2], numbers_BRTN[..., -1]
    assert reference_BRT[..., 0].equal(fitted.reference_BR)
    earned_BRT = fitted.need("rewards_BRT").cumsum(-1) - fitted.need("rewards_BRT")
    mask = fitted.mask_BRT
    torch.testing.assert_close(before_BRT[mask], earned_BRT[mask].to(before_BRT))
    assert bool((before_BRT[..., 0] == 0).all())
    assert float(before_BRT[mask].abs().max()) > 0


@pytest.mark.parametrize(
    "asked",
    [("window.probe=0.5",), ("calibration.mode=repeated", "reward.reference=foreign"), ("critic.features=policy",)],
)
def test_a_window_of_every_kind_has_what_they_see_and_resumes(asked: tuple[str, ...], home: Path) -> None:
    given = (SEES, "critic.adapt=top", "critic.blocks=1", "qualify.rule=fixed", *asked, *QUICK)
    run, again = assembled(home, *given), assembled(home, *given)
    advance_to(run.method, "calibrate")
    again.method.load_state_dict(run.method.state_dict())
    again.ledger.load_state_dict(run.ledger.state_dict())
    for one in (run, again):
        window(one.method)
    assert same(*(one.actor.engine.model.state_dict() for one in (run, again)))
    assert run.critics is not None
    assert all(critic.head.seen is not None for critic in run.critics.critics)


def test_saved_critics_are_not_taken_for_others(tmp_path: Path) -> None:
    seeing = twins("continuation").critics
    save_critics(tmp_path / "critics", seeing)
    load_critics(tmp_path / "critics", twins("continuation").critics)
    with pytest.raises(UserError, match="saved with sees = continuation, this run has sees = prefix"):
        load_critics(tmp_path / "critics", twins("prefix").critics)


def test_a_head_without_the_text_it_needs_says_so() -> None:
    critic = twins("continuation").critics[0]
    features = torch.zeros(1, 1, PLAN.length, critic.head.features)
    with pytest.raises(ValueError, match="numbers of the scoring text"):
        critic.evaluate(features, torch.ones(1, 1, PLAN.length, dtype=torch.bool))


@pytest.mark.parametrize("width", ["0", "16"])
def test_its_weights_are_counted(home: Path, width: str) -> None:
    run = assembled(home, SEES, "critic.adapt=head", f"critic.width={width}")
    assert run.critics is not None
    own = sum(weight.numel() for _, weight in run.critics.critics[0].trainable())
    shape = shape_from(run.loaded.model.config.to_dict(), "the run")
    assert trained_by_critic(run.config, shape) == own


def test_what_only_the_scoring_text_tells_is_not_called_visible(home: Path, verdicts: Any) -> None:
    """Critics that see it put it into their features and values; the visible part of an offset must not have it."""
    run = assembled(home, SEES, *QUICK)
    method = t5_of(run)
    advance_to(method, "calibrate")
    parts, normaliser = method.parts, method.normaliser
    assert normaliser is not None
    fresh = parts.rollout.collect("head_train", method.window, states=True)
    tokens_BRH = fresh.need("no_thought_token_BRH")
    seen = []
    for given in (fresh, fresh.having(no_thought_token_BRH=tokens_BRH + 1)):
        values = parts.critics.evaluate(given)
        parts.critics.release()
        context = parts.calibrator.data(parts.critics.advantages(given, values), values, normaliser).mean_inputs
        seen.append((context, context.visible(parts.calibrator._own)))
    (whole, shown), (other, as_shown) = seen
    assert not whole.prefix_NTD.equal(other.prefix_NTD)
    assert not whole.value_NT2.equal(other.value_NT2)
    assert shown.prefix_NTD.equal(as_shown.prefix_NTD)
    assert shown.value_NT2.equal(as_shown.value_NT2)
    assert bool((shown.prefix_NTD != 0).any())

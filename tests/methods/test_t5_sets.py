"""Which sets of T⁵'s window are drawn in the same passes, and critics that stand on what those passes leave behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scene import play, until
from t5_window import PLAIN, advance_to, t5_of, window
from torch import Tensor

from stage import assembled
from tfive.tree.layout import TextBatch

pytestmark = pytest.mark.model


def texts_of_calls(engine: Any, verb: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []
    plain: Callable[..., Any] = getattr(engine, verb)

    def noted(texts: TextBatch, *given: Any, **options: Any) -> Any:
        calls.append(len(texts.tokens_BS))
        return plain(texts, *given, **options)

    monkeypatch.setattr(engine, verb, noted)
    return calls


def test_a_window_draws_its_sets_in_few_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    method = play("t5", mode="learned", dropout=0.0)
    method.parts.rollout.passes.rows = 99
    drawn = texts_of_calls(method.parts.rollout.engine, "sample", monkeypatch)
    recorded = texts_of_calls(method.parts.rollout.engine, "policy", monkeypatch)
    until(method, "update")
    # Sets of five texts. Two rounds of fitting, each with its test; then pilot, both sets of the heads, actor, scale.
    assert drawn == [10, 10, 25]
    assert recorded == [5], "of the actor's set alone ratios will be taken"
    assert not method.parts.rollout.ready


@pytest.mark.parametrize("adapt", ["probe", "top"])
def test_critics_on_the_policys_features_read_no_base_and_resume(
    adapt: str, home: Path, verdicts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdicts(False)
    asked = ("critic.features=policy", f"critic.adapt={adapt}", "ratio.denominator=scored", *PLAIN)
    run, again = assembled(home, *asked), assembled(home, *asked)
    assert run.critics is not None
    assert run.critics.base.tree is run.actor.reader
    assert run.method.parts.rollout.old_law == "scored"
    read = texts_of_calls(run.actor.reader, "lower", monkeypatch)
    advance_to(t5_of(run), "calibrate")
    again.method.load_state_dict(run.method.state_dict())
    again.ledger.load_state_dict(run.ledger.state_dict())
    for one in (run, again):
        window(one.method)
    assert not read
    left, right = (one.actor.engine.model.state_dict() for one in (run, again))
    moved: list[Tensor] = [left[name] for name in left if not left[name].equal(right[name])]
    assert not moved, "a run that was saved with sets drawn ahead goes on as if it had not been"


def test_updates_hold_no_activations_that_only_critics_read(home: Path, verdicts: Any) -> None:
    verdicts(False, False)
    baseline = ("qualify.attempts=2", "qualify.on_failure=baseline", *PLAIN)
    for asked in (baseline, ("method=quiet-star-ppo", "gate.passes=0")):
        run = assembled(home, *asked, "critic.features=policy")
        assert run.method.parts.rollout.below is not None
        advance_to(run.method, "close")
        acting = run.method.held["actor"]
        assert acting.lower_BND is acting.states_BRTD is acting.scoring_BRF is None

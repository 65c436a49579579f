"""`window.history`: the actor's thoughts fit the critics and set the scale of the window that follows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from t5_window import PLAIN, actor_weights, advance_to, changing, goes_on_from, logged, noting, same, t5_of, window
from test_t5_sets import texts_of_calls

from stage import Tally, assembled
from tfive.errors import RunFailed
from tfive.rl.reward import final_gain
from tfive.rl.trajectory import Trajectories
from tfive.training.build import Assembly
from tfive.training.drawn import texts_drawn_together

pytestmark = pytest.mark.model

AGAIN = ("window.history=true", "critic.passes=2", *PLAIN)
LATER = ["pilot", "calibrate", "collect", "refit", "refit", *["update"] * 4, "close"]


def critic_weights(run: Any) -> dict[str, torch.Tensor]:
    return {
        f"{number}.{name}": tensor.clone()
        for number, critic in enumerate(run.critics.critics)
        for name, tensor in critic.state_dict().items()
    }


def drawn_by_role(run: Any, method: Any) -> dict[str, int]:
    """Trajectories of each role that the next window counts."""
    tally = run.method.parts.telemetry
    assert isinstance(tally, Tally)
    before = {role: amounts["trajectories"] for role, amounts in tally.amounts.items()}
    window(method)
    found = {role: amounts["trajectories"] - before.get(role, 0) for role, amounts in tally.amounts.items()}
    return {role: count for role, count in found.items() if count}


def test_a_later_window_draws_nothing_for_fit_and_scale(home: Path, verdicts: Any) -> None:
    run = assembled(home, *AGAIN)
    method = t5_of(run)
    assert window(method) == ["open", *["fit"] * 3, "qualify", *LATER]
    assert set(drawn_by_role(run, method)) == {"qualify", "pilot", "actor"}
    assert window(method) == ["open", "qualify", *LATER]


def test_all_sets_of_a_later_window_are_drawn_in_one_pass(
    home: Path, verdicts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = assembled(home, "window.history=true", "window.probe=0", "calibration.cross_fit=false", "gate.passes=0")
    window(run.method)
    run.method.parts.rollout.passes.rows = 99
    drawn = texts_of_calls(run.method.parts.rollout.engine, "sample", monkeypatch)
    advance_to(run.method, "update")
    assert drawn == [texts_drawn_together(run.config)[1]]


def test_the_actors_set_is_what_the_critics_are_fitted_to_before_it_is_learned_from(home: Path, verdicts: Any) -> None:
    run = assembled(home, *AGAIN)
    method = t5_of(run)
    acted: list[Trajectories] = []
    changing(run, "actor", noting(acted))
    fitted: list[tuple[Trajectories, torch.Tensor | None]] = []
    fit_pass = run.critics.fit_pass  # type: ignore[union-attr]

    def noted(record: Trajectories, frozen: torch.Tensor | None, *given: Any, **options: Any) -> list[float]:
        fitted.append((record, frozen))
        return fit_pass(record, frozen, *given, **options)

    run.critics.fit_pass = noted  # type: ignore[method-assign, union-attr]
    advance_to(method, "refit")
    before, kept = critic_weights(run), method.held["actor"]
    fresh = len(fitted)
    advance_to(method, "update")
    assert not same(critic_weights(run), before)
    for record, frozen in fitted[fresh:]:
        assert record.thoughts.tokens_BRT is acted[0].thoughts.tokens_BRT
        # Clipped around what the critics said when they gave the advantages.
        assert frozen is not None
        assert frozen.equal(kept.need("values_2BRT"))
    assert method.held["actor"].need("advantage_BRT").equal(kept.need("advantage_BRT"))
    assert "critic_fit" not in method.held, "updates hold no activations that only critics read"
    advance_to(method, "open")
    # Returns are in the scale of the window that the critics are for.
    later = method.parts.rollout._with_rewards(acted[0]).need("returns_BRT")
    assert not later.equal(acted[0].need("returns_BRT"))
    assert all(record.need("returns_BRT").equal(later) for record, _ in fitted[fresh:])


def test_the_actors_set_sets_the_next_scale(home: Path, verdicts: Any) -> None:
    run = assembled(home, *AGAIN, "reward.decay=0")
    method = t5_of(run)
    advance_to(method, "close")
    acting = method.held["actor"]
    gain_BR = final_gain(acting.reference_BR, acting.need("losses_BRK"), acting.need("checkpoint_mask_BRK"))
    expected = gain_BR[acting.thoughts.valid_BR].double().square().mean()
    method.advance()
    method.advance()
    assert method.report["reward_scale"] == pytest.approx(float(expected) ** 0.5, rel=1e-4)


def test_critics_that_fail_are_fitted_to_fresh_thoughts(home: Path, verdicts: Any) -> None:
    run = assembled(home, *AGAIN, "qualify.attempts=2", "qualify.on_failure=stop")
    method = t5_of(run)
    window(method)
    verdicts(False)
    fitted: list[Trajectories] = []
    changing(run, "critic_fit", noting(fitted))
    assert window(method) == ["open", "qualify", "fit", "fit", "qualify", *LATER]
    assert [record.role for record in fitted] == ["critic_fit/1"]


def test_sets_that_no_critic_will_judge_are_let_go_of_and_counted(home: Path, verdicts: Any) -> None:
    run = assembled(home, *AGAIN, "qualify.attempts=1", "qualify.on_failure=baseline")
    method = t5_of(run)
    window(method)
    verdicts(False, True)
    found = drawn_by_role(run, method)
    # All were drawn in the passes of the test, before it failed.
    assert set(found) == {"qualify", "pilot", "actor"}
    assert not method.parts.rollout.ready
    assert ("qualification: baseline", method.window) in [(what, 2) for what, _ in logged(run)]
    # Critics that failed are fitted all the same, and the next test draws nothing ahead.
    assert advance_to(method, "pilot") == ["open", "qualify"]
    assert not method.parts.rollout.ready
    window(method)
    assert method.report["actor_updates"]["qualified"] == 4


def test_grown_thoughts_need_a_fresh_fit_and_a_scale_of_their_own(home: Path, verdicts: Any) -> None:
    run = assembled(home, *AGAIN, "window.curriculum=1", "window.windows=4", "reward.decay=0.5")
    method, rollout = t5_of(run), run.method.parts.rollout
    assert rollout.grows(2)
    assert not rollout.grows(3)
    scales: list[Trajectories] = []
    changing(run, "scale", noting(scales))
    # Nothing is fitted for thoughts that will be longer, and their scale is not that of the shorter ones.
    assert window(method)[-6:] == ["refit", *["update"] * 4, "close"]
    assert [one.window for one in scales] == [1, 2]
    assert int(scales[-1].thoughts.length_BR.max()) > rollout.longest(1)
    own = final_gain(*(scales[-1].need(name) for name in ("no_thought_BR", "losses_BRK", "checkpoint_mask_BRK")))
    moment = own[scales[-1].thoughts.valid_BR].double().square().mean()
    advance_to(method, "fit")
    assert method.report["reward_scale"] == pytest.approx(float(moment) ** 0.5, rel=1e-4)
    advance_to(method, "close")
    acted = method.held["actor"].gain_BR[method.held["actor"].thoughts.valid_BR].double().square().mean()
    # The window after goes on from there, with critics that the grown one has fitted.
    assert advance_to(method, "qualify") == ["close", "open"]
    assert method.report["reward_scale"] == pytest.approx(float(moment + acted) ** 0.5 / 2**0.5, rel=1e-4)
    assert [one.window for one in scales] == [1, 2]


def test_what_a_refit_measured_is_told_of_the_window_it_was_for(home: Path, verdicts: Any) -> None:
    run = assembled(home, *AGAIN, "critic.loss=squared", "qualify.attempts=1", "qualify.on_failure=stop")
    method = t5_of(run)
    advance_to(method, "update")
    fresh, later = dict(method.report), dict(method.fitted)
    assert later["fit_r2"] != fresh["fit_r2"]
    verdicts(False)
    window(method)
    method.advance()
    assert {name: method.report[name] for name in later} == later
    # Why critics failed is told with it.
    with pytest.raises(RunFailed):
        method.advance()
    assert method.failed[-1]["fit_r2"] == later["fit_r2"]


def test_sets_drawn_ahead_are_light_while_critics_are_fitted_again(home: Path, verdicts: Any) -> None:
    run = assembled(home, *AGAIN, "critic.features=policy", "critic.adapt=probe", "qualify.attempts=2")
    method = t5_of(run)
    window(method)
    verdicts(False)
    advance_to(method, "fit")
    ready = method.parts.rollout.ready
    assert {role for role, _ in ready} == {"pilot", "actor"}
    assert all(one.lower_BND is None for one in ready.values())
    window(method)
    assert method.report["actor_updates"]["qualified"] == 4


@pytest.mark.parametrize("adapt", ["probe", "top"])
def test_a_run_goes_on_from_anywhere(adapt: str, tmp_path: Path, verdicts: Any) -> None:
    asked = (*AGAIN, "critic.features=policy", f"critic.adapt={adapt}")

    def held(run: Assembly) -> Any:
        return critic_weights(run), actor_weights(run)

    goes_on_from(["qualify", "refit", "update"], lambda: assembled(tmp_path, *asked), held)


def test_ppo_has_it_too(home: Path) -> None:
    run = assembled(
        home, "method=quiet-star-ppo", "window.history=true", "critic.passes=1", "critic.warmup_rounds=1",
        "ppo.frozen_windows=1", "gate.passes=0",
    )  # fmt: skip
    method = run.method
    assert window(method) == ["open", "fit", "fit", "collect", "refit", "close"], "a window in which the actor waits"
    before = critic_weights(run)
    assert set(drawn_by_role(run, method)) == {"actor"}
    assert not same(critic_weights(run), before)
    assert window(method) == ["open", "collect", "refit", *["update"] * 4, "close"]

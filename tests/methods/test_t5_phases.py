"""The window as a state machine: the order of its phases, and what a critic that fails its test does."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from t5_window import PLAIN, QUICK, actor_weights, advance_to, changing, logged, noting, same, t5_of, window

from stage import assembled
from tfive.errors import RunFailed
from tfive.methods.registry import spec_of
from tfive.rl.trajectory import Trajectories

pytestmark = pytest.mark.model


def test_phases_come_in_the_declared_order(home: Path, verdicts: Any) -> None:
    run = assembled(home, "qualify.consecutive=2", "critic.passes=2", *QUICK)
    method = t5_of(run)
    stages: list[str] = []
    done: list[str] = []
    while not done or method.phase != "open":
        stages.append(method.stage)
        done.append(method.advance())
    assert done == [
        "open", *["fit"] * 3, *["qualify"] * 2, "pilot", "calibrate", "collect", *["update"] * 4, "close"
    ]  # fmt: skip
    assert [phase for phase, _ in groupby(done)] == list(spec_of("t5").phases)
    assert [stage for stage, _ in groupby(stages)] == ["head warm-up", "full warm-up", "alternating"]
    # The value heads come first and alone; later windows need as many tests and no more head passes (Algorithm 1).
    assert stages[: 2 + 1] == ["head warm-up"] * 2 + ["full warm-up"]
    assert window(method) == [
        "open", *["fit"] * 2, *["qualify"] * 2, "pilot", "calibrate", "collect", *["update"] * 4, "close"
    ]  # fmt: skip
    kinds = [what for what, _ in logged(run) if "validation" not in what]
    assert kinds == [
        "stage", "qualification: reset", "qualification: passed", "qualification: passed", "qualification: admitted",
        "stage", "qualification: passed", "qualification: passed", "qualification: admitted",
    ]  # fmt: skip
    assert [detail for what, detail in logged(run) if what == "stage"] == ["full warm-up", "alternating"]


@pytest.mark.parametrize("overrides", [("critic.adapt=head",), ("critic.head_passes=0",)], ids=["head", "no warm-up"])
def test_without_a_warm_up_the_first_window_fits_no_longer_than_the_next(
    home: Path, verdicts: Any, overrides: tuple[str, ...]
) -> None:
    method = t5_of(assembled(home, "critic.passes=2", *overrides, *PLAIN))
    assert advance_to(method, "qualify") == ["open", "fit", "fit"]
    assert method.stage == "full warm-up"


def test_failing_goes_back_to_fitting_until_the_attempts_are_spent(home: Path, verdicts: Any) -> None:
    verdicts(*[False] * 9)
    run = assembled(home, "qualify.attempts=3", "qualify.on_failure=stop", *PLAIN)
    before = actor_weights(run)
    assert advance_to(run.method, "qualify") == ["open", "fit", "fit"]
    for _ in range(2):
        assert advance_to(run.method, "qualify") == ["qualify", "fit"]
    with pytest.raises(RunFailed, match="critics did not qualify in 3 attempts: attempt 3 of 3: as the test says"):
        run.method.advance()
    assert same(actor_weights(run), before)
    told = [what for what, _ in logged(run)]
    assert told.index("qualification: exhausted") == len(told) - told[::-1].index("qualification: failed")
    assert told[-1] == "qualification: suggests"


def test_every_attempt_fits_and_tests_on_fresh_trajectories(home: Path, verdicts: Any) -> None:
    verdicts(False, True, False)
    run = assembled(home, "qualify.consecutive=2", *PLAIN)
    drawn: list[Trajectories] = []
    for role in ("critic_fit", "qualify"):
        changing(run, role, noting(drawn))
    done = advance_to(run.method, "pilot")
    # A failure in between starts the row of passes again, after another fit.
    assert done == ["open", "fit", "fit", "qualify", "fit", "qualify", "qualify", "fit", "qualify", "qualify"]
    assert [record.role for record in drawn] == [
        "critic_fit", "qualify", "critic_fit/1", "qualify/1", "qualify/2", "critic_fit/2", "qualify/3", "qualify/4"
    ]  # fmt: skip
    tokens = [record.thoughts.tokens_BRT for record in drawn]
    assert all(not a.equal(b) for i, a in enumerate(tokens) for b in tokens[:i] if a.shape == b.shape)


def test_a_sustained_failure_pauses_the_actor_and_recovery_readmits_it(home: Path, verdicts: Any) -> None:
    run = assembled(home, "qualify.rule=sustained", "qualify.patience=2", *PLAIN)
    method = t5_of(run)
    window(method)
    assert method.report["actor_updates"]["qualified"] == 4
    verdicts(False)
    before = actor_weights(run)
    window(method)
    assert method.stage == "alternating"
    assert not same(actor_weights(run), before), "one slip does not pause"
    assert method.report["actor_updates"] == {"qualified": 0, "slipped": 4, "untested": 0, "baseline": 0}
    verdicts(False, False, False)
    before = actor_weights(run)
    done = advance_to(method, "qualify")
    done += [method.advance()]
    assert (method.stage, method.phase) == ("recovery", "fit")
    while method.phase in ("fit", "qualify"):
        done.append(method.advance())
        assert same(actor_weights(run), before)
    assert done == ["open", "fit", "qualify", "fit", "qualify", "fit", "qualify", "fit", "qualify"]
    assert (method.stage, method.phase) == ("alternating", "pilot")
    window(method)
    assert not same(actor_weights(run), before)
    told = [what.removeprefix("qualification: ") for what, _ in logged(run)]
    later = [what for what in told if "validation" not in what and what != "suggests"]
    assert later[-9:] == [
        "slipped", "failed", "paused", "stage", "failed", "failed", "passed", "admitted", "stage"
    ]  # fmt: skip
    assert [detail for what, detail in logged(run) if what == "stage"][-2:] == ["recovery", "alternating"]


def test_a_fixed_warm_up_asks_nobody(home: Path, verdicts: Any) -> None:
    verdicts(*[False] * 9)
    run = assembled(home, "qualify.rule=fixed", "critic.warmup_rounds=3", "qualify.attempts=1", *PLAIN)
    method = t5_of(run)
    warm = ["open", "fit", "fit", "qualify", "fit", "qualify", "fit", "qualify"]
    assert window(method) == [*warm, "pilot", "calibrate", "collect", *["update"] * 4, "close"]
    assert window(method) == ["open", "fit", "qualify", "pilot", "calibrate", "collect", *["update"] * 4, "close"]
    assert method.report["actor_updates"]["untested"] == 4
    # The tests are made and reported; nothing is decided by them.
    assert len(method.report["r2"]) == 2
    assert method.stage == "alternating"
    assert {what for what, _ in logged(run)} - {"rates"} == {"stage", "qualification: reset"}

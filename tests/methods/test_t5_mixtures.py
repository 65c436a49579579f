"""How two critics become one advantage: fixed mixtures, learned ones, the fallback, and centred scores."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from t5_window import PLAIN, QUICK, actor_weights, advance_to, logged, same, t5_of, window

from pretended_graphs import PretendedGraphs
from stage import Tally, assembled
from tfive.rl.calibration.mixture import LearnedWeight

pytestmark = pytest.mark.model


@pytest.mark.parametrize(("mode", "weight"), [("average", 0.5), ("single", 1.0), ("minimum", 0.0)])
def test_fixed_mixtures_need_no_heads(home: Path, verdicts: Any, mode: str, weight: float) -> None:
    run = assembled(home, f"calibration.mode={mode}", *QUICK)
    method = t5_of(run)
    before = copy.deepcopy(method.parts.calibrator.state_dict())
    advance_to(method, "update")
    acting = method.held["actor"]
    assert (acting.need("weight_BRT")[acting.mask_BRT] == weight).all()
    first, second = (method._normaliser().normalise(gae, acting.mask_BRT) for gae in acting.need("gae_2BRT"))
    expected = {"average": (first + second) / 2, "single": first, "minimum": torch.minimum(first, second)}[mode]
    torch.testing.assert_close(acting.need("advantage_BRT"), expected, rtol=1e-5, atol=1e-6)
    window(method)
    assert method.report["mixture"] == mode
    assert "retention" not in method.report
    assert same(method.parts.calibrator.state_dict(), before)
    tally = method.parts.telemetry
    assert isinstance(tally, Tally)
    assert not {"head_train", "head_validate"} & set(tally.amounts)
    other = t5_of(assembled(home, f"calibration.mode={mode}", *QUICK))
    other.load_state_dict(method.state_dict())
    assert other.mixture == method.mixture


@pytest.mark.parametrize("mode", ["learned", "state", "repeated"])
def test_learned_mixtures_are_validated_or_fall_back(home: Path, verdicts: Any, mode: str) -> None:
    run = assembled(home, f"calibration.mode={mode}", "calibration.kappa=0.9", "calibration.weight_lr=0.03", *QUICK)
    method = t5_of(run)
    window(method)
    report = method.report
    assert 0 <= report["retention"] <= 0.9 or report["mixture"] == "average"
    assert report["mixture"] in (mode, "average")
    assert {"moment", "moment_error", "signal", "multiplier", "head_moment", "weight_mean", "twin_correlation"} <= set(
        report
    )
    # A weight that a validation accepted is the one a resumed run goes on with.
    head = method.parts.calibrator.fresh_weight_head()
    with torch.no_grad():
        head.joined.last.bias.add_(1.0)
    method.mixture = LearnedWeight(head, mode == "state", mode)
    other = t5_of(assembled(home, f"calibration.mode={mode}", *QUICK))
    other.load_state_dict(method.state_dict())
    assert isinstance(other.mixture, LearnedWeight)
    assert (other.mixture.name, other.mixture.state_only) == (mode, mode == "state")
    assert same(dict(other.mixture.head.state_dict()), dict(head.state_dict()))


def test_a_candidate_that_keeps_too_little_signal_is_replaced_by_the_average(home: Path, verdicts: Any) -> None:
    run = assembled(home, "calibration.kappa=0.0", *QUICK)
    advance_to(run.method, "calibrate")
    learn = run.method.parts.calibrator.learn_apart

    def learned(*arguments: Any) -> Any:
        (candidate,) = learn(*arguments)
        head = run.method.parts.calibrator.fresh_weight_head()
        with torch.no_grad():
            head.joined.last.bias += 2.0
        return [type(candidate)(LearnedWeight(head), candidate.mean_head, 0.0, 0.0, 0, candidate.trace)]

    run.method.parts.calibrator.learn_apart = learned
    window(run.method)
    assert run.method.report["mixture"] == "average"
    assert run.method.report["accepted"] is False
    assert logged(run)[-1][0] == "validation: retention"


def test_heads_learn_where_nothing_can_be_captured_and_the_run_says_so(home: Path, verdicts: Any) -> None:
    class Refused(PretendedGraphs):
        def capture(self, work: Any, warm_up: int = 0) -> Any:
            raise RuntimeError("operation not permitted when stream is capturing")

    run, other = assembled(home, *QUICK), assembled(home, *QUICK)
    run.method.parts.calibrator.graphs = Refused()
    for one in (run, other):
        advance_to(one.method, "collect")
    said = [entry for entry in logged(run) if entry[0] == "calibration: its steps cannot be captured"]
    assert len(said) == 1
    assert "not permitted" in said[0][1]
    states = [one.method.parts.calibrator.state_dict() for one in (run, other)]
    assert same(*states)


def test_a_capture_that_first_fails_in_cross_fitting_is_said_too(home: Path, verdicts: Any) -> None:
    run = assembled(home, "calibration.cross_fit=true")
    calibrator = run.method.parts.calibrator
    calibrator.graphs = PretendedGraphs()

    def offsets(*given: Any) -> dict[str, float]:
        calibrator.graphs.trouble = "not permitted"
        return {}

    calibrator.offsets = offsets
    advance_to(run.method, "collect")
    said = [entry for entry in logged(run) if entry[0] == "calibration: its steps cannot be captured"]
    assert [detail for _, detail in said] == ["they are launched: not permitted"]


def test_centred_scores_remember_the_opening_and_resume(home: Path, verdicts: Any) -> None:
    overrides = ("calibration.score_centering=true", "sampling.temperature=0.6", *PLAIN)
    run = assembled(home, *overrides)
    window(run.method)
    opening = actor_weights(run)
    advance_to(run.method, "update")
    run.method.advance()
    assert run.actor.centring is not None
    assert same(dict(run.actor.centring.old.model.state_dict()), opening)
    assert not same(actor_weights(run), opening)
    other = assembled(home, *overrides)
    other.method.load_state_dict(copy.deepcopy(run.method.state_dict()))
    plain = assembled(home, "sampling.temperature=0.6", *PLAIN)
    plain.method.load_state_dict(copy.deepcopy({**run.method.state_dict(), "window": run.method.window}))
    for one in (run, other, plain):
        while one.method.phase == "update":
            one.method.advance()
    assert same(actor_weights(run), actor_weights(other))
    assert not same(actor_weights(run), actor_weights(plain))

"""Calibration from repeated continuations of one prefix: roles stay apart, and every thought is booked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from t5_window import QUICK, advance_to, changing, other_outcomes, same, t5_of

from stage import Tally, assembled
from tfive import rng
from tfive.errors import RunFailed
from tfive.rl.calibration.mixture import LearnedWeight
from tfive.rl.roles import repeated_rollouts
from tfive.rl.trajectory import Trajectories

pytestmark = pytest.mark.model
REPEATED = ("calibration.mode=repeated", "calibration.kappa=0.9", "calibration.weight_lr=0.03", *QUICK)


def changing_continuations(run: Any, role: str) -> None:
    """From now on the outcomes of one role's continuations are others than they were."""
    rollout = run.method.parts.rollout
    rewarded = rollout.rewarded

    def changed(scored: Trajectories) -> Trajectories:
        found = rewarded(scored)
        return other_outcomes(found) if scored.role == role and scored.probe_step_BR is not None else found

    rollout.rewarded = changed


def test_repeated_continuations_keep_the_roles_apart(home: Path, verdicts: Any) -> None:
    """Outcomes of the anchors that validate, of the probes and of the actor never reach the weight; those that teach
    it do, and the weight of an action stays a function of what is visible."""
    # A seed whose heads learn something: early stopping may also keep them as they began.
    runs = [assembled(home, *REPEATED, "run.seed=5") for _ in range(4)]
    changing_continuations(runs[1], "head_train")
    changing_continuations(runs[2], "head_validate")
    changing_continuations(runs[3], "probe")
    changing(runs[3], "actor", other_outcomes)
    for run in runs:
        advance_to(run.method, "update")
    plain, taught, validated, acted = map(t5_of, runs)
    heads = [method.parts.calibrator.state_dict() for method in (plain, taught, validated, acted)]
    assert not same(heads[1], heads[0])
    assert same(heads[2], heads[0])
    assert same(heads[3], heads[0])
    assert isinstance(plain.mixture, LearnedWeight)
    assert validated.report["head_moment"] == plain.report["head_moment"]
    assert validated.report["moment"] != plain.report["moment"]
    assert acted.report["moment"] == plain.report["moment"]
    weights = [method.held["actor"].need("weight_BRT") for method in (plain, acted)]
    assert weights[0].equal(weights[1])
    assert not plain.held["actor"].need("advantage_BRT").equal(acted.held["actor"].need("advantage_BRT"))


def test_repeated_prefixes_are_paid_for_under_their_roles(home: Path, verdicts: Any) -> None:
    """eq:repeated-rollout-budget: anchors times continuations for calibration and for admission, and the rest."""
    run = assembled(home, "calibration.continuations=3", "window.probe=0", *REPEATED)
    counts: dict[str, list[int]] = {}
    rewarded = run.method.parts.rollout.rewarded

    def noting(scored: Trajectories) -> Trajectories:
        given = 0 if scored.probe_step_BR is None else int(scored.probe_step_BR[scored.thoughts.valid_BR].sum())
        counts.setdefault(scored.role, []).append(scored.count)
        counts.setdefault(f"{scored.role} tokens", []).append(int(scored.mask_BRT.sum()) - given)
        return rewarded(scored)

    run.method.parts.rollout.rewarded = noting
    advance_to(run.method, "update")
    tally = run.method.parts.telemetry
    assert isinstance(tally, Tally)
    anchors = {}
    for role in ("head_train", "head_validate"):
        bank, continuations = counts[role]
        anchors[role], rest = divmod(continuations, 3)
        assert rest == 0
        assert 0 < anchors[role] <= bank
        assert tally.amounts[role]["trajectories"] == bank + 3 * anchors[role]
        assert tally.amounts[role]["generated_tokens"] == sum(counts[f"{role} tokens"])
    acting = tally.amounts["actor"]["trajectories"]
    base = sum(tally.amounts[role]["trajectories"] for role in ("critic_fit", "qualify", "pilot", "scale"))
    base += counts["head_train"][0] + counts["head_validate"][0]
    total = sum(amounts["trajectories"] for amounts in tally.amounts.values())
    assert total == repeated_rollouts(anchors["head_train"], 3, 0, 0, base) + anchors["head_validate"] * 3 + acting


def test_anchors_that_no_thought_reaches_are_named(home: Path, verdicts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = assembled(home, *REPEATED)
    advance_to(run.method, "calibrate")
    uniforms = rng.uniforms
    monkeypatch.setattr(
        rng,
        "uniforms",
        lambda seed, role, *counter: (
            uniforms(seed, role, *counter) * 0 + 0.99 if "/step" in role else uniforms(seed, role, *counter)
        ),
    )
    changing(
        run,
        "head_train",
        lambda record: replace(record, thoughts=replace(record.thoughts, length_BR=record.thoughts.valid_BR.long())),
    )
    with pytest.raises(RunFailed, match=r"no thought of the head_train set of window 1 lasts until its anchor: raise"):
        run.method.advance()

"""What a window of T⁵ books and reports."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from t5_window import QUICK, advance_to, changing, noting, window

from stage import assembled
from tfive.methods.registry import spec_of
from tfive.rl.snapshots import KINDS, WrongSnapshot
from tfive.rl.trajectory import Trajectories
from tfive.training.recorder import AMOUNTS, Recorder
from tfive.tree.forward import TreeModel

pytestmark = pytest.mark.model


def test_the_account_adds_up(home: Path, verdicts: Any) -> None:
    verdicts(False)
    with Recorder(quiet=True) as recorder:
        run = assembled(home, *QUICK, telemetry=recorder)
        made: dict[str, list[Trajectories]] = {}
        for role in ("critic_fit", "qualify", "pilot", "head_train", "head_validate", "actor", "scale", "probe"):
            changing(run, role, noting(made.setdefault(role, [])))
        advance_to(run.method, "update")
        probe = run.method.held["probe"]
        window(run.method)
        account = recorder.account()
    roles = account["roles"]
    for name in AMOUNTS:
        assert account["total"][name] == sum(amounts[name] for amounts in roles.values())
    for role, sets in made.items():
        booked = roles["extra" if role == "probe" else role]
        continued = probe.count if role == "probe" else 0
        assert booked["trajectories"] == sum(record.count for record in sets) + continued
        if role != "probe":
            assert booked["generated_tokens"] == sum(int(record.mask_BRT.sum()) for record in sets)
    assert set(roles) == set(made) - {"probe"} | {"extra"}
    # The rejected attempt is paid for, and only actor tokens teach the actor.
    assert [len(made[role]) for role in ("critic_fit", "qualify", "scale")] == [2, 2, 2]
    assert account["total"]["actor_tokens"] == roles["actor"]["generated_tokens"] == roles["actor"]["actor_tokens"]
    # Three regressions of 4 steps before the weight moves, then 4 steps of it with one of the mean response each.
    assert account["total"]["head_updates"] == roles["head_train"]["head_updates"] == 3 * 4 + 4 * (1 + 1)
    assert set(spec_of("t5").phases) | {"calibrate/validate"} <= set(account["seconds"])


def test_a_window_reports_every_diagnostic(home: Path, verdicts: Any) -> None:
    run = assembled(home, "calibration.continuations=4", "window.probe=0.5")
    window(run.method)
    wanted = {
        "window", "reward_scale", "critic_loss", "fit_r2", "value_risk", "value_risk_upper", "value_clipped",
        "actor_updates", "r2", "r2_per_step", "r2_within", "value_spread", "value_disagreement",
        "pilot_deviation", "multiplier", "moment", "moment_error", "retention", "accepted", "signal",
        "twin_correlation", "twin_disagreement", "weight_mean", "weight_deviation",
        "cross_fit_mixture", "cross_fit_mixture_error", "cross_fit_mixture_visible", "cross_fit_mixture_hidden",
        "cross_fit_average", "offset", "offset_error", "offset_average", "offset_change", "offset_change_error",
        "drift_covariance_first", "drift_mean_induced_first", "drift_covariance_last", "drift_mean_induced_last",
        "drift_mean_induced_net_first", "drift_mean_induced_net_last", "drift_mean_induced_error_last",
        "drift_mean_induced_square_first", "drift_mean_induced_square_last", "drift_bound_estimate_last",
        "probe_clip_fraction_first", "probe_clip_fraction_last", "clip_fraction", "policy_kl", "policy_kl_last",
        "mismatch_kl", "gradient_norm", "skipped_updates", "gate_loss", "stage", "mixture", "actor_gain",
        "mean_thought_length",
    }  # fmt: skip
    report = run.method.report
    assert wanted <= set(report)
    assert len(report["r2"]) == 2
    assert [len(steps) for steps in report["r2_per_step"]] == [4, 4]
    plain: Iterable[float] = [value for value in report.values() if isinstance(value, float)]
    assert all(value == value for value in plain)
    assert run.method.held == {}


def test_head_updates_of_diagnoses_are_extra(home: Path, verdicts: Any) -> None:
    with Recorder(quiet=True) as recorder:
        run = assembled(home, "window.probe=0", "gate.passes=0", telemetry=recorder)
        window(run.method)
        roles = recorder.account()["roles"]
    # Two folds of at most 4 steps each: whole and visible, of mixture and average, and two each for both changes.
    assert 0 < roles["extra"]["head_updates"] <= 2 * 4 * (2 * 2 + 2 * 2)
    assert roles["extra"]["trajectories"] == 0


def test_probes_read_as_the_update_does(home: Path, verdicts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same pass with the same parts and gradients on, so that it rounds alike: before any step the ratios are those
    that the first step sees."""
    run = assembled(home, "anchor.conditioned=0.5", "anchor.mixture=0.3", "window.probe=0.5", *QUICK)
    seen: dict[str, list[tuple[dict[str, Any], bool]]] = {"collect": [], "update": []}
    policy = TreeModel.policy

    def watched(self: TreeModel, *arguments: Any, **options: Any) -> Any:
        if run.method.phase in seen and "of_first" in options:
            parts = {name: value for name, value in options.items() if name not in ("features", "thoughts")}
            seen[run.method.phase].append((parts, torch.is_grad_enabled()))
        return policy(self, *arguments, **options)

    monkeypatch.setattr(TreeModel, "policy", watched)
    window(run.method)
    assert seen["collect"]
    assert {str(one) for one in seen["collect"]} == {str(one) for one in seen["update"]}
    assert seen["update"][0][1]


def test_actor_sets_name_every_snapshot_behind_them(home: Path, verdicts: Any) -> None:
    run = assembled(home, *QUICK)
    advance_to(run.method, "update")
    assert set(run.method.held["actor"].snapshots) == set(KINDS)
    run.method.parts.snapshots.renew("auxiliary")
    with pytest.raises(WrongSnapshot, match="auxiliary"):
        run.method.advance()


def test_the_confidence_of_the_value_risk_is_reported_and_spends_its_budget(home: Path, verdicts: Any) -> None:
    """eq:value-risk-confidence on every test, with texts as draws and δ/(k(k+1)) for the k-th; clipped values."""
    run = assembled(home, "qualify.consecutive=2", *QUICK)
    tested: list[Trajectories] = []
    changing(run, "qualify", noting(tested))
    advance_to(run.method, "pilot")
    report, largest = run.method.report, 6.0
    values_2BRT = run.method.parts.critics.evaluate(tested[-1]).values_2BRT.clamp(-largest, largest)
    for critic, values_BRT in enumerate(values_2BRT):
        risks = []
        for row in range(len(values_BRT)):
            mask_RT = tested[-1].mask_BRT[row]
            if mask_RT.any():
                square = (tested[-1].need("returns_BRT")[row] - values_BRT[row])[mask_RT].double().square()
                risks.append(float(square.mean()))
        slack = (2 * largest) ** 2 * math.sqrt(math.log(2 / (0.05 / 6)) / (2 * len(risks)))
        assert report["value_risk"][critic] == pytest.approx(sum(risks) / len(risks), rel=1e-5)
        assert report["value_risk_upper"][critic] == pytest.approx(sum(risks) / len(risks) + slack, rel=1e-5)
    assert report["value_clipped"] == 0

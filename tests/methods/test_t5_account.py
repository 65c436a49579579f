"""What a window of T⁵ books and reports."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from t5_window import QUICK, advance_to, changing, noting, window

from stage import assembled
from tfive.methods.registry import spec_of
from tfive.rl.trajectory import Trajectories
from tfive.training.recorder import AMOUNTS, Recorder

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
    assert account["total"]["head_updates"] == roles["head_train"]["head_updates"] == 4
    assert set(spec_of("t5").phases) | {"calibrate/validate"} <= set(account["seconds"])


def test_a_window_reports_every_diagnostic(home: Path, verdicts: Any) -> None:
    run = assembled(home, "calibration.continuations=4", "window.probe=0.5")
    window(run.method)
    wanted = {
        "window", "reward_scale", "critic_loss", "r2", "r2_per_step", "r2_within", "value_spread", "value_disagreement",
        "pilot_deviation", "multiplier", "moment", "moment_error", "retention", "accepted", "signal",
        "twin_correlation", "twin_disagreement", "weight_mean", "weight_deviation",
        "cross_fit_mixture", "cross_fit_mixture_error", "cross_fit_mixture_visible", "cross_fit_mixture_hidden",
        "cross_fit_average", "offset", "offset_error", "offset_average", "offset_change", "offset_change_error",
        "drift_covariance_first", "drift_mean_induced_first", "drift_covariance_last", "drift_mean_induced_last",
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

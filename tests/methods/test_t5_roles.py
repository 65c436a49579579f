"""Who may move when, and what keeps the roles of a window apart."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from t5_window import PLAIN, QUICK, actor_weights, advance_to, changing, other_outcomes, same, t5_of, window

from stage import assembled
from tfive.rl.snapshots import WrongSnapshot
from tfive.rl.trajectory import Trajectories

pytestmark = pytest.mark.model


def test_only_the_actor_moves_while_it_is_updated(home: Path, verdicts: Any) -> None:
    run = assembled(home, *QUICK)
    method = t5_of(run)
    parts = method.parts
    advance_to(method, "update")
    assert parts.gate is not None

    def others() -> dict[str, Any]:
        state = {name: getattr(parts, name).state_dict() for name in ("critics", "calibrator", "rollout", "gate")}
        return copy.deepcopy({**state, "normaliser": method.normaliser, "base": dict(run.base.model.state_dict())})

    frozen, held = others(), {role: copy.deepcopy(record.state_dict()) for role, record in method.held.items()}
    moved = [actor_weights(run)]
    while method.phase == "update":
        method.advance()
        moved.append(actor_weights(run))
        assert same(others(), frozen)
        assert same({role: record.state_dict() for role, record in method.held.items()}, held)
    assert all(not same(a, b) for a, b in pairwise(moved))
    method.advance()
    assert not same(parts.gate.state_dict(), frozen["gate"])
    assert same(run.base.model.state_dict(), frozen["base"])


def test_the_actor_set_of_any_stale_snapshot_is_refused(home: Path, verdicts: Any) -> None:
    run = assembled(home, *QUICK)
    method, snapshots = run.method, run.method.parts.snapshots
    advance_to(method, "update")
    method.advance()
    before, current = actor_weights(run), snapshots.state_dict()
    for kind in ("policy", "scorer", "scale", "critics", "normaliser", "weight"):
        snapshots.renew(kind)
        with pytest.raises(WrongSnapshot, match=r"the actor set was made with .* is in force"):
            method.advance()
        assert same(actor_weights(run), before)
        snapshots.load_state_dict(current)
    # Renewed without use, nothing has changed: the window goes on as if it had not been.
    other = assembled(home, *QUICK).method
    advance_to(other, "update")
    window(method)
    window(other)
    assert same(actor_weights(run), dict(other.parts.actor.engine.model.state_dict()))
    assert method.report == other.report


@pytest.mark.parametrize("kind", ["policy", "scorer", "scale"])
def test_fitting_scale_and_probe_sets_of_a_stale_snapshot_are_refused(home: Path, verdicts: Any, kind: str) -> None:
    method = assembled(home, "calibration.mode=average", "gate.passes=0").method
    snapshots = method.parts.snapshots
    advance_to(method, "fit")
    method.advance()
    current = snapshots.state_dict()
    snapshots.renew(kind)
    with pytest.raises(WrongSnapshot, match="the fitting set"):
        method.advance()
    snapshots.load_state_dict(current)
    advance_to(method, "close")
    current = snapshots.state_dict()
    snapshots.renew(kind)
    with pytest.raises(WrongSnapshot, match="the probe set"):
        method.advance()
    if kind != "scale":
        with pytest.raises(WrongSnapshot, match="the scale set"):
            method.parts.rollout.update_scale(method.held["scale"])


def test_qualification_sees_fitting_outcomes_through_the_weights_alone(home: Path, verdicts: Any) -> None:
    runs = [assembled(home, *PLAIN) for _ in range(3)]
    for run in runs[1:]:
        changing(run, "critic_fit", other_outcomes)
    for run in runs:
        advance_to(run.method, "qualify")
    plain, lent, own = (run.method for run in runs)
    assert not same(lent.parts.critics.state_dict()["critics"], plain.parts.critics.state_dict()["critics"])
    lent.parts.critics.load_state_dict(copy.deepcopy(plain.parts.critics.state_dict()))
    for method in (plain, lent, own):
        method.advance()
    names = ("r2", "r2_per_step", "r2_within", "value_spread", "value_disagreement")
    assert [plain.report[name] for name in names] == [lent.report[name] for name in names]
    assert own.report["r2"] != plain.report["r2"]


def test_validation_outcomes_do_not_reach_the_candidate(home: Path, verdicts: Any) -> None:
    runs = [assembled(home, *QUICK) for _ in range(2)]
    changing(runs[1], "head_validate", other_outcomes)
    for run in runs:
        advance_to(run.method, "collect")
    plain, changed = (run.method for run in runs)
    assert same(plain.parts.calibrator.state_dict(), changed.parts.calibrator.state_dict())
    assert plain.report["head_moment"] == changed.report["head_moment"]
    assert plain.report["signal"] != changed.report["signal"]


def test_the_pilot_alone_sets_the_normaliser(home: Path, verdicts: Any) -> None:
    runs = [assembled(home, *PLAIN) for _ in range(3)]
    changing(runs[1], "pilot", other_outcomes)
    changing(runs[2], "actor", other_outcomes)
    for run in runs:
        advance_to(run.method, "update")
    plain, pilot, actor = map(t5_of, runs)
    assert pilot.normaliser != plain.normaliser
    assert actor.normaliser == plain.normaliser
    assert plain.normaliser is not None
    first, second = actor.held["actor"].need("gae_2BRT")
    mask = actor.held["actor"].mask_BRT
    batch = torch.cat([first[mask], second[mask]]).double()
    # The actor's own batch is never recentred: its mean stays where its outcomes put it.
    assert float(batch.mean()) != pytest.approx(plain.normaliser.mean, abs=1e-3)


def test_the_next_scale_comes_from_its_own_disjoint_set(home: Path, verdicts: Any) -> None:
    runs = [assembled(home, *PLAIN) for _ in range(3)]
    for run in runs:
        advance_to(run.method, "close")
    plain, actor, scale = (run.method for run in runs)
    held = plain.held
    texts = {role: set(record.texts.items_BP.flatten().tolist()) - {-1} for role, record in held.items()}
    assert not texts["actor"] & texts["scale"]
    before, record = plain.parts.rollout.scale.moment, held["scale"]
    gains = record.gain_BR[record.thoughts.valid_BR].double()
    for method, role in ((actor, "actor"), (scale, "scale")):
        method.held[role] = method.held[role].having(losses_BRK=method.held[role].need("losses_BRK") + 1.0)
    for method in (plain, actor, scale):
        method.advance()
    moments = [method.parts.rollout.scale.moment for method in (plain, actor, scale)]
    assert moments[0] == pytest.approx(0.9 * before + 0.1 * float(gains.square().mean()))
    assert moments[1] == moments[0]
    assert moments[2] != moments[0]
    # It is in force from the next window on.
    sigma = plain.parts.rollout.scale.value
    plain.advance()
    assert plain.report["reward_scale"] == sigma


def test_no_text_serves_two_roles(home: Path, verdicts: Any) -> None:
    run = assembled(home, *QUICK)
    seen: dict[str, set[int]] = {}

    def noting(role: str) -> Callable[[Trajectories], Trajectories]:
        def note(record: Trajectories) -> Trajectories:
            items = record.texts.items_BP.flatten().tolist()
            seen.setdefault(role, set()).update(item // 2 for item in items if item >= 0)
            return record

        return note

    roles = ("critic_fit", "qualify", "pilot", "head_train", "head_validate", "actor", "scale", "probe")
    for role in roles:
        changing(run, role, noting(role))
    window(run.method)
    advance_to(run.method, "pilot")
    assert set(seen) == set(roles)
    development = {int(item) // 2 for item in run.development.texts.items_BP.flatten().tolist() if item >= 0}
    everyone = [*seen.values(), development]
    assert sum(map(len, everyone)) == len(set().union(*everyone))

"""The window as a state machine: its order, who may move when, what a failure does, and what keeps roles apart."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stage import Tally, workshop
from tfive import rng
from tfive.errors import RunFailed
from tfive.methods.registry import spec_of
from tfive.methods.t5 import T5
from tfive.rl.accounting import repeated_rollouts
from tfive.rl.calibration.mixture import LearnedWeight
from tfive.rl.qualify import Qualifier
from tfive.rl.snapshots import WrongSnapshot
from tfive.rl.trajectory import Trajectories
from tfive.training.build import Workshop
from tfive.training.recorder import AMOUNTS, Recorder

pytestmark = pytest.mark.model
PLAIN = ("calibration.mode=average", "window.probe=0", "gate.enabled=false")
"""Enough of a window for what does not concern heads, probes or gate."""
QUICK = ("calibration.cross_fit=false",)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture
def verdicts(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Decide the outcome of every qualification test; after the given ones all pass."""

    def script(*given: bool) -> None:
        left = list(given)
        monkeypatch.setattr(Qualifier, "_judge", lambda *_: (left.pop(0) if left else True, "as the test says"))

    script()
    return script


def advance_to(method: T5, phase: str) -> list[str]:
    """Micro-steps until `phase` is next."""
    done = []
    while method.phase != phase or not done:
        done.append(method.advance())
    return done


def window(method: T5) -> list[str]:
    """One whole window."""
    return advance_to(method, "open")


def same(left: Any, right: Any) -> bool:
    """Equal trees, tensors bit for bit."""
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, Tensor):
        return left.equal(right)
    return bool(left == right)


def actor_weights(shop: Workshop) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in shop.actor.engine.model.state_dict().items()}


def told(shop: Workshop) -> list[tuple[str, str]]:
    tally = shop.method.parts.telemetry
    assert isinstance(tally, Tally)
    return tally.events


def changing(shop: Workshop, role: str, change: Callable[[Trajectories], Trajectories]) -> None:
    """From now on the sets of one role are changed right after they were collected."""
    collect = shop.method.parts.rollout.collect

    def changed(asked: str, *arguments: Any, **options: Any) -> Trajectories:
        found = collect(asked, *arguments, **options)
        return change(found) if asked == role else found

    shop.method.parts.rollout.collect = changed  # type: ignore[method-assign]


def other_outcomes(record: Trajectories) -> Trajectories:
    names = ("rewards_BRT", "returns_BRT")
    return record.having(**{name: (record.need(name) * -2 + 1) * record.mask_BRT for name in names})


def test_phases_come_in_the_declared_order(home: Path, verdicts: Any) -> None:
    shop = workshop(home, "qualify.consecutive=2", "critic.passes=2", *QUICK)
    method, stages = shop.method, []
    done = []
    while not done or method.phase != "open":
        stages.append(method.stage)
        done.append(method.advance())
    assert done == [
        "open", *["fit"] * 3, *["qualify"] * 2, "pilot", "calibrate", "collect", *["update"] * 4, "close"
    ]  # fmt: skip
    assert [phase for phase, _ in groupby(done)] == list(spec_of("t5").phases)
    assert [stage for stage, _ in groupby(stages)] == ["head warm-up", "full warm-up", "alternating"]
    # The value heads come first and alone; once admitted, one test and no more head passes.
    assert stages[: 2 + 1] == ["head warm-up"] * 2 + ["full warm-up"]
    assert window(method) == [
        "open", *["fit"] * 2, "qualify", "pilot", "calibrate", "collect", *["update"] * 4, "close"
    ]  # fmt: skip
    kinds = [what for what, _ in told(shop) if "validation" not in what]
    assert kinds == [
        "stage", "qualification: reset", "qualification: passed", "qualification: passed", "qualification: admitted",
        "stage", "qualification: passed",
    ]  # fmt: skip
    assert [detail for what, detail in told(shop) if what == "stage"] == ["full warm-up", "alternating"]


@pytest.mark.parametrize("overrides", [("critic.adapt=head",), ("critic.head_passes=0",)], ids=["head", "no warm-up"])
def test_without_a_warm_up_the_first_window_fits_no_longer_than_the_next(
    home: Path, verdicts: Any, overrides: tuple[str, ...]
) -> None:
    method = workshop(home, "critic.passes=2", *overrides, *PLAIN).method
    assert advance_to(method, "qualify") == ["open", "fit", "fit"]
    assert method.stage == "full warm-up"


def test_failing_goes_back_to_fitting_until_the_attempts_are_spent(home: Path, verdicts: Any) -> None:
    verdicts(*[False] * 9)
    shop = workshop(home, "qualify.attempts=3", *PLAIN)
    before = actor_weights(shop)
    assert advance_to(shop.method, "qualify") == ["open", "fit", "fit"]
    for _ in range(2):
        assert advance_to(shop.method, "qualify") == ["qualify", "fit"]
    with pytest.raises(RunFailed, match="critics did not qualify in 3 attempts: as the test says"):
        shop.method.advance()
    assert same(actor_weights(shop), before)
    assert told(shop)[-1][0] == "qualification: exhausted"


def test_every_attempt_fits_and_tests_on_fresh_trajectories(home: Path, verdicts: Any) -> None:
    verdicts(False, True, False)
    shop = workshop(home, "qualify.consecutive=2", *PLAIN)
    drawn: list[Trajectories] = []
    for role in ("critic_fit", "qualify"):
        changing(shop, role, lambda record: drawn.append(record) or record)  # type: ignore[func-returns-value]
    done = advance_to(shop.method, "pilot")
    # A failure in between starts the row of passes again, after another fit.
    assert done == ["open", "fit", "fit", "qualify", "fit", "qualify", "qualify", "fit", "qualify", "qualify"]
    assert [record.role for record in drawn] == [
        "critic_fit", "qualify", "critic_fit/1", "qualify/1", "qualify/2", "critic_fit/2", "qualify/3", "qualify/4"
    ]  # fmt: skip
    tokens = [record.thoughts.tokens_BRT for record in drawn]
    assert all(not a.equal(b) for i, a in enumerate(tokens) for b in tokens[:i] if a.shape == b.shape)


def test_a_sustained_failure_pauses_the_actor_and_recovery_readmits_it(home: Path, verdicts: Any) -> None:
    shop = workshop(home, "qualify.patience=2", *PLAIN)
    method = shop.method
    window(method)
    verdicts(False)
    before = actor_weights(shop)
    window(method)
    assert method.stage == "alternating"
    assert not same(actor_weights(shop), before), "one slip does not pause"
    verdicts(False, False, False)
    before = actor_weights(shop)
    done = advance_to(method, "qualify")
    done += [method.advance()]
    assert (method.stage, method.phase) == ("recovery", "fit")
    while method.phase in ("fit", "qualify"):
        done.append(method.advance())
        assert same(actor_weights(shop), before)
    assert done == ["open", "fit", "qualify", "fit", "qualify", "fit", "qualify", "fit", "qualify"]
    assert (method.stage, method.phase) == ("alternating", "pilot")
    window(method)
    assert not same(actor_weights(shop), before)
    later = [what.removeprefix("qualification: ") for what, _ in told(shop) if "validation" not in what]
    assert later[-9:] == [
        "slipped", "failed", "paused", "stage", "failed", "failed", "passed", "admitted", "stage"
    ]  # fmt: skip
    assert [detail for what, detail in told(shop) if what == "stage"][-2:] == ["recovery", "alternating"]


def test_a_fixed_warm_up_asks_nobody(home: Path, verdicts: Any) -> None:
    verdicts(*[False] * 9)
    shop = workshop(home, "qualify.mode=fixed", "qualify.rounds=3", "qualify.attempts=1", *PLAIN)
    method = shop.method
    warm = ["open", "fit", "fit", "qualify", "fit", "qualify", "fit", "qualify"]
    assert window(method) == [*warm, "pilot", "calibrate", "collect", *["update"] * 4, "close"]
    assert window(method) == ["open", "fit", "qualify", "pilot", "calibrate", "collect", *["update"] * 4, "close"]
    # The tests are made and reported; nothing is decided by them.
    assert len(method.report["r2"]) == 2
    assert method.stage == "alternating"
    assert {what for what, _ in told(shop)} == {"stage", "qualification: reset"}


def test_only_the_actor_moves_while_it_is_updated(home: Path, verdicts: Any) -> None:
    shop = workshop(home, *QUICK)
    method, parts = shop.method, shop.method.parts
    advance_to(method, "update")
    assert parts.gate is not None

    def others() -> dict[str, Any]:
        state = {name: getattr(parts, name).state_dict() for name in ("critics", "calibrator", "rollout", "gate")}
        return copy.deepcopy({**state, "normaliser": method.normaliser, "base": dict(shop.base.model.state_dict())})

    frozen, held = others(), {role: copy.deepcopy(record.state_dict()) for role, record in method.held.items()}
    moved = [actor_weights(shop)]
    while method.phase == "update":
        method.advance()
        moved.append(actor_weights(shop))
        assert same(others(), frozen)
        assert same({role: record.state_dict() for role, record in method.held.items()}, held)
    assert all(not same(a, b) for a, b in pairwise(moved))
    method.advance()
    assert not same(parts.gate.state_dict(), frozen["gate"])
    assert same(shop.base.model.state_dict(), frozen["base"])


@pytest.mark.parametrize(("mode", "weight"), [("average", 0.5), ("single", 1.0), ("minimum", 0.0)])
def test_fixed_mixtures_need_no_heads(home: Path, verdicts: Any, mode: str, weight: float) -> None:
    shop = workshop(home, f"calibration.mode={mode}", *QUICK)
    method = shop.method
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
    other = workshop(home, f"calibration.mode={mode}", *QUICK).method
    other.load_state_dict(method.state_dict())
    assert other.mixture == method.mixture


@pytest.mark.parametrize("mode", ["learned", "state", "repeated"])
def test_learned_mixtures_are_validated_or_fall_back(home: Path, verdicts: Any, mode: str) -> None:
    shop = workshop(home, f"calibration.mode={mode}", "calibration.kappa=0.9", "calibration.weight_lr=0.03", *QUICK)
    method = shop.method
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
        head.joined.last.bias += 1.0
    method.mixture = LearnedWeight(head, mode == "state", mode)
    other = workshop(home, f"calibration.mode={mode}", *QUICK).method
    other.load_state_dict(method.state_dict())
    assert isinstance(other.mixture, LearnedWeight)
    assert (other.mixture.name, other.mixture.state_only) == (mode, mode == "state")
    assert same(dict(other.mixture.head.state_dict()), dict(head.state_dict()))


def test_a_candidate_that_keeps_too_little_signal_is_replaced_by_the_average(home: Path, verdicts: Any) -> None:
    shop = workshop(home, "calibration.kappa=0.0", *QUICK)
    advance_to(shop.method, "calibrate")
    learn = shop.method.parts.calibrator.learn

    def learned(*arguments: Any) -> Any:
        candidate = learn(*arguments)
        head = shop.method.parts.calibrator.fresh_weight_head()
        with torch.no_grad():
            head.joined.last.bias += 2.0
        return type(candidate)(LearnedWeight(head), candidate.mean_head, 0.0, 0.0, 0, candidate.trace)

    shop.method.parts.calibrator.learn = learned  # type: ignore[method-assign]
    window(shop.method)
    assert shop.method.report["mixture"] == "average"
    assert shop.method.report["accepted"] is False
    assert told(shop)[-1][0] == "validation: retention"


def test_the_actor_set_of_any_stale_snapshot_is_refused(home: Path, verdicts: Any) -> None:
    shop = workshop(home, *QUICK)
    method, snapshots = shop.method, shop.method.parts.snapshots
    advance_to(method, "update")
    method.advance()
    before, current = actor_weights(shop), snapshots.state_dict()
    for kind in ("policy", "scorer", "scale", "critics", "normaliser", "weight"):
        snapshots.renew(kind)
        with pytest.raises(WrongSnapshot, match=r"the actor set was made with .* is in force"):
            method.advance()
        assert same(actor_weights(shop), before)
        snapshots.load_state_dict(current)
    # Renewed without use, nothing has changed: the window goes on as if it had not been.
    other = workshop(home, *QUICK).method
    advance_to(other, "update")
    window(method)
    window(other)
    assert same(actor_weights(shop), dict(other.parts.actor.engine.model.state_dict()))
    assert method.report == other.report


@pytest.mark.parametrize("kind", ["policy", "scorer", "scale"])
def test_fitting_scale_and_probe_sets_of_a_stale_snapshot_are_refused(home: Path, verdicts: Any, kind: str) -> None:
    method = workshop(home, "calibration.mode=average", "gate.enabled=false").method
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
    shops = [workshop(home, *PLAIN) for _ in range(3)]
    for shop in shops[1:]:
        changing(shop, "critic_fit", other_outcomes)
    for shop in shops:
        advance_to(shop.method, "qualify")
    plain, lent, own = (shop.method for shop in shops)
    assert not same(lent.parts.critics.state_dict()["critics"], plain.parts.critics.state_dict()["critics"])
    lent.parts.critics.load_state_dict(copy.deepcopy(plain.parts.critics.state_dict()))
    for method in (plain, lent, own):
        method.advance()
    names = ("r2", "r2_per_step", "r2_within", "value_spread", "value_disagreement")
    assert [plain.report[name] for name in names] == [lent.report[name] for name in names]
    assert own.report["r2"] != plain.report["r2"]


def test_validation_outcomes_do_not_reach_the_candidate(home: Path, verdicts: Any) -> None:
    shops = [workshop(home, *QUICK) for _ in range(2)]
    changing(shops[1], "head_validate", other_outcomes)
    for shop in shops:
        advance_to(shop.method, "collect")
    plain, changed = (shop.method for shop in shops)
    assert same(plain.parts.calibrator.state_dict(), changed.parts.calibrator.state_dict())
    assert plain.report["head_moment"] == changed.report["head_moment"]
    assert plain.report["signal"] != changed.report["signal"]


REPEATED = ("calibration.mode=repeated", "calibration.kappa=0.9", "calibration.weight_lr=0.03", *QUICK)


def changing_continuations(shop: Workshop, role: str) -> None:
    """From now on the outcomes of one role's continuations are others than they were."""
    rollout = shop.method.parts.rollout
    rewarded = rollout.rewarded

    def changed(scored: Trajectories) -> Trajectories:
        found = rewarded(scored)
        return other_outcomes(found) if scored.role == role and scored.probe_step_BR is not None else found

    rollout.rewarded = changed  # type: ignore[method-assign]


def test_repeated_continuations_keep_the_roles_apart(home: Path, verdicts: Any) -> None:
    """Outcomes of the anchors that validate, of the probes and of the actor never reach the weight; those that teach
    it do, and the weight of an action stays a function of what is visible."""
    shops = [workshop(home, *REPEATED) for _ in range(4)]
    changing_continuations(shops[1], "head_train")
    changing_continuations(shops[2], "head_validate")
    changing_continuations(shops[3], "probe")
    changing(shops[3], "actor", other_outcomes)
    for shop in shops:
        advance_to(shop.method, "update")
    plain, taught, validated, acted = (shop.method for shop in shops)
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
    shop = workshop(home, "calibration.continuations=3", "window.probe=0", *REPEATED)
    counts: dict[str, list[int]] = {}
    rewarded = shop.method.parts.rollout.rewarded

    def noting(scored: Trajectories) -> Trajectories:
        given = 0 if scored.probe_step_BR is None else int(scored.probe_step_BR[scored.thoughts.valid_BR].sum())
        counts.setdefault(scored.role, []).append(scored.count)
        counts.setdefault(f"{scored.role} tokens", []).append(int(scored.mask_BRT.sum()) - given)
        return rewarded(scored)

    shop.method.parts.rollout.rewarded = noting  # type: ignore[method-assign]
    advance_to(shop.method, "update")
    tally = shop.method.parts.telemetry
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
    shop = workshop(home, *REPEATED)
    advance_to(shop.method, "calibrate")
    uniforms = rng.uniforms
    monkeypatch.setattr(
        rng,
        "uniforms",
        lambda seed, role, *counter: (
            uniforms(seed, role, *counter) * 0 + 0.99 if "/step" in role else uniforms(seed, role, *counter)
        ),
    )
    changing(
        shop,
        "head_train",
        lambda record: replace(record, thoughts=replace(record.thoughts, length_BR=record.thoughts.valid_BR.long())),
    )
    with pytest.raises(RunFailed, match=r"no thought of the head_train set of window 1 lasts until its anchor: raise"):
        shop.method.advance()


def test_centred_scores_remember_the_opening_and_resume(home: Path, verdicts: Any) -> None:
    overrides = ("calibration.score_centering=true", "sampling.temperature=0.6", *PLAIN)
    shop = workshop(home, *overrides)
    window(shop.method)
    opening = actor_weights(shop)
    advance_to(shop.method, "update")
    shop.method.advance()
    assert shop.actor.centring is not None
    assert same(dict(shop.actor.centring.old.model.state_dict()), opening)
    assert not same(actor_weights(shop), opening)
    other = workshop(home, *overrides)
    other.method.load_state_dict(copy.deepcopy(shop.method.state_dict()))
    plain = workshop(home, "sampling.temperature=0.6", *PLAIN)
    plain.method.load_state_dict(copy.deepcopy({**shop.method.state_dict(), "window": shop.method.window}))
    for one in (shop, other, plain):
        while one.method.phase == "update":
            one.method.advance()
    assert same(actor_weights(shop), actor_weights(other))
    assert not same(actor_weights(shop), actor_weights(plain))


def test_the_pilot_alone_sets_the_normaliser(home: Path, verdicts: Any) -> None:
    shops = [workshop(home, *PLAIN) for _ in range(3)]
    changing(shops[1], "pilot", other_outcomes)
    changing(shops[2], "actor", other_outcomes)
    for shop in shops:
        advance_to(shop.method, "update")
    plain, pilot, actor = (shop.method for shop in shops)
    assert pilot.normaliser != plain.normaliser
    assert actor.normaliser == plain.normaliser
    assert plain.normaliser is not None
    first, second = actor.held["actor"].need("gae_2BRT")
    mask = actor.held["actor"].mask_BRT
    batch = torch.cat([first[mask], second[mask]]).double()
    # The actor's own batch is never recentred: its mean stays where its outcomes put it.
    assert float(batch.mean()) != pytest.approx(plain.normaliser.mean, abs=1e-3)


def test_the_next_scale_comes_from_its_own_disjoint_set(home: Path, verdicts: Any) -> None:
    shops = [workshop(home, *PLAIN) for _ in range(3)]
    for shop in shops:
        advance_to(shop.method, "close")
    plain, actor, scale = (shop.method for shop in shops)
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
    shop = workshop(home, *QUICK)
    seen: dict[str, set[int]] = {}

    def noting(role: str) -> Callable[[Trajectories], Trajectories]:
        def note(record: Trajectories) -> Trajectories:
            items = record.texts.items_BP.flatten().tolist()
            seen.setdefault(role, set()).update(item // 2 for item in items if item >= 0)
            return record

        return note

    roles = ("critic_fit", "qualify", "pilot", "head_train", "head_validate", "actor", "scale", "probe")
    for role in roles:
        changing(shop, role, noting(role))
    window(shop.method)
    advance_to(shop.method, "pilot")
    assert set(seen) == set(roles)
    development = {int(item) // 2 for item in shop.development.texts.items_BP.flatten().tolist() if item >= 0}
    everyone = [*seen.values(), development]
    assert sum(map(len, everyone)) == len(set().union(*everyone))


def test_the_account_adds_up(home: Path, verdicts: Any) -> None:
    verdicts(False)
    with Recorder(quiet=True) as recorder:
        shop = workshop(home, *QUICK, telemetry=recorder)
        made: dict[str, list[Trajectories]] = {}
        for role in ("critic_fit", "qualify", "pilot", "head_train", "head_validate", "actor", "scale", "probe"):
            changing(shop, role, lambda record, role=role: made.setdefault(role, []).append(record) or record)  # type: ignore[misc]
        advance_to(shop.method, "update")
        probe = shop.method.held["probe"]
        window(shop.method)
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
    shop = workshop(home, "calibration.continuations=4", "window.probe=0.5")
    window(shop.method)
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
    report = shop.method.report
    assert wanted <= set(report)
    assert len(report["r2"]) == 2
    assert [len(steps) for steps in report["r2_per_step"]] == [4, 4]
    plain: Iterable[float] = [value for value in report.values() if isinstance(value, float)]
    assert all(value == value for value in plain)
    assert shop.method.held == {}

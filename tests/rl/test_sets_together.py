"""Several sets of thoughts in the same passes: the thoughts each would have alone, and what scoring leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from stage import LAW, PLAN, Tally, gpt2, llama, rollout_of, texts
from tfive.rl.critic import FrozenBase, build_pair
from tfive.rl.critics import Critics
from tfive.rl.rollout import Draw, Rollout
from tfive.rl.sampling import Wanted, sample, sample_sets
from tfive.rl.settings import CriticSettings
from tfive.rl.trajectory import Trajectories
from tfive.tree.forward import TreeModel
from tfive.tree.gated import ReadingGates
from tfive.tree.layout import TextBatch
from tfive.tree.settings import SamplingSettings

pytestmark = pytest.mark.model

ROLES = ("critic_fit", "qualify", "actor")


@pytest.fixture
def engine() -> TreeModel:
    return TreeModel(gpt2(closing=1.5), PLAN)


def batch(number: int, rows: int) -> TextBatch:
    """Texts whose items no other batch has."""
    found = texts(rows=rows, seed=number)
    return replace(found, items_BP=torch.where(found.items_BP >= 0, found.items_BP + 100 * number, -1))


def counted(engine: TreeModel, verb: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The texts of every call of a verb from now on."""
    calls: list[int] = []
    plain: Callable[..., Any] = getattr(engine, verb)

    def noted(some: TextBatch, *given: Any, **options: Any) -> Any:
        calls.append(len(some.tokens_BS))
        return plain(some, *given, **options)

    monkeypatch.setattr(engine, verb, noted)
    return calls


def agree(left: Trajectories, right: Trajectories) -> None:
    assert left.thoughts.tokens_BRT.equal(right.thoughts.tokens_BRT)
    assert (left.role, left.window) == (right.role, right.window)
    assert left.texts.items_BP.equal(right.texts.items_BP)
    for name in ("losses_BRK", "no_thought_BR", "log_old_BRT", "states_BRTD", "scoring_BRF"):
        one, other = getattr(left, name), getattr(right, name)
        assert (one is None) == (other is None), name
        if one is not None:
            torch.testing.assert_close(one, other)


def test_sets_drawn_together_are_those_drawn_alone(engine: TreeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    given = [batch(number, rows) for number, rows in ((1, 4), (2, 1), (3, 3))]
    kept: list[dict[str, Any]] = [{"old": "none"}, {"old": "none"}, {"old": "recorded", "states": True}]
    wanted = [Wanted(some, role, 2, **own) for some, role, own in zip(given, ROLES, kept)]
    calls, passes = counted(engine, "sample", monkeypatch), counted(engine, "policy", monkeypatch)
    together = sample_sets(engine, wanted, LAW, seed=5, rows=5, snapshots={"policy": "policy-1"})
    assert (calls, passes) == ([5, 3], [3]), "small sets share passes, and the law is recorded for one of them alone"
    for one, some, role, own in zip(together, given, ROLES, kept):
        options: dict[str, Any] = {"record_old": own["old"] == "recorded", "states": own.get("states", False)}
        alone = sample(engine, some, LAW, seed=5, role=role, window=2, rows=2, scored=True, **options)
        agree(one, alone)
        assert one.snapshots == {"policy": "policy-1"}


def test_sets_of_other_shapes_are_drawn_apart(engine: TreeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted(engine, "sample", monkeypatch)
    wide = texts(rows=2, width=24, seed=3)
    sets = [Wanted(batch(1, 2), "pilot", 1), Wanted(wide, "actor", 1), Wanted(batch(2, 2), "scale", 2, longest=2)]
    found = sample_sets(engine, sets, LAW, seed=5, rows=9)
    assert calls == [2, 2, 2]
    assert [one.role for one in found] == ["pilot", "actor", "scale"]
    assert int(found[2].thoughts.length_BR.max()) == 2


@pytest.mark.parametrize("parity", [False, True])
def test_the_scoring_pass_knows_the_old_law(engine: TreeModel, parity: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    law, some = SamplingSettings(parity=parity), batch(1, 4)
    passes = counted(engine, "policy", monkeypatch)
    sets = [Wanted(some, "head_train", 2, "scored", states=True), Wanted(batch(2, 2), "pilot", 2, "none")]
    scored, other = sample_sets(engine, sets, law, seed=5, rows=4)
    assert bool(passes) == parity, "in parity mode the law is the training forward's"
    recorded = sample(engine, some, law, seed=5, role="head_train", window=2, rows=4, scored=True, states=True)
    agree(scored, recorded)
    assert float(scored.need("log_old_BRT").abs().sum()) > 0
    assert other.log_old_BRT is None
    if parity:
        assert scored.need("log_old_BRT").equal(scored.thoughts.log_q_BRT)


def test_sampling_and_scoring_leave_the_activations_critics_stand_on() -> None:
    engine = TreeModel(llama(torch.float64), PLAN)
    sets = [Wanted(batch(1, 3), "pilot", 1, "none", lower=True), Wanted(batch(2, 2), "scale", 1, "none")]
    found, without = sample_sets(engine, sets, LAW, seed=5, rows=2, below=2)
    read = engine.lower(found.texts, found.thoughts, 2).hidden_BND
    layout = engine._grow(found.texts, found.thoughts)
    torch.testing.assert_close(found.need("lower_BND")[layout.kind_BN >= 0], read[layout.kind_BN >= 0])
    assert without.lower_BND is None
    assert engine.score(found.texts, found.thoughts).lower_BND is None


def on_policy(engine: TreeModel, adapt: str) -> tuple[Rollout, Critics]:
    """A rollout whose sets bring what critics of one block, or probes below it, stand on."""
    settings = CriticSettings(adapt=adapt, blocks=1, width=8, features="policy", minibatches=2)
    base = FrozenBase(engine.model, engine.plan, settings, policy=engine)
    pair = build_pair(llama(torch.float64, seed=4), engine.plan, settings, seed=1)
    rollout = rollout_of(engine)
    rollout.below = base.below
    return rollout, Critics(base, [one.double() for one in pair], settings, alpha=1.0, seed=2, rows=2, read_rows=3)


@pytest.mark.parametrize("adapt", ["probe", "top"])
def test_critics_on_the_policys_features_make_no_pass_for_them(adapt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TreeModel(llama(torch.float64), PLAN)
    rollout, critics = on_policy(engine, adapt)
    read = counted(engine, "lower", monkeypatch)
    drawn = rollout.collect("critic_fit", 1)
    values = critics.evaluate(drawn).values_2BRT
    losses = critics.fit_pass(drawn, None, 1, 0, warmup=True)
    assert not read
    again, other = on_policy(engine, adapt)
    plain = replace(again.collect("critic_fit", 1), lower_BND=None)
    torch.testing.assert_close(other.evaluate(plain).values_2BRT, values)
    assert other.fit_pass(plain, None, 1, 0, warmup=True) == pytest.approx(losses)
    assert read


def test_the_actors_law_may_come_from_scoring_too(engine: TreeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = rollout_of(engine).collect("actor", 1)
    passes, rollout = counted(engine, "policy", monkeypatch), rollout_of(engine)
    rollout.old_law = "scored"
    agree(rollout.collect("actor", 1), recorded)
    assert not passes


def test_a_set_drawn_ahead_is_handed_out_once_and_survives_saving(engine: TreeModel) -> None:
    rollout, alone = rollout_of(engine), rollout_of(engine)
    first = rollout.collect("critic_fit", 1, ahead=[Draw("qualify", 1), Draw("actor", 1, states=True)])
    wanted = [alone.collect(role, 1, states=role == "actor") for role in ROLES]
    agree(first, wanted[0])
    tally = rollout.telemetry
    assert isinstance(tally, Tally)
    assert set(tally.amounts) == {"critic_fit"}, "a set is counted when it is used"
    other = rollout_of(engine)
    other.load_state_dict(rollout.state_dict())
    for one, expected in zip((rollout.collect("qualify", 1), other.collect("actor", 1)), wanted[1:]):
        agree(one, expected)
        assert one.need("returns_BRT").equal(expected.need("returns_BRT"))
    assert not rollout.collect("qualify", 2).thoughts.tokens_BRT.equal(wanted[1].thoughts.tokens_BRT)


def test_no_set_is_drawn_ahead_that_waits_already(engine: TreeModel) -> None:
    rollout = rollout_of(engine)
    rollout.collect("critic_fit", 1, ahead=[Draw("qualify", 1)])
    assert not rollout.draw_ahead(Draw("qualify", 1))


@pytest.mark.parametrize("opened", [0.0, 0.5])
def test_the_law_of_gated_readers_is_recorded_whatever_their_gates_are(
    opened: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes without the actor do not know whether its gates are open, and all must make the same passes."""
    model = llama()
    gates = ReadingGates.of(model)
    for parameter in gates.parameters():
        parameter.data.fill_(opened)
    engine = TreeModel(model, replace(PLAN, gated=True), None, None, gates)
    assert engine.unread == (opened == 0)
    passes = counted(engine, "policy", monkeypatch)
    sample_sets(engine, [Wanted(batch(1, 2), "head_train", 2, "scored", states=True)], LAW, seed=5, rows=4)
    assert passes == [2]

"""Fresh trajectories: rewards by a literal loop over checkpoints, a scale from other sets, and every way to stop."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

from stage import CLOSE, FIXED, PLAN, PlainModel, Shelf, Tally, gpt2, items_of, rollout_of, say_only, texts
from tfive.errors import RunFailed
from tfive.rl.continuations import continued
from tfive.rl.rollout import Rollout
from tfive.rl.settings import OLD_LAW
from tfive.rl.snapshots import WrongSnapshot
from tfive.rl.trajectory import Trajectories
from tfive.tree.forward import TreeModel
from tfive.tree.layout import TextBatch, ThoughtPlan

pytestmark = pytest.mark.model


def many(number: int) -> TextBatch:
    """Seventeen thoughts: enough to call a policy collapsed."""
    return texts(rows=6, count=3, width=30, seed=number)


def on(model: PreTrainedModel, plan: ThoughtPlan = PLAN) -> Rollout:
    return rollout_of(TreeModel(model, plan), many)


@pytest.fixture(scope="module")
def rollout() -> Rollout:
    return on(gpt2(closing=1.5))


@pytest.fixture(scope="module")
def actor_set(rollout: Rollout) -> Trajectories:
    return rollout.collect("actor", 1)


def test_rewards_are_a_loop_over_checkpoints(rollout: Rollout, actor_set: Trajectories) -> None:
    sigma, clip = rollout.scale.value, rollout.reward.clip
    assert sigma == pytest.approx(0.5)
    plain, lengths = PlainModel(rollout.engine.model), set()
    for item in items_of(actor_set.texts, actor_set.thoughts):
        losses = plain.checkpoints(item)
        l_0 = float(-plain.without(item).mean().detach())
        rewards, before, previous = [0.0] * PLAN.length, [0.0] * PLAN.length, 0.0
        for step in range(1, len(item.thought) + 1):
            before[step - 1] = previous
            if step in losses:
                potential = min(max((l_0 - losses[step]) / sigma, -clip), clip)
                rewards[step - 1] = potential - previous
                previous = potential
        returns = [sum(rewards[step:]) if step < len(item.thought) else 0.0 for step in range(PLAN.length)]
        at = (item.row, item.branch)
        length = len(item.thought)
        assert actor_set.need("rewards_BRT")[at].tolist() == pytest.approx(rewards, abs=1e-6)
        assert actor_set.need("returns_BRT")[at].tolist() == pytest.approx(returns, abs=1e-6)
        assert actor_set.need("potentials_BRT")[at][:length].tolist() == pytest.approx(before[:length], abs=1e-6)
        lengths.add(length)
    assert lengths == {1, 2, 3, 4}
    assert (actor_set.need("rewards_BRT")[~actor_set.mask_BRT] == 0).all()


def test_rewards_may_be_held_against_thoughts_of_other_texts() -> None:
    rollout = on(gpt2(closing=1.5))
    rollout.reward = rollout.reward.model_copy(update={"reference": "foreign"})
    found, plain = rollout.collect("actor", 1), PlainModel(rollout.engine.model)
    items = list(items_of(found.texts, found.thoughts))
    most = max(sum(other.row == item.row for other in items) for item in items)
    apart, gains = 0.0, []
    for number, item in enumerate(items):
        donor = items[(number + most) % len(items)]
        assert donor.row != item.row
        lent = replace(item, thought=donor.thought, closed=donor.closed)
        reference, own = (float(-plain.after(one).mean().detach()) for one in (lent, item))
        at = (item.row, item.branch)
        assert float(found.reference_BR[at]) == pytest.approx(reference, abs=1e-6)
        total = min(max((reference - own) / rollout.scale.value, -rollout.reward.clip), rollout.reward.clip)
        assert float(found.need("returns_BRT")[at][0]) == pytest.approx(total, abs=1e-5)
        apart = max(apart, abs(reference - float(found.need("no_thought_BR")[at])))
        gains.append(reference - own)
    assert apart > 1e-3
    tally = rollout.telemetry
    assert isinstance(tally, Tally)
    before = on(gpt2(closing=1.5))
    earlier = before.telemetry
    assert isinstance(earlier, Tally)
    same = before.collect("actor", 1)
    assert same.foreign_BR is None
    assert same.thoughts.tokens_BRT.equal(found.thoughts.tokens_BRT)
    assert same.gain_BR.equal(found.gain_BR), "what a thought gains is told against no thought, whatever is rewarded"
    more = tally.amounts["actor"]["scored_tokens"] - earlier.amounts["actor"]["scored_tokens"]
    assert more == len(items) * PLAN.horizon
    rollout.scale = type(rollout.scale)(0.9, 1e-8)
    assert rollout.update_scale(found) == pytest.approx(math.sqrt(sum(g**2 for g in gains) / len(gains) + 1e-8))
    begun = continued(before, replace(found, snapshots=same.snapshots), 3)
    assert begun.reference_BR[:, 0].equal(found.reference_BR[:, 0])


def one_row(count: int) -> Callable[[int], TextBatch]:
    return lambda _: texts(rows=1, count=count, width=30)


def test_a_foreign_reference_of_a_single_text_is_the_thought_of_the_place_before() -> None:
    for count in (3, 1):
        alone = rollout_of(TreeModel(gpt2(), PLAN), one_row(count))
        alone.reward = alone.reward.model_copy(update={"reference": "foreign"})
        if count == 1:
            with pytest.raises(RunFailed, match=r"one thought and no other; raise window\.items or window\.pilot"):
                alone.collect("pilot", 1)
            continue
        found, plain = alone.collect("pilot", 1), PlainModel(alone.engine.model)
        items = list(items_of(found.texts, found.thoughts))
        for item, donor in zip(items, [items[-1], *items[:-1]]):
            lent = replace(item, thought=donor.thought, closed=donor.closed)
            wanted = float(-plain.after(lent).mean().detach())
            assert float(found.reference_BR[item.row, item.branch]) == pytest.approx(wanted, abs=1e-6)


def test_potentials_are_clipped_once_each(rollout: Rollout, actor_set: Trajectories) -> None:
    narrow = on(gpt2())
    narrow.scale.load_state_dict({**narrow.scale.state_dict(), "moment": 1e-6})
    rewarded = narrow.rewarded(narrow.collect("actor", 1, rewarded=False))
    totals = rewarded.need("rewards_BRT").sum(-1)[rewarded.thoughts.valid_BR]
    assert (totals.abs() == narrow.reward.clip).all()
    assert rewarded.need("rewards_BRT").abs().max() <= 2 * narrow.reward.clip


def test_the_scale_follows_the_sets_it_is_given(actor_set: Trajectories) -> None:
    rollout = on(gpt2())
    fresh = type(rollout.scale)(0.9, 1e-8)
    rollout.scale = fresh
    sets = [rollout.collect("scale", window, rewarded=False) for window in (1, 2)]
    moments = []
    for one in sets:
        gains = [float(one.gain_BR[row, branch]) for row, branch in one.thoughts.valid_BR.nonzero().tolist()]
        moments.append(sum(gain**2 for gain in gains) / len(gains))
    assert rollout.update_scale(sets[0]) == pytest.approx(math.sqrt(moments[0] + 1e-8))
    assert rollout.update_scale(sets[1]) == pytest.approx(math.sqrt(0.9 * moments[0] + 0.1 * moments[1] + 1e-8))


def test_a_new_scale_touches_no_record_and_marks_it_stale(rollout: Rollout) -> None:
    first = rollout.collect("actor", 2)
    kept = {name: getattr(first, name).clone() for name in ("rewards_BRT", "returns_BRT", "potentials_BRT")}
    rollout.update_scale(rollout.collect("scale", 2, rewarded=False))
    assert all(getattr(first, name).equal(tensor) for name, tensor in kept.items())
    with pytest.raises(WrongSnapshot, match="scale"):
        rollout.snapshots.require(first.snapshots, ("scale",), what="the actor set")
    again = rollout.rewarded(first)
    assert not again.need("rewards_BRT").equal(kept["rewards_BRT"])
    rollout.snapshots.require(again.snapshots, ("policy", "scorer", "scale"), what="the actor set")


@pytest.mark.parametrize("kind", ["policy", "scorer"])
def test_records_of_another_policy_or_scorer_are_refused(kind: str) -> None:
    rollout = on(gpt2())
    scored = rollout.collect("actor", 1, rewarded=False)
    rollout.snapshots.renew(kind)
    with pytest.raises(WrongSnapshot, match="actor set"):
        rollout.rewarded(scored)
    with pytest.raises(WrongSnapshot, match="actor set"):
        rollout.update_scale(scored)


def test_every_draw_has_numbers_of_its_own() -> None:
    same = rollout_of(TreeModel(gpt2(), PLAN))
    shelf = Shelf(lambda number: texts())
    shelf.draw = lambda role, window, attempt=0: texts()  # type: ignore[method-assign]
    same.ledger = shelf  # type: ignore[assignment]
    draws = [("actor", 1, 0), ("actor", 1, 1), ("pilot", 1, 0), ("actor", 2, 0)]
    tokens = [same.collect(*draw).thoughts.tokens_BRT for draw in draws]
    assert all(not a.equal(b) for i, a in enumerate(tokens) for b in tokens[:i])
    assert same.collect("actor", 1).thoughts.tokens_BRT.equal(tokens[0])


def test_the_account_counts_what_was_made() -> None:
    rollout = on(gpt2())
    tally = rollout.telemetry
    assert isinstance(tally, Tally)
    sets = {role: rollout.collect(role, 1) for role in ("actor", "pilot", "probe")}
    for role, one in sets.items():
        items = list(items_of(one.texts, one.thoughts))
        tokens = sum(len(item.thought) for item in items)
        # Without a thought, and after every checkpoint below the thought's end and at it.
        scored = sum(2 + sum(tau < len(item.thought) for tau in PLAN.checkpoints) for item in items) * PLAN.horizon
        assert tally.amounts["extra" if role == "probe" else role] == {
            "trajectories": len(items),
            "generated_tokens": tokens,
            "actor_tokens": tokens if role == "actor" else 0,
            "scored_tokens": scored,
        }
        assert (one.log_old_BRT is None) == (OLD_LAW.get(role) == "none")
        assert one.snapshots == rollout.snapshots.current("policy", "scorer", "scale")


def test_thoughts_that_are_all_alike_stop_the_run() -> None:
    with pytest.raises(RunFailed, match="all 17 thoughts of the actor set of window 3 are identical"):
        on(say_only(12), FIXED).collect("actor", 3)


def test_thoughts_that_all_end_at_once_stop_the_run() -> None:
    with pytest.raises(RunFailed, match="every thought of the pilot set of window 1 ends at once"):
        on(say_only(CLOSE)).collect("pilot", 1)


def test_a_few_alike_thoughts_do_not() -> None:
    few = rollout_of(TreeModel(say_only(12), FIXED), lambda number: texts(rows=2, count=1, seed=number))
    assert few.collect("actor", 1).thoughts.tokens_BRT.unique().tolist() == [12]


def test_losses_that_are_no_numbers_stop_the_run() -> None:
    model = gpt2()
    with torch.no_grad():
        model.transformer.ln_f.weight[0] = float("nan")
    with pytest.raises(RunFailed, match="scale set of window 1 has continuation losses that are not finite"):
        on(model).collect("scale", 1, rewarded=False)


def test_a_scorer_that_ignores_thoughts_stops_the_run() -> None:
    model = gpt2(tied=False)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    rollout = on(model)
    rollout.scale = type(rollout.scale)(0.9, 1e-8)
    with pytest.raises(RunFailed, match=r"reward scale .*ignores thoughts"):
        rollout.update_scale(rollout.collect("scale", 1, rewarded=False))


def test_the_scale_survives_a_checkpoint(rollout: Rollout) -> None:
    other = on(gpt2())
    other.load_state_dict(rollout.state_dict())
    assert other.scale.state_dict() == rollout.scale.state_dict()

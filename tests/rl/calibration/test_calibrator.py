"""Who may read what: the inputs of both heads under every change they must not notice, bit for bit."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from calibration_world import (
    NORMALISER,
    World,
    all_data,
    equal,
    other_actions,
    other_outcomes,
    other_scoring_text,
    shorter,
)
from torch import Tensor

from pretended_graphs import PretendedGraphs
from stage import PLAN, V
from tfive.rl.calibration.mean import MeanResponse, regress_mean
from tfive.rl.calibration.mixture import FixedWeight, LearnedWeight, Minimum, fixed_mixture
from tfive.rl.calibration.moments import CalibrationData
from tfive.rl.calibration.saddle import Candidate
from tfive.rl.continuations import continued
from tfive.rl.critics import CriticValues
from tfive.rl.trajectory import Trajectories

pytestmark = pytest.mark.model


def test_the_weight_reads_no_outcome(world: World) -> None:
    calibrator = world.calibrator()
    record, judged = world.made()
    before = calibrator.weight_inputs(record, judged)
    assert all(equal(before, calibrator.weight_inputs(other_outcomes(record), judged)).values())
    mixture = LearnedWeight(calibrator.weight_head)
    weights = [
        calibrator.advantage(one, judged, NORMALISER, mixture) for one in (record, other_outcomes(record))
    ]  # fmt: skip
    assert weights[0].need("weight_BRT").equal(weights[1].need("weight_BRT"))
    assert not weights[0].need("advantage_BRT").equal(weights[1].need("advantage_BRT"))


@pytest.mark.parametrize("change", [other_actions, shorter])
@pytest.mark.parametrize("step", [1, 2, 3])
def test_the_weight_reads_no_later_action(world: World, data: CalibrationData, step: int, change: Any) -> None:
    calibrator = world.calibrator()
    after = all_data(world, calibrator, None, change(world, step))
    # Action `step` is the first that differs: weights of the actions before it stay.
    assert all(equal(data.weight_inputs, after.weight_inputs, step).values())
    later = equal(data.weight_inputs, after.weight_inputs, step + 1)
    assert not later["action_NTE"]
    assert not later["log_prob_NT"]
    head = calibrator.weight_head
    with torch.no_grad():
        assert head(data.weight_inputs)[:, :step].equal(head(after.weight_inputs)[:, :step])
        assert not head(data.weight_inputs)[:, step].equal(head(after.weight_inputs)[:, step])


def test_the_weight_reads_no_scoring_text(world: World, data: CalibrationData) -> None:
    calibrator = world.calibrator()
    after = all_data(world, calibrator, other_scoring_text(world))
    assert all(equal(data.weight_inputs, after.weight_inputs).values())
    assert calibrator.weight_head(data.weight_inputs).equal(calibrator.weight_head(after.weight_inputs))
    assert not data.first_NT.equal(after.first_NT)


@pytest.mark.parametrize("change", [other_actions, shorter])
@pytest.mark.parametrize("step", [0, 1, 2, 3])
def test_the_mean_reads_neither_the_action_nor_what_follows(
    world: World, data: CalibrationData, step: int, change: Any
) -> None:
    calibrator = world.calibrator()
    after = all_data(world, calibrator, None, change(world, step))
    assert all(equal(data.mean_inputs, after.mean_inputs, step + 1).values())
    with torch.no_grad():
        left, right = (calibrator.mean_head(one.mean_inputs)[:, : step + 1] for one in (data, after))
    assert left.equal(right)
    if step + 1 < PLAN.length:
        assert not equal(data.mean_inputs, after.mean_inputs, step + 2)["prefix_NTD"]
    assert not data.first_NT.equal(after.first_NT)


M = 3


def test_the_mean_head_sees_what_rewards_are_held_against(world: World, data: CalibrationData) -> None:
    made, judged = world.made()
    valid_BR = made.thoughts.valid_BR
    assert data.mean_inputs.scoring_NTF[:, 0, -1].allclose(made.need("no_thought_BR")[valid_BR].float())
    foreign_BR = torch.arange(valid_BR.numel(), dtype=torch.float32).view(valid_BR.shape)
    other = world.calibrator().data(made.having(foreign_BR=foreign_BR), judged, NORMALISER).mean_inputs
    assert other.scoring_NTF[:, 0, -1].equal(foreign_BR[valid_BR])
    assert other.scoring_NTF[..., :-1].equal(data.mean_inputs.scoring_NTF[..., :-1])


@pytest.fixture(scope="module")
def anchors(world: World) -> tuple[Trajectories, CriticValues]:
    """Three continuations of a prefix of each thought, as repeated-prefix calibration reads them."""
    rewarded = continued(world.rollout, world.rollout.collect("head_validate", 1), M)
    judged = world.critics.evaluate(rewarded)
    return world.critics.advantages(rewarded, judged), judged


def test_an_anchors_continuations_stand_side_by_side(world: World, anchors: tuple[Trajectories, CriticValues]) -> None:
    record, judged = anchors
    data = world.calibrator(mode="repeated", continuations=M).data(record, judged, NORMALISER)
    expected = []
    for row, branch in record.thoughts.valid_BR.nonzero().tolist():
        step = int(record.need("probe_step_BR")[row, branch])
        gaes = [(float(gae[row, branch, step]) - 0.1) / 0.7 for gae in record.need("gae_2BRT")]
        log_old = float(record.need("log_old_BRT")[row, branch, step])
        expected.append([*gaes, log_old, step / PLAN.length, float(record.need("potentials_BRT")[row, branch, step])])
    wanted = torch.tensor(expected).view(-1, M, 5)
    found = [data.first_NT, data.second_NT, data.weight_inputs.log_prob_NT, data.weight_inputs.time_NT]
    found.append(data.mean_inputs.potential_NT)
    torch.testing.assert_close(torch.stack(found, -1), wanted, rtol=1e-5, atol=1e-6)
    assert data.occupation.mask_NT.all()
    assert data.occupation.horizon == M
    assert data.occupation.count == record.count // M > 5
    # Everything known before the action is the same for all continuations of an anchor; the actions are not.
    for name, tensor in vars(data.mean_inputs).items():
        torch.testing.assert_close(tensor, tensor[:, :1].expand_as(tensor), rtol=1e-4, atol=1e-4, msg=name)
    assert not data.weight_inputs.log_prob_NT[:, 0].equal(data.weight_inputs.log_prob_NT[:, 1])
    rows = [row for row, _ in record.thoughts.valid_BR.nonzero().tolist()][::M]
    assert data.occupation.text_N.tolist() == [int(record.texts.items_BP[row].max()) for row in rows]


def test_a_repeated_weight_reads_no_outcome(world: World, anchors: tuple[Trajectories, CriticValues]) -> None:
    record, judged = anchors
    calibrator = world.calibrator(mode="repeated", continuations=M, kappa=0.9)
    before, after = (calibrator.data(one, judged, NORMALISER) for one in (record, other_outcomes(record)))
    assert all(equal(before.weight_inputs, after.weight_inputs).values())
    assert not before.first_NT.equal(after.first_NT)
    candidate = calibrator.learn(before, 1)
    assert candidate.mean_head is None
    head = LearnedWeight(calibrator.weight_head)
    assert head.weight(before.weight_inputs).equal(head.weight(after.weight_inputs))
    # Outcomes teach the weight and nothing else: with others, the same head learns something else.
    other = world.calibrator(mode="repeated", continuations=M, kappa=0.9)
    other.learn(after, 1)
    assert not head.weight(before.weight_inputs).equal(LearnedWeight(other.weight_head).weight(before.weight_inputs))


def test_a_repeated_weight_reads_nothing_after_its_action(
    world: World, anchors: tuple[Trajectories, CriticValues]
) -> None:
    record, judged = anchors
    calibrator = world.calibrator(mode="repeated", continuations=M)
    step_BR1 = record.need("probe_step_BR")[..., None]
    later_BRT = (torch.arange(PLAN.length) > step_BR1) & record.mask_BRT & (record.thoughts.tokens_BRT >= 10)
    tokens_BRT = torch.where(later_BRT, (record.thoughts.tokens_BRT - 9) % (V - 10) + 10, record.thoughts.tokens_BRT)
    assert not tokens_BRT.equal(record.thoughts.tokens_BRT)
    changed = replace(record, thoughts=replace(record.thoughts, tokens_BRT=tokens_BRT))
    before, after = (calibrator.weight_inputs(one, world.critics.evaluate(one)) for one in (record, changed))
    at = torch.arange(record.count), record.need("probe_step_BR")[record.thoughts.valid_BR]
    assert all(getattr(before, name)[at].equal(getattr(after, name)[at]) for name in vars(before))
    assert not before.prefix_NTD.equal(after.prefix_NTD)
    short = replace(record, thoughts=replace(record.thoughts, length_BR=record.need("probe_step_BR")))
    with pytest.raises(ValueError, match="ends before the step"):
        calibrator.data(short, judged, NORMALISER)


def test_the_mean_reads_no_log_probability_and_no_later_outcome(world: World) -> None:
    calibrator = world.calibrator()
    record, judged = world.made()
    before = calibrator.data(record, judged, NORMALISER)
    changed = record.having(log_old_BRT=record.need("log_old_BRT") - 1)
    others: dict[str, Any] = {name: changed.need(name) * -3 for name in ("rewards_BRT", "returns_BRT", "gae_2BRT")}
    changed = changed.having(**others)
    after = calibrator.data(changed, judged, NORMALISER)
    assert all(equal(before.mean_inputs, after.mean_inputs).values())
    assert not before.weight_inputs.log_prob_NT.equal(after.weight_inputs.log_prob_NT)
    assert not before.first_NT.equal(after.first_NT)


def test_the_mean_reads_the_scoring_text_and_its_visible_side_does_not(world: World, data: CalibrationData) -> None:
    calibrator = world.calibrator()
    after = all_data(world, calibrator, other_scoring_text(world))
    same = equal(data.mean_inputs, after.mean_inputs)
    assert {name for name, is_same in same.items() if not is_same} == {"scoring_NTF", "potential_NT"}
    assert all(equal(data.mean_inputs.visible(), after.mean_inputs.visible()).values())
    with torch.no_grad():
        left, right = (calibrator.mean_head(one.mean_inputs.visible()) for one in (data, after))
        assert left.equal(right)
        assert not calibrator.mean_head(data.mean_inputs).equal(calibrator.mean_head(after.mean_inputs))


def test_a_learned_candidate_keeps_to_the_same_rules(
    world: World, data: CalibrationData, easy: CalibrationData
) -> None:
    calibrator = world.calibrator()
    candidate = calibrator.learn(easy, 1)
    assert isinstance(candidate.mixture, LearnedWeight)
    later = all_data(world, calibrator, None, other_actions(world, 2))
    weight = candidate.mixture.weight
    assert weight(data.weight_inputs)[:, :2].equal(weight(later.weight_inputs)[:, :2])
    response = candidate.mean_head
    assert response is not None
    assert response(data.mean_inputs)[:, :3].equal(response(later.mean_inputs)[:, :3])
    hidden = all_data(world, calibrator, other_scoring_text(world))
    assert weight(data.weight_inputs).equal(weight(hidden.weight_inputs))
    assert not response(data.mean_inputs).equal(response(hidden.mean_inputs))
    # Nothing of the frozen candidate moves when the heads learn on.
    before = weight(data.weight_inputs)
    calibrator.learn(easy, 2)
    assert weight(data.weight_inputs).equal(before)


def test_a_state_only_weight_does_not_read_the_action(
    world: World, data: CalibrationData, easy: CalibrationData
) -> None:
    calibrator = world.calibrator(mode="state")
    mixture = calibrator.learn(easy, 1).mixture
    assert isinstance(mixture, LearnedWeight)
    assert mixture.name == "state"
    inputs = data.weight_inputs
    changed = replace(inputs, action_NTE=inputs.action_NTE * -2, log_prob_NT=inputs.log_prob_NT - 1)
    assert mixture.weight(inputs).equal(mixture.weight(changed))
    learned = world.calibrator().learn(easy, 1).mixture
    assert not learned.weight(inputs).equal(learned.weight(changed))


def test_inputs_are_where_they_belong(world: World) -> None:
    """Values, features, potentials and time against the tensors they come from, thought by thought."""
    calibrator = world.calibrator()
    record, judged = world.made()
    data = calibrator.data(record, judged, NORMALISER)
    engine, embedding = world.rollout.engine, world.rollout.engine.model.get_input_embeddings()
    policy_BRTD = engine.features(record.texts, record.thoughts)
    visible, context, mask = data.weight_inputs, data.mean_inputs, record.mask_BRT
    for number, (row, branch) in enumerate(record.thoughts.valid_BR.nonzero().tolist()):
        for t in range(int(record.thoughts.length_BR[row, branch])):
            at = (row, branch, t)
            features = [policy_BRTD[at], *judged.features_2BRTE[:, row, branch, t]]
            torch.testing.assert_close(visible.prefix_NTD[number, t], torch.cat(features))
            assert visible.value_NT2[number, t].equal(judged.values_2BRT[:, row, branch, t])
            assert visible.time_NT[number, t] == t / 4
            assert context.remaining_NT[number, t] == 1 - t / 4
            assert context.potential_NT[number, t] == record.need("potentials_BRT")[at]
            assert visible.action_NTE[number, t].equal(embedding(record.thoughts.tokens_BRT[at]))
            assert visible.log_prob_NT[number, t] == record.need("log_old_BRT")[at]
            for side, gae in zip((data.first_NT, data.second_NT), record.need("gae_2BRT")):
                assert float(side[number, t]) == pytest.approx((float(gae[at]) - 0.1) / 0.7, rel=1e-5)
    assert data.occupation.mask_NT.equal(mask[record.thoughts.valid_BR])
    owner = record.thoughts.valid_BR.nonzero()[:, 0]
    assert (data.occupation.text_N[:, None] == data.occupation.text_N).equal(owner[:, None] == owner)
    assert data.occupation.horizon == PLAN.length


@pytest.mark.parametrize("rule", ["average", "single", "minimum", "learned"])
def test_the_mixed_advantage_by_hand(world: World, rule: str) -> None:
    calibrator = world.calibrator()
    record, judged = world.made()
    mixture = fixed_mixture(rule) or LearnedWeight(calibrator.weight_head)
    found = calibrator.advantage(record, judged, NORMALISER, mixture)
    inputs = calibrator.weight_inputs(record, judged)
    weight_NT = mixture.weight(inputs)
    number = -1
    for row, branch in torch.ones_like(record.thoughts.valid_BR).nonzero().tolist():
        valid = bool(record.thoughts.valid_BR[row, branch])
        number += valid
        for t in range(PLAN.length):
            at = (row, branch, t)
            if not record.mask_BRT[at]:
                assert found.need("advantage_BRT")[at] == found.need("weight_BRT")[at] == 0
                continue
            first, second = ((float(gae[at]) - 0.1) / 0.7 for gae in record.need("gae_2BRT"))
            if isinstance(mixture, Minimum):
                expected = min(first, second)
            else:
                assert weight_NT is not None
                w = float(weight_NT[number, t])
                expected = w * first + (1 - w) * second
                assert float(found.need("weight_BRT")[at]) == pytest.approx(w)
            assert float(found.need("advantage_BRT")[at]) == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert not found.need("advantage_BRT").requires_grad


@pytest.mark.parametrize("rule", ["minimum", "learned"])
def test_advantages_are_mixed_a_few_texts_at_a_time(world: World, monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    """What the weight reads of many thoughts is large: a pass of texts at a time, half as many where memory ends."""
    record, judged = world.made()
    whole, halved = world.calibrator(), world.calibrator()
    mixture = fixed_mixture(rule) or LearnedWeight(whole.weight_head)
    texts = len(record.mask_BRT)
    whole.passes.rows = halved.passes.rows = texts
    expected = whole.advantage(record, judged, NORMALISER, mixture)
    read, sizes, said = halved._weight_inputs, [], list[str]()

    def tight(some: Trajectories, values: CriticValues, at: Any) -> Any:
        sizes.append(len(some.mask_BRT))
        if sizes[-1] > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        assert values.values_2BRT.shape[1] == sizes[-1]
        return read(some, values, at)

    monkeypatch.setattr(halved, "_weight_inputs", tight)
    halved.passes.tell = said.append
    found = halved.advantage(record, judged, NORMALISER, mixture)
    assert texts > 2
    assert sizes[0] == texts
    fitting = sizes[next(n for n, size in enumerate(sizes) if size <= 2) :]
    assert (max(fitting), sum(fitting)) == (halved.passes.rows, texts)
    assert len(said) == 1
    for name in ("advantage_BRT", "weight_BRT"):
        torch.testing.assert_close(found.need(name), expected.need(name), rtol=1e-6, atol=1e-7)
    assert found.states_BRTD is None


def test_advantages_read_no_features_with_gradients(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets without states, as the probes', are read again; a graph of them would be kept for nothing."""
    record, judged = world.made()
    calibrator, engine, graphs = world.calibrator(), world.rollout.engine, list[bool]()
    assert record.states_BRTD is None
    features = engine.features
    trained = [weight for weight in engine.model.parameters() if weight.requires_grad]

    def seen(*given: Any) -> Tensor:
        graphs.append(torch.is_grad_enabled())
        return features(*given)

    monkeypatch.setattr(engine, "features", seen)
    for weight in engine.model.parameters():
        weight.requires_grad_(True)
    try:
        calibrator.advantage(record, judged, NORMALISER, LearnedWeight(calibrator.weight_head))
    finally:
        engine.model.requires_grad_(False)
        for weight in trained:
            weight.requires_grad_(True)
    assert graphs
    assert not any(graphs)


def test_offsets_are_split_and_leave_the_heads_alone(world: World, data: CalibrationData) -> None:
    calibrator = world.calibrator()
    calibrator.learn(data, 1)
    mixture = FixedWeight(0.9, "leaning")
    before = {name: tensor.clone() for name, tensor in calibrator.mean_head.state_dict().items()}
    found = calibrator.offsets(data, mixture, 1)
    assert all(tensor.equal(before[name]) for name, tensor in calibrator.mean_head.state_dict().items())
    for name in ("mixture", "average"):
        total, visible, hidden = (found[f"cross_fit_{name}{end}"] for end in ("", "_visible", "_hidden"))
        assert hidden == pytest.approx(total - visible, abs=1e-9)
        assert found[f"cross_fit_{name}_error"] > 0
    assert found["cross_fit_mixture"] != found["cross_fit_average"]
    assert calibrator.offsets(data, mixture, 1) == found
    same = calibrator.offsets(data, FixedWeight(), 1)
    assert same["cross_fit_mixture"] == same["cross_fit_average"] == found["cross_fit_average"]


@pytest.mark.parametrize(("mixture", "fits"), [(FixedWeight(0.9, "leaning"), 12), (FixedWeight(), 8)])
def test_no_cross_fit_is_made_twice(
    world: World, data: CalibrationData, monkeypatch: pytest.MonkeyPatch, mixture: FixedWeight, fits: int
) -> None:
    made: list[int] = []

    def counted(*given: Any) -> Any:
        made.append(1)
        return regress_mean(*given)

    monkeypatch.setattr("tfive.rl.calibration.mean.regress_mean", counted)
    calibrator = world.calibrator()
    calibrator.learn(data, 1)
    made.clear()
    found = calibrator.offsets(data, mixture, 1)
    # Two folds, all inputs and visible ones: the average, the mixture unless it is the average, and the change.
    assert len(made) == fits
    alone = calibrator.changes(data, mixture, 1)
    assert {name: found[name] for name in alone if name != "cross_fit_updates"} == {
        name: value for name, value in alone.items() if name != "cross_fit_updates"
    }


def test_heads_and_multiplier_are_the_next_windows_start(world: World, easy: CalibrationData) -> None:
    first, second = world.calibrator(), world.calibrator()
    fresh = {name: tensor.clone() for name, tensor in second.weight_head.state_dict().items()}
    candidate = first.learn(easy, 1)
    assert first.multiplier == candidate.multiplier
    assert not all(tensor.equal(fresh[name]) for name, tensor in first.weight_head.state_dict().items())
    second.load_state_dict(first.state_dict())
    again, there = first.learn(easy, 2), second.learn(easy, 2)
    assert again.multiplier == there.multiplier
    assert again.trace == there.trace
    weights: list[Tensor] = [one.mixture.weight(easy.weight_inputs) for one in (again, there)]
    assert weights[0].equal(weights[1])


def moved(data: CalibrationData) -> CalibrationData:
    """The same with inputs of other moments."""
    visible, context = data.weight_inputs, data.mean_inputs
    return replace(
        data,
        weight_inputs=replace(visible, prefix_NTD=5 * visible.prefix_NTD + 2, action_NTE=visible.action_NTE - 3),
        mean_inputs=replace(context, prefix_NTD=5 * context.prefix_NTD + 2, scoring_NTF=4 * context.scoring_NTF - 1),
    )


@pytest.mark.parametrize("graphs", [None, PretendedGraphs()])
@pytest.mark.parametrize("before", [False, True])
def test_sets_are_learned_apart_from_the_same_heads(
    world: World, easy: CalibrationData, graphs: PretendedGraphs | None, before: bool
) -> None:
    together, apart = world.calibrator(), world.calibrator()
    together.graphs = graphs
    other = moved(easy)
    for one in (together, apart):
        if before:
            one.learn(easy, 1)
    start = copy.deepcopy(apart.state_dict())
    found = together.learn_apart([other, easy], 2)
    expected, offsets = list[Candidate](), list[dict[str, float]]()
    for data in (other, easy):
        apart.load_state_dict(start)
        expected.append(apart.learn(data, 2))
        offsets.append(apart.offsets(data, FixedWeight(0.9, "leaning"), 2))
    for mine, alone in zip(found, expected, strict=True):
        assert (mine.trace, mine.multiplier, mine.updates) == (alone.trace, alone.multiplier, alone.updates)
        assert mine.mixture.mixed(other.weight_inputs, easy.first_NT, easy.second_NT).equal(
            alone.mixture.mixed(other.weight_inputs, easy.first_NT, easy.second_NT)
        )
    # The last one's heads go on.
    assert together.multiplier == apart.multiplier
    for name in ("weight", "mean"):
        states = together.state_dict()[name], apart.state_dict()[name]
        assert all(states[0][key].equal(states[1][key]) for key in states[0])
    # What is measured of each has its own moments of inputs.
    for data, candidate, known in zip((other, easy), found, offsets, strict=True):
        assert isinstance(candidate.mean_head, MeanResponse)
        like = candidate.mean_head.average
        assert together.offsets(data, FixedWeight(0.9, "leaning"), 2, like) == known
    assert together.offsets(other, FixedWeight(0.9, "leaning"), 2) != offsets[0]


@pytest.mark.parametrize("small", [False, True])
def test_sets_are_learned_side_by_side_where_their_inputs_are_small(
    world: World, easy: CalibrationData, small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = [part for part in vars(easy.mean_inputs).values() if isinstance(part, Tensor)]
    taken = sum(4 * part.numel() for part in inputs)
    # Of both sets together; each by itself is small either way.
    monkeypatch.setattr("tfive.rl.calibration.heads.READY_BYTES", 2 * taken - (not small))
    calibrator, graphs = world.calibrator(), PretendedGraphs()
    calibrator.graphs = graphs
    calibrator.learn_apart([easy, easy], 1)
    # With both side by side each lane has two of its own for its regressions; else those two alone.
    assert len(graphs.lanes) == (2 + 4 if small else 2)


def test_one_text_alone_is_not_cross_fitted(world: World, data: CalibrationData) -> None:
    alone = data.rows((data.occupation.text_N == data.occupation.text_N[0]).nonzero().flatten())
    calibrator = world.calibrator()
    assert calibrator.offsets(alone, FixedWeight(), 1) == {}
    # Learning from one text goes on without an early stop.
    assert calibrator.learn(alone, 1).trace[-1]["step"] == 6


def test_a_later_window_does_not_take_an_old_average_for_the_disagreement(world: World, easy: CalibrationData) -> None:
    """Critics that agree leave nothing to move: however large the offset learned before, no look may see a change."""
    calibrator = world.calibrator(warm_steps=60)
    calibrator.learn(easy, 1)
    agreed = (easy.first_NT + easy.second_NT) / 2
    assert float(calibrator.mean_head.eval()(easy.mean_inputs).detach().mean()) > 0.1
    candidate = calibrator.learn(replace(easy, first_NT=agreed, second_NT=agreed), 2)
    assert max(abs(look["change"]) for look in candidate.trace) < 0.02


def test_kept_states_are_those_the_heads_would_read_anew(world: World) -> None:
    """States that scoring kept give the inputs that passes of their own give, to the rounding of sums in another order;
    then they are gone."""
    kept = world.rollout.collect("head_validate", 2, states=True)
    judged = world.critics.evaluate(kept)
    kept = world.critics.advantages(kept, judged)
    calibrator = world.calibrator()
    mine = calibrator.data(kept, judged, NORMALISER)
    plain = calibrator.data(kept.without_states(), judged, NORMALISER)
    torch.testing.assert_close(mine.weight_inputs.prefix_NTD, plain.weight_inputs.prefix_NTD)
    torch.testing.assert_close(mine.mean_inputs.scoring_NTF, plain.mean_inputs.scoring_NTF)
    assert float(mine.weight_inputs.prefix_NTD.abs().max()) > 0
    mixed = calibrator.advantage(kept, judged, NORMALISER, FixedWeight())
    assert mixed.states_BRTD is None
    assert mixed.scoring_BRF is None


def test_heads_learn_by_rounded_products_only_where_their_inputs_are_rounded_more(
    world: World, data: CalibrationData, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibrator = world.calibrator()
    assert not calibrator.rounds  # a processor, and float32
    seen = list[str]()

    def learn(*_: Any, **__: Any) -> None:
        seen.append(torch.get_float32_matmul_precision())
        raise KeyboardInterrupt

    monkeypatch.setattr("tfive.rl.calibration.calibrator.calibrating", learn)
    for rounds in (False, True):
        calibrator.rounds = rounds
        with pytest.raises(KeyboardInterrupt):
            calibrator.learn(data, 0)
        assert torch.get_float32_matmul_precision() == "highest"
    assert seen == ["highest", "high"]

"""Readings and scores by replayed graphs are those launched kernel by kernel, one after another."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from cases import Case, random_case
from families import tiny
from test_decode import numbers
from torch import Tensor

from pretended_graphs import Again, PretendedGraphs
from taped_graphs import TapedGraphs
from tfive.tree.fast.replayed import ReplayedPasses, _in_words, copy_all
from tfive.tree.forward import TreeModel
from tfive.tree.picks import Picks
from tfive.tree.settings import EngineOptions, SamplingSettings

pytestmark = pytest.mark.model


@pytest.mark.parametrize("variable", [False, True])
@pytest.mark.parametrize("below", [None, 1])
def test_replayed_readings_and_scores_are_the_launched_ones(below: int | None, variable: bool) -> None:
    case, model = random_case(1, "text" if variable else "text2", variable=variable, group=2), tiny("qwen3")
    options = EngineOptions(fused_blocks="on", max_nodes=1, replayed_passes=True)
    trees = [TreeModel(model, case.plan, options) for _ in range(2)]
    graphs = trees[0].passes.graphs = PretendedGraphs()
    kept: list[list[Tensor]] = []
    for step in range(4):
        texts = replace(case.texts, tokens_BS=case.texts.tokens_BS.roll(step, 1))
        found = []
        for tree in trees:
            reading = tree.read(texts, below)
            scores = tree.score(texts, case.thoughts, reading)
            trunk = [part for both in reading.attention.values() for part in both]
            if reading.lower is not None:
                assert reading.lower.block == below
                trunk += [reading.lower.hidden_BND, scores.need("lower_BND")]
            found.append([reading.hidden_BSD, *trunk, scores.losses_BRK, scores.no_thought_BR])
        assert all(torch.equal(mine, other) for mine, other in zip(*found, strict=True)), step
        kept.append(found[0])
    # Later passes write elsewhere than where an earlier reading is kept.
    assert not torch.equal(kept[2][0], kept[3][0])
    # Of each shape the first call runs as it is, the second is captured and looked at; then it is replayed.
    branches = case.thoughts.length_BR.shape[1]
    # Thoughts of one length are scored whole by graphs, others are read.
    plain = [] if variable else [3]
    assert sorted(graph.replays for graph in graphs.graphs) == [*plain, 3, 4 * branches - 1]
    assert trees[0].passes.reason == ""


def verbs(tree: TreeModel, case: Case, actions: bool) -> list[Tensor]:
    """What one reading of the texts gives of each verb that shares it."""
    reading = tree.read(case.texts, 1)
    drawn = numbers(case.texts, case.plan.group, case.plan.length)
    thoughts = tree.sample(case.texts, drawn, SamplingSettings(), reading)
    all_B = torch.ones(len(case.texts.tokens_BS), dtype=torch.bool) if actions else None
    found = [thoughts.tokens_BRT, thoughts.log_q_BRT]
    for these in (thoughts, replace(case.thoughts, length_BR=0 * case.thoughts.length_BR)):
        scores = tree.score(case.texts, these, reading, features=True, actions_B=all_B)
        names = ("losses_BRK", "token_BRH", "no_thought_BR", "features_BRHD", "no_thought_features_BRHD", "lower_BND")
        found += [scores.need(name) for name in (*names, *(("log_prob_BRT", "states_BRTD") if actions else ()))]
        for whole in (False, True):
            alone = tree.score(case.texts, these, reading, whole=whole)
            found += [
                alone.need(name) for name in ("losses_BRK", "mask_BRK", "token_BRH", "no_thought_BR", "lower_BND")
            ]
    kept = [part for both in reading.attention.values() for part in both]
    return [*found, tree.no_thought(case.texts), reading.hidden_BSD, *kept]


@pytest.mark.parametrize("actions", [False, True])
def test_recorded_readings_and_scores_are_the_launched_ones(actions: bool) -> None:
    case, model = random_case(5, "text", rows=3, width=40, group=2), tiny("qwen3")
    options = EngineOptions(fused_blocks="on", replayed_passes=True)
    trees = [TreeModel(model, case.plan, one) for one in (options, replace(options, replayed_passes=False))]
    graphs = trees[0].passes.graphs = TapedGraphs(undo=True)
    for step in range(4):
        # Other positions, too: a graph must not remember which nodes were read when it was captured.
        moved = case.texts.positions_BP.roll(step, 0).sort(-1).values
        texts = replace(case.texts, tokens_BS=case.texts.tokens_BS.roll(step, 1), positions_BP=moved)
        valid_BR = (moved >= 0).repeat_interleave(2, 1)
        own = replace(case.thoughts, valid_BR=valid_BR, length_BR=valid_BR * case.plan.length)
        found = [verbs(tree, replace(case, texts=texts, thoughts=own), actions) for tree in trees]
        assert all(torch.equal(mine, other) for mine, other in zip(*found, strict=True)), step
    assert trees[0].passes.reason == ""
    assert trees[0].passes.count >= 2
    assert all(graph.replays for graph in graphs.graphs)


def test_passes_that_leave_padding_out_are_launched_and_others_still_captured() -> None:
    case, model = random_case(5, "text", rows=3, width=40, group=2), tiny("qwen3")
    options = EngineOptions(fused_blocks="on", replayed_passes=True, packed="on")
    trees = [TreeModel(model, case.plan, one) for one in (options, replace(options, replayed_passes=False))]
    trees[0].passes.graphs = TapedGraphs(undo=True)
    for _ in range(3):
        for length_BR in (case.thoughts.length_BR, 0 * case.thoughts.length_BR):
            some = replace(case.thoughts, length_BR=length_BR)
            mine, other = (tree.score(case.texts, some, tree.read(case.texts)) for tree in trees)
            assert torch.equal(mine.losses_BRK, other.losses_BRK)
    assert (trees[0].passes.reason, trees[0].passes.count) == ("", 1)


def test_weights_that_moved_are_read_where_they_are() -> None:
    case, model = random_case(1, "text"), tiny("qwen3")
    tree = TreeModel(model, case.plan, EngineOptions(fused_blocks="on", replayed_passes=True))
    tree.passes.graphs = PretendedGraphs()
    for _ in range(3):
        before = tree.read(case.texts).hidden_BSD
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.data * 1.5
    after = tree.read(case.texts).hidden_BSD
    assert not torch.allclose(before, after)
    assert torch.equal(after, TreeModel(model, case.plan, EngineOptions(fused_blocks="on")).read(case.texts).hidden_BSD)


def test_an_engine_that_lets_go_keeps_nothing_and_captures_nothing_any_more() -> None:
    case, model = random_case(1, "text"), tiny("qwen3")
    tree = TreeModel(model, case.plan, EngineOptions(fused_blocks="on", replayed_passes=True))
    graphs = tree.passes.graphs = PretendedGraphs()
    for _ in range(2):
        before = tree.read(case.texts).hidden_BSD
    assert (tree.passes.count, len(graphs.graphs)) == (1, 1)
    graphs._keeper = cast(Any, object())  # what owns the memory of graphs to come
    tree.let_go()
    assert (tree.passes.count, len(graphs.graphs), graphs._keeper) == (0, 0, None)
    for _ in range(3):
        assert torch.equal(tree.read(case.texts).hidden_BSD, before)
    assert (tree.passes.count, len(graphs.graphs)) == (0, 0)


@pytest.mark.parametrize("variable", [False, True])
def test_padded_picks_give_the_same_and_padding_gets_no_gradient(variable: bool) -> None:
    case, model = random_case(2, "text", variable=variable, group=2, rows=3), tiny("llama")
    tree = TreeModel(model, case.plan, EngineOptions(fused_blocks="on", fused_training="on"))
    assert tree.replays_training
    plain = tree.prepare(case.texts, case.thoughts, text=True, continuations=True, no_thought=True)
    padded = plain.padded()
    assert padded.kinds == plain.kinds == ("actions", "text", "after", "without", "no_thought")
    for mine, other in zip(tree.policy_from(padded).log_probs, tree.policy_from(plain).log_probs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
    for picks, full in ((plain.actions, padded.actions), (plain.text, padded.text)):
        assert picks is not None
        assert full is not None
        count, size = len(picks.index), len(full.index)
        assert size % 16 == 0
        assert count <= size < count + picks.keep.numel() / 8 + 16
        values = torch.randn(size, generator=torch.Generator().manual_seed(0)).requires_grad_()
        spread = full.spread(values)
        assert torch.equal(spread, picks.spread(values[:count]))
        (slope,) = torch.autograd.grad(spread.exp().sum(), values)
        assert (slope[:count] != 0).all()
        assert not slope[count:].any()


def test_no_picks_are_padded_to_the_least_size() -> None:
    none = Picks(*(torch.zeros(0, dtype=torch.int64),) * 2, torch.zeros(2, 3, dtype=torch.bool), torch.zeros(0).long())
    padded = none.padded()
    assert padded.place.tolist() == [6] * 16
    assert not padded.spread(torch.ones(16)).any()


def test_copies_in_longer_numbers_move_what_is_asked_for_and_nothing_else() -> None:
    draw = torch.Generator().manual_seed(0)
    kinds = (torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.bool)
    for kind, width, offset in itertools.product(kinds, (16, 12, 7), (0, 1)):
        target, source = (torch.randint(0, 2, (3, 5, width + 1), generator=draw).to(kind) for _ in range(2))
        wanted = target.clone()
        wanted[:2, :4, offset : width + offset] = source[1:, 1:, :width]
        copy_all([target[:2, :4, offset : width + offset]], [source[1:, 1:, :width]])
        assert torch.equal(target, wanted)
    slots, trunk = torch.zeros(2, 3, 10, 16, dtype=torch.bfloat16), torch.randn(2, 3, 6, 16, generator=draw).bfloat16()
    assert _in_words(slots[:, :, :6], trunk)[0].shape == (2, 3, 6, 4)
    copy_all([slots[:, :, :6], slots[0, 0, 9]], [trunk, trunk[0, 0, 0]])
    assert torch.equal(slots[:, :, :6], trunk)
    assert torch.equal(slots[0, 0, 9], trunk[0, 0, 0])
    assert slots[:, :, 6:].count_nonzero() == trunk[0, 0, 0].count_nonzero()


class Stale(Again):
    """A graph that leaves what it was captured with."""

    def replay(self) -> None:
        pass


class StaleGraphs(PretendedGraphs):
    def capture(self, work: Callable[[], None], warm_up: int = 0) -> Again:
        super().capture(work, warm_up)
        return Stale(work)


def test_a_wrong_graph_ends_capturing() -> None:
    case, calls = random_case(1, "text"), []

    def moving(given: Sequence[Tensor]) -> dict[str, Tensor]:
        calls.append(1)
        return {"tokens": given[0].float() + len(calls) * 100.0}

    passes, given = ReplayedPasses(graphs=StaleGraphs()), [case.texts.tokens_BS]
    for _ in range(3):
        passes("any", 0, moving, given)
    assert "differs" in passes.reason
    before = len(calls)
    passes("any", 0, moving, given)
    assert len(calls) == before + 1

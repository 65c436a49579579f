"""The last block where it is read alone: the same numbers and gradients from fewer rows, and nothing else is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import Case, lifted, random_case
from exact import apart
from families import tiny
from test_decode import numbers
from test_packed import products_of
from torch import Tensor

from taped_graphs import TapedGraphs
from tfive.tree import packed
from tfive.tree.delimiters import Delimiters
from tfive.tree.fast.fused import TorchOps
from tfive.tree.fast.replayed_backward import ReplayedBackward
from tfive.tree.fast.training_ops import TorchTraining
from tfive.tree.forward import TreeModel
from tfive.tree.grow import read_at_positions, without_thoughts
from tfive.tree.layout import Layout
from tfive.tree.packed import Asked, LastRows
from tfive.tree.picks import Picks, standing
from tfive.tree.settings import EngineOptions, SamplingSettings
from tfive_lab.bench.phases import OwnGradients

FUSED = EngineOptions(fused_blocks="on", fused_training="on", last_rows=True)
WHOLE = replace(FUSED, last_rows=False)


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "ROWS", 1)
    monkeypatch.setattr(packed, "ALIGNED", 4)


def spread_out(**changes: Any) -> Case:
    """Texts much longer than what is read of them."""
    given: dict[str, Any] = {"kind": "text", "rows": 3, "width": 40, "group": 2}
    return random_case(5, **(given | changes))


def engine(model: Any, case: Case, options: EngineOptions, **given: Any) -> TreeModel:
    delimiters = Delimiters.from_model(model, case.plan) if case.plan.learned else None
    return TreeModel(model, case.plan, options, delimiters, **given)


def all_weights(model: Any) -> list[Tensor]:
    return list(model.parameters())


def update(tree: TreeModel, case: Case, change: Callable[[Any], Any] = lambda prepared: prepared) -> list[Tensor]:
    """What an update's pass over actions and continuations gives, and the gradients of a sum of its squares."""
    prepared = change(tree.prepare(case.texts, case.thoughts, continuations=True, no_thought=True, of_first=True))
    out = tree.policy_from(prepared)
    parts = out.need("log_prob_BRT"), out.need("continuation_log_prob_BRH"), out.need("no_thought_log_prob_BRH")
    total = sum((i + 1) * part.square().sum() for i, part in enumerate(parts))
    slopes = torch.autograd.grad(total, all_weights(tree.model))  # type: ignore[arg-type]
    return [*(part.detach() for part in parts), *slopes]


def named_by(prepared: Any) -> int:
    """How many nodes the picks name, each once."""
    index = [picks.index for picks in (prepared.actions, prepared.after, prepared.without)]
    return len(torch.cat(index).unique())


def test_standing_entries_are_those_that_nonzero_finds() -> None:
    draw = torch.Generator().manual_seed(0)
    for share in (0.0, 0.3, 1.0):
        keep = torch.rand(50, generator=draw) < share
        found = keep.nonzero()[:, 0]
        assert torch.equal(standing(keep, len(found)), found)
        assert standing(keep, len(found) + 3).tolist() == [*found.tolist(), 50, 50, 50]


def test_rows_are_asked_for_once_and_padding_stands_nowhere() -> None:
    asked = Asked(torch.tensor([7, 2, 7, 30, 11]), 30)
    rows = asked.rows()
    assert rows is not None
    assert rows.place_x.tolist() == [2, 7, 11, 30, 30, 30, 30, 30]
    among = asked.rows(torch.tensor([0, 2, 3, 4, 11, 12, 13, 14, 15]))
    assert among is not None
    assert among.place_x.tolist() == [1, 4, 9, 9, 9, 9, 9, 9]
    assert asked.rows(torch.arange(8)) is None  # nearly all of them
    nodes = Asked.among(torch.tensor([[[0, -1]], [[4, -7]]]), 5)
    assert (nodes.index_x.tolist(), nodes.count) == ([0, 10, 9, 10], 10)


def test_taken_and_spread_rows_have_their_own_gradients() -> None:
    rows = LastRows(torch.tensor([1, 3, 5, 5]), 5)
    values = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    some = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    assert torch.equal(rows.taken(values)[:2], values[[1, 3]])
    full = rows.spread(some)
    assert torch.equal(full[[1, 3]], some[:2])
    assert not full[[0, 2, 4]].any()

    def through(values: Tensor) -> Tensor:
        return rows.spread(rows.taken(values).square()).sin()

    assert torch.autograd.gradcheck(through, (values,))
    (slope,) = torch.autograd.grad(rows.spread(some).exp().sum(), some)
    assert torch.equal(slope, some.exp() * torch.tensor([[1], [1], [0], [0]]))
    # What padding has become is nobody's.
    (slope,) = torch.autograd.grad(rows.taken(values).sum(), values)
    assert slope.tolist() == [[0, 0], [1, 1], [0, 0], [1, 1], [0, 0]]


def test_what_is_read_of_a_text_is_what_its_positions_predict_from() -> None:
    case = spread_out()
    # The last tokens of documents, too, after which nothing follows.
    positions_BP = torch.cat([case.texts.positions_BP, torch.tensor([[19], [39], [-1]])], 1)
    texts = replace(case.texts, positions_BP=positions_BP, items_BP=positions_BP)
    named = read_at_positions(texts.document_BS, texts.positions_BP, case.plan.horizon)
    node_BPH, _, keep_BPH = without_thoughts(texts, case.plan.horizon)
    for row in range(len(named)):
        wanted = {*node_BPH[row][keep_BPH[row]].tolist(), *(p for p in texts.positions_BP[row].tolist() if p >= 0)}
        assert set(named[row].unique().tolist()) - {-1} == wanted


@pytest.mark.model
@pytest.mark.parametrize(
    ("family", "kind", "variable"),
    [("qwen3", "text", False), ("llama", "none", False), ("qwen3", "learned", True), ("qwen3_5", "text2", False)],
)
def test_updates_need_the_last_block_where_they_read(family: str, kind: str, variable: bool) -> None:
    # Without an opening the thoughts of a group begin at one node: it is named twice, and has both gradients.
    case, model = spread_out(kind=kind, variable=variable), tiny(family)
    with lifted():
        for packs in ("off", "on"):
            found, rows = [], []
            for options in (FUSED, WHOLE):
                tree = engine(model, case, replace(options, packed=packs))
                assert tree.training.forwards is not None
                with products_of(model) as read:
                    found.append(update(tree, case))
                rows.append(read)
            for mine, other in zip(*found, strict=True):
                assert apart(mine, other) < 1e-12
            few, all_rows = rows
            prepared = tree.prepare(case.texts, case.thoughts, continuations=True, no_thought=True, of_first=True)
            asked, count = prepared.asked, named_by(prepared)
            assert asked is not None
            assert count <= few[-1] < min(0.9 * all_rows[-1], len(asked.index_x) + 4)
            # Mixer and feed-forward layer of the last block, and no other.
            last = 1 if family == "qwen3_5" and few[-2] == few[-4] else 2
            assert few[:-last] == all_rows[:-last]
            assert set(few[-last:]) == {few[-1]}


@pytest.mark.model
@pytest.mark.parametrize("recomputed", [False, True])
def test_padded_picks_and_recomputed_activations(recomputed: bool) -> None:
    case, model = spread_out(variable=True), tiny("qwen3")
    with lifted():
        found = []
        for options in (FUSED, WHOLE):
            tree = engine(model, case, replace(options, activation_checkpointing=recomputed))
            found.append(update(tree, case, lambda prepared: prepared.padded()))
    for mine, other in zip(*found, strict=True):
        assert apart(mine, other) < 1e-12


@pytest.mark.model
def test_a_pass_that_reads_nearly_all_is_computed_whole() -> None:
    case = spread_out(group=1, count=1)
    tree = engine(tiny("qwen3"), case, FUSED)
    assert tree.training.forwards is not None
    with gated_rows() as read:
        tree.policy(case.texts, case.thoughts, text=True)
    assert len(set(read)) == 1
    # Parity is that with passes that read every node.
    for parity, sizes in ((True, 1), (False, 2)):
        with gated_rows() as read:
            tree.policy(case.texts.rows(0, 1), case.thoughts.rows(0, 1), parity=parity)
        assert len(set(read)) == sizes


@contextmanager
def gated_rows() -> Iterator[list[int]]:
    """For how many rows each block computes its feed-forward layer, fused or trained."""
    seen: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        for kind in (TorchOps, TorchTraining):
            own: Any = kind.gate

            def gate(ops: Any, gate_xI: Tensor, *others: Any, own: Any = own) -> Tensor:
                seen.append(len(gate_xI))
                found: Tensor = own(ops, gate_xI, *others)
                return found

            patch.setattr(kind, "gate", gate)
        yield seen


@pytest.mark.model
@pytest.mark.parametrize("given", ["fused", "trained"])
def test_states_for_critics_are_those_of_all_nodes(given: str) -> None:
    case, model = spread_out(), tiny("qwen3")
    found = []
    for options in (FUSED, WHOLE):
        tree = engine(model, case, options)
        assert tree.training.forwards is not None
        with torch.set_grad_enabled(given == "trained"), gated_rows() as read:
            found.append([tree.features(case.texts, case.thoughts), tree.read(case.texts).hidden_BSD])
        assert read[::2] == read[1::2]
    assert all(torch.equal(*both) for both in zip(*found, strict=True))


def spoiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was not asked for is noise."""
    own = LastRows.spread

    def spread(self: LastRows, values_x: Tensor) -> Tensor:
        full = own(self, values_x)
        here = torch.zeros(self.count + 1, dtype=torch.bool).index_fill_(0, self.place_x, True)[: self.count]
        noise = torch.linspace(-9, 9, full.shape[-1], dtype=full.dtype)
        return torch.where(here[:, None], full, noise)

    monkeypatch.setattr(LastRows, "spread", spread)


def verbs(tree: TreeModel, case: Case, actions: bool, **options: Any) -> list[Tensor]:
    """What one reading of the texts gives of each verb that shares it."""
    drawn = numbers(case.texts, case.plan.group, case.plan.length)
    reading = tree.read(case.texts, of_positions=True, **options)
    thoughts = tree.sample(case.texts, drawn, SamplingSettings(), reading)
    all_B = torch.ones(len(case.texts.tokens_BS), dtype=torch.bool) if actions else None
    found = [thoughts.tokens_BRT.double(), thoughts.log_q_BRT.double()]
    for these in (thoughts, replace(case.thoughts, length_BR=0 * case.thoughts.length_BR)):
        scores = tree.score(case.texts, these, reading, features=True, actions_B=all_B)
        names = ("losses_BRK", "token_BRH", "no_thought_BR", "features_BRHD", "no_thought_features_BRHD")
        found += [scores.need(name) for name in names]
        found += [scores.need(name) for name in ("log_prob_BRT", "states_BRTD") if actions]
    kept = [part for both in reading.attention.values() for part in both]
    return [*found, tree.no_thought(case.texts), *kept]


@pytest.mark.model
@pytest.mark.parametrize(
    ("family", "kind", "variable", "packs"),
    [("qwen3", "text", True, "off"), ("qwen3", "none", False, "off"), ("llama", "learned", True, "on"),
     ("qwen3_5", "text", False, "off")],
)  # fmt: skip
@pytest.mark.parametrize("actions", [False, True])
def test_readings_and_scores_need_the_last_block_where_they_are_read(
    family: str, kind: str, variable: bool, packs: str, actions: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, model = spread_out(kind=kind, variable=variable, length=5), tiny(family)
    with lifted():
        found = []
        for options in (WHOLE, FUSED):
            tree = engine(model, case, replace(options, packed=packs))  # type: ignore[arg-type]
            assert tree.fuses
            if options is FUSED:
                spoiled(monkeypatch)
            found.append(verbs(tree, case, actions))
            with gated_rows() as read:
                tree.read(case.texts, of_positions=True)
                tree.score(case.texts, case.thoughts, tree.read(case.texts))
            layers = len(model.model.layers)
            asked_for, all_of_it, scored = (read[at : at + layers] for at in (0, layers, 2 * layers))
            assert (asked_for[-1] < 0.6 * asked_for[0]) == (options is FUSED)
            assert len(set(all_of_it)) == 1
            assert len(set(asked_for[:-1])) == 1
            assert (scored[-1] < scored[0]) == (options is FUSED)
            everywhere, asked = tree.read(case.texts), tree.read(case.texts, of_positions=True)
            assert torch.equal(everywhere.hidden_BSD, asked.hidden_BSD) == (options is WHOLE)
    for mine, other in zip(*found, strict=True):
        assert apart(mine, other) < 1e-12
    # Keys and values of the whole text are there, bit for bit.
    assert all(torch.equal(a, b) for a, b in zip(*(one[-2:] for one in found), strict=True))


@pytest.mark.model
def test_gated_scores_keep_to_what_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    from tfive.tree.gated import ReadingGates

    case, model, found = spread_out(), tiny("qwen3"), []
    plan, gates = replace(case.plan, gated=True), ReadingGates.of(model)
    torch.nn.init.normal_(gates.gate, generator=torch.Generator().manual_seed(1))
    with lifted():
        for options in (WHOLE, FUSED):
            tree = TreeModel(model, plan, options, gates=gates)
            if options is FUSED:
                spoiled(monkeypatch)
            scores = tree.score(case.texts, case.thoughts)
            found.append([scores.losses_BRK, scores.no_thought_BR])
    for mine, other in zip(*found, strict=True):
        assert apart(mine, other) < 1e-12


@pytest.mark.model
@pytest.mark.parametrize("actions", [False, True])
def test_recorded_readings_and_scores_are_the_launched_ones(actions: bool) -> None:
    case, model = spread_out(), tiny("qwen3")
    trees = [engine(model, case, replace(FUSED, replayed_passes=replayed)) for replayed in (True, False)]
    graphs = trees[0].passes.graphs = TapedGraphs(undo=True)
    for step in range(4):
        # Other positions, too: a graph must not remember which nodes were read when it was captured.
        moved = case.texts.positions_BP.roll(step, 0).sort(-1).values
        texts = replace(case.texts, tokens_BS=case.texts.tokens_BS.roll(step, 1), positions_BP=moved)
        valid_BR = (moved >= 0).repeat_interleave(2, 1)
        own = replace(case.thoughts, valid_BR=valid_BR, length_BR=valid_BR * case.plan.length)
        found = [verbs(tree, replace(case, texts=texts, thoughts=own), actions, below=1) for tree in trees]
        assert all(torch.equal(mine, other) for mine, other in zip(*found, strict=True)), step
    assert trees[0].passes.reason == ""
    assert trees[0].passes.count >= 2
    assert all(graph.replays for graph in graphs.graphs)


@pytest.mark.model
def test_recorded_updates_are_the_launched_ones() -> None:
    case, model = spread_out(variable=True), tiny("qwen3")
    tree, gradients = engine(model, case, FUSED), OwnGradients(all_weights(model))  # type: ignore[arg-type]
    graphs = TapedGraphs()
    passes = ReplayedBackward(graphs=graphs, gradients=gradients)
    asked: dict[str, Any] = {"continuations": True, "no_thought": True}
    for step in range(5):
        texts = replace(case.texts, tokens_BS=case.texts.tokens_BS.roll(step, 1))
        thoughts = replace(case.thoughts, length_BR=case.thoughts.length_BR.roll(step, 1) * case.thoughts.valid_BR)
        prepared = tree.prepare(texts, thoughts, **asked).padded()

        def work(layout: Layout, picked: Any) -> list[Tensor]:
            out = tree.policy_from(prepared.on(layout, picked))  # noqa: B023
            parts = out.need("log_prob_BRT"), out.need("continuation_log_prob_BRH")
            sum(part.square().sum() for part in parts).backward()  # type: ignore[union-attr]
            return out.log_probs

        slopes, sums = [], []
        for call in (work, lambda layout, picked: passes("update", 0, work, layout, picked)):
            model.zero_grad(set_to_none=True)
            sums.append([part.clone() for part in call(prepared.layout, prepared.tensors)])
            slopes.append([weight.grad.clone() for weight in model.parameters() if weight.grad is not None])
        assert all(torch.equal(*both) for pairs in (slopes, sums) for both in zip(*pairs, strict=True)), step
    assert passes.reason == ""
    assert graphs.graphs[0].replays > 2


@pytest.mark.model
def test_picks_of_a_pass_are_what_is_asked_of_it() -> None:
    case = spread_out()
    tree = TreeModel(tiny("qwen3"), case.plan, FUSED)
    prepared = tree.prepare(case.texts, case.thoughts, text=True, continuations=True)
    asked = prepared.asked
    assert asked is not None
    picks = (prepared.actions, prepared.text, prepared.after)
    assert asked.index_x.tolist() == [node for one in picks if isinstance(one, Picks) for node in one.index.tolist()]
    assert asked.count == prepared.layout.token_BN.numel()
    assert tree.prepare(case.texts, case.thoughts, actions=False).asked is None

"""Sampling steps of the branches that are still being written: the same thoughts from fewer rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import STOP, Case, lifted, random_case
from exact import apart
from families import HYBRID, tiny
from test_decode import numbers

from taped_graphs import TapedGraphs
from tfive.tree import decode
from tfive.tree.fast import listed
from tfive.tree.fast.cuda_graph import CudaGraphs
from tfive.tree.fast.fused import TorchOps
from tfive.tree.fast.listed import Lists
from tfive.tree.forward import Delimiters, TreeModel
from tfive.tree.layout import Thoughts
from tfive.tree.settings import EngineOptions, SamplingSettings

pytestmark = pytest.mark.model
LENGTH = 9


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "_EVERY", 2)
    monkeypatch.setattr(listed, "LEAST", 1)
    monkeypatch.setattr(listed, "WHOLE", 1)
    monkeypatch.setattr(listed, "WORTH", 0.99)


def scene(delimiters: str = "text") -> Case:
    return random_case(3, delimiters, variable=True, count=4, group=3, length=LENGTH)


def beginnings(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """First tokens of all thoughts but some; three of four end with a close, so that they are thoughts already."""
    shape = case.thoughts.length_BR.shape
    branch = torch.arange(shape.numel()).view(shape)
    length, ends = branch % 5, (branch % 4 > 0) & (branch % 5 > 0)
    tokens = (branch[..., None] + torch.arange(LENGTH)) % 7
    last = torch.arange(LENGTH) == length[..., None] - 1
    return torch.where(last & ends[..., None], STOP, tokens), length


def tree_of(case: Case, packs: str) -> TreeModel:
    options: dict[str, Any] = {"fused_blocks": "on", "packed": packs}
    model = tiny("qwen3")
    delimiters = Delimiters.from_model(model, case.plan).double() if case.plan.learned else None
    return TreeModel(model, case.plan, EngineOptions(**options), delimiters)


def drawn(case: Case, packs: str, prefix: Any = None) -> tuple[Thoughts, list[int]]:
    """Thoughts by fused blocks, and how many rows each block of each step had."""
    tree = tree_of(case, packs)
    assert tree.fuses
    rows, gate, reading = list[int](), TorchOps.gate, tree.read(case.texts)

    def counted(ops: TorchOps, gate_xI: torch.Tensor, *rest: Any) -> torch.Tensor:
        rows.append(len(gate_xI))
        return gate(ops, gate_xI, *rest)

    given = (case.texts, numbers(case.texts, 3, LENGTH), SamplingSettings(), reading, prefix or beginnings(case))
    with lifted(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchOps, "gate", counted)
        return tree.sample(*given), rows


def same(found: Thoughts, expected: Thoughts) -> None:
    assert expected.closed_BR.any()
    assert not expected.closed_BR.all()
    assert found.tokens_BRT.equal(expected.tokens_BRT)
    assert found.length_BR.equal(expected.length_BR)
    assert found.closed_BR.equal(expected.closed_BR)
    assert apart(found.log_q_BRT, expected.log_q_BRT) < 1e-6


@pytest.mark.parametrize("delimiters", ["text", "learned"])
def test_thoughts_that_closed_are_computed_no_more(delimiters: str) -> None:
    case = scene(delimiters)
    (found, few), (expected, every) = drawn(case, "on"), drawn(case, "off")
    same(found, expected)
    assert len(few) == len(every)
    assert few == sorted(few, reverse=True)
    assert few[-1] < 0.5 * every[-1]
    assert set(every) == {case.thoughts.length_BR.numel()}


def test_each_size_is_captured_once_and_serves_other_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = TapedGraphs(undo=True)
    case, law = scene(), SamplingSettings()
    every = tree_of(case, "off")
    monkeypatch.setattr(CudaGraphs, "on", lambda *_: graphs)
    tree = tree_of(case, "on")
    steps = case.plan.open_width + LENGTH - 1
    with lifted():
        for seed in (3, 4, 3):
            texts = random_case(seed, "text", variable=True, count=4, group=3, length=LENGTH).texts
            tokens, length = beginnings(case)
            given = (texts, numbers(texts, 3, LENGTH), law, None, (tokens.roll(seed, 1), length.roll(seed, 1)))
            with monkeypatch.context() as patch:
                patch.setattr(CudaGraphs, "on", lambda *_: None)
                expected = every.sample(*given)
            same(tree.sample(*given), expected)
    sampler = tree.sampler
    assert sampler is not None
    assert sampler.lists is not None
    assert set(sampler._graphs) <= {0, *sampler.lists.sizes}
    assert len(sampler._graphs) == len(graphs.graphs) >= 3
    replays = {size: graph.replays for size, graph in sampler._graphs.items()}  # type: ignore[attr-defined]
    assert sum(replays.values()) == 3 * steps
    assert all(count > 0 for size, count in replays.items() if size)


def test_nothing_is_captured_for_a_step_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = TapedGraphs(undo=True)
    monkeypatch.setattr(CudaGraphs, "on", lambda *_: graphs)
    monkeypatch.setattr(decode, "_EVERY", LENGTH)
    case = scene()
    tree = tree_of(case, "on")
    with lifted():
        tree.sample(case.texts, numbers(case.texts, 3, LENGTH), SamplingSettings(), None, beginnings(case))
    assert tree.sampler is not None
    assert set(tree.sampler._graphs) == {0}


def test_when_all_have_closed_sampling_ends() -> None:
    case = scene()
    tokens = torch.full((*case.thoughts.length_BR.shape, LENGTH), 5)
    tokens[..., 1] = STOP
    given = (tokens, torch.full(tokens.shape[:2], LENGTH))
    found, rows = drawn(case, "on", prefix=given)
    expected, every = drawn(case, "off", prefix=given)
    assert found.length_BR.equal(expected.length_BR)
    assert set(found.length_BR[case.thoughts.valid_BR].tolist()) == {2}
    assert len(rows) < len(every)


def test_fixed_lengths_recurrent_layers_and_the_default_compute_all() -> None:
    case = random_case(3, "text", variable=False, count=4, group=3, length=LENGTH)
    on = EngineOptions(fused_blocks="on", packed="on")
    for tree, texts in (
        (TreeModel(tiny("qwen3"), case.plan, on), case.texts),
        (TreeModel(tiny(HYBRID[0]), scene().plan, on), scene().texts),
        (TreeModel(tiny("qwen3"), scene().plan, EngineOptions(fused_blocks="on")), scene().texts),
    ):
        tree.sample(texts, numbers(texts, 3, LENGTH), SamplingSettings())
        assert tree.sampler is not None
        assert tree.sampler.lists is None


def test_many_long_thoughts_are_listed_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    case = scene()
    count = case.thoughts.length_BR.numel()
    for large, long, expected in ((count, LENGTH, True), (count + 1, LENGTH, False), (count, LENGTH + 1, False)):
        monkeypatch.setattr(listed, "LARGE", large)
        monkeypatch.setattr(listed, "LONG", long)
        for packed in ("auto", "off"):
            tree = TreeModel(tiny("qwen3"), case.plan, EngineOptions(fused_blocks="on", packed=packed))
            tree.sample(case.texts, numbers(case.texts, 3, LENGTH), SamplingSettings())
            assert tree.sampler is not None
            assert (tree.sampler.lists is not None) == (expected and packed == "auto")


def test_lists_hold_those_asked_for_and_are_filled_up() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        rows, branches = (int(torch.randint(1, 9, (), generator=generator)) for _ in range(2))
        writing = torch.rand(rows, branches, generator=generator) < torch.rand((), generator=generator)
        size = int(torch.randint(int(writing.sum()), rows * branches + 1, (), generator=generator))
        if size == 0:
            continue
        found = Lists(rows, branches, torch.device("cpu")).fill(writing, size)
        index = found.index_x.tolist()
        assert index == sorted(set(index))
        assert len(index) == size
        assert set(writing.flatten().nonzero()[:, 0].tolist()) <= set(index)
        # The same again as the kernels read it.
        texts = [
            row * branches + int(branch)
            for row in range(rows)
            for branch in found.branch_BR[row, : int(found.count_B[row])]
        ]
        assert texts == index
        assert found.begin_B.tolist() == [sum(at < row * branches for at in index) for row in range(rows)]


def test_sizes_of_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    lists = Lists(24, 32, torch.device("cpu"))
    assert lists.sizes == [48, 96, 144, 192, 288, 384, 576]
    assert [lists.size_for(count) for count in (1, 48, 49, 576, 577, 768)] == [48, 48, 96, 576, 768, 768]
    assert Lists(2, 25, torch.device("cpu")).sizes == []  # 48 of 50 are not worth a graph


@pytest.mark.parametrize("gated", [False, True])
def test_attention_of_some_branches(gated: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    rows, branches, heads, trunk, own, place = 3, 5, 4, 7, 3, 1

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    query = random(rows, branches, heads, 8)
    key, value = (random(2, rows, trunk + branches * own, 8).transpose(0, 1) for _ in range(2))
    gate = random(rows * branches, 2 * heads * 8) if gated else None
    first = torch.randint(trunk, (rows, branches), generator=generator)
    seen = (first, torch.full_like(first, trunk), torch.tensor([place]), trunk, 0.3)
    writing = torch.tensor([[1, 0, 1, 1, 0], [0, 0, 0, 0, 0], [0, 1, 0, 0, 1]]).bool()
    lists = Lists(rows, branches, query.device).fill(writing, 5)
    every = TorchOps().attend(query, key, value, *seen, gate)
    some_gate = None if gate is None else gate[lists.index_x]
    some = TorchOps().attend(query.flatten(0, 1)[lists.index_x][None], key, value, *seen, some_gate, lists)
    assert lists.index_x.tolist() == [0, 2, 3, 11, 14]
    assert apart(some[0], every.flatten(0, 1)[lists.index_x]) < 1e-12

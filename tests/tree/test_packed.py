"""Passes without padding: the same numbers from fewer rows, in scoring, sampling and below the critics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import Case, lifted, random_case
from exact import apart
from families import tiny
from test_decode import numbers

from pretended_graphs import PretendedGraphs
from tfive.tree import packed
from tfive.tree.forward import TreeModel
from tfive.tree.outputs import Lower
from tfive.tree.settings import EngineOptions, SamplingSettings

pytestmark = pytest.mark.model


def scene() -> tuple[TreeModel, Case]:
    case = random_case(3, "text", variable=True, count=4, group=3, length=5)
    return TreeModel(tiny("qwen3"), case.plan), case


@contextmanager
def rows_read(tree: TreeModel) -> Iterator[list[int]]:
    """How many rows each pass sends through the first block."""
    seen: list[int] = []
    hook = tree.backbone.blocks[0].register_forward_pre_hook(lambda _, given: seen.append(given[0][..., 0].numel()))
    try:
        yield seen
    finally:
        hook.remove()


def whole(tree: TreeModel) -> TreeModel:
    """The same with its padding."""
    return TreeModel(tree.model, tree.plan, EngineOptions(packed="off"))


@contextmanager
def products_of(model: Any) -> Iterator[list[int]]:
    """How many rows the blocks' down projections multiply, whoever calls them."""
    seen: list[int] = []
    own = torch.addmm

    def counted(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, **given: Any) -> torch.Tensor:
        seen.append(len(left))
        return own(total, left, right, **given)

    hooks = [
        block.mlp.down_proj.register_forward_pre_hook(lambda _, given: seen.append(given[0][..., 0].numel()))
        for block in model.model.layers
    ]
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "addmm", counted)
            yield seen
    finally:
        for hook in hooks:
            hook.remove()


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "ROWS", 1)


def test_scores_and_lower_activations_need_no_padding() -> None:
    tree, case = scene()
    all_of_it = whole(tree)
    with lifted():
        with rows_read(tree) as few:
            scores, lower = tree.score(case.texts, case.thoughts), tree.lower(case.texts, case.thoughts, 1)
        with rows_read(all_of_it) as all_rows:
            expected, full = all_of_it.score(case.texts, case.thoughts), all_of_it.lower(case.texts, case.thoughts, 1)
    assert apart(scores.losses_BRK, expected.losses_BRK) < 1e-12
    assert apart(scores.token_BRH, expected.token_BRH) < 1e-12
    read = tree.features(case.texts, case.thoughts, lower)
    assert apart(read.detach(), tree.features(case.texts, case.thoughts, full).detach()) < 1e-12
    # The text is read whole; its branches and the row below the critics are not.
    assert few[0] == all_rows[0]
    assert all(a < 0.9 * b for a, b in zip(few[1:], all_rows[1:], strict=True))


@pytest.mark.parametrize("fused", ["off", "on"])
def test_scores_keep_what_enters_a_block_without_padding(fused: str) -> None:
    _, case = scene()
    model, found, rows = tiny("qwen3"), [], list[list[int]]()
    with lifted():
        for packs in ("on", "off"):
            tree = TreeModel(model, case.plan, EngineOptions(fused_blocks=fused, packed=packs))  # type: ignore[arg-type]
            assert tree.fuses == (fused == "on")
            assert tree.training.reason  # chosen before blocks are watched
            reading = tree.read(case.texts, below=1)
            with products_of(model) as read:
                scores = tree.score(case.texts, case.thoughts, reading)
            rows.append(read)
            assert scores.lower_BND is not None
            states = tree.states(case.texts, case.thoughts, Lower(scores.lower_BND, 1))
            found.append([scores.losses_BRK, scores.token_BRH, states])
    for own, expected in zip(*found, strict=True):
        assert apart(own, expected) < 1e-12
    assert all(a < 0.9 * b for a, b in zip(*rows, strict=True))


def test_scores_without_padding_are_launched_where_others_are_captured() -> None:
    tree, case = scene()
    scores, captured = [], []
    with lifted():
        for packs in ("on", "off"):
            options = EngineOptions(fused_blocks="on", replayed_passes=True, packed=packs)
            other = TreeModel(tree.model, case.plan, options)
            graphs = other.passes.graphs = PretendedGraphs()
            scores += [other.score(case.texts, case.thoughts).losses_BRK for _ in range(3)]
            assert other.passes.reason == ""
            captured.append(len(graphs.graphs))
    assert all(apart(found, scores[-1]) < 1e-12 for found in scores)
    assert captured == [1, 2]  # the reading, and with it the scoring


def test_sampling_stops_reading_thoughts_that_closed() -> None:
    tree, case = scene()
    all_of_it = whole(tree)
    # Sharpened, so that many close soon.
    given = (case.texts, numbers(case.texts, 3, 5), SamplingSettings(temperature=0.05))
    with lifted():
        with rows_read(tree) as few:
            drawn = tree.sample(*given)
        with rows_read(all_of_it) as all_rows:
            expected = all_of_it.sample(*given)
    assert drawn.tokens_BRT.equal(expected.tokens_BRT)
    assert drawn.length_BR.equal(expected.length_BR)
    assert apart(drawn.log_q_BRT, expected.log_q_BRT) < 1e-6
    assert expected.closed_BR.any()
    assert sum(few) < sum(all_rows)


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_the_last_block_is_computed_where_it_is_read(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, case = scene()
    tree = TreeModel(tiny(family), case.plan)
    entered: list[int] = []
    last: Any = tree.backbone.blocks[-1].mlp
    hook = last.register_forward_hook(lambda module, given, _: entered.append(given[0][..., 0].numel()))
    inner = getattr(last, "down_proj", None)
    if inner is not None:
        inner.register_forward_pre_hook(lambda _, given: entered.append(given[0][..., 0].numel()))
    with lifted():
        with monkeypatch.context() as patch:
            patch.setattr(packed, "ROWS", 10**9)
            expected, slopes = features_and_slopes(tree, case)
        whole_rows = entered[-1]
        entered.clear()
        with torch.no_grad():
            found = tree.features(case.texts, case.thoughts)
        learned, learned_slopes = features_and_slopes(tree, case)
    hook.remove()
    assert apart(found, expected) < 1e-12
    assert apart(learned, expected) < 1e-12
    assert apart(learned_slopes, slopes) < 1e-12
    # A family whose parts go by other names is computed whole.
    wanted = int(case.thoughts.mask_BRT.sum()) if inner is not None else whole_rows
    assert entered.count(wanted) == (2 if inner is not None else len(entered))


def features_and_slopes(tree: TreeModel, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Features, and the gradients of a sum of their squares in all weights that it depends on."""
    weights = [weight for weight in tree.model.parameters() if weight.requires_grad]
    found = tree.features(case.texts, case.thoughts)
    slopes = torch.autograd.grad(found.square().sum(), weights, allow_unused=True)
    return found.detach(), torch.cat([slope.flatten() for slope in slopes if slope is not None])


def test_features_made_again_for_their_gradients_are_the_same() -> None:
    tree, case = scene()
    again = TreeModel(tree.model, case.plan, EngineOptions(activation_checkpointing=True))
    with lifted():
        (expected, slopes), (found, found_slopes) = features_and_slopes(tree, case), features_and_slopes(again, case)
    assert apart(found, expected) < 1e-12
    assert apart(found_slopes, slopes) < 1e-12


def update(tree: TreeModel, case: Case, *, prepared: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """What an update's pass gives, and the gradients of a sum of its squares; `prepared`: by the pass that is made
    ready before, its picks padded where it may be captured."""
    asked: dict[str, Any] = {"text": True, "continuations": True, "of_first": True}
    if prepared:
        ready = tree.prepare(case.texts, case.thoughts, **asked)
        assert ready.nodes_x is None or ready.padded() is ready
        ready = ready.padded()
        out = tree.policy_from(ready.on([tensor.clone() for tensor in ready.tensors]))
    else:
        out = tree.policy(case.texts, case.thoughts, **asked)
    parts = out.need("log_prob_BRT"), out.need("text_log_prob_BS"), out.need("continuation_log_prob_BRH")
    weights = list(tree.model.parameters())
    slopes = torch.autograd.grad(sum(part.square().sum() for part in parts), weights)  # type: ignore[arg-type]
    return torch.cat([part.detach().flatten() for part in parts]), torch.cat([one.flatten() for one in slopes])


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("fused", ["off", "on"])
def test_updates_need_no_padding(fused: str, prepared: bool) -> None:
    _, case = scene()
    model, rows = tiny("qwen3"), list[list[int]]()
    found = []
    with lifted():
        for packs in ("on", "off"):
            options: dict[str, Any] = {"fused_blocks": fused, "fused_training": fused, "packed": packs}
            tree = TreeModel(model, case.plan, EngineOptions(**options))
            assert (tree.training.forwards is not None) == (fused == "on")
            with products_of(model) as read:
                found.append(update(tree, case, prepared=prepared))
            rows.append(read)
    (values, slopes), (expected, expected_slopes) = found
    assert apart(values, expected) < 1e-12
    assert apart(slopes, expected_slopes) < 1e-12
    assert all(a < 0.95 * b for a, b in zip(*rows, strict=True))


def test_which_passes_leave_padding_out_by_themselves() -> None:
    tree, case = scene()
    with lifted(), rows_read(tree) as few:
        update(tree, case)
    layout = tree._grow(case.texts, case.thoughts, "first")
    assert few[0] < 0.9 * layout.token_BN.numel()
    fused = EngineOptions(fused_blocks="on", fused_training="on")
    for options in (fused, EngineOptions(packed="off"), EngineOptions(activation_checkpointing=True)):
        assert TreeModel(tree.model, case.plan, options)._packing(layout) is None


class Elsewhere(TreeModel):
    """A model that says it is on a GPU."""

    device = torch.device("cuda")


def test_on_a_gpu_large_ones_do_where_thoughts_may_close(monkeypatch: pytest.MonkeyPatch) -> None:
    tree, case = scene()
    assert Elsewhere(tree.model, case.plan).existing(torch.zeros(64, 127, dtype=torch.bool), fused=True) is None
    assert Elsewhere(tree.model, case.plan).existing(torch.zeros(64, 128, dtype=torch.bool), fused=True) is not None
    monkeypatch.setattr("tfive.tree.reader.LARGE", 6)
    exists = torch.tensor([[True, False, False], [False, True, False]])
    fixed = replace(case.plan, variable_length=False)
    for fused in (False, True):
        found = Elsewhere(tree.model, case.plan).existing(exists, fused)
        assert found is not None
        assert found.tolist() == [0, 4]
        assert Elsewhere(tree.model, fixed).existing(exists, fused) is None
        assert Elsewhere(tree.model, fixed, EngineOptions(packed="on")).existing(exists, fused) is not None
        assert Elsewhere(tree.model, case.plan, EngineOptions(packed="off")).existing(exists, fused) is None


def test_which_rows_are_kept() -> None:
    exists = torch.tensor([[True, False, False], [False, True, False]])
    found = packed.packing(exists)
    assert found is not None
    assert found.tolist() == [0, 4]
    assert packed.packing(torch.ones(2, 3, dtype=torch.bool)) is None


def test_few_rows_are_filled_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "ROWS", 4)
    exists = torch.zeros(3, 4, dtype=torch.bool)
    exists[2, 1] = True
    found = packed.packing(exists)
    assert found is not None
    assert found.tolist() == [0, 1, 2, 9]

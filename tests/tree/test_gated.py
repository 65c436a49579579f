"""Gated reading equals its plain reference in losses and gradients; shut gates change nothing, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from cases import Case, lifted, random_case
from exact import apart
from families import DENSE, HYBRID, VOCABULARY, WINDOWED, tiny
from plain_gated import HandWrittenLlama, PlainGatedModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from tfive.errors import UserError
from tfive.tree.admission import admit
from tfive.tree.forward import Delimiters, TreeModel
from tfive.tree.gated import GatedReading, ReadingGates
from tfive.tree.layout import Layout
from tfive.tree.outputs import PolicyOutput
from tfive.tree.settings import EngineOptions

pytestmark = pytest.mark.model


def opened(model: PreTrainedModel, seed: int = 3) -> ReadingGates:
    """Gates of every size and sign, in the model's precision."""
    gates = ReadingGates.of(model)
    draw = torch.Generator().manual_seed(seed)
    gates.gate.data.copy_(torch.randn(gates.gate.shape, generator=draw))
    return gates.to(model.dtype)


def gated_case(seed: int, kind: str = "text2", variable: bool = False, group: int = 1, count: int = 3) -> Case:
    case = random_case(seed, kind, variable, group=group, count=count)
    return replace(case, plan=replace(case.plan, gated=True))


def delimiters_of(model: PreTrainedModel, case: Case) -> Delimiters | None:
    return Delimiters.from_model(model, case.plan).to(model.dtype) if case.plan.learned else None


def whole(found: list[list[Tensor]]) -> Tensor:
    """Losses after the whole thought, all branches."""
    return torch.cat([by_checkpoint[-1] for by_checkpoint in found])


def slopes(total: Tensor, modules: list[nn.Module]) -> list[Tensor]:
    """Gradients of a scalar, zeros where there are none."""
    named = [p for m in modules for p in m.parameters()]
    found = torch.autograd.grad(total, named, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(named, found)]


def weighted(losses: Tensor) -> Tensor:
    return (losses * torch.arange(1, len(losses) + 1, dtype=losses.dtype).cos()).sum()


def conditioned(output: PolicyOutput) -> Tensor:
    return -output.need("continuation_log_prob_BRH")[output.need("continuation_mask_BRH")]


@pytest.mark.parametrize("family", DENSE + WINDOWED)
@pytest.mark.parametrize(
    ("kind", "variable", "group"), [("text2", False, 1), ("text", True, 2), ("none", False, 1), ("learned", True, 1)]
)
def test_losses_and_gradients_are_the_references(family: str, kind: str, variable: bool, group: int) -> None:
    case, model = gated_case(21, kind, variable, group), tiny(family)
    gates, delimiters = opened(model), delimiters_of(model, case)
    modules: list[torch.nn.Module] = [m for m in (model, gates, delimiters) if m is not None]
    tree = TreeModel(model, case.plan, None, delimiters, gates)
    with lifted():
        weights = None if delimiters is None else delimiters.weight_2D
        plain = PlainGatedModel(model, case.plan, gates.gate_LY, weights).losses(case.texts, case.thoughts)
        scores = tree.score(case.texts, case.thoughts)
        output = tree.policy(case.texts, case.thoughts, continuations=True)
        ours, theirs = (slopes(weighted(x), modules) for x in (conditioned(output), whole(plain)))
    assert len(plain) >= 3
    every = torch.stack([loss.mean() for by_checkpoint in plain for loss in by_checkpoint])
    assert apart(scores.losses_BRK[scores.mask_BRK], every) < 1e-9
    assert apart(scores.token_BRH[scores.token_mask_BRH], whole(plain)) < 1e-9
    assert apart(conditioned(output), whole(plain)) < 1e-9
    scale = max(float(slope.abs().max()) for slope in theirs)
    assert max(float((a - b).abs().max()) for a, b in zip(ours, theirs)) < 1e-9 * scale
    assert float(ours[len(list(model.parameters()))].abs().max()) > 1e-3 * scale  # the gates' own


@pytest.mark.parametrize("variable", [False, True])
def test_a_hand_written_llama_agrees(variable: bool) -> None:
    case, model = gated_case(22, "text", variable, count=4), tiny("llama")
    gates = opened(model)
    tree = TreeModel(model, case.plan, None, None, gates)
    with lifted():
        output = tree.policy(case.texts, case.thoughts, continuations=True)
        scores = tree.score(case.texts, case.thoughts)
    plain = HandWrittenLlama(model, gates.gate_LY).losses(case.plan, case.texts, case.thoughts)
    every = torch.stack([loss.mean() for by_checkpoint in plain for loss in by_checkpoint])
    assert apart(scores.losses_BRK[scores.mask_BRK], every) < 1e-9
    ours, theirs = (slopes(weighted(x), [model, gates]) for x in (conditioned(output), whole(plain)))
    scale = max(float(slope.abs().max()) for slope in theirs)
    assert max(float((a - b).abs().max()) for a, b in zip(ours, theirs)) < 1e-9 * scale


@pytest.mark.parametrize(
    "engine",
    [
        EngineOptions(attention="sdpa"),
        EngineOptions(attention="flex"),
        EngineOptions(fused_blocks="on"),
        EngineOptions(max_nodes=40, head_bytes=7 * 4 * VOCABULARY),
    ],
    ids=["sdpa", "flex", "fused", "in parts"],
)
def test_every_way_of_scoring_agrees(engine: EngineOptions) -> None:
    case, model = gated_case(23, "text2", True, group=2), tiny("qwen3")
    gates = opened(model)
    with lifted():
        plain = PlainGatedModel(model, case.plan, gates.gate_LY).losses(case.texts, case.thoughts)
        scores = TreeModel(model, case.plan, engine, None, gates).score(case.texts, case.thoughts)
    assert apart(scores.token_BRH[scores.token_mask_BRH], whole(plain)) < 1e-9


def test_recomputed_activations_change_nothing() -> None:
    case, model = gated_case(24, group=2), tiny("llama")
    gates = opened(model)
    found = []
    for engine in (EngineOptions(), EngineOptions(activation_checkpointing=True)):
        output = TreeModel(model, case.plan, engine, None, gates).policy(
            case.texts, case.thoughts, continuations=True, of_first=True
        )
        found.append((conditioned(output), slopes(weighted(conditioned(output)), [model, gates])))
    assert apart(found[0][0], found[1][0]) < 1e-12
    assert max(apart(a, b) for a, b in zip(found[0][1], found[1][1]) if a.any()) < 1e-9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", DENSE + WINDOWED)
def test_shut_gates_predict_as_without_a_thought_bit_for_bit(family: str, dtype: torch.dtype) -> None:
    case, model = gated_case(25, "text2", group=2), tiny(family, dtype)
    inline = TreeModel(model, replace(case.plan, gated=False)).score(case.texts, case.thoughts, features=True)
    tree = TreeModel(model, case.plan, None, None, ReadingGates.of(model))
    scores = tree.score(case.texts, case.thoughts, features=True)
    assert scores.mask_BRK.any()
    assert torch.equal(scores.mask_BRK, inline.mask_BRK)
    assert torch.equal(scores.checkpoint_BRK, inline.checkpoint_BRK)
    assert torch.equal(scores.token_mask_BRH, inline.token_mask_BRH)
    assert torch.equal(scores.no_thought_BR, inline.no_thought_BR)
    assert torch.equal(scores.losses_BRK, scores.no_thought_BR[..., None] * scores.mask_BRK)
    assert torch.equal(scores.token_BRH, inline.no_thought_token_BRH)
    assert torch.equal(scores.need("features_BRHD"), inline.need("no_thought_features_BRHD"))
    output = tree.policy(case.texts, case.thoughts, continuations=True, no_thought=True)
    assert torch.equal(output.need("continuation_log_prob_BRH"), output.need("no_thought_log_prob_BRH"))


def test_shut_gates_are_the_limit_of_open_ones_and_have_gradients() -> None:
    case, model = gated_case(26), tiny("llama")
    gates = ReadingGates.of(model).double()
    tree = TreeModel(model, case.plan, None, None, gates)
    step = 1e-6
    with lifted():
        shut = conditioned(tree.policy(case.texts, case.thoughts, continuations=True)).sum()
        slope = torch.autograd.grad(shut, gates.gate)[0]
        with torch.no_grad():
            gates.gate[5] = step
            ajar = conditioned(tree.policy(case.texts, case.thoughts, continuations=True)).sum()
    assert float(slope.abs().min()) > 0
    assert float((ajar - shut.detach()) / step) == pytest.approx(float(slope[5]), rel=1e-4)


def test_actions_values_and_sampling_do_not_depend_on_the_reading() -> None:
    case, model = gated_case(27, "text2", group=2), tiny("qwen3")
    inline = TreeModel(model, replace(case.plan, gated=False))
    gated = TreeModel(model, case.plan, None, None, opened(model))
    found = [tree.policy(case.texts, case.thoughts, text=True) for tree in (inline, gated)]
    assert torch.equal(found[0].need("log_prob_BRT"), found[1].need("log_prob_BRT"))
    assert torch.equal(found[0].need("text_log_prob_BS"), found[1].need("text_log_prob_BS"))
    assert torch.equal(*(tree.features(case.texts, case.thoughts) for tree in (inline, gated)))


@pytest.mark.parametrize("seed", range(3))
def test_thoughts_that_differ_matter_only_through_open_gates(seed: int) -> None:
    case, model = gated_case(30 + seed), tiny("llama")
    other = replace(case.thoughts, tokens_BRT=case.thoughts.tokens_BRT.flip(-1))
    tree = TreeModel(model, case.plan, None, None, opened(model))
    some, others = (tree.score(case.texts, thoughts) for thoughts in (case.thoughts, other))
    assert not torch.allclose(some.losses_BRK, others.losses_BRK, rtol=1e-3)
    assert torch.equal(some.no_thought_BR, others.no_thought_BR)


@pytest.mark.parametrize("family", DENSE + WINDOWED)
def test_gated_reading_is_admitted(family: str) -> None:
    found = admit(TreeModel(tiny(family, torch.float32), gated_case(0, "text2", True).plan), longest=48)
    assert found.reading is not None
    assert found.reading < 1e-5


@pytest.mark.parametrize(
    "mistake",
    [
        lambda reading: reading.seen_Bst.logical_not_(),
        lambda reading: reading.seen_Bst[..., -1:].zero_(),
        lambda reading: reading.gates.gate.data.neg_(),
    ],
    ids=["the wrong nodes", "no close", "gates of the wrong sign"],
)
def test_a_mistake_in_gated_reading_is_caught(
    mistake: Callable[[GatedReading], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = GatedReading.__init__

    def wrong(self: GatedReading, layout: Layout, start: int, gates: ReadingGates) -> None:
        right(self, layout, start, copy.deepcopy(gates))
        mistake(self)

    monkeypatch.setattr(GatedReading, "__init__", wrong)
    with pytest.raises(UserError, match=r"thought\.reading = gated.*set thought\.reading = inline"):
        admit(TreeModel(tiny("llama", torch.float32), gated_case(0).plan), longest=48)


def test_a_hybrid_is_refused_with_a_remedy() -> None:
    case = gated_case(28)
    with pytest.raises(UserError, match=r"thought\.reading = gated: .*Qwen3_5.*set thought\.reading = inline"):
        TreeModel(tiny(HYBRID[0]), case.plan)


def test_continuations_without_gates_are_an_error() -> None:
    case = gated_case(29)
    tree = TreeModel(tiny("llama"), case.plan)
    with pytest.raises(ValueError, match="ReadingGates"):
        tree.score(case.texts, case.thoughts)

"""Low-rank updates: the engine computes what a plain model with merged weights computes, by every path it has."""

from __future__ import annotations

import copy

import pytest
import torch
from cases import lifted, random_case
from families import tiny
from test_decode import numbers
from torch import Tensor, nn
from transformers import PreTrainedModel

from tfive.errors import UserError
from tfive.rl.adapters import adapt_actor
from tfive.rl.settings import ActorSettings
from tfive.tree.forward import TreeModel
from tfive.tree.low_rank import (
    LoraLinear,
    copy_sharing_frozen,
    load_trained_state,
    low_rank_parts,
    merge,
    trained_state,
)
from tfive.tree.settings import EngineOptions, SamplingSettings

pytestmark = pytest.mark.model
FAMILIES = ("llama", "qwen3", "qwen3_5")


def adapted(family: str, targets: str = "all", dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """A tiny model whose updates are large enough to matter."""
    model = tiny(family, dtype)
    adapt_actor(model, ActorSettings(adapt="lora", lora_rank=3, lora_targets=targets), seed=1)
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for _, part in low_rank_parts(model):
            part.up.copy_(0.03 * torch.randn(part.up.shape, generator=draw))
    return model


def plain(model: PreTrainedModel) -> PreTrainedModel:
    """The reference: weights by the formula, in a model that knows nothing of updates."""
    found = copy.deepcopy(model)
    for name, part in list(low_rank_parts(found)):
        parent, _, leaf = name.rpartition(".")
        whole = nn.Linear(part.in_features, part.out_features, part.bias is not None, dtype=part.up.dtype)
        with torch.no_grad():
            whole.weight.copy_(part.linear.weight + part.scale * (part.up @ part.down))
            if part.bias is not None and whole.bias is not None:
                whole.bias.copy_(part.bias)
        setattr(found.get_submodule(parent), leaf, whole)
    return found


def close(found: Tensor | None, wanted: Tensor | None, by: float = 1e-9) -> None:
    assert found is not None
    assert wanted is not None
    torch.testing.assert_close(found, wanted, rtol=by, atol=by)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("fused", ["off", "on"])
def test_every_verb_computes_what_merged_weights_compute(family: str, fused: str) -> None:
    case = random_case(1, "text2", group=2)
    model = adapted(family)
    ours = TreeModel(model, case.plan, EngineOptions(fused_blocks=fused))  # type: ignore[arg-type]
    reference, base = TreeModel(plain(model), case.plan), TreeModel(tiny(family), case.plan)
    u, law = numbers(case.texts, 2, case.plan.length), SamplingSettings()
    with lifted():
        assert (ours.fusion.fusion is not None) == (fused == "on")
        drawn, wanted = ours.sample(case.texts, u, law), reference.sample(case.texts, u, law)
        assert drawn.tokens_BRT.equal(wanted.tokens_BRT)
        close(drawn.log_q_BRT, wanted.log_q_BRT, 1e-6)
        close(ours.score(case.texts, drawn).losses_BRK, reference.score(case.texts, drawn).losses_BRK)
        close(ours.features(case.texts, drawn), reference.features(case.texts, drawn))
        found, expected = (tree.policy(case.texts, drawn).log_prob_BRT for tree in (ours, reference))
        close(found, expected)
        untouched = base.policy(case.texts, drawn).log_prob_BRT
        assert untouched is not None
        assert found is not None
        assert float((found - untouched).detach().abs().max()) > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_held_updates_follow_the_model(family: str) -> None:
    case = random_case(5, "text")
    model = adapted(family, dtype=torch.float32)
    fused, u = TreeModel(model, case.plan, EngineOptions(fused_blocks="on")), numbers(case.texts, 1, case.plan.length)
    before = fused.sample(case.texts, u, SamplingSettings())
    with torch.no_grad():
        for _, part in low_rank_parts(model):
            part.up.mul_(-8.0)
    after = fused.sample(case.texts, u, SamplingSettings())
    wanted = TreeModel(plain(model), case.plan).sample(case.texts, u, SamplingSettings())
    assert not before.log_q_BRT.equal(after.log_q_BRT)
    assert after.tokens_BRT.equal(wanted.tokens_BRT)
    close(after.log_q_BRT, wanted.log_q_BRT, 1e-4)


@pytest.mark.parametrize(
    ("targets", "leaves"),
    [
        (
            "attention",
            {"q_proj", "k_proj", "v_proj", "o_proj", "out_proj"} | {f"in_proj_{n}" for n in ("qkv", "z", "b", "a")},
        ),
        ("mlp", {"gate_proj", "up_proj", "down_proj"}),
    ],
)
def test_targets_are_the_layers_they_name(targets: str, leaves: set[str]) -> None:
    model = adapted("qwen3_5", targets)
    assert {name.rpartition(".")[2] for name, _ in low_rank_parts(model)} == leaves
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert trained == {f"{name}.{half}" for name, _ in low_rank_parts(model) for half in ("down", "up")}
    case = random_case(2, "text")
    with lifted():
        ours, reference = (TreeModel(one, case.plan) for one in (model, plain(model)))
        close(
            ours.policy(case.texts, case.thoughts).log_prob_BRT,
            reference.policy(case.texts, case.thoughts).log_prob_BRT,
        )


def test_merging_gives_a_plain_model_and_says_what_precision_cost() -> None:
    ids = torch.arange(1, 20)[None]
    model = adapted("qwen3")
    wanted = model(ids).logits
    assert merge(model) < 1e-12
    assert not list(low_rank_parts(model))
    close(model(ids).logits, wanted, 1e-9)
    assert set(model.state_dict()) == set(tiny("qwen3").state_dict())
    coarse = adapted("qwen3", dtype=torch.bfloat16)
    with torch.no_grad():
        for _, part in low_rank_parts(coarse):
            part.up.mul_(1e-4)
    # Far smaller than the spacing of bfloat16 numbers: next to nothing of it is left.
    assert merge(coarse) > 0.5


def test_the_size_of_an_update_is_that_of_its_product() -> None:
    part = LoraLinear(nn.Linear(7, 5).double(), torch.randn(2, 7), 1.5)
    with torch.no_grad():
        part.up.normal_()
    update, frozen = part.change()
    assert update == pytest.approx(float((1.5 * part.up @ part.down).square().sum().detach()))
    assert frozen == pytest.approx(float(part.linear.weight.square().sum().detach()), rel=1e-6)


def test_copies_share_what_is_frozen_and_nothing_else() -> None:
    model = adapted("llama")
    twin = copy_sharing_frozen(model)
    for (name, ours), (_, theirs) in zip(model.named_parameters(), twin.named_parameters()):
        shared = ours.untyped_storage().data_ptr() == theirs.untyped_storage().data_ptr()
        assert shared == (not name.endswith((".up", ".down"))), name
    state = {name: value.clone() for name, value in trained_state(model).items()}
    assert state
    assert all(name.endswith((".up", ".down")) for name in state)
    with torch.no_grad():
        for _, part in low_rank_parts(twin):
            part.up.zero_()
    load_trained_state(twin, state)
    ids = torch.arange(1, 9)[None]
    assert twin(ids).logits.equal(model(ids).logits)
    with pytest.raises(RuntimeError, match="another model"):
        load_trained_state(twin, dict(list(state.items())[1:]))
    with pytest.raises(RuntimeError, match="another model"):
        load_trained_state(twin, {**state, "new": torch.ones(1)})


def test_a_model_is_adapted_once_and_where_it_can_be() -> None:
    with pytest.raises(UserError, match="already has low-rank updates"):
        adapt_actor(adapted("llama"), ActorSettings(adapt="lora"), seed=0)
    with pytest.raises(UserError, match="has no linear layers"):
        adapt_actor(tiny("gpt2"), ActorSettings(adapt="lora"), seed=0)


def test_weights_that_are_trained_in_shards_are_copied_and_saved() -> None:
    # They need no gradient themselves, and yet change: a teacher must not follow them, a checkpoint must hold them.
    model = tiny("llama", torch.float64).requires_grad_(False)
    copied = copy_sharing_frozen(model)
    assert not {id(one) for one in model.parameters()} & {id(one) for one in copied.parameters()}
    assert trained_state(model).keys() == model.state_dict().keys()

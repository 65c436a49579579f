"""Fused blocks: they compute what the blocks they replace compute, and are refused where they would not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from cases import lifted, random_case
from families import tiny
from test_decode import numbers
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from tfive.errors import UserError
from tfive.tree.delimiters import Delimiters
from tfive.tree.fast.fan import Fan
from tfive.tree.fast.fused import Division, Heads, TorchOps, choose_ops, differences, output_gate
from tfive.tree.fast.hf_fused import choose_fusion
from tfive.tree.fast.updates import Outward
from tfive.tree.forward import TreeModel
from tfive.tree.settings import EngineOptions, EngineSettings, SamplingSettings

FUSED = EngineOptions(fused_blocks="on")
CPU = torch.device("cpu")
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}


@pytest.mark.model
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_5"])
@pytest.mark.parametrize("kind", ["text2", "learned"])
def test_sampling_and_scoring_by_fused_blocks(family: str, kind: str) -> None:
    case = random_case(1, kind, group=2)
    model = tiny(family)
    delimiters = Delimiters.from_model(model, case.plan).double() if kind == "learned" else None
    stock, fused = (TreeModel(model, case.plan, engine, delimiters) for engine in (EngineOptions(), FUSED))
    u = numbers(case.texts, 2, case.plan.length)
    with lifted():
        assert fused.fusion.fusion is not None
        wanted, thoughts = (tree.sample(case.texts, u, SamplingSettings()) for tree in (stock, fused))
        assert torch.equal(thoughts.tokens_BRT, wanted.tokens_BRT)
        torch.testing.assert_close(thoughts.log_q_BRT, wanted.log_q_BRT, rtol=1e-6, atol=1e-6)
        scores, again = (tree.score(case.texts, thoughts) for tree in (stock, fused))
        torch.testing.assert_close(again.losses_BRK, scores.losses_BRK, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(again.no_thought_BR, scores.no_thought_BR, rtol=1e-9, atol=1e-9)


@pytest.mark.model
@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_products_in_parts_and_the_next_norm_on_the_way(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, asked = random_case(4, "text2", group=2), list[int]()
    model = tiny(family)
    stock, fused = TreeModel(model, case.plan), TreeModel(model, case.plan, FUSED)

    def two(_: Outward, rows: int) -> int:
        asked.append(rows)
        return 2

    given, prepare = list[Fan](), Fan.prepare

    def noted(fan: Fan, *rest: Tensor) -> None:
        given.append(fan)
        prepare(fan, *rest)

    monkeypatch.setattr(Outward, "shares", two)
    monkeypatch.setattr(Fan, "prepare", noted)
    u = numbers(case.texts, 2, case.plan.length)
    with lifted():
        wanted, thoughts = (tree.sample(case.texts, u, SamplingSettings()) for tree in (stock, fused))
    assert torch.equal(thoughts.tokens_BRT, wanted.tokens_BRT)
    torch.testing.assert_close(thoughts.log_q_BRT, wanted.log_q_BRT, rtol=1e-6, atol=1e-6)
    steps, blocks = case.plan.open_width + case.plan.length - 1, model.config.num_hidden_layers
    assert asked.count(thoughts.length_BR.numel()) == steps * blocks  # others: of blocks that are compared
    unfolded = (
        [block for block in fused.fusion.fusion.held[1:] if not block.mixer.inward.folds] if fused.fusion.fusion else []
    )
    assert len(given) == steps * len(unfolded)
    assert bool(unfolded) == (family == "qwen3_5")


@pytest.mark.model
@pytest.mark.parametrize("inside", [False, True])
def test_a_hook_between_blocks_is_seen_by_the_norm_behind_it(inside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    case, model = random_case(4, "text2", group=2), tiny("qwen3_5")
    backbone: Any = model.base_model
    push = torch.linspace(-1, 1, model.config.hidden_size, dtype=torch.float64)

    def changed(_: Any, __: Any, hidden: Tensor) -> Tensor:
        return hidden.add_(push) if inside else hidden + push

    stock, fused = TreeModel(model, case.plan), TreeModel(model, case.plan, FUSED)
    monkeypatch.setattr(Outward, "shares", lambda *_: 2)
    with lifted():
        assert fused.fusion.fusion is not None  # one that was there before the blocks were compared is found by that
    backbone.layers[1].register_forward_hook(changed)
    u = numbers(case.texts, 2, case.plan.length)
    with lifted():
        wanted, thoughts = (tree.sample(case.texts, u, SamplingSettings()) for tree in (stock, fused))
    assert torch.equal(thoughts.tokens_BRT, wanted.tokens_BRT)
    torch.testing.assert_close(thoughts.log_q_BRT, wanted.log_q_BRT, rtol=1e-6, atol=1e-6)


@pytest.mark.model
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_5"])
def test_angles_of_a_step_are_looked_up(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, turned = random_case(3, "text2", group=2), list[int]()
    model = tiny(family)
    fused, rotary = TreeModel(model, case.plan, FUSED), cast(Any, type(model.base_model.rotary_emb))
    asked = rotary.forward

    def counted(self: Any, x: Tensor, position_ids: Tensor, **given: Any) -> Any:
        turned.append(position_ids.shape[-1])
        return asked(self, x, position_ids, **given)

    monkeypatch.setattr(rotary, "forward", counted)
    u = numbers(case.texts, 2, case.plan.length)
    with lifted():
        fused.sample(case.texts, u, SamplingSettings())
        assert fused.sampler is not None
        assert fused.sampler.angles is not None
        before = len(turned)
        fused.sample(case.texts, u, SamplingSettings())
    # The texts are read by the model's own angles; no step asks for any.
    assert len(turned) == before + 1


@pytest.mark.model
def test_angles_that_depend_on_more_than_the_position_stay_the_model_s() -> None:
    case, model = random_case(3, "text"), tiny("llama", rope_parameters=DYNAMIC)
    stock, fused = TreeModel(model, case.plan), TreeModel(model, case.plan, FUSED)
    u = numbers(case.texts, 1, case.plan.length)
    with lifted():
        wanted, thoughts = (tree.sample(case.texts, u, SamplingSettings()) for tree in (stock, fused))
    assert fused.sampler is not None
    assert fused.sampler.angles is None
    assert torch.equal(thoughts.tokens_BRT, wanted.tokens_BRT)


def test_one_key_switches_every_fast_path() -> None:
    assert EngineSettings().options() == EngineOptions(replayed_passes=True)
    on = EngineOptions(fused_norms="on", fused_blocks="on", fused_training="on", replayed_passes=True)
    assert EngineSettings(fast="on").options() == on
    plain = EngineOptions(
        "sdpa", "torch", fused_norms="off", fused_blocks="off", fused_training="off", cuda_graphs=False
    )
    assert EngineSettings(fast="off").options() == plain
    lean = EngineSettings(fast="off", activation_checkpointing=True).options()
    assert lean == replace(plain, activation_checkpointing=True)


@pytest.mark.model
@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_fast_or_not_computes_the_same(family: str) -> None:
    case = random_case(2, "text", group=2)
    model = tiny(family)
    with lifted():
        on, off = (TreeModel(model, case.plan, EngineSettings(fast=fast).options()) for fast in ("on", "off"))
        scores, plain = (tree.score(case.texts, case.thoughts) for tree in (on, off))
    assert on.fusion.fusion is not None
    assert off.fusion.fusion is None
    torch.testing.assert_close(scores.losses_BRK, plain.losses_BRK, rtol=1e-9, atol=1e-9)


@pytest.mark.model
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_5"])
def test_held_weights_follow_the_model(family: str) -> None:
    case = random_case(5, "text")
    model, other = tiny(family, torch.float32), tiny(family, torch.float32, seed=7)
    fused, u = TreeModel(model, case.plan, FUSED), numbers(case.texts, 1, case.plan.length)
    before = fused.sample(case.texts, u, SamplingSettings())
    model.load_state_dict(other.state_dict())
    after = fused.sample(case.texts, u, SamplingSettings())
    wanted = TreeModel(model, case.plan).sample(case.texts, u, SamplingSettings())
    assert not torch.equal(before.tokens_BRT, after.tokens_BRT)
    assert torch.equal(after.tokens_BRT, wanted.tokens_BRT)
    torch.testing.assert_close(after.log_q_BRT, wanted.log_q_BRT, rtol=1e-4, atol=1e-4)


@pytest.mark.model
def test_biased_projections_are_fused() -> None:
    case = random_case(2, "text")
    model = tiny("llama", attention_bias=True)
    stock, fused = TreeModel(model, case.plan), TreeModel(model, case.plan, FUSED)
    u = numbers(case.texts, 1, case.plan.length)
    with lifted():
        wanted, thoughts = (tree.sample(case.texts, u, SamplingSettings()) for tree in (stock, fused))
    torch.testing.assert_close(thoughts.log_q_BRT, wanted.log_q_BRT, rtol=1e-6, atol=1e-6)


@pytest.mark.model
@pytest.mark.parametrize(
    ("family", "why"),
    [("gpt2", "rotary"), ("gpt_neox", "made of"), ("mistral", "window"), ("gemma2", "made of|window")],
)
def test_other_blocks_are_refused(family: str, why: str) -> None:
    case = random_case(3, "text")
    with pytest.raises(UserError, match=why):
        _ = TreeModel(tiny(family), case.plan, FUSED).fusion
    assert TreeModel(tiny(family), case.plan).fusion.fusion is None


@pytest.mark.model
def test_blocks_that_compute_something_else_are_refused_by_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("qwen3")
    kind: Any = type(model.model.layers[0].mlp)
    stock = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: 1.01 * stock(self, x))
    with pytest.raises(UserError, match="computes something else"):
        _ = TreeModel(model, random_case(3, "text").plan, FUSED).fusion


@pytest.mark.model
def test_adapted_layers_are_refused() -> None:
    model = tiny("llama")
    model.model.layers[1].mlp.up_proj = torch.nn.Sequential(model.model.layers[1].mlp.up_proj)
    with pytest.raises(UserError, match="up_proj of LlamaMLP is no plain linear"):
        _ = TreeModel(model, random_case(3, "text").plan, FUSED).fusion


@pytest.mark.model
def test_parity_stays_exact_beside_fused_blocks() -> None:
    case = random_case(4, "text")
    tree, u = TreeModel(tiny("qwen3", torch.float32), case.plan, FUSED), numbers(case.texts, 1, case.plan.length)
    thoughts = tree.sample(case.texts, u, SamplingSettings(parity=True))
    with torch.no_grad():
        policy = tree.policy(case.texts, thoughts, parity=True).log_prob_BRT
    assert policy is not None
    assert torch.equal(policy, thoughts.log_q_BRT)


def test_attention_to_a_stretch_of_the_trunk_and_the_own_branch() -> None:
    draw = torch.Generator().manual_seed(0)
    query = torch.randn(2, 3, 4, 8, generator=draw, dtype=torch.float64)
    key, value = (torch.randn(2, 2, 7 + 3 * 2, 8, generator=draw, dtype=torch.float64) for _ in range(2))
    first, stop = torch.tensor([[0, 2, 4], [1, 0, 0]]), torch.tensor([[3, 7, 5], [2, 0, 1]])
    found = TorchOps().attend(query, key, value, first, stop, torch.tensor([1]), 7, 0.3, None)
    for b in range(2):
        for r in range(3):
            seen = [*range(int(first[b, r]), int(stop[b, r])), 7 + 2 * r, 8 + 2 * r]
            for y in range(4):
                weight = (key[b, y // 2, seen] @ query[b, r, y] * 0.3).softmax(0)
                torch.testing.assert_close(found[b, r, y], weight @ value[b, y // 2, seen])


def test_rotation_norm_and_slots() -> None:
    draw = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(6, n, generator=draw) for n in (4 * 8, 2 * 8, 2 * 8))
    cos, sin = torch.randn(6, 8, generator=draw), torch.randn(6, 8, generator=draw)
    norms = (torch.rand(8, generator=draw), torch.rand(8, generator=draw), 1e-5)
    turned, keys, values = torch.empty(2, 3, 4, 8), torch.zeros(2, 2, 9, 8), torch.zeros(2, 2, 9, 8)
    slot = torch.tensor([8, 1, 4])
    TorchOps().rotate((query, key, value), None, norms, (cos, sin), False, slot, turned, keys, values)
    heads = [F.rms_norm(x.view(6, -1, 8), (8,), w, 1e-5) for x, w in ((query, norms[0]), (key, norms[1]))]
    wanted_query, wanted_key = apply_rotary_pos_emb(*heads, cos, sin)
    torch.testing.assert_close(turned.flatten(0, 1), wanted_query)
    torch.testing.assert_close(keys[:, :, slot].transpose(1, 2).flatten(0, 1), wanted_key)
    torch.testing.assert_close(values[:, :, slot].transpose(1, 2).flatten(0, 1), value.view(6, 2, 8))
    assert not keys[:, :, [0, 2, 3, 5, 6, 7]].any()


def test_the_gate_stands_beside_each_query_head() -> None:
    packed = torch.randn(3, 2 * 2 * 4, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(output_gate(packed, 2)[:, 1], packed[:, 12:16].sigmoid())


def test_ops_are_compared_and_the_reason_is_kept() -> None:
    heads = Heads(4, 2, 16, 8, True, True)
    assert max(differences(TorchOps(), heads, CPU, torch.float32).values()) == 0

    class Wrong(TorchOps):
        def gate(self, gate_xI: Tensor, up_xI: Tensor, division: Division | None) -> Tensor:
            return gate_xI * up_xI

    assert differences(Wrong(), heads, CPU, torch.float32)["gated product"] > 0.1
    ops, reason = choose_ops("auto", heads, CPU, torch.float32)
    assert ops is None
    assert "no kernels for cpu" in reason


@pytest.mark.model
def test_auto_is_off_without_a_gpu() -> None:
    tree = TreeModel(tiny("llama"), random_case(0).plan)
    assert tree.fusion.fusion is None
    assert "cpu" in tree.fusion.reason
    assert choose_fusion("off", tree.backbone, None, None).reason == "switched off"  # type: ignore[arg-type]

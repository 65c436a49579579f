"""Admission by numbers: what is right is let in, what would silently be wrong is refused and named."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import random_case
from families import DENSE, WINDOWED, tiny
from torch import Tensor

from tfive.errors import UserError
from tfive.tree import admission
from tfive.tree.admission import admit
from tfive.tree.attention import Attending
from tfive.tree.fast import delta_kernel
from tfive.tree.fast.delta_step import RecurrentHeads
from tfive.tree.fast.mixer import TorchMixer
from tfive.tree.forward import Delimiters, TreeModel
from tfive.tree.layout import Layout
from tfive.tree.recurrent.delta_rule import read_paths
from tfive.tree.settings import EngineOptions

pytestmark = pytest.mark.model
PLAN = random_case(0, "text2", variable=True, length=4).plan


@pytest.mark.parametrize("family", DENSE + WINDOWED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_right_models_are_admitted(family: str, dtype: torch.dtype) -> None:
    found = admit(TreeModel(tiny(family, dtype), PLAN), longest=48)
    assert found.dtype == "float32"
    assert max(found.blocks) < 1e-5
    assert found.leak == 0


def test_what_admission_computes_with_is_gone_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made, small_copy = list[weakref.ref[TreeModel]](), admission._small_copy

    def noted(*given: Any) -> TreeModel:
        tree = small_copy(*given)
        made.append(weakref.ref(tree))
        return tree

    monkeypatch.setattr(admission, "_small_copy", noted)
    model = TreeModel(tiny("qwen3", torch.bfloat16), PLAN, EngineOptions(fused_blocks="on"))
    gc.disable()
    try:
        admit(model, longest=48)
        assert [tree() for tree in made] == [None], "its weights would stay until garbage is collected"
    finally:
        gc.enable()


def test_a_hybrid_is_admitted() -> None:
    assert max(admit(TreeModel(tiny("qwen3_5", torch.float32), PLAN), longest=90).blocks) < 1e-4


def test_recurrent_kernels_that_go_wrong_in_a_model_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unmasked(TorchMixer):
        def heads(self, sequence_QLU: Tensor, taps_UJ: Tensor, heads: RecurrentHeads, document_QL: Any) -> Any:
            return super().heads(sequence_QLU, taps_UJ, heads, None)

    pretended = SimpleNamespace(TritonRule=lambda exact: read_paths)
    monkeypatch.setitem(sys.modules, "tfive.tree.fast.delta_chunk", pretended)
    monkeypatch.setattr(delta_kernel, "triton_trouble", lambda *_: None)
    monkeypatch.setattr(delta_kernel, "_refused", {})
    model = tiny("qwen3_5", torch.float32)
    for mixer, name in ((TorchMixer, "triton"), (Unmasked, "torch")):
        monkeypatch.setattr(delta_kernel, "TritonMixer", mixer)
        assert max(admit(TreeModel(model, PLAN), longest=90).blocks) < 1e-4
        assert TreeModel(model, PLAN).rule.name == name
    assert "not admitted with them (model" in TreeModel(model, PLAN).rule.reason
    delta_kernel._refused.clear()
    with pytest.raises(UserError, match="differ from block 0"):
        admit(TreeModel(model, PLAN, EngineOptions(delta_rule="triton")), longest=90)
    assert not delta_kernel._refused


def test_half_precision_without_a_copy_has_wider_bounds() -> None:
    found = admit(TreeModel(tiny("llama", torch.bfloat16), PLAN), longest=48, copy_bytes=0)
    assert found.dtype == "bfloat16"
    assert 1e-4 < max(found.blocks) < 0.1


@pytest.mark.parametrize("kind", ["none", "learned"])
def test_other_delimiters(kind: str) -> None:
    plan, model = random_case(0, kind).plan, tiny("qwen3", torch.float32)
    delimiters = Delimiters.from_model(model, plan) if kind == "learned" else None
    assert max(admit(TreeModel(model, plan, delimiters=delimiters), longest=48).blocks) < 1e-5


def test_dynamic_rotary_embeddings_are_refused_beyond_their_limit_only() -> None:
    tree = TreeModel(tiny("dynamic", torch.float32, max_position_embeddings=40), PLAN)
    assert max(admit(tree, longest=39).blocks) < 1e-5
    for longest in (44, 200):
        with pytest.raises(UserError, match=r"LlamaForCausalLM.*block 0 \(LlamaDecoderLayer\)"):
            admit(tree, longest)


def test_an_ignored_window_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    attend: Callable[..., Tensor] = Attending.attend

    def careless(self: Attending, *args: Any) -> Any:
        return attend(self, *args[:5], None, *args[6:])

    monkeypatch.setattr(Attending, "attend", careless)
    with pytest.raises(UserError, match=r"block 0 \(MistralDecoderLayer\)"):
        admit(TreeModel(tiny("mistral", torch.float32), PLAN), longest=48)
    only_second = tiny("gemma2", torch.float32, layer_types=["full_attention", "sliding_attention"])
    with pytest.raises(UserError, match=r"block 1 \(Gemma2DecoderLayer\)"):
        admit(TreeModel(only_second, PLAN), longest=48)


def test_an_ignored_cap_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    attend: Callable[..., Tensor] = Attending.attend
    monkeypatch.setattr(Attending, "attend", lambda self, *args: attend(self, *args[:6], None))
    with pytest.raises(UserError, match=r"block 0 \(Gemma2DecoderLayer\)"):
        admit(TreeModel(tiny("gemma2", torch.float32), PLAN), longest=48)


def test_a_head_that_is_not_the_models_is_caught() -> None:
    model = tiny("llama", torch.float32)
    model.config.logit_scale = 2.0
    with pytest.raises(UserError, match="the head does not"):
        admit(TreeModel(model, PLAN), longest=48)


def test_a_leak_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    clean = admission._tree_pass
    passes: list[int] = []

    def leaking(tree: TreeModel, layout: Layout, shift: int) -> tuple[list[Tensor], Tensor]:
        passes.append(1)
        blocks, hidden = clean(tree, layout, shift)
        return blocks, hidden + 1e-3 * layout.token_BN.sum() * (len(passes) > 1)

    monkeypatch.setattr(admission, "_tree_pass", leaking)
    with pytest.raises(UserError, match="sees what it must not"):
        admit(TreeModel(tiny("llama", torch.float32), PLAN), longest=48)


def test_a_wrong_sampling_step_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    from tfive.tree.step_pass import StepPass

    right = StepPass.visible
    monkeypatch.setattr(StepPass, "visible", lambda self, window: right(self, window) & (self.slot_place_m != 0))
    with pytest.raises(UserError, match="sampling step"):
        admit(TreeModel(tiny("llama", torch.float32), PLAN), longest=48)


def test_too_short_a_run_is_refused() -> None:
    with pytest.raises(UserError, match="too short"):
        admit(TreeModel(tiny("llama"), PLAN), longest=15)

"""Gated products in stretches of rows: those of the module, from smaller tensors; other modules are left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from exact import apart
from families import tiny
from torch import nn

from tfive.tree import stretches
from tfive.tree.hf import Backbone, replaced
from tfive.tree.stretches import stretched

pytestmark = pytest.mark.model


def product(dtype: torch.dtype = torch.float32) -> Any:
    return Backbone(tiny("llama", dtype)).blocks[0].mlp


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stretches_give_the_same_rows_and_smaller_tensors(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(stretches, "ROWS", 64)
    module = product(dtype)
    widest: list[int] = []
    module.act_fn.register_forward_pre_hook(lambda _, given: widest.append(len(given[0])))
    hidden = torch.randn(3, 70, module.gate_proj.in_features, generator=torch.Generator().manual_seed(1)).to(dtype)
    own = stretched(module)
    assert own is not None
    with torch.no_grad():
        expected = module(hidden)
        widest.clear()
        assert apart(own(hidden), expected) < (1e-5 if dtype == torch.float32 else 2e-2)
    assert 32 <= min(widest) <= max(widest) <= 64


def test_another_computation_is_left_alone() -> None:
    module = product()
    module.__class__ = type("Raised", (type(module),), {"forward": lambda self, x: x + 1})
    assert stretched(module) is None
    assert stretched(nn.Linear(3, 3)) is None


def test_a_pass_uses_them_without_gradients_alone() -> None:
    backbone: Any = Backbone(tiny("llama", torch.float32))
    assert backbone._products() == []
    with torch.no_grad():
        assert [part for part, _ in backbone._products()] == [block.mlp for block in backbone.blocks]
        with replaced(backbone.blocks[0].mlp, lambda x: x):
            assert len(Backbone(backbone.model)._products()) == len(backbone.blocks) - 1
        backbone.blocks[0].mlp.__dict__["forward"] = lambda x: x
        assert len(backbone._products()) == len(backbone.blocks) - 1

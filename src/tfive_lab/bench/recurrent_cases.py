"""Inputs for the kernels of recurrent layers at a shape of model: one sampling step, and paths for the chunked rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tfive.errors import UserError
from tfive.models.shape import known_shapes
from tfive.tree.fast.delta_step import LayerMemory, RecurrentHeads, StepWeights
from tfive_lab.bench.work import SHAPES, Work


def heads_of(shape: str) -> RecurrentHeads:
    """The recurrent layers of a known shape."""
    facts = known_shapes()
    known: dict[str, Any] = facts[next(key for key in facts if key.startswith(SHAPES[shape]))]
    if "linear_num_key_heads" not in known:
        raise UserError(f"shape {shape} has no recurrent layers; use one of qwen3.5-2b, qwen3.5-9b")
    names = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
    keys, values, key_features, value_features = (int(known[name]) for name in names)
    return RecurrentHeads(keys, values, key_features, value_features, int(known["linear_conv_kernel_dim"]) - 1)


def step_case(heads: RecurrentHeads, work: Work, device: torch.device) -> tuple[Callable[[], Any], int]:
    """One layer's step of all branches at the last place, and the bytes of states it reads."""
    from tfive.tree.fast import delta_step_triton

    branches, width = work.branches, 2048
    like = torch.randn(branches, width, device=device).bfloat16()
    memory = LayerMemory.empty(branches // work.group, branches, work.length + 1, heads, like, once=True)
    for buffer in (memory.state_XIEF, memory.past_QLU, memory.key_QIZE, memory.write_QIZF):
        buffer.normal_()
    sizes = (heads.channels, heads.values * heads.value_features, heads.values, heads.values)
    joined = torch.randn(branches, sum(sizes), device=device).bfloat16()
    log_rate, bias = (torch.randn(heads.values, device=device).bfloat16() for _ in range(2))
    taps = torch.randn(heads.channels, heads.memory + 1, device=device).bfloat16()
    weights = StepWeights(
        heads, taps, log_rate, bias, torch.ones(heads.value_features, device=device).bfloat16(), 1e-6, once=True
    )
    place = torch.tensor([work.length], device=device)
    products: Any = joined.split(sizes, -1)
    moved = memory.state_XIEF.numel() * 2 + memory.key_QIZE.numel() * 2 + memory.write_QIZF.numel() * 4
    return lambda: delta_step_triton.step(products, weights, memory, place), moved


def path_case(heads: RecurrentHeads, paths: int, length: int, states: int, device: torch.device) -> list[Tensor]:
    """Rule inputs of paths in bfloat16, with an initial state where `states` is not 0."""
    count, keys = heads.values, heads.key_features
    query, key = (
        torch.nn.functional.normalize(torch.randn(paths, length, count, keys, device=device), dim=-1) for _ in range(2)
    )
    value = torch.randn(paths, length, count, heads.value_features, device=device)
    found = [x.bfloat16() for x in (query * keys**-0.5, key, value)]
    found += [-torch.rand(paths, length, count, device=device), torch.rand(paths, length, count, device=device)]
    if states:
        found.append(torch.randn(states, count, keys, heads.value_features, device=device) * 0.1)
    return [x.requires_grad_() for x in found]

"""Triton's sampling step against PyTorch's in Triton's interpreter, on a processor.

`test_interpreted.py` runs it in a process of its own: Triton decides when it is imported whether it interprets.
"""

from __future__ import annotations

import json
import math
from dataclasses import fields
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

from tfive.tree.fast.delta_step import LayerMemory, RecurrentHeads, StepWeights, torch_step
from tfive.tree.fast.delta_step_triton import step

FEW, SQUARE = RecurrentHeads(1, 2, 16, 16, 3), RecurrentHeads(1, 1, 32, 16, 3)
CASES = (
    # heads, precision, branches of a state, places, the place
    (FEW, torch.bfloat16, 2, 20, 0),
    (FEW, torch.bfloat16, 2, 20, 18),
    (SQUARE, torch.bfloat16, 1, 13, 12),
    (SQUARE, torch.bfloat16, 1, 16, 15),
    (FEW, torch.bfloat16, 2, 5, 3),
    (SQUARE, torch.float32, 2, 20, 17),
)


def mend() -> None:
    """What Triton 3.6 lacks here: bounds of loops under numpy 2.4, and products in bfloat16, which it keeps as whole
    numbers."""
    tensors, product = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot

    def with_bounds(tensor: Any, scope: Any) -> None:
        tensors(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def wide(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        return product(self, wide(a), wide(b), *others)

    interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot = with_bounds, dot


def apart(heads: RecurrentHeads, dtype: torch.dtype, share: int, window: int, place: int) -> float:
    """How far outputs and buffers are from `torch_step` in float32 after one step, at most: |a − b| / |b|. NaN where
    the kernels use what stands behind the place, or beside a buffer."""
    generator = torch.Generator().manual_seed(place)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    sizes = (heads.channels, heads.values * heads.value_features, heads.values, heads.values)
    joined, taps = random(share, sum(sizes)), random(heads.channels, heads.memory + 1)
    norm = 1 + 0.1 * random(heads.value_features)
    gates, filled = (random(heads.values), random(heads.values)), LayerMemory.empty(1, share, window, heads, taps, True)
    for buffer in (filled.state_XIEF, filled.past_QLU, filled.key_QIZE, filled.write_QIZF):
        buffer.copy_(0.3 * random(*buffer.shape))
    filled.sum_QIZ.copy_(-torch.linspace(0, 1, window))
    filled.past_QLU[:, place + heads.memory :] = 0
    found: list[list[Tensor]] = []
    for some, kind, behind in ((torch_step, torch.float32, 0.0), (step, dtype, torch.nan)):
        held = [_between_nan(getattr(filled, field.name), kind) for field in fields(LayerMemory)]
        memory = LayerMemory(*held)
        for buffer in (memory.key_QIZE, memory.write_QIZF, memory.sum_QIZ):
            buffer[:, :, place:] = behind
        memory.past_QLU[:, place + heads.memory :] = behind
        weights = StepWeights(heads, taps.to(kind), *gates, norm.to(kind), 1e-6, True)
        products: Any = _between_nan(joined, kind).split(sizes, -1)
        output = some(products, weights, memory, torch.tensor([place]))
        reached = place + heads.memory + 1
        found.append(
            [output, memory.past_QLU[:, :reached]]
            + [x[:, :, : place + 1] for x in (memory.key_QIZE, memory.write_QIZF, memory.sum_QIZ)]
        )
    sizes_apart = [
        float((got.double() - want.double()).norm() / want.double().norm()) for want, got in zip(*found, strict=True)
    ]
    return math.nan if any(map(math.isnan, sizes_apart)) else max(sizes_apart)


def _between_nan(x: Tensor, kind: torch.dtype) -> Tensor:
    """A copy, in precision `kind` if it is held in the model's, with NaN before and behind it."""
    room = torch.full((x.numel() + 256,), torch.nan, dtype=kind if x.dtype != torch.float32 else x.dtype)
    return room[128 : 128 + x.numel()].view(x.shape).copy_(x)


if __name__ == "__main__":
    mend()
    print(json.dumps([apart(*case) for case in CASES]))

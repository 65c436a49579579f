"""Decoder blocks with few kernels, for passes with gradients; the blocks are those that `hf_fused.py` found.

A trained block replaces a block's forward, never the model, and computes by the model's own weights. Names admit
nothing here either: the first block of each kind is compared, gradients of all its weights included, with the forward
it would replace, in float32; each kernel is compared with PyTorch (`training_ops.py`) in the model's precision.

Local shape letters as in `training_ops.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tfive.errors import UserError
from tfive.tree.attention import Attending, TreePass
from tfive.tree.fast.fused import Angles, output_gate
from tfive.tree.fast.hf_fused import AttentionPart, FusedBlock, Fusion, fused_block, rotary_angles
from tfive.tree.fast.trained import gated, normed, onto, products, rotated
from tfive.tree.fast.training_ops import BlockShape, TorchTraining, TrainingOps, choose_training
from tfive.tree.fast.updates import Linear
from tfive.tree.hf import IMPLEMENTATION, Backbone, is_recurrent, mixing, recurrent_parts, replaced
from tfive.tree.layout import Layout
from tfive.tree.low_rank import LoraLinear

_BOUND = 1e-3
"""Largest error of a trained block's output and gradients in float32, relative to their size."""


def _plain(*parts: Linear) -> list[nn.Linear]:
    """Layers without low-rank updates; `choose_trained` lets no others come here."""
    return [part for part in parts if isinstance(part, nn.Linear)]


def _mixed(block: FusedBlock, hidden_BnD: Tensor, angles: Angles, tree: Attending, ops: TrainingOps) -> Tensor:
    """The residual stream `[x, D]` after the block's attention or recurrent layer."""
    mixer, norm = block.mixer, block.mixer.inward.norm
    if not isinstance(mixer, AttentionPart):
        residual_xD, inputs_xD = normed(ops, hidden_BnD.flatten(0, 1), norm.weight, norm.epsilon)
        if tree.recurrence is None:
            raise RuntimeError("this pass has no recurrence for a recurrent layer")
        mixed_BnD = tree.recurrence.mix(recurrent_parts(mixer.module), inputs_xD.view(hidden_BnD.shape))
        return residual_xD + mixed_BnD.flatten(0, 1)
    room_xD = torch.empty_like(hidden_BnD.flatten(0, 1), requires_grad=False)
    residual_xD, inputs_xD = normed(ops, hidden_BnD.flatten(0, 1), norm.weight, norm.epsilon, room_xD)
    heads, norms = mixer.heads, None
    if mixer.norms is not None:
        norms = (mixer.norms[0].weight, mixer.norms[1].weight, mixer.norms[0].epsilon)
    query, key, value = products(inputs_xD, _plain(*mixer.inward.parts), join=True)
    three = rotated(ops, (query, key, value), norms, angles, heads, len(hidden_BnD))
    output_BnYE = tree.attend(mixer.layer, *three, mixer.scale)
    if heads.gated:
        output_BnYE = output_BnYE * output_gate(query, heads.queries).view(output_BnYE.shape)
    return onto(residual_xD, output_BnYE.reshape(len(residual_xD), -1), room_xD, *_plain(mixer.outward.part))


def trained_forward(block: FusedBlock, ops: TrainingOps) -> Callable[..., Tensor]:
    """A forward to put in place of the block's own."""

    def forward(
        hidden_states: Tensor, *_: Any, position_embeddings: tuple[Tensor, Tensor], tree: Attending, **__: Any
    ) -> Tensor:
        shape = hidden_states.shape
        cos, sin = (a.expand(shape[0], -1, -1).reshape(-1, a.shape[-1]) for a in position_embeddings)
        residual_xD = _mixed(block, hidden_states.contiguous(), (cos, sin), tree, ops)
        norm = block.spread.norm
        room_xD = torch.empty_like(residual_xD, requires_grad=False)
        residual_xD, inputs_xD = normed(ops, residual_xD, norm.weight, norm.epsilon, room_xD)
        gate_xI, up_xI = products(inputs_xD, _plain(*block.spread.parts))
        return onto(residual_xD, gated(ops, gate_xI, up_xI), room_xD, *_plain(block.down.part)).view(shape)

    return forward


@dataclass(frozen=True)
class TrainingChoice:
    """Forwards with gradients for all blocks and the operations they use, or None, and why."""

    forwards: list[Callable[..., Tensor]] | None
    ops: TrainingOps | None
    reason: str


def _slopes(forward: Callable[..., Any], twin: Any, hidden: Tensor, given: dict[str, Any]) -> list[Tensor]:
    """Output of a block and the gradients of its input and parameters."""
    inputs = hidden.clone().requires_grad_()
    output = forward(inputs, **given)
    output = output[0] if isinstance(output, tuple) else output
    weight = torch.linspace(-1, 1, output.numel(), dtype=output.dtype, device=output.device).view(output.shape)
    leaves = [inputs, *twin.parameters()]
    return [(output - inputs).detach(), *torch.autograd.grad((output * weight).sum(), leaves)]


def _examine(backbone: Backbone, index: int, angles: Angles, tree: TreePass, scale: float) -> str | None:
    """Why block `index` is not trained by fewer kernels, None where all gradients agree."""
    block = backbone.blocks[index]
    twin: Any = copy.deepcopy(block, {id(backbone.config): backbone.config}).to(angles[0].dtype).requires_grad_()
    shape = (*tree.layout.position_BN.shape, backbone.config.hidden_size)
    hidden = torch.randn(shape, generator=torch.Generator().manual_seed(index)).to(angles[0])
    given = {"position_embeddings": angles, "attention_mask": None, "tree": tree}
    with torch.enable_grad(), backbone.attending_by(IMPLEMENTATION), ExitStack() as patches:
        for module in twin.children():
            if is_recurrent(module):
                patches.enter_context(replaced(module, mixing(module)))
        wanted = _slopes(twin, twin, hidden, given)
        forward = trained_forward(fused_block(twin, angles[0].shape[-1], scale), TorchTraining())
        found = _slopes(forward, twin, hidden, given)
    off = max(float((a - b).norm() / b.norm().clamp(min=1e-20)) for a, b in zip(found, wanted, strict=True))
    return None if off <= _BOUND else f"block {index} ({type(block).__name__}) has other gradients, {off:.2g} apart"


def choose_trained(
    setting: str, backbone: Backbone, fusion: Fusion | None, reason: str, layout: Layout, recurrence: Any
) -> TrainingChoice:
    """Trained blocks for the option `fused_training`, given the fused ones (or the reason why there are none)."""
    first = next(backbone.base.parameters())
    if setting == "off" or fusion is None:
        return TrainingChoice(None, None, "switched off" if setting == "off" else reason)
    if any(isinstance(module, LoraLinear) for block in backbone.blocks for module in block.modules()):
        return TrainingChoice(None, None, "low-rank updates are trained by the model's own kernels")
    tree = TreePass(layout, recurrence=recurrence)
    with torch.no_grad():
        angles = rotary_angles(backbone, layout)
    kinds = {type(block.mixer): index for index, block in reversed(list(enumerate(fusion.blocks)))}
    for index in kinds.values():
        mixer = fusion.blocks[index].mixer
        scale = mixer.scale if isinstance(mixer, AttentionPart) else 1.0
        trouble = _examine(backbone, index, angles, tree, scale)
        if trouble is not None:
            if setting == "on":
                raise UserError(f"engine.fast = on: {trouble}; set it to auto")
            return TrainingChoice(None, None, trouble)
    ops: TrainingOps | None = None
    for shape in block_shapes(fusion, backbone):
        ops, reason = choose_training(setting, shape, first.device, first.dtype)
        if ops is None:
            break
    forwards = None if ops is None else [trained_forward(block, ops) for block in fusion.blocks]
    return TrainingChoice(forwards, ops, reason)


def block_shapes(fusion: Fusion, backbone: Backbone) -> set[BlockShape]:
    """The sizes of all blocks that attend."""
    width = int(backbone.config.hidden_size)
    return {
        BlockShape(block.mixer.heads, width, block.down.part.in_features)
        for block in fusion.blocks
        if isinstance(block.mixer, AttentionPart)
    }

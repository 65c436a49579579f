"""Decoder blocks with few kernels, for passes without gradients. Beside `hf.py` the one file that reads transformers'
internals: the parts of a block, by name.

A fused block replaces a block's forward, never the model: embeddings, rotary angles and the last norm stay the model's.
It is for blocks that add attention (or a gated delta net) and then a gated feed-forward layer, each behind a
root-mean-square norm, to the residual stream: Llama, Qwen2, Qwen3, the attention and recurrent layers of Qwen3.5.
Names admit nothing: every block is compared, in float32 and with its own weights, with the forward it would replace.

For sampling, whose steps are bound by reading weights and by the number of kernels, `Fusion.hold` keeps copies of the
weights that project from the residual stream, those of one input joined into one matrix; `refresh` brings them up to
date.

Local shape letters as in `fused.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tfive.errors import UserError
from tfive.tree.attention import Attending, TreePass
from tfive.tree.fast.angles import handed_angles
from tfive.tree.fast.delta_step import BranchSteps, RecurrentHeads, StepKernel, StepWeights, torch_step
from tfive.tree.fast.delta_step_choice import choose_step
from tfive.tree.fast.fan import Fan, HeldNorm, Unfit, held
from tfive.tree.fast.fused import Angles, Heads, Ops, TorchOps, choose_ops, list_trouble
from tfive.tree.fast.kernel_recurrence import finish_trouble
from tfive.tree.fast.updates import Linear, Outward, is_plain
from tfive.tree.hf import (
    IMPLEMENTATION,
    Backbone,
    RootMeanSquare,
    fused_norm,
    is_recurrent,
    mixing,
    recurrent_parts,
    replaced,
)
from tfive.tree.layout import Layout
from tfive.tree.low_rank import LoraLinear
from tfive.tree.recurrent.deltanet import ForkMemory

_BOUND = 1e-4
"""Largest error of a fused block in float32, relative to what the block adds to the residual stream."""


@dataclass(frozen=True)
class AttentionPart:
    """Attention as a fused block computes it."""

    layer: int
    heads: Heads
    scale: float
    inward: Fan
    outward: Outward
    norms: tuple[RootMeanSquare, RootMeanSquare] | None

    def onto(self, residual_BnD: Tensor, angles: Angles, tree: Attending, ops: Ops) -> Tensor:
        """The residual stream `[x, D]` after this part."""
        residual_xD, norms = residual_BnD.flatten(0, 1), None
        if self.norms is not None:
            norms = (self.norms[0].weight, self.norms[1].weight, self.norms[0].epsilon)
        products = self.inward(residual_xD, ops)
        query_BnYE, keys, values, slot_n = tree.room(self.layer, residual_BnD, self.heads)
        division, gated = self.inward.division(residual_xD), self.heads.gated
        ops.rotate(products, division, norms, angles, gated, slot_n, query_BnYE, keys, values)
        gate = products[0] if gated else None
        output = tree.attend_written(ops, self.layer, query_BnYE, keys, values, self.scale, gate)
        return self.outward.onto(residual_xD, output.reshape(len(residual_xD), -1))

    def holding(self) -> AttentionPart:
        """The same on copies of the weights it projects with."""
        norms = None if self.norms is None else (held(self.norms[0]), held(self.norms[1]))
        # The gate would be read undivided.
        inward = self.inward.holding(fold=not self.heads.gated)
        return replace(self, inward=inward, outward=self.outward.holding(), norms=norms)

    def refresh(self, ops: Ops) -> None:
        """Bring the copies up to date."""
        self.inward.refresh(ops)
        self.outward.refresh()
        for norm in self.norms or ():
            if isinstance(norm, HeldNorm):
                norm.refresh()


@dataclass(frozen=True)
class RecurrentPart:
    """A gated delta net as a fused block computes it."""

    module: nn.Module
    inward: Fan
    outward: Outward

    def onto(self, residual_BnD: Tensor, angles: Angles, tree: Attending, ops: Ops) -> Tensor:
        """The residual stream `[x, D]` after this part."""
        residual_xD = residual_BnD.flatten(0, 1)
        if isinstance(tree.recurrence, BranchSteps):
            mixed, gate, strength, rate = self.inward(residual_xD, ops)
            output_xV = tree.recurrence.step(self.layer, (mixed, gate, strength, rate))
            return self.outward.onto(residual_xD, output_xV)
        if tree.recurrence is None:
            raise RuntimeError("this pass has no recurrence for a recurrent layer")
        parts = replace(recurrent_parts(self.module), project=partial(self._project, ops))
        mixed_BnD = tree.recurrence.mix(parts, residual_BnD)
        return residual_xD.add_(mixed_BnD.flatten(0, 1))

    @property
    def layer(self) -> int:
        """Which block it belongs to."""
        module: Any = self.module
        return int(module.layer_idx)

    def _project(self, ops: Ops, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mixed, gate, strength, rate = self.inward(hidden, ops)
        return mixed, gate, strength, rate

    def holding(self) -> RecurrentPart:
        """The same on copies of the weights it projects with."""
        # A folded norm rounds elsewhere than training, which recurrent layers answer with a larger mismatch.
        return replace(self, inward=self.inward.holding(fold=False), outward=self.outward.holding())

    def refresh(self, ops: Ops) -> None:
        """Bring the copies up to date."""
        self.inward.refresh(ops)
        self.outward.refresh()


@dataclass(frozen=True)
class FusedBlock:
    """A whole decoder block."""

    mixer: AttentionPart | RecurrentPart
    spread: Fan
    """The feed-forward layer's gate and up projections, and the norm before them."""
    down: Outward

    def forward(self, ops: Ops, following: FusedBlock | None = None) -> Callable[..., Tensor]:
        """A forward to put in place of the block's own. In sampling, `following` is the next block, whose norm may be
        computed on the way."""
        fan = None if following is None or following.mixer.inward.folds else following.mixer.inward

        def forward(
            hidden_states: Tensor, *_: Any, position_embeddings: tuple[Tensor, Tensor], tree: Attending, **__: Any
        ) -> Tensor:
            shape = hidden_states.shape
            cos, sin = (a.expand(shape[0], -1, -1).reshape(-1, a.shape[-1]) for a in position_embeddings)
            residual_xD = self.mixer.onto(hidden_states.contiguous(), (cos, sin), tree, ops)
            gate, up = self.spread(residual_xD, ops)
            inner_xI = ops.gate(gate, up, self.spread.division(residual_xD))
            shares = self.down.shares(len(residual_xD)) if self.spread.weight is not None else 1
            if shares == 1:
                return self.down.onto(residual_xD, inner_xI).view(shape)
            norm = None if fan is None else (fan.norm.weight, fan.norm.epsilon)
            normed_xD = ops.join(self.down.apart(inner_xI, shares), residual_xD, norm)
            stream = residual_xD.view(shape)
            if fan is not None and normed_xD is not None:
                fan.prepare(normed_xD, stream)
            return stream

        return forward

    def holding(self) -> FusedBlock:
        """The same block on copies of the weights it projects with."""
        return FusedBlock(self.mixer.holding(), self.spread.holding(fold=True), self.down.holding())

    def refresh(self, ops: Ops) -> None:
        """Bring the copies up to date."""
        self.mixer.refresh(ops)
        self.spread.refresh(ops)
        self.down.refresh()


class Fusion:
    """All blocks of a model, fused, on the model's weights and (for sampling) on copies of most of them."""

    def __init__(self, blocks: list[FusedBlock], ops: Ops, step: StepKernel | None = None, once: bool = False) -> None:
        """`step` is how recurrent layers advance in sampling; without one they do so by `deltanet.StepRecurrence`.
        `once` is how it rounds (`StepWeights.once`)."""
        self.blocks, self.ops, self.step, self.once = blocks, ops, step, once
        self.forwards = [block.forward(ops) for block in blocks]
        self.held: list[FusedBlock] = []

    def hold(self) -> list[Callable[..., Tensor]]:
        """Forwards on held weights; all samplers share these."""
        if not self.held:
            self.held = [block.holding() for block in self.blocks]
        return [block.forward(self.ops, then) for block, then in zip(self.held, [*self.held[1:], None])]

    def list_trouble(self, like: Tensor) -> str | None:
        """Why steps of sampling compute no lists of branches on the device of this tensor, in its type; None: they
        can."""
        if isinstance(self.ops, TorchOps):
            return None
        heads = {block.mixer.heads for block in self.blocks if isinstance(block.mixer, AttentionPart)}
        return next(filter(None, (list_trouble(one, like.device, like.dtype) for one in heads)), None)

    def steps(self, memory: dict[int, ForkMemory], branches: int, steps: int) -> BranchSteps | None:
        """What recurrent layers need of a sampling loop, None where the step has no kernel."""
        if self.step is None:
            return None
        recurrent = [block.mixer for block in self.blocks if isinstance(block.mixer, RecurrentPart)]
        weights = {part.layer: StepWeights.of(recurrent_parts(part.module), self.once) for part in recurrent}
        return BranchSteps(memory, branches, steps, self.step, weights)

    @torch.no_grad()
    def refresh(self) -> None:
        """Bring held copies up to date with the model's weights.

        It is done every time: no sign of a change is safe against all ways of changing a parameter.
        """
        for block in self.held:
            block.refresh(self.ops)


def _linear(module: Any, name: str) -> Linear:
    part: Any = getattr(module, name, None)
    if not is_plain(part):
        raise Unfit(f"{name} of {type(module).__name__} is no plain linear layer")
    return part


def _norm(module: Any, name: str) -> RootMeanSquare:
    norm = fused_norm(getattr(module, name))
    if norm is None:
        raise Unfit(f"{name} of {type(module).__name__} is no root-mean-square norm")
    return norm


def _parts(module: Any, wanted: set[str], possible: set[str]) -> None:
    found = {name for name, _ in module.named_children()}
    if not wanted <= found <= wanted | possible or any(True for _ in module.parameters(recurse=False)):
        raise Unfit(f"{type(module).__name__} is made of {', '.join(sorted(found))}")


def _attention(module: Any, before: RootMeanSquare, turned: int, scale: float) -> AttentionPart:
    _parts(module, {"q_proj", "k_proj", "v_proj", "o_proj"}, {"q_norm", "k_norm"})
    inward = Fan(before, tuple(_linear(module, name) for name in ("q_proj", "k_proj", "v_proj")))
    outer, features = _linear(module, "o_proj"), int(module.head_dim)
    normed = hasattr(module, "q_norm")
    norms = (_norm(module, "q_norm"), _norm(module, "k_norm")) if normed else None
    if norms is not None and (norms[0].epsilon != norms[1].epsilon or len(norms[0].weight) != features):
        raise Unfit(f"norms of {type(module).__name__} are not over the features of a head")
    queries = outer.in_features // features
    width = inward.sizes[0] // (queries * features)
    if width not in (1, 2) or inward.sizes[0] != width * queries * features:
        raise Unfit(f"q_proj of {type(module).__name__} gives neither queries nor queries and gates")
    heads = Heads(queries, inward.sizes[1] // features, features, turned, normed, gated=width == 2)
    return AttentionPart(int(module.layer_idx), heads, scale, inward, Outward(outer), norms)


def fused_block(block: Any, turned: int, scale: float) -> FusedBlock:
    known = {"mlp", "input_layernorm", "post_attention_layernorm"}
    mixers = {name for name, _ in block.named_children()} - known
    _parts(block, known | mixers, set())
    if len(mixers) != 1:
        raise Unfit(f"{type(block).__name__} is made of {', '.join(sorted(known | mixers))}")
    mixer = getattr(block, mixers.pop())
    _parts(block.mlp, {"gate_proj", "up_proj", "down_proj"}, {"act_fn"})
    trial = torch.linspace(-5, 5, 101)
    if not torch.allclose(block.mlp.act_fn(trial), F.silu(trial)):
        raise Unfit(f"the activation of {type(block.mlp).__name__} is not silu")
    before, after = _norm(block, "input_layernorm"), _norm(block, "post_attention_layernorm")
    spread = Fan(after, (_linear(block.mlp, "gate_proj"), _linear(block.mlp, "up_proj")))
    part: AttentionPart | RecurrentPart
    if is_recurrent(mixer):
        inward = Fan(before, tuple(_linear(mixer, f"in_proj_{n}") for n in ("qkv", "z", "b", "a")))
        part = RecurrentPart(mixer, inward, Outward(_linear(mixer, "out_proj")))
    else:
        part = _attention(mixer, before, turned, scale)
    return FusedBlock(part, spread, Outward(_linear(block.mlp, "down_proj")))


class _Noting(TreePass):
    """A pass that notes what attention layers ask for beside their queries."""

    asked: tuple[float | None, int | None, float | None] = (None, None, None)

    def attend(self, layer: int, query_BYnE: Tensor, key_BXnE: Tensor, value_BXnE: Tensor, scale: float | None,
               window: int | None = None, cap: float | None = None) -> Tensor:  # fmt: skip
        self.asked = (scale, window, cap)
        return super().attend(layer, query_BYnE, key_BXnE, value_BXnE, scale, window, cap)


def rotary_angles(backbone: Backbone, layout: Layout) -> Angles:
    """What the model hands its blocks to rotate by, in float32."""
    first = next(backbone.base.parameters())
    angles = handed_angles(backbone, layout.position_BN, TreePass(layout), first.dtype)
    if angles is None:
        raise Unfit("its blocks are not handed rotary angles")
    wide = torch.promote_types(first.dtype, torch.float32)
    return angles[0].to(wide), angles[1].to(wide)


def _examined(backbone: Backbone, index: int, angles: Angles, tree: _Noting) -> FusedBlock:
    """The block, fused, after a comparison of both forwards in float32 on its own weights."""
    block, wide = backbone.blocks[index], angles[0].dtype
    twin: Any = copy.deepcopy(block, {id(backbone.config): backbone.config}).to(wide)
    for module in twin.modules():
        if isinstance(module, LoraLinear):  # it begins at zero, and nothing would be compared
            module.up.copy_(torch.randn(module.up.shape, generator=torch.Generator().manual_seed(index)) * 0.1)
    shape = (*tree.layout.position_BN.shape, backbone.config.hidden_size)
    hidden = torch.randn(shape, generator=torch.Generator().manual_seed(index)).to(angles[0])
    turned = angles[0].shape[-1]
    fused_block(twin, turned, 1.0)  # what is made otherwise may not even be called alike
    given = {"position_embeddings": angles, "attention_mask": None, "tree": tree}
    recurrent = [module for module in twin.children() if is_recurrent(module)]
    with backbone.attending_by(IMPLEMENTATION), ExitStack() as patches:
        for module in recurrent:
            patches.enter_context(replaced(module, mixing(module)))
        wanted = twin(hidden, **given)
    wanted = wanted[0] if isinstance(wanted, tuple) else wanted
    scale, window, cap = tree.asked
    if not recurrent and (scale is None or window is not None or cap is not None):
        raise Unfit(f"block {index} attends with a window or a soft cap")
    fused = fused_block(twin, turned, scale or 1.0)
    for form in (fused, fused.holding()):
        off = float((form.forward(TorchOps())(hidden.clone(), **given) - wanted).norm() / (wanted - hidden).norm())
        if not off <= _BOUND:
            raise Unfit(f"block {index} ({type(block).__name__}) computes something else, {off:.2g} apart")
    return fused_block(block, turned, scale or 1.0)


@dataclass(frozen=True)
class FusionChoice:
    """The fused blocks, or None, and why; how recurrent layers step in sampling, where there are any."""

    fusion: Fusion | None
    reason: str
    steps: str = ""


@torch.no_grad()
def choose_fusion(setting: str, backbone: Backbone, layout: Layout, recurrence: Any, step: bool = True) -> FusionChoice:
    """The fused blocks for the option `fused_blocks`; `layout` is a small trunk to compare on. With `step`, sampling
    advances recurrent layers by one kernel, which rounds as those of whole passes do; without, by plain PyTorch."""
    first = next(backbone.base.parameters())
    if setting == "off" or (setting == "auto" and first.device.type != "cuda"):
        return FusionChoice(None, "switched off" if setting == "off" else f"no use on {first.device.type}")
    if any(isinstance(block, nn.Identity) for block in backbone.blocks):
        return FusionChoice(None, "only its last blocks are there")
    try:
        tree = _Noting(layout, recurrence=recurrence)
        angles = rotary_angles(backbone, layout)
        blocks = [_examined(backbone, index, angles, tree) for index in range(len(backbone.blocks))]
    except Unfit as unfit:
        if setting == "on":
            raise UserError(f"engine.fast = on: not for {backbone.name}: {unfit}; set it to auto") from None
        return FusionChoice(None, f"{backbone.name}: {unfit}")
    ops: Ops | None = None
    reason = "there is no attention in it"
    for heads in {block.mixer.heads for block in blocks if isinstance(block.mixer, AttentionPart)}:
        ops, reason = choose_ops(setting, heads, first.device, first.dtype)
        if ops is None:
            break
    if ops is None:
        return FusionChoice(None, reason)
    kernel, why = _choose_step(blocks, ops, first) if step else (None, "no kernels run the recurrent layers' passes")
    return FusionChoice(Fusion(blocks, ops, kernel, once=True), reason, why)


def _choose_step(blocks: list[FusedBlock], ops: Ops, like: Tensor) -> tuple[StepKernel | None, str]:
    """The step of all recurrent layers, None where one of them cannot have it, and why."""
    layers = [recurrent_parts(block.mixer.module) for block in blocks if isinstance(block.mixer, RecurrentPart)]
    if not layers:
        return None, ""
    trouble = next((why for parts in layers if (why := finish_trouble(parts)) is not None), None)
    if trouble is not None:
        return None, trouble
    if isinstance(ops, TorchOps):
        return torch_step, "asked for"
    chosen = [
        choose_step(heads, like.device, like.dtype, True) for heads in {RecurrentHeads.of(parts) for parts in layers}
    ]
    return next((choice for choice in chosen if choice[0] is None), chosen[0])

"""Decoder blocks with few kernels, for passes without gradients. Beside `hf.py` the one file that reads transformers'
internals: the parts of a block, by name.

A fused block replaces a block's forward, never the model: embeddings, rotary angles and the last norm stay the model's.
It is for blocks that add attention (or a gated delta net) and then a gated feed-forward layer, each behind a
root-mean-square norm, to the residual stream: Llama, Qwen2, Qwen3, the attention and recurrent layers of Qwen3.5.
Names admit nothing: every block is compared, in float32 and with its own weights, with the forward it would replace.

For sampling, whose steps are bound by reading weights and by the number of kernels, `Fusion.hold` keeps copies of
weights that are multiplied with the same input, joined into one matrix; `refresh` brings them up to date.

Local shape letters as in `fused.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tfive.errors import UserError
from tfive.tree.attention import Attending, TreePass
from tfive.tree.fused import Heads, Ops, TorchOps, choose_ops
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

_BOUND = 1e-4
"""Largest error of a fused block in float32, relative to what the block adds to the residual stream."""


Angles = tuple[Tensor, Tensor]
"""Cosines and sines a node's heads are rotated by, each `[x, t]`."""


class Unfit(Exception):
    """This block is none that can be fused; the message says why."""


class Fan:
    """Products of one input, each by itself, or (held) by one matrix that holds a copy of them all."""

    def __init__(self, parts: tuple[nn.Linear, ...], hold: bool = False) -> None:
        self.parts, self.sizes = parts, [part.out_features for part in parts]
        biased = [part.bias is not None for part in parts]
        if any(biased) != all(biased):
            raise Unfit("only some products of one input have a bias")
        self.weight = torch.cat([part.weight.detach() for part in parts]) if hold else None
        self.bias = torch.cat([part.bias.detach() for part in parts]) if hold and all(biased) else None

    def __call__(self, inputs: Tensor) -> tuple[Tensor, ...]:
        if self.weight is None:
            return tuple(F.linear(inputs, part.weight, part.bias) for part in self.parts)
        return F.linear(inputs, self.weight, self.bias).split(self.sizes, -1)

    def copies(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Where the held copies of all weights lie, and the weights."""
        if self.weight is not None:
            yield from zip(self.weight.split(self.sizes), (part.weight for part in self.parts))
        if self.bias is not None:
            yield from zip(self.bias.split(self.sizes), (part.bias for part in self.parts))


class HeldNorm(RootMeanSquare):
    """A norm whose weight, the added one included, is computed when weights are refreshed, not in every step."""

    def __init__(self, norm: RootMeanSquare) -> None:
        super().__init__(norm.module, norm.epsilon, norm.shift)
        self.held = norm.weight.detach().clone()

    @property
    def weight(self) -> Tensor:
        return self.held


def _onto(residual_xD: Tensor, inputs: Tensor, linear: nn.Linear) -> Tensor:
    """The residual stream plus a product."""
    total = torch.addmm(residual_xD, inputs, linear.weight.t())
    return total if linear.bias is None else total + linear.bias


@dataclass(frozen=True)
class AttentionPart:
    """Attention as a fused block computes it."""

    layer: int
    heads: Heads
    scale: float
    inward: Fan
    outward: nn.Linear
    norms: tuple[RootMeanSquare, RootMeanSquare] | None

    def onto(self, residual_xD: Tensor, normed_BnD: Tensor, angles: Angles, tree: Attending, ops: Ops) -> Tensor:
        """The residual stream after this part."""
        query, key, value = self.inward(normed_BnD.flatten(0, 1))
        heads = self.heads
        turned = query.new_empty(len(query), heads.queries, heads.features)
        query_BnYE = turned.view(*normed_BnD.shape[:2], heads.queries, heads.features)
        norms = None
        if self.norms is not None:
            norms = (self.norms[0].weight, self.norms[1].weight, self.norms[0].epsilon)
        keys, values, slot_n = tree.destination(self.layer, query_BnYE, heads.keys)
        ops.rotate(query, key, value, norms, *angles, heads.gated, slot_n, turned, keys, values)
        gate = query if heads.gated else None
        output = tree.attend_written(ops, self.layer, query_BnYE, keys, values, self.scale, gate)
        return _onto(residual_xD, output.reshape(len(query), -1), self.outward)


@dataclass(frozen=True)
class RecurrentPart:
    """A gated delta net as a fused block computes it."""

    module: nn.Module
    inward: Fan

    def onto(self, residual_xD: Tensor, normed_BnD: Tensor, angles: Angles, tree: Attending, ops: Ops) -> Tensor:
        """The residual stream after this part."""
        if tree.recurrence is None:
            raise RuntimeError("this pass has no recurrence for a recurrent layer")
        parts = replace(recurrent_parts(self.module), project=self._project)
        return residual_xD + tree.recurrence.mix(parts, normed_BnD).flatten(0, 1)

    def _project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mixed, gate, strength, rate = self.inward(hidden)
        return mixed, gate, strength, rate


@dataclass(frozen=True)
class FusedBlock:
    """A whole decoder block."""

    before: RootMeanSquare
    mixer: AttentionPart | RecurrentPart
    after: RootMeanSquare
    spread: Fan
    down: nn.Linear

    def forward(self, ops: Ops) -> Callable[..., Tensor]:
        """A forward to put in place of the block's own."""

        def forward(
            hidden_states: Tensor, *_: Any, position_embeddings: tuple[Tensor, Tensor], tree: Attending, **__: Any
        ) -> Tensor:
            shape = hidden_states.shape
            cos, sin = (a.expand(shape[0], -1, -1).reshape(-1, a.shape[-1]) for a in position_embeddings)
            normed_BnD = self.before(hidden_states)
            hidden_xD = self.mixer.onto(hidden_states.reshape(-1, shape[-1]), normed_BnD, (cos, sin), tree, ops)
            gated = ops.gate(*self.spread(self.after(hidden_xD)))
            return _onto(hidden_xD, gated, self.down).view(shape)

        return forward

    def holding(self) -> FusedBlock:
        """The same block on copies of its weights."""
        norms = getattr(self.mixer, "norms", None)
        changes: dict[str, Any] = {"inward": Fan(self.mixer.inward.parts, True)}
        if norms is not None:
            changes["norms"] = (HeldNorm(norms[0]), HeldNorm(norms[1]))
        mixer = replace(self.mixer, **changes)
        return FusedBlock(HeldNorm(self.before), mixer, HeldNorm(self.after), Fan(self.spread.parts, True), self.down)

    def held_norms(self) -> Iterator[HeldNorm]:
        """Norms on copies of their weights."""
        for norm in (self.before, self.after, *(getattr(self.mixer, "norms", None) or ())):
            if isinstance(norm, HeldNorm):
                yield norm


class Fusion:
    """All blocks of a model, fused, on the model's weights and (for sampling) on copies of them."""

    def __init__(self, blocks: list[FusedBlock], ops: Ops) -> None:
        self.blocks, self.ops = blocks, ops
        self.forwards = [block.forward(ops) for block in blocks]
        self.held: list[FusedBlock] = []

    def hold(self) -> list[Callable[..., Tensor]]:
        """Forwards on held weights; all samplers share them."""
        if not self.held:
            self.held = [block.holding() for block in self.blocks]
        return [block.forward(self.ops) for block in self.held]

    @torch.no_grad()
    def refresh(self) -> None:
        """Bring the held copies up to date with the model's weights."""
        fans = [fan for block in self.held for fan in (block.mixer.inward, block.spread)]
        pairs = [pair for fan in fans for pair in fan.copies()]
        norms = [norm for block in self.held for norm in block.held_norms()]
        pairs += [(norm.held, norm.module.weight) for norm in norms]  # type: ignore[misc]
        torch._foreach_copy_([to for to, _ in pairs], [weight for _, weight in pairs])
        shifted = [norm.held for norm in norms if norm.shift]
        if shifted:
            torch._foreach_add_(shifted, 1.0)


def _linear(module: Any, name: str) -> nn.Linear:
    part = getattr(module, name, None)
    if type(part) is not nn.Linear or part._forward_hooks or part._forward_pre_hooks:
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


def _attention(module: Any, turned: int, scale: float) -> AttentionPart:
    _parts(module, {"q_proj", "k_proj", "v_proj", "o_proj"}, {"q_norm", "k_norm"})
    inward = Fan(tuple(_linear(module, name) for name in ("q_proj", "k_proj", "v_proj")))
    outward, features = _linear(module, "o_proj"), int(module.head_dim)
    normed = hasattr(module, "q_norm")
    norms = (_norm(module, "q_norm"), _norm(module, "k_norm")) if normed else None
    if norms is not None and (norms[0].epsilon != norms[1].epsilon or len(norms[0].weight) != features):
        raise Unfit(f"norms of {type(module).__name__} are not over the features of a head")
    queries = outward.in_features // features
    width = inward.sizes[0] // (queries * features)
    if width not in (1, 2) or inward.sizes[0] != width * queries * features:
        raise Unfit(f"q_proj of {type(module).__name__} gives neither queries nor queries and gates")
    heads = Heads(queries, inward.sizes[1] // features, features, turned, normed, gated=width == 2)
    return AttentionPart(int(module.layer_idx), heads, scale, inward, outward, norms)


def _block(block: Any, turned: int, scale: float) -> FusedBlock:
    names = {name for name, _ in block.named_children()}
    mixers = names - {"mlp", "input_layernorm", "post_attention_layernorm"}
    _parts(block, {"mlp", "input_layernorm", "post_attention_layernorm"}, mixers if len(mixers) == 1 else set())
    mixer = getattr(block, mixers.pop())
    _parts(block.mlp, {"gate_proj", "up_proj", "down_proj"}, {"act_fn"})
    trial = torch.linspace(-5, 5, 101)
    if not torch.allclose(block.mlp.act_fn(trial), F.silu(trial)):
        raise Unfit(f"the activation of {type(block.mlp).__name__} is not silu")
    spread = Fan((_linear(block.mlp, "gate_proj"), _linear(block.mlp, "up_proj")))
    part: AttentionPart | RecurrentPart
    if is_recurrent(mixer):
        inner = tuple(_linear(mixer, f"in_proj_{name}") for name in ("qkv", "z", "b", "a"))
        part = RecurrentPart(mixer, Fan(inner))
    else:
        part = _attention(mixer, turned, scale)
    before, after = _norm(block, "input_layernorm"), _norm(block, "post_attention_layernorm")
    return FusedBlock(before, part, after, spread, _linear(block.mlp, "down_proj"))


class _Noting(TreePass):
    """A pass that notes what attention layers ask for beside their queries."""

    asked: tuple[float | None, int | None, float | None] = (None, None, None)

    def attend(self, layer: int, query_BYnE: Tensor, key_BXnE: Tensor, value_BXnE: Tensor, scale: float | None,
               window: int | None = None, cap: float | None = None) -> Tensor:  # fmt: skip
        self.asked = (scale, window, cap)
        return super().attend(layer, query_BYnE, key_BXnE, value_BXnE, scale, window, cap)


def _angles(backbone: Backbone, layout: Layout) -> Angles:
    """What the model hands its blocks to rotate by, in float32."""
    handed: list[Any] = []

    def note(hidden_states: Tensor, *_: Any, **given: Any) -> Tensor:
        handed.append(given.get("position_embeddings"))
        return hidden_states

    embeds = backbone.embedding(layout.token_BN)
    backbone.run(embeds, layout.position_BN, TreePass(layout), fused=[note] * len(backbone.blocks))
    if not isinstance(handed[0], tuple) or len(handed[0]) != 2:
        raise Unfit("its blocks are not handed rotary angles")
    wide = torch.promote_types(embeds.dtype, torch.float32)
    return handed[0][0].to(wide), handed[0][1].to(wide)


def _examined(backbone: Backbone, index: int, angles: Angles, tree: _Noting) -> FusedBlock:
    """The block, fused, after a comparison of both forwards in float32 on its own weights."""
    block, wide = backbone.blocks[index], angles[0].dtype
    twin: Any = copy.deepcopy(block, {id(backbone.config): backbone.config}).to(wide)
    shape = (*tree.layout.position_BN.shape, backbone.config.hidden_size)
    hidden = torch.randn(shape, generator=torch.Generator().manual_seed(index)).to(angles[0])
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
    fused = _block(twin, angles[0].shape[-1], scale or 1.0).forward(TorchOps())(hidden, **given)
    off = float((fused - wanted).norm() / (wanted - hidden).norm())
    if not off <= _BOUND:
        raise Unfit(f"block {index} ({type(block).__name__}) computes something else, {off:.2g} apart")
    return _block(block, angles[0].shape[-1], scale or 1.0)


@dataclass(frozen=True)
class FusionChoice:
    """The fused blocks, or None, and why."""

    fusion: Fusion | None
    reason: str


@torch.no_grad()
def choose_fusion(setting: str, backbone: Backbone, layout: Layout, recurrence: Any) -> FusionChoice:
    """The fused blocks for `engine.fused_blocks`; `layout` is a small trunk to compare on."""
    first = next(backbone.base.parameters())
    if setting == "off" or (setting == "auto" and first.device.type != "cuda"):
        return FusionChoice(None, "switched off" if setting == "off" else f"no use on {first.device.type}")
    try:
        tree = _Noting(layout, recurrence=recurrence)
        angles = _angles(backbone, layout)
        blocks = [_examined(backbone, index, angles, tree) for index in range(len(backbone.blocks))]
    except Unfit as unfit:
        if setting == "on":
            raise UserError(
                f"engine.fused_blocks: 'on' is not for {backbone.name}: {unfit}; set it to 'auto'"
            ) from None
        return FusionChoice(None, f"{backbone.name}: {unfit}")
    ops: Ops | None = None
    reason = "there is no attention in it"
    for heads in {block.mixer.heads for block in blocks if isinstance(block.mixer, AttentionPart)}:
        ops, reason = choose_ops(setting, heads, first.device, first.dtype)
        if ops is None:
            break
    return FusionChoice(None if ops is None else Fusion(blocks, ops), reason)

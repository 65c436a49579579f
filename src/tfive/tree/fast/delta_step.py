"""One sampling step of a gated delta net layer as one operation, in plain PyTorch, and the buffers it works on.

From the products of a layer's input to the gated, normed output that its last product reads: the short convolution,
its activation, the norms of queries and keys, both gates, the delta rule and the output's norm. A branch's fork state
is read once a step and never written: its own tokens act through their writes (`delta_rule.BranchMemory`). States are
held in the model's precision, everything a branch adds to them in float32.

Local shape letters as in `delta_rule.py` and `deltanet.py`; V = I · F, H key heads, x = Q.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tfive.tree.recurrent.delta_rule import CHUNK, unit_rows, wide_dtype
from tfive.tree.recurrent.deltanet import ForkMemory, RecurrentParts

Products = tuple[Tensor, Tensor, Tensor, Tensor]
"""A node's convolution inputs `[x, U]`, output gate `[x, V]`, write-strength logits and decay logits `[x, I]`."""


@dataclass(frozen=True)
class RecurrentHeads:
    """The shape of a gated delta net layer as the kernels see it."""

    keys: int
    values: int
    key_features: int
    value_features: int
    memory: int
    """How many earlier inputs the convolution reads."""

    @staticmethod
    def of(parts: RecurrentParts) -> RecurrentHeads:
        heads = len(parts.log_rate_I)
        return RecurrentHeads(parts.key_heads, heads, parts.key_features, parts.value_features, parts.memory)

    @property
    def channels(self) -> int:
        """U: width of the convolution."""
        return 2 * self.keys * self.key_features + self.values * self.value_features


@dataclass(frozen=True)
class StepWeights:
    """What a layer's step reads beside its products."""

    heads: RecurrentHeads
    taps_UJ: Tensor
    log_rate_I: Tensor
    rate_bias_I: Tensor
    norm_F: Tensor
    norm_epsilon: float
    once: bool = False
    """Round as a `Mixer` does, once at the end of each of its operations, and not wherever the model's own code does:
    noise that sampling and training share does not set them apart."""

    @staticmethod
    def of(parts: RecurrentParts, once: bool = False) -> StepWeights:
        return StepWeights(
            RecurrentHeads.of(parts),
            parts.taps_UJ,
            parts.log_rate_I,
            parts.rate_bias_I,
            parts.norm_F,
            parts.norm_epsilon,
            once,
        )


@dataclass(frozen=True)
class LayerMemory:
    """A layer's static buffers: fork states, and what every branch has read since, Z places of it."""

    state_XIEF: Tensor
    """Each serves Q / X consecutive branches."""
    past_QLU: Tensor
    """Convolution inputs: the J before the first place, then one a place."""
    key_QIZE: Tensor
    write_QIZF: Tensor
    sum_QIZ: Tensor
    """Decay summed up to each place."""

    @staticmethod
    def empty(
        states: int, branches: int, window: int, heads: RecurrentHeads, like: Tensor, once: bool = False
    ) -> LayerMemory:
        """Buffers of zeros on the device and in the precision of `like`. `once`: keys are rounded to it anyway."""
        count, wide = heads.values, wide_dtype(like.dtype)
        return LayerMemory(
            like.new_zeros(states, count, heads.key_features, heads.value_features),
            like.new_zeros(branches, heads.memory + window, heads.channels),
            like.new_zeros(branches, count, window, heads.key_features, dtype=like.dtype if once else wide),
            like.new_zeros(branches, count, window, heads.value_features, dtype=wide),
            like.new_zeros(branches, count, window, dtype=wide),
        )


StepKernel = Callable[[Products, StepWeights, LayerMemory, Tensor], Tensor]
"""Products, weights, buffers and the place (int64 `[1]`) to `[x, V]`; the place's part of the buffers is written."""


def torch_step(products: Products, weights: StepWeights, memory: LayerMemory, place: Tensor) -> Tensor:
    """The meaning of the step, rounded to the model's precision where training does it (`StepWeights.once`)."""
    heads, (inputs, gate, strength, rate) = weights.heads, products
    dtype, wide, reach, once = inputs.dtype, wide_dtype(inputs.dtype), heads.memory, weights.once

    def rounded(x: Tensor, now: bool) -> Tensor:
        return x.to(dtype).to(wide) if now else x

    memory.past_QLU.index_copy_(1, place + reach, inputs[:, None])
    seen_QJU = memory.past_QLU.index_select(1, place + torch.arange(reach + 1, device=place.device))
    mixed = (seen_QJU.to(wide) * weights.taps_UJ.T.to(wide)).sum(1)
    mixed = rounded(F.silu(rounded(mixed, not once)), not once)
    both, value = mixed.split([2 * heads.keys * heads.key_features, heads.values * heads.value_features], -1)
    query, key = unit_rows(both.unflatten(-1, (-1, heads.key_features))).split(heads.keys, -2)
    query, key, value = (rounded(x, once) for x in (query * heads.key_features**-0.5, key, value))
    each = heads.values // heads.keys
    query, key = query.repeat_interleave(each, -2), key.repeat_interleave(each, -2)
    decay = -weights.log_rate_I.to(wide).exp() * F.softplus(rate.to(wide) + weights.rate_bias_I)
    before_QI = memory.sum_QIZ.index_select(2, (place - 1).clamp(min=0))[..., 0] * (place > 0)
    beta, value = rounded(strength.to(wide).sigmoid(), not once), value.unflatten(-1, (heads.values, -1))
    read_QIF = rounded(_rule_step(query, key, value, beta, before_QI + decay, memory, place), True)
    normed = rounded(F.rms_norm(read_QIF, (heads.value_features,), None, weights.norm_epsilon), not once)
    normed = rounded(weights.norm_F.to(wide) * normed, not once)
    return (normed.flatten(1) * F.silu(gate.to(wide))).to(dtype)


def _rule_step(
    query_QIE: Tensor, key_QIE: Tensor, value_QIF: Tensor, beta_QI: Tensor, now_QI: Tensor, memory: LayerMemory,
    place: Tensor,
) -> Tensor:  # fmt: skip
    """The rule's output `[Q, I, F]`; key, write and decay are put at `place`."""
    both_QI2E = torch.stack([key_QIE, query_QIE], 2)
    earlier_Z = torch.arange(memory.sum_QIZ.shape[-1], device=place.device) < place
    fade_QI1Z = (now_QI[..., None] - memory.sum_QIZ).exp().where(earlier_Z, 0.0).unsqueeze(2)
    recent_QI2F = (both_QI2E @ memory.key_QIZE.mT.to(key_QIE.dtype) * fade_QI1Z) @ memory.write_QIZF
    share = len(now_QI) // len(memory.state_XIEF)
    state_QIEF = memory.state_XIEF.to(key_QIE.dtype).repeat_interleave(share, 0)
    known_QI2F = recent_QI2F + both_QI2E @ state_QIEF * now_QI.exp()[..., None, None]
    write_QIF = beta_QI[..., None] * (value_QIF - known_QI2F[:, :, 0])
    for buffer, new in ((memory.key_QIZE, key_QIE), (memory.write_QIZF, write_QIF), (memory.sum_QIZ, now_QI)):
        buffer.index_copy_(2, place, new.unsqueeze(2).to(buffer.dtype))
    return known_QI2F[:, :, 1] + (query_QIE * key_QIE).sum(-1, keepdim=True) * write_QIF


class BranchSteps:
    """One node per branch at a time, on static buffers, by a step kernel: what `deltanet.StepRecurrence` does.

    `place` is set outside the captured step, by `begin` and `advance`.
    """

    def __init__(
        self,
        memory: dict[int, ForkMemory],
        branches: int,
        steps: int,
        kernel: StepKernel,
        weights: dict[int, StepWeights],
        window: int = CHUNK,
    ) -> None:
        some = next(iter(memory.values()))
        self.branches, self.steps, self.window = branches, steps, min(steps, window)
        self.kernel, self.weights = kernel, weights
        self.place = torch.zeros(1, dtype=torch.int64, device=some.state_XIEF.device)
        self._taken = 0
        # Folding the window into the state needs a state of its own for every branch.
        self._copies = branches // len(some.state_XIEF) if steps > self.window else 1
        states = len(some.state_XIEF) * self._copies
        self.layers = {
            layer: LayerMemory.empty(
                states, branches, self.window, weights[layer].heads, fork.tail_XJU, weights[layer].once
            )
            for layer, fork in memory.items()
        }

    def begin(self, memory: dict[int, ForkMemory]) -> None:
        """Put all branches back to their forks, those of a freshly read trunk of the same shape."""
        for layer, fork in memory.items():
            held, heads = self.layers[layer], self.weights[layer].heads
            held.state_XIEF.unflatten(0, (-1, self._copies)).copy_(fork.state_XIEF[:, None])
            tail_XJU = fork.tail_XJU[:, fork.tail_XJU.shape[1] - heads.memory :]
            share = self.branches // len(tail_XJU)
            held.past_QLU[:, : heads.memory].unflatten(0, (-1, share)).copy_(tail_XJU[:, None])
        self._taken = 0
        self.place.zero_()

    def advance(self) -> None:
        """To be called after every step, outside the captured part."""
        self._taken += 1
        self.place.add_(1)
        if self._taken % self.window == 0 and self._taken < self.steps:
            for layer, held in self.layers.items():
                _fold(held, self.weights[layer].heads.memory)
            self.place.zero_()

    def step(self, layer: int, products: Products) -> Tensor:
        """What the layer's last product reads, `[x, V]`."""
        return self.kernel(products, self.weights[layer], self.layers[layer], self.place)

    def mix(self, parts: RecurrentParts, hidden_BRD: Tensor) -> Tensor:
        """The layer's output for the branches' newest nodes, `[B, R, D]`; buffers move on in place."""
        mixed, gate, strength, rate = (x.flatten(0, 1) for x in parts.project(hidden_BRD))
        output_xV = self.step(parts.layer, (mixed, gate, strength, rate))
        return parts.outward(output_xV.unflatten(0, hidden_BRD.shape[:2]))


def _fold(held: LayerMemory, reach: int) -> None:
    """Move all remembered tokens into the states, in place, and free all places."""
    last_QI1 = held.sum_QIZ[..., -1:]
    fade_QIZ1 = (last_QI1 - held.sum_QIZ).exp()[..., None]
    written = (held.key_QIZE * fade_QIZ1).mT @ held.write_QIZF
    held.state_XIEF.copy_(held.state_XIEF * last_QI1.exp()[..., None] + written)
    held.past_QLU[:, :reach].copy_(held.past_QLU[:, -reach:].clone())

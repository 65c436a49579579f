"""A pass over recurrent layers by kernels: what `deltanet.TreeRecurrence` computes, section by section, with gradients.

Local shape letters as in `deltanet.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tfive.tree.fast.delta_step import RecurrentHeads
from tfive.tree.fast.mixer import Mixer, TorchMixer
from tfive.tree.layout import Layout
from tfive.tree.recurrent.deltanet import DeltaRule, ForkMemory, RecurrentParts, TreeRecurrence


@dataclass(frozen=True)
class _Section:
    """Paths of one kind: where their nodes begin in a row, how many paths a row has, and how long they are."""

    start: int
    count: int
    length: int

    def paths(self, x_BN: Tensor) -> Tensor:
        """The nodes' entries, path by path."""
        taken = x_BN[:, self.start : self.start + self.count * self.length]
        return taken.unflatten(1, (self.count, self.length)).flatten(0, 1)


class KernelRecurrence(TreeRecurrence):
    """The same passes; queries, keys, values, gates and the outputs' norm come from a `Mixer`."""

    def __init__(self, layout: Layout, rule: DeltaRule, mixer: Mixer, **options: Any) -> None:
        super().__init__(layout, rule, **options)
        self.mixer = mixer

    def mix(self, parts: RecurrentParts, hidden_BND: Tensor) -> Tensor:
        """The layer's output for all nodes of the pass, `[B, n, D]`."""
        inputs_BNU, gate, strength, rate = parts.project(hidden_BND)
        decay_BNI, beta_BNI = self.mixer.gates(strength, rate, parts.log_rate_I, parts.rate_bias_I, self.real_BN)
        cut = self.cut(inputs_BNU)
        forks, tail_XJU = self.fork_places(parts, cut[0])
        heads, sections, trace = RecurrentHeads.of(parts), self._sections(), None
        state_XIEF = None if self.reads_trunk else self.memory[parts.layer].state_XIEF
        outputs = []
        for at, sequence_QLU in enumerate(self.sequences(parts, cut, tail_XJU)):
            section, trunk = sections[at], self.reads_trunk and at == 0
            document = self.document_BS if trunk and self.starts_BS is not None else None
            query, key, value = self.mixer.heads(sequence_QLU, parts.taps_UJ, heads, document)
            if heads.values > heads.keys:
                query, key = (x.repeat_interleave(heads.values // heads.keys, 2) for x in (query, key))
            gates = section.paths(decay_BNI), section.paths(beta_BNI)
            start = None if trunk else self._start(at, state_XIEF, trace)
            output_QLIF, trace = self.rule(query, key, value, *gates, start, self.starts_BS if trunk else None)
            if trunk:
                state_XIEF = trace.state_after(forks.row_X, forks.count_X)
            outputs.append(output_QLIF.unflatten(0, (len(hidden_BND), -1)).flatten(1, 2))
        if self.keep and state_XIEF is not None:
            self.memory[parts.layer] = ForkMemory(state_XIEF, tail_XJU)
        joined_BNIF = torch.cat(outputs, 1).to(gate.dtype)
        return parts.outward(self.mixer.gated_norm(joined_BNIF, gate, parts.norm_F, parts.norm_epsilon))

    def _start(self, at: int, state_XIEF: Tensor | None, trace: Any) -> Tensor | None:
        """The states a section's paths start from: thoughts from the trunk's forks, segments from the thoughts'."""
        if at == (1 if self.reads_trunk else 0):
            return None if state_XIEF is None else self._of_branches(state_XIEF)
        state: Tensor = trace.state_after(self.path_Y, self.cut_Y)
        return state

    def _sections(self) -> list[_Section]:
        layout = self.layout
        end = self.width + layout.branch_count * layout.thought_width
        found = [_Section(0, 1, self.width)] if self.reads_trunk else []
        if layout.branch_count:
            found.append(_Section(self.width, layout.branch_count, layout.thought_width))
            if layout.segment_count and layout.segment_width:
                found.append(_Section(end, layout.segments, layout.segment_width))
        return found


@torch.no_grad()
def finish_trouble(parts: RecurrentParts) -> str | None:
    """Why a layer cannot be run by a `Mixer`: what its parts compute is not what the mixer does. None: it is."""
    if parts.tap_bias_U is not None:
        return "the convolution has a bias"
    weight = parts.norm_F
    if hasattr(weight, "to_local"):
        return "its weights are in shards, so what it computes cannot be tried here"
    shape = (2, 3, len(parts.log_rate_I), parts.value_features)
    generator = torch.Generator().manual_seed(0)
    output, gate = (torch.randn(shape, generator=generator).to(weight) for _ in range(2))
    want = parts.finish(output, gate.flatten(-2)).double()
    normed = TorchMixer().gated_norm(output, gate.flatten(-2), weight, parts.norm_epsilon)
    off = float((parts.outward(normed).double() - want).norm() / want.norm())
    bound = 1e-4 if weight.dtype in (torch.float32, torch.float64) else 0.02
    return None if off <= bound else f"its output's norm and gate are other ones, {off:.2g} apart"

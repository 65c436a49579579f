"""Gated delta net layers over a tree row: the trunk is cut at the positions, each thought at its checkpoints.

Everything that is done node by node (projections, gates, norms) runs on the flat row; only the short causal convolution
and the delta rule know the tree. Both run part by part: the trunk as one path per row whose state is emptied where a
document begins, every thought as a path that starts from the trunk's state after its position, every segment as a path
that starts from the thought's state after its checkpoint. Gradients flow through the forks.

A `Recurrence` says which nodes a pass holds and where their past comes from; `hf.py` hands it to the layers.

Local shape letters beside the legends of `layout.py` and `delta_rule.py`: U channels of the convolution, J remembered
inputs of it, X forks, Y runs of branches that share a fork.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tfive.tree.layout import PADDING, Layout
from tfive.tree.recurrent.delta_rule import CHUNK, BranchMemory, DeltaTrace, unit_rows, wide_dtype


class Trace(Protocol):
    """What a delta rule leaves behind."""

    def state_after(self, path_X: Tensor, count_X: Tensor) -> Tensor:
        """State of a path after its first `count` tokens."""


class DeltaRule(Protocol):
    """A way to compute the gated delta rule over paths, with the contract of `delta_rule.read_paths`."""

    def __call__(
        self,
        query_QLIE: Tensor,
        key_QLIE: Tensor,
        value_QLIF: Tensor,
        decay_QLI: Tensor,
        beta_QLI: Tensor,
        state_XIEF: Tensor | None = None,
        starts_QL: Tensor | None = None,
    ) -> tuple[Tensor, Trace | DeltaTrace]: ...


@dataclass(frozen=True)
class RecurrentParts:
    """One gated delta net layer as this file sees it; made by `hf.recurrent_parts`."""

    layer: int
    project: Callable[[Tensor], tuple[Tensor, Tensor, Tensor, Tensor]]
    """Hidden states to conv inputs `[…, U]`, output gate, write-strength logits `[…, I]` and decay logits `[…, I]`."""
    finish: Callable[[Tensor, Tensor], Tensor]
    """Rule outputs `[…, I, F]` and the output gate to hidden states."""
    activate: Callable[[Tensor], Tensor]
    taps_UJ: Tensor
    """Depthwise convolution weights, oldest input first."""
    tap_bias_U: Tensor | None
    log_rate_I: Tensor
    rate_bias_I: Tensor
    key_heads: int
    key_features: int
    value_features: int
    norm_F: Tensor
    """Weight of the output's norm, after which the gate acts, and its epsilon: `finish` is both, then `outward`."""
    norm_epsilon: float
    outward: Callable[[Tensor], Tensor]

    @property
    def memory(self) -> int:
        """How many earlier inputs the convolution reads."""
        return self.taps_UJ.shape[1] - 1


@dataclass(frozen=True)
class RuleInputs:
    """Queries, keys, values, decays and write strengths of nodes, ready for the rule, `[B, n, I, …]`."""

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    beta: Tensor

    def paths(self, start: int, count: int, length: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The nodes `start … start + count·length − 1` of every row as paths, `[B·count, length, I, …]`."""

        def cut(x: Tensor) -> Tensor:
            return x[:, start : start + count * length].unflatten(1, (count, length)).flatten(0, 1)

        return cut(self.query), cut(self.key), cut(self.value), cut(self.decay), cut(self.beta)


def rule_inputs(parts: RecurrentParts, conv: Tensor, strength: Tensor, rate: Tensor, real: Tensor | None) -> RuleInputs:
    """Rule inputs from convolved channels and the two gates' logits; nodes that are not `real` become no-ops."""
    wide = wide_dtype(conv.dtype)
    keys = parts.key_heads * parts.key_features
    both, value = parts.activate(conv).split([2 * keys, conv.shape[-1] - 2 * keys], -1)
    value = value.unflatten(-1, (-1, parts.value_features))
    query, key = unit_rows(both.unflatten(-1, (-1, parts.key_features)).to(wide)).split(parts.key_heads, -2)
    share = value.shape[-2] // parts.key_heads
    if share > 1:
        query, key = query.repeat_interleave(share, -2), key.repeat_interleave(share, -2)
    decay = -parts.log_rate_I.to(wide).exp() * F.softplus(rate.to(wide) + parts.rate_bias_I)
    beta = strength.sigmoid().to(wide)
    if real is not None:
        decay, beta = decay * real[..., None], beta * real[..., None]
    return RuleInputs(query * parts.key_features**-0.5, key, value, decay, beta)


def _convolve(parts: RecurrentParts, sequence_QLU: Tensor, seen: tuple[Tensor, ...] | None = None) -> Tensor:
    """The causal convolution of `[Q, J + L, U]` (J earlier inputs first), `[Q, L, U]`.

    `seen[d − 1]`, bool `[Q, L]`, says whether the input d places earlier belongs to the same document.
    """
    memory, wide = parts.memory, wide_dtype(sequence_QLU.dtype)
    length = sequence_QLU.shape[1] - memory
    taps_UJ = parts.taps_UJ.to(wide)
    if length == 1 and seen is None and parts.tap_bias_U is None:
        return (sequence_QLU * taps_UJ.T).sum(1, keepdim=True).to(sequence_QLU.dtype)
    total = sequence_QLU[:, memory:] * taps_UJ[:, memory]
    for distance in range(1, memory + 1):
        earlier = sequence_QLU[:, memory - distance : memory - distance + length]
        if seen is not None:
            earlier = earlier * seen[distance - 1][..., None]
        total = torch.addcmul(total, earlier, taps_UJ[:, memory - distance])
    if parts.tap_bias_U is not None:
        total = total + parts.tap_bias_U
    return total.to(sequence_QLU.dtype)


@dataclass(frozen=True)
class ForkMemory:
    """What branches need of the trunk at one layer: the state and the latest conv inputs after each position."""

    state_XIEF: Tensor
    """X = B · positions."""
    tail_XJU: Tensor
    """Inputs before a document's start are zero."""


@dataclass(frozen=True)
class _Forks:
    """Where branches leave the trunk, as indices into the flattened trunk."""

    row_X: Tensor
    count_X: Tensor
    """Trunk tokens read before the fork."""
    tail_XJ: Tensor
    tail_seen_XJ: Tensor

    @staticmethod
    def of(document_BS: Tensor, position_BP: Tensor, reach: int) -> _Forks:
        rows, count = position_BP.shape
        index_BP = position_BP.clamp(min=0)
        tail_BPJ = index_BP[..., None] + torch.arange(1 - reach, 1, device=position_BP.device)
        nearest_BPJ = tail_BPJ.clamp(min=0)
        own_BP1 = document_BS.gather(1, index_BP)[..., None]
        document_BPJ = document_BS.gather(1, nearest_BPJ.flatten(1)).view_as(tail_BPJ)
        row_X = torch.arange(rows, device=position_BP.device).repeat_interleave(count)
        tail_XJ = nearest_BPJ.flatten(0, 1) + row_X[:, None] * document_BS.shape[1]
        return _Forks(
            row_X, index_BP.flatten() + 1, tail_XJ, ((document_BPJ == own_BP1) & (tail_BPJ >= 0)).flatten(0, 1)
        )

    def tail(self, trunk_BSU: Tensor) -> Tensor:
        taken = trunk_BSU.flatten(0, 1).index_select(0, self.tail_XJ.flatten())
        return taken.view(*self.tail_XJ.shape, trunk_BSU.shape[-1]) * self.tail_seen_XJ[..., None]


class TreeRecurrence:
    """A pass over trunk and branches, over the trunk alone, or over branches whose trunk was read before.

    Without `memory` the pass begins with the S trunk nodes, with it at the first thought node. `position_BP` are the
    forks that are kept or were kept; by default they are the branches' own. With `keep` the pass leaves the forks of
    every layer in `self.memory` for later passes.
    """

    def __init__(
        self,
        layout: Layout,
        rule: DeltaRule,
        position_BP: Tensor | None = None,
        memory: dict[int, ForkMemory] | None = None,
        keep: bool = False,
    ) -> None:
        self.layout, self.rule, self.keep = layout, rule, keep
        self.memory = {} if memory is None else memory
        self.reads_trunk = memory is None
        self.width = layout.trunk_width if self.reads_trunk else 0
        self.document_BS = layout.document_BN[:, : layout.trunk_width]
        real_BN = layout.kind_BN[:, layout.trunk_width - self.width :] != PADDING
        starts_BS = (layout.parent_BN[:, : layout.trunk_width] < 0) & (self.document_BS >= 0)
        padded, packed = torch.stack([(~real_BN).any(), starts_BS[:, 1:].any()]).tolist()
        self.real_BN = real_BN if padded else None
        self.starts_BS = starts_BS if packed else None
        self.position_BP, self.fork_Y = _branch_forks(layout, position_BP)
        # Segments: the path of the thought each leaves, and after how many of its nodes.
        device, count = layout.token_BN.device, layout.segment_count
        path_BR = torch.arange(layout.position_BR.numel(), device=device).view(layout.position_BR.shape)
        self.path_Y = path_BR[:, :: layout.segment_every].flatten().repeat_interleave(count)
        self.cut_Y = (layout.plan.open_width + layout.checkpoint_BRK).flatten()
        self._indices: dict[str, Any] = {}

    def _once(self, name: str, make: Callable[[], Any]) -> Any:
        """Indices that all layers share are made by the first."""
        if name not in self._indices:
            self._indices[name] = make()
        return self._indices[name]

    def mix(self, parts: RecurrentParts, hidden_BND: Tensor) -> Tensor:
        """The layer's output for all nodes of the pass, `[B, n, D]`."""
        inputs_BNU, gate, strength, rate = parts.project(hidden_BND)
        cut = self.cut(inputs_BNU)
        forks, tail_XJU = self.fork_places(parts, cut[0])
        conv_BNU = self._convolved(parts, cut, tail_XJU)
        ready = rule_inputs(parts, conv_BNU, strength, rate, self.real_BN)

        sections = []
        if self.reads_trunk:
            output, trunk = self.rule(*ready.paths(0, 1, self.width), None, self.starts_BS)
            sections.append(output)
            state_XIEF = trunk.state_after(forks.row_X, forks.count_X)
        else:
            state_XIEF = self.memory[parts.layer].state_XIEF
        if self.keep:
            self.memory[parts.layer] = ForkMemory(state_XIEF, tail_XJU)
        if self.layout.branch_count:
            sections += self._read_branches(ready, self._of_branches(state_XIEF))
        return parts.finish(torch.cat(sections, 1).to(hidden_BND.dtype), gate)

    def cut(self, inputs_BNU: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Conv inputs of trunk, thoughts and segments, cut once: each slice would have a gradient of all nodes."""
        thoughts = self.layout.branch_count * self.layout.thought_width
        rest = inputs_BNU.shape[1] - self.width - thoughts
        trunk, thought, segment = inputs_BNU.split([self.width, thoughts, rest], 1)
        return trunk, thought, segment

    def fork_places(self, parts: RecurrentParts, trunk_BSU: Tensor) -> tuple[_Forks, Tensor]:
        """Where branches leave the trunk, and the latest conv inputs there."""
        reach = parts.memory + (self.layout.plan.close_width if self.layout.plan.variable_length else 0)
        forks: _Forks = self._once("forks", lambda: _Forks.of(self.document_BS, self.position_BP, reach))
        if self.reads_trunk:
            return forks, forks.tail(trunk_BSU)
        return forks, self.memory[parts.layer].tail_XJU

    def _of_branches(self, forks_X: Tensor) -> Tensor:
        return forks_X if self.fork_Y is None else forks_X.index_select(0, self.fork_Y)

    def _convolved(self, parts: RecurrentParts, cut: tuple[Tensor, Tensor, Tensor], tail_XJU: Tensor) -> Tensor:
        """The convolution of every node over its own ancestors."""
        sections: list[Tensor] = []
        for sequence_QLU in self.sequences(parts, cut, tail_XJU):
            trunk = self.width > 0 and not sections
            seen = self._once("same document", lambda: self._same_document(parts.memory)) if trunk else None
            convolved_QLU = _convolve(parts, sequence_QLU, seen)
            sections.append(convolved_QLU.unflatten(0, (len(cut[0]), -1)).flatten(1, 2))
        return torch.cat(sections, 1)

    def sequences(
        self, parts: RecurrentParts, cut: tuple[Tensor, Tensor, Tensor], tail_XJU: Tensor
    ) -> Iterator[Tensor]:
        """Conv inputs of the pass's paths with the J before them in front: of the trunk, the thoughts, the segments, as
        far as the pass has them, each `[Q, J + L, U]`."""
        layout, memory = self.layout, parts.memory
        rows, branches = layout.position_BR.shape
        if self.width:
            yield F.pad(cut[0], (0, 0, memory, 0))
        if branches:
            tail_YJU = self._of_branches(tail_XJU)
            tail_QJU = tail_YJU.repeat_interleave(rows * branches // len(tail_YJU), 0)
            thought = cut[1].unflatten(1, (branches, -1)).flatten(0, 1)
            past_QLU = torch.cat([tail_QJU, thought], 1)
            spare = tail_QJU.shape[1] - memory
            yield past_QLU[:, spare:] if spare else past_QLU
            if layout.segment_count and layout.segment_width:
                segment = cut[2].unflatten(1, (layout.segments, -1)).flatten(0, 1)
                yield self._after_thought(past_QLU, segment, tail_QJU.shape[1], spare)

    def _same_document(self, memory: int) -> tuple[Tensor, ...] | None:
        if self.starts_BS is None:
            return None
        own_BS = self.document_BS
        return tuple(own_BS == F.pad(own_BS, (d, 0), value=-2)[:, : self.width] for d in range(1, memory + 1))

    def _after_thought(self, past_QLU: Tensor, segment_YLU: Tensor, reach: int, spare: int) -> Tensor:
        """Segments with the conv inputs before them in front. Where the close was sampled, its place is an empty node
        that must not stand between the thought and the continuation."""

        def priors() -> Tensor:
            first_Y1 = (self.path_Y * past_QLU.shape[1] + self.cut_Y)[:, None]
            return first_Y1 + torch.arange(reach, device=first_Y1.device)

        def closed() -> Tensor:
            heads_BY = self.layout.kind_BN[:, self.layout.segment_start :: self.layout.segment_width]
            return (heads_BY == PADDING).flatten()[:, None, None]

        index_YJ = self._once("priors", priors)
        prior_YJU = past_QLU.flatten(0, 1).index_select(0, index_YJ.flatten()).view(*index_YJ.shape, -1)
        plain = torch.cat([prior_YJU[:, spare:], segment_YLU], 1)
        if not spare:
            return plain
        return torch.where(self._once("closed", closed), torch.cat([prior_YJU, segment_YLU[:, spare:]], 1), plain)

    def _read_branches(self, ready: RuleInputs, state_YIEF: Tensor) -> list[Tensor]:
        """Rule outputs of the thoughts and of the segments, each `[B, n, I, F]`."""
        layout = self.layout
        rows, branches = layout.position_BR.shape
        output, thought = self.rule(*ready.paths(self.width, branches, layout.thought_width), state_YIEF)
        sections = [output.unflatten(0, (rows, branches)).flatten(1, 2)]
        if layout.segment_count and layout.segment_width:
            end = self.width + branches * layout.thought_width
            nodes = ready.paths(end, layout.segments, layout.segment_width)
            output, _ = self.rule(*nodes, thought.state_after(self.path_Y, self.cut_Y))
            sections.append(output.unflatten(0, (rows, -1)).flatten(1, 2))
        return sections


def _branch_forks(layout: Layout, position_BP: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The forks, and for each run of branches that share one, which fork it is (None: in order)."""
    branches, group = layout.branch_count, layout.plan.group
    if branches % group:
        group = 1
    own_BY = layout.position_BR.unflatten(1, (-1, group)).amax(-1) if branches else layout.position_BR
    if position_BP is None:
        return own_BY, None
    if not branches or branches == position_BP.shape[1] * layout.plan.group:
        return position_BP, None
    match_BYP = own_BY[..., None] == position_BP[:, None, :]
    if not bool((match_BYP.any(-1) | (own_BY < 0)).all()):
        raise ValueError("a branch leaves the trunk at a position that was not kept when the trunk was read")
    first = torch.arange(len(own_BY), device=own_BY.device)[:, None] * position_BP.shape[1]
    return position_BP, (match_BYP.int().argmax(-1) + first).flatten()


class StepRecurrence:
    """One node per branch at a time, on static buffers: what a captured sampling step needs of the recurrent layers.

    `place` (int64 `[1]`) is the step's number inside the remembered window. It is set outside the captured step, by
    `begin` and `advance`.
    """

    def __init__(self, memory: dict[int, ForkMemory], branches: int, steps: int, window: int = CHUNK) -> None:
        some = next(iter(memory.values()))
        self.branches, self.steps, self.window = branches, steps, min(steps, window)
        self.place = torch.zeros(1, dtype=torch.int64, device=some.state_XIEF.device)
        self._taken = 0
        # Folding the window into the state needs a state of its own for every branch.
        self._copies = branches // len(some.state_XIEF) if steps > self.window else 1
        self.layers = {layer: BranchMemory(self._states(fork), branches, self.window) for layer, fork in memory.items()}
        self.past = {layer: self._inputs(fork) for layer, fork in memory.items()}

    def _states(self, fork: ForkMemory) -> Tensor:
        return fork.state_XIEF.repeat_interleave(self._copies, 0) if self._copies > 1 else fork.state_XIEF

    def _inputs(self, fork: ForkMemory) -> Tensor:
        tail_QJU = fork.tail_XJU.repeat_interleave(self.branches // len(fork.tail_XJU), 0)
        return F.pad(tail_QJU, (0, 0, 1, 0))

    def begin(self, memory: dict[int, ForkMemory]) -> None:
        """Put all branches back to their forks, those of a freshly read trunk of the same shape."""
        for layer, fork in memory.items():
            self.layers[layer].begin(self._states(fork))
            self.past[layer].copy_(self._inputs(fork))
        self._taken = 0
        self.place.zero_()

    def advance(self) -> None:
        """To be called after every step, outside the captured part."""
        self._taken += 1
        self.place.add_(1)
        if self._taken % self.window == 0 and self._taken < self.steps:
            for layer in self.layers.values():
                layer.fold()
            self.place.zero_()

    def mix(self, parts: RecurrentParts, hidden_BRD: Tensor) -> Tensor:
        """The layer's output for the branches' newest nodes, `[B, R, D]`; buffers move on in place."""
        inputs_BRU, gate, strength, rate = parts.project(hidden_BRD)
        past = self.past[parts.layer]
        past.copy_(torch.cat([past[:, 1:], inputs_BRU.flatten(0, 1)[:, None]], 1))
        conv_BRU = _convolve(parts, past[:, -1 - parts.memory :]).view_as(inputs_BRU)
        ready = rule_inputs(parts, conv_BRU, strength, rate, None)
        query, key, value, decay, beta = (x[:, 0] for x in ready.paths(0, hidden_BRD.shape[1], 1))
        output_QIF = self.layers[parts.layer].step(query, key, value, decay, beta, self.place)
        return parts.finish(output_QIF.unflatten(0, hidden_BRD.shape[:2]).to(hidden_BRD.dtype), gate)

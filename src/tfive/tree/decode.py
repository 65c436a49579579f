"""Decoding on static buffers: the loop's step, and the sampler of thoughts.

`DecodeLoop` is what sampling thoughts (`Sampler`: all branches of all texts advance together, one node each) and
writing texts (`tfive.inference.writer`) share. A step reads and writes fixed tensors and never waits for the host, so
on CUDA it is captured once per shape and replayed; elsewhere the same function runs as it is. Random numbers come in
from outside.

Local shape letters: m slots, the S trunk nodes followed by the R·A branch nodes; X key/value heads, E head features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from tfive.tree.attention import SHORT, Attending, KeysValues
from tfive.tree.fast.cuda_graph import CudaGraphs, Graph
from tfive.tree.fast.delta_step import BranchSteps
from tfive.tree.fast.fused import Heads, Ops
from tfive.tree.fast.hf_fused import Fusion
from tfive.tree.fast.replayed import copy_all
from tfive.tree.head import VocabularyHead, chunk_rows
from tfive.tree.hf import Backbone
from tfive.tree.law import Draw, draw, draw_token
from tfive.tree.layout import Layout, Thoughts
from tfive.tree.outputs import Lower
from tfive.tree.packed import packing, run_nodes
from tfive.tree.recurrent.deltanet import ForkMemory, StepRecurrence
from tfive.tree.settings import EngineOptions, SamplingSettings


@dataclass(frozen=True)
class Reading:
    """What one pass over the trunk leaves behind: the text is read once, then sampled from and scored."""

    hidden_BSD: Tensor
    """Final hidden states of the trunk."""
    attention: dict[int, KeysValues]
    """Keys and values of the trunk by layer."""
    recurrent: dict[int, ForkMemory]
    """States of recurrent layers at the positions, by layer."""
    lower: Lower | None = None
    """Activations of the trunk that enter a block, where they are kept."""


class StepPass(Attending):
    """The pass of one sampling step: one query per branch, keys and values in fixed slots."""

    def __init__(self, layout: Layout, reading: Reading, kernel: str, fusion: Fusion | None = None) -> None:
        recurrence: BranchSteps | StepRecurrence | None = None
        if reading.recurrent:
            asked = (reading.recurrent, layout.position_BR.numel(), layout.thought_width)
            recurrence = (None if fusion is None else fusion.steps(*asked)) or StepRecurrence(*asked)
        super().__init__(kernel, recurrence)
        self.states = recurrence
        own = layout.branch_count * layout.thought_width
        self.width, self.stride = layout.trunk_width, layout.thought_width
        self.slots = {i: (_room(k, own), _room(v, own)) for i, (k, v) in reading.attention.items()}
        rows, device = len(layout.token_BN), layout.token_BN.device
        self.place = torch.zeros(1, dtype=torch.int64, device=device)
        self.first_slot_R = self.width + torch.arange(layout.branch_count, device=device) * self.stride
        self.slot_place_m = torch.cat(
            [
                torch.full((self.width,), -1, device=device),
                torch.arange(self.stride, device=device).repeat(layout.branch_count),
            ]
        )
        self.slot_position_Bm = torch.zeros(rows, len(self.slot_place_m), dtype=torch.int64, device=device)
        self.position_BR, self.first_BR, self.stop_BR = (
            torch.zeros(layout.position_BR.shape, dtype=torch.int64, device=device) for _ in range(3)
        )
        self.trunk_BRS = torch.zeros(*layout.position_BR.shape, self.width, dtype=torch.bool, device=device)
        self.exists_BR = torch.zeros(layout.position_BR.shape, dtype=torch.bool, device=device)

    def begin(self, layout: Layout, reading: Reading) -> None:
        """Take over a freshly read trunk of the same shape; every branch stands at its trunk node again."""
        slots = [buffer[:, :, : self.width] for buffers in self.slots.values() for buffer in buffers]
        copy_all(slots, (trunk for index in self.slots for trunk in reading.attention[index]))
        if self.states is not None:
            self.states.begin(reading.recurrent)
        # All nodes of a branch see the same of the trunk; documents are contiguous, so it is one stretch.
        index_S = torch.arange(self.width, device=self.place.device)
        self.trunk_BRS.copy_(layout.mask_of(self.first_slot_R, None, index_S))
        self.exists_BR.copy_(layout.position_BR >= 0)
        self.first_BR.copy_(torch.where(self.trunk_BRS, index_S, self.width).amin(-1))
        self.stop_BR.copy_(torch.where(self.trunk_BRS, index_S + 1, 0).amax(-1))
        self.slot_position_Bm.copy_(layout.position_BN)
        self.position_BR.copy_(layout.position_BN[:, self.first_slot_R])
        self.place.zero_()

    def visible(self, window: int | None) -> Tensor:
        trunk_BRS, own_BRA = self._seen(window)
        branches = len(self.first_slot_R)
        mine_BRRA = torch.eye(branches, dtype=torch.bool, device=trunk_BRS.device)[..., None] & own_BRA[:, :, None]
        return _some(torch.cat([trunk_BRS, mine_BRRA.flatten(2)], -1))[:, None]

    def _seen(self, window: int | None) -> tuple[Tensor, Tensor]:
        """What each branch sees of the trunk `[B, R, S]` and of its own slots `[B, R, A]`."""
        trunk_BRS = self.trunk_BRS
        own_BRA = self.exists_BR[..., None] & (torch.arange(self.stride, device=self.place.device) <= self.place)
        if window is not None:
            depth_BR1, position_Bm = (self.position_BR + self.place)[..., None], self.slot_position_Bm
            trunk_BRS = trunk_BRS & (depth_BR1 - position_Bm[:, None, : self.width] < window)
            position_BRA = position_Bm[:, self.width :].unflatten(1, (len(self.first_slot_R), self.stride))
            own_BRA = own_BRA & (depth_BR1 - position_BRA < window)
        return trunk_BRS, own_BRA

    def _attend_masked(
        self, query_BYnE: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, cap: float | None
    ) -> Tensor:
        """As all passes do it; many branches by two products, with the trunk's keys and with each branch's own, so that
        no branch is asked for the slots of the others."""
        count, heads = len(self.first_slot_R), key.shape[1]
        if count * self.stride <= max(2 * self.width, SHORT):
            return super()._attend_masked(query_BYnE, key, value, scale, window, cap)
        seen_BRm = self._once(("apart", window), lambda: _some(torch.cat(self._seen(window), -1)))
        query_BXFRE = query_BYnE.unflatten(1, (heads, -1))
        fold = query_BXFRE.shape[2]

        def own(slots: Tensor) -> Tensor:
            """A branch's own slots, `[B, X, R, A, E]`."""
            return slots[:, :, self.width :].unflatten(2, (count, self.stride))

        of_trunk = query_BXFRE.flatten(2, 3) @ key[:, :, : self.width].transpose(-1, -2)
        of_own = (query_BXFRE.transpose(2, 3) @ own(key).transpose(-1, -2)).transpose(2, 3)
        scores = torch.cat([of_trunk.unflatten(2, (fold, count)), of_own], -1) * scale
        if cap is not None:
            scores = cap * torch.tanh(scores / cap)
        wide = torch.promote_types(scores.dtype, torch.float32)
        weight = scores.masked_fill(~seen_BRm[:, None, None], float("-inf")).softmax(-1, dtype=wide).to(value.dtype)
        on_trunk, on_own = weight[..., : self.width], weight[..., self.width :]
        read = (on_trunk.flatten(2, 3) @ value[:, :, : self.width]).unflatten(2, (fold, count))
        read = read + (on_own.transpose(2, 3) @ own(value)).transpose(2, 3)
        return read.flatten(1, 2).transpose(1, 2)

    def extend(self, layer: int, key_BXRE: Tensor, value_BXRE: Tensor) -> KeysValues:
        key, value = self.slots[layer]
        key.index_copy_(2, self._taken_R(), key_BXRE.to(key.dtype))
        value.index_copy_(2, self._taken_R(), value_BXRE.to(value.dtype))
        return key, value

    def _taken_R(self) -> Tensor:
        """The slots this step writes."""
        return self._once("taken", lambda: self.first_slot_R + self.place)

    def room(self, layer: int, like_BnD: Tensor, heads: Heads) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        query_BRYE = like_BnD.new_empty(*like_BnD.shape[:2], heads.queries, heads.features)
        return query_BRYE, *self.slots[layer], self._taken_R()

    def attend_written(
        self, ops: Ops, layer: int, query_BnYE: Tensor, key: Tensor, value: Tensor, scale: float, gate_xq: Tensor | None
    ) -> Tensor:
        seen = (self.first_BR, self.stop_BR, self.place, self.width)
        return ops.attend(query_BnYE, key, value, *seen, scale, gate_xq)

    def advance(self) -> None:
        """On to the next place; outside the captured step."""
        self.place.add_(1)
        if self.states is not None:
            self.states.advance()

    def forget_masks(self) -> None:
        """The next step's masks and slots differ: they depend on the place."""
        self._masks.clear()


def _some(seen_BRm: Tensor) -> Tensor:
    """A branch that does not exist still asks: it sees one slot rather than none."""
    first_m = torch.arange(seen_BRm.shape[-1], device=seen_BRm.device) == 0
    return seen_BRm | (~seen_BRm.any(-1, keepdim=True) & first_m)


def _room(trunk_BXSE: Tensor, own: int) -> Tensor:
    rows, heads, width, features = trunk_BXSE.shape
    return trunk_BXSE.new_zeros(rows, heads, width + own, features)


class DecodeLoop(ABC):
    """Steps of decoding, one token of every row each, on static buffers; on CUDA one graph per shape of step."""

    WARM_UP = 2
    """Runs of the step before it is captured."""

    def __init__(
        self,
        head: VocabularyHead,
        engine: EngineOptions,
        device: torch.device,
        forbidden_V: Tensor | None,
        by: Draw = draw,
    ) -> None:
        self.head, self._by = head, by
        self._forbidden = None if forbidden_V is None else forbidden_V.nonzero()[:, 0]
        self._cuda_graphs = CudaGraphs.on(device, engine.cuda_graphs)
        self._graphs: dict[int, Graph] = {}

    @abstractmethod
    def _step(self) -> None:
        """Read one input of every row and choose the next ones; nothing of it may wait for the host."""

    def uncaptured(self, shape: int = 0) -> bool:
        """Whether steps of this shape are to be captured first."""
        return self._cuda_graphs is not None and shape not in self._graphs

    def capture(self, shape: int = 0) -> None:
        """Capture the step as it would run now. It runs a few times before, which moves the buffers."""
        if self._cuda_graphs is not None:
            self._graphs[shape] = self._cuda_graphs.capture(self._step, self.WARM_UP)

    def step(self, shape: int = 0) -> None:
        """One step of all rows: a replay where it was captured."""
        self._graphs[shape].replay() if shape in self._graphs else self._step()

    def thought_token(self, logits_xV: Tensor, law: SamplingSettings, uniform_x: Tensor) -> tuple[Tensor, Tensor]:
        """A thought's next token in every row, and its log q; `logits_xV` are overwritten."""
        return draw_token(logits_xV, law, uniform_x, self._forbidden, self._by)


class Sampler(DecodeLoop):
    """The sampling loop for one shape of batch and one law, with the buffers (and on CUDA the graph) it needs."""

    def __init__(
        self,
        backbone: Backbone,
        head: VocabularyHead,
        embed: Callable[[Tensor, Tensor], Tensor],
        engine: EngineOptions,
        law: SamplingSettings,
        forbidden_V: Tensor | None,
        layout: Layout,
        reading: Reading,
        fusion: Fusion | None = None,
    ) -> None:
        device, by = layout.token_BN.device, draw if fusion is None else fusion.ops.draw
        super().__init__(head, engine, device, forbidden_V, by)
        self.backbone, self.embed, self.law = backbone, embed, law
        self.blocks = None if fusion is None else fusion.hold()
        self.rows = chunk_rows(head.vocabulary, 1, engine.head_bytes)
        self.tree = StepPass(layout, reading, "sdpa" if engine.attention == "sdpa" else "folded", fusion)
        shape = layout.position_BR.shape
        self.token_BR = torch.zeros(shape, dtype=torch.int64, device=device)
        self.delimiter_BR = torch.full(shape, -1, dtype=torch.int64, device=device)
        self.uniform_BR = torch.zeros(shape, dtype=torch.float64, device=device)
        self.log_q_BR = torch.zeros(shape, dtype=torch.float32, device=device)
        self.writing_BR = torch.zeros(shape, dtype=torch.bool, device=device)
        """Branches that have not closed; where padding is left out, no other is computed."""
        own = self.blocks is None and self.tree.recurrence is None
        self.packs = own and device.type == "cpu" and engine.packed != "off"

    def _choose(self, hidden_BRD: Tensor) -> None:
        """Draw every branch's next token from its hidden state; it becomes the step's next input."""
        rows, index_x = hidden_BRD.flatten(0, 1), packing(self.writing_BR) if self.packs else None
        for start in range(0, len(rows) if index_x is None else len(index_x), self.rows):
            at: slice | Tensor = slice(start, start + self.rows)
            at = at if index_x is None else index_x[at]
            token, log_q = self.thought_token(self.head.logits(rows[at]), self.law, self.uniform_BR.view(-1)[at])
            self.token_BR.view(-1)[at] = token
            self.log_q_BR.view(-1)[at] = log_q.to(self.log_q_BR.dtype)

    def _step(self) -> None:
        """Read the input tokens at the current place and choose the next ones."""
        self.tree.forget_masks()
        embeds_BRD = self.embed(self.token_BR, self.delimiter_BR)
        position_BR = self.tree.position_BR + self.tree.place
        index_x = packing(self.writing_BR) if self.packs else None
        given = (self.backbone, embeds_BRD, position_BR, self.tree, index_x)
        self._choose(run_nodes(*given, fused=self.blocks))

    def run(
        self, layout: Layout, reading: Reading, uniforms_BRT: Tensor, prefix: tuple[Tensor, Tensor] | None = None
    ) -> Thoughts:
        """One thought per branch of `layout` (whose thought tokens are not read), from `uniforms_BRT`: as many tokens
        as it has numbers, at most.

        `prefix` is `(tokens_BRT, length_BR)`: the first tokens of each thought, taken as given instead of drawn.
        """
        self.tree.begin(layout, reading)
        if self.uncaptured():
            self.capture()
            self.tree.begin(layout, reading)
        plan, opening = layout.plan, layout.plan.open_width
        uniforms_BRT = uniforms_BRT.to(self.uniform_BR)
        tokens_BRT = torch.zeros(uniforms_BRT.shape, dtype=torch.int64, device=self.token_BR.device)
        log_q_BRT = torch.zeros(uniforms_BRT.shape, device=self.token_BR.device)
        self.writing_BR.copy_(layout.position_BR >= 0)
        for place in range(-1, opening + uniforms_BRT.shape[-1] - 1):
            step = place - opening + 1
            if step >= 0:
                self.uniform_BR.copy_(uniforms_BRT[..., step])
            if place < 0:
                # Without an opening the trunk node itself predicts the first action.
                if opening == 0:
                    self._choose(_at_positions(reading.hidden_BSD, layout.position_BR))
            else:
                if place < opening:
                    self.token_BR.fill_(plan.open_ids[place])
                self.delimiter_BR.fill_(0 if plan.learned and place < opening else -1)
                self.step()
                self.tree.advance()
            if step >= 0:
                if prefix is not None:
                    given_BR = step < prefix[1]
                    self.token_BR.copy_(torch.where(given_BR, prefix[0][..., step], self.token_BR))
                    self.log_q_BR.masked_fill_(given_BR, 0.0)
                tokens_BRT[..., step] = self.token_BR
                log_q_BRT[..., step] = self.log_q_BR
                if self.packs and plan.stop_id is not None:
                    self.writing_BR &= self.token_BR != plan.stop_id
                    if not self.writing_BR.any():
                        break
        return ended(tokens_BRT, log_q_BRT, layout)


def _at_positions(hidden_BSD: Tensor, position_BR: Tensor) -> Tensor:
    index = position_BR.clamp(min=0)[..., None].expand(-1, -1, hidden_BSD.shape[-1])
    return hidden_BSD.gather(1, index)


def ended(tokens_BRT: Tensor, log_q_BRT: Tensor, layout: Layout) -> Thoughts:
    """Thoughts cut at a sampled close, which counts as their last action; what was drawn after it is dropped. Fewer
    steps than the plan's are filled up with none."""
    length, stop = tokens_BRT.shape[-1], layout.plan.stop_id
    valid_BR = layout.position_BR >= 0
    length_BR = torch.where(valid_BR, length, 0)
    closed_BR = torch.zeros_like(valid_BR)
    if stop is not None:
        stops_BRT = tokens_BRT == stop
        closed_BR = stops_BRT.any(-1) & valid_BR
        length_BR = torch.where(closed_BR, stops_BRT.int().argmax(-1) + 1, length_BR)
    keep_BRT = torch.arange(length, device=tokens_BRT.device) < length_BR[..., None]
    missing = (0, layout.plan.length - length)
    tokens_BRT, log_q_BRT = (pad(drawn_BRT * keep_BRT, missing) for drawn_BRT in (tokens_BRT, log_q_BRT))
    return Thoughts(tokens_BRT, length_BR, valid_BR, closed_BR, log_q_BRT)

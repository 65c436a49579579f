"""Decoding on static buffers: the loop's step, and the sampler of thoughts.

`DecodeLoop` is what sampling thoughts (`Sampler`: all branches of all texts advance together, one node each) and
writing texts (`tfive.inference.writer`) share. A step reads and writes fixed tensors and never waits for the host, so
on CUDA it is captured once per shape and replayed; elsewhere the same function runs as it is. Random numbers come in
from outside.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from tfive.tree.fast.angles import angle_table, looked_up
from tfive.tree.fast.cuda_graph import CudaGraphs, Graph
from tfive.tree.fast.hf_fused import Fusion
from tfive.tree.fast.listed import Lists, wanted
from tfive.tree.fast.replayed import copy_all
from tfive.tree.head import VocabularyHead, chunk_rows
from tfive.tree.hf import Backbone
from tfive.tree.law import Draw, draw, draw_token
from tfive.tree.layout import Layout, Thoughts
from tfive.tree.outputs import Reading
from tfive.tree.packed import packing, run_nodes
from tfive.tree.settings import EngineOptions, SamplingSettings
from tfive.tree.step_pass import StepPass

_EVERY = 8
"""After so many tokens thoughts that closed meanwhile leave a step of fused blocks."""


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
        lists = wanted(engine.packed, layout.position_BR.numel(), layout.plan.length)
        lists = lists and layout.plan.stop_id is not None and not reading.recurrent
        lists = lists and fusion is not None and fusion.list_trouble(reading.hidden_BSD) is None
        self.tree = StepPass(layout, reading, "sdpa" if engine.attention == "sdpa" else "folded", fusion, lists)
        positions, like = layout.trunk_width + layout.thought_width, reading.hidden_BSD
        self.angles = None if fusion is None else angle_table(backbone, positions, self.tree, like)
        shape = layout.position_BR.shape
        self.token_BR = torch.zeros(shape, dtype=torch.int64, device=device)
        self.delimiter_BR = torch.full(shape, -1, dtype=torch.int64, device=device)
        self.uniform_BR = torch.zeros(shape, dtype=torch.float64, device=device)
        self.log_q_BR = torch.zeros(shape, dtype=torch.float32, device=device)
        self.writing_BR = torch.zeros(shape, dtype=torch.bool, device=device)
        """Branches that have not closed; where padding is left out, no other is computed."""
        own = self.blocks is None and self.tree.recurrence is None
        self.packs = own and device.type == "cpu" and engine.packed != "off"
        self.lists = Lists(shape[0], shape[1], device) if lists else None

    def _choose(self, rows_xD: Tensor, index_x: Tensor | None) -> None:
        """Draw the next token of these branches (none: all) from their hidden states; it becomes their next input."""
        for start in range(0, len(rows_xD), self.rows):
            some = slice(start, start + self.rows)
            logits_xV, uniform_x = self.head.logits(rows_xD[some]), self.uniform_BR.view(-1)
            uniform_x = uniform_x[some] if index_x is None else uniform_x[index_x[some]]
            drawn = self.thought_token(logits_xV, self.law, uniform_x)
            for kept_BR, new_x in zip((self.token_BR, self.log_q_BR), drawn, strict=True):
                if index_x is None:
                    kept_BR.view(-1)[some] = new_x
                else:
                    kept_BR.view(-1).index_copy_(0, index_x[some], new_x.to(kept_BR.dtype))

    def _turn(self, position_Bn: Tensor) -> Tensor:
        """The positions of a step's nodes, whose angles are looked up where there is a table of them."""
        self.tree.angles = None if self.angles is None else looked_up(self.angles, position_Bn)
        return position_Bn

    def _step(self) -> None:
        """Read the input tokens at the current place and choose the next ones."""
        self.tree.forget_masks()
        if self.tree.listed is not None:
            self._step_of(self.tree.listed.index_x)
            return
        embeds_BRD = self.embed(self.token_BR, self.delimiter_BR)
        position_BR = self._turn(self.tree.position_BR + self.tree.place)
        index_x = packing(self.writing_BR) if self.packs else None
        given = (self.backbone, embeds_BRD, position_BR, self.tree, index_x)
        rows_xD = run_nodes(*given, fused=self.blocks).flatten(0, 1)
        self._choose(rows_xD if index_x is None else rows_xD[index_x], index_x)

    def _step_of(self, index_x: Tensor) -> None:
        """The same for these branches alone, as the nodes of one row."""
        token_x, delimiter_x, position_x = (
            value_BR.view(-1)[index_x] for value_BR in (self.token_BR, self.delimiter_BR, self.tree.position_BR)
        )
        embeds_1xD = self.embed(token_x[None], delimiter_x[None])
        position_1x = self._turn(position_x[None] + self.tree.place)
        self._choose(self.backbone.run(embeds_1xD, position_1x, self.tree, fused=self.blocks)[0], index_x)

    def _shorten(self, lists: Lists) -> int:
        """Have steps compute only as many branches as a list needs for those still being written; how many these are.
        It waits for the device."""
        left = int(self.writing_BR.sum())
        size, now = lists.size_for(left), lists.every if self.tree.listed is None else len(self.tree.listed.index_x)
        if left > 0 and size < now:
            self.tree.listed = lists.fill(self.writing_BR, size)
            if self.uncaptured(size):
                kept = self.token_BR.clone(), self.log_q_BR.clone()
                self.capture(size)
                copy_all((self.token_BR, self.log_q_BR), kept)
        return left

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
        if self.lists is not None:
            self._shorten(self.lists)
        for place in range(-1, opening + uniforms_BRT.shape[-1] - 1):
            step = place - opening + 1
            if step >= 0:
                self.uniform_BR.copy_(uniforms_BRT[..., step])
            if place < 0:
                # Without an opening the trunk node itself predicts the first action.
                if opening == 0:
                    self._choose(_at_positions(reading.hidden_BSD, layout.position_BR).flatten(0, 1), None)
            else:
                if place < opening:
                    self.token_BR.fill_(plan.open_ids[place])
                self.delimiter_BR.fill_(0 if plan.learned and place < opening else -1)
                self.step(0 if self.tree.listed is None else len(self.tree.listed.index_x))
                self.tree.advance()
            if step >= 0:
                if prefix is not None:
                    given_BR = step < prefix[1]
                    self.token_BR.copy_(torch.where(given_BR, prefix[0][..., step], self.token_BR))
                    self.log_q_BR.masked_fill_(given_BR, 0.0)
                tokens_BRT[..., step] = self.token_BR
                log_q_BRT[..., step] = self.log_q_BR
                if plan.stop_id is not None and (self.packs or self.lists is not None):
                    self.writing_BR &= self.token_BR != plan.stop_id
                if self.packs and not self.writing_BR.any():
                    break
                due = step % _EVERY == _EVERY - 1 and step + 1 < uniforms_BRT.shape[-1]
                if self.lists is not None and due and not self._shorten(self.lists):
                    break
        self.tree.listed = None
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

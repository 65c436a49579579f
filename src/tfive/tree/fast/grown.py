"""Layouts by a replayed graph: growing one is some two hundred small operations on a few thousand numbers, and on a GPU
their launches are all it costs, before every pass, while the device waits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from tfive.tree.fast.cuda_graph import CudaGraphs, Graph, first_line
from tfive.tree.layout import Layout, TextBatch, ThoughtPlan, Thoughts, layout_tensors

_EAGER = 1
"""Calls of a shape before it is captured: they set libraries up."""
_SHAPES = 32
"""How many shapes are captured; further ones are grown as they are."""
_READ = ("tokens_BRT", "length_BR", "valid_BR", "closed_BR")
"""What growing reads of thoughts."""


Grow = Callable[..., Layout]


class _Captured:
    """Growing layouts of one shape: the tensors the graph reads, and those it leaves its results in."""

    def __init__(
        self,
        graphs: CudaGraphs,
        grow: Grow,
        texts: TextBatch,
        plan: ThoughtPlan,
        thoughts: Thoughts | None,
        segments: str,
        position_BR: Tensor | None,
    ) -> None:
        self.texts = TextBatch(*(getattr(texts, f.name).clone() for f in fields(texts)))
        self.thoughts = None
        if thoughts is not None:
            self.thoughts = Thoughts(*(getattr(thoughts, f.name).clone() for f in fields(thoughts)))
        self.position_BR = None if position_BR is None else position_BR.clone()
        self.example: Layout | None = None
        self.joined: dict[torch.dtype, Tensor] = {}

        def work() -> None:
            layout = grow(self.texts, plan, self.thoughts, segments, self.position_BR)
            parts: dict[torch.dtype, list[Tensor]] = {}
            for tensor in layout_tensors(layout).values():
                parts.setdefault(tensor.dtype, []).append(tensor.flatten())
            self.example, self.joined = layout, {dtype: torch.cat(some) for dtype, some in parts.items()}

        self.graph: Graph = graphs.capture(work, warm_up=1)

    def __call__(self, texts: TextBatch, thoughts: Thoughts | None, position_BR: Tensor | None) -> Layout:
        for name in ("tokens_BS", "document_BS", "positions_BP"):
            getattr(self.texts, name).copy_(getattr(texts, name))
        if self.thoughts is not None and thoughts is not None:
            for name in _READ:
                getattr(self.thoughts, name).copy_(getattr(thoughts, name))
        if self.position_BR is not None and position_BR is not None:
            self.position_BR.copy_(position_BR)
        self.graph.replay()
        if self.example is None:
            raise RuntimeError("the graph was captured without running its work")
        # The next replay writes here again, while this layout may still be in use.
        own = {dtype: joined.clone() for dtype, joined in self.joined.items()}
        found: dict[str, Any] = {}
        used = dict.fromkeys(own, 0)
        for name, tensor in layout_tensors(self.example).items():
            start = used[tensor.dtype]
            used[tensor.dtype] = start + tensor.numel()
            found[name] = own[tensor.dtype][start : start + tensor.numel()].view(tensor.shape)
        return replace(self.example, **found)


@dataclass
class GrownLayouts:
    """`grow.grow`, captured for shapes that come again where `wanted` and the device has graphs."""

    wanted: bool = True
    graphs: CudaGraphs | None = None
    """Those to capture with; made on the first occasion on a device that has them."""
    reason: str = ""
    """Why nothing is captured any more, if so."""

    def __post_init__(self) -> None:
        self._calls: dict[Any, int] = {}
        self._captured: dict[Any, _Captured] = {}

    def __call__(
        self,
        grow: Grow,
        texts: TextBatch,
        plan: ThoughtPlan,
        thoughts: Thoughts | None,
        segments: str = "none",
        position_BR: Tensor | None = None,
    ) -> Layout:
        """The layout that `grow` (`tree.grow.grow`) gives for the rest."""
        device = texts.tokens_BS.device
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if not self.wanted or capturing or (self.graphs is None and device.type != "cuda"):
            return grow(texts, plan, thoughts, segments, position_BR)
        branches = None if thoughts is None else thoughts.tokens_BRT.shape
        given = None if position_BR is None else position_BR.shape
        key = (texts.tokens_BS.shape, texts.positions_BP.shape, branches, given, plan, segments, device)
        if key in self._captured:
            return self._captured[key](texts, thoughts, position_BR)
        self._calls[key] = self._calls.get(key, 0) + 1
        layout = grow(texts, plan, thoughts, segments, position_BR)
        if self._calls[key] > _EAGER and len(self._captured) < _SHAPES:
            self.graphs = self.graphs or CudaGraphs(device, frequent=True)
            self._try(self.graphs, key, layout, grow, texts, plan, thoughts, segments, position_BR)
        return layout

    def _try(self, graphs: CudaGraphs, key: Any, layout: Layout, *given: Any) -> None:
        """Capture this shape, and keep it if it gives the layout that was grown; otherwise capture no more."""
        try:
            captured = _Captured(graphs, *given)
            found = captured(given[1], given[3], given[5])
        except RuntimeError as error:
            self.wanted, self.reason = False, f"cannot be captured: {first_line(error)}"
            return
        same = layout_tensors(layout)
        if all(torch.equal(value, same[name]) for name, value in layout_tensors(found).items()):
            self._captured[key] = captured
        else:
            self.wanted, self.reason = False, "a captured layout differs from a grown one"

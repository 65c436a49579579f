"""Passes by a replayed graph: reading texts and scoring thoughts are some five hundred kernels each, and the device
waits while the host launches them one by one. `replayed_backward.py` does the same for passes with gradients.

A pass that comes again with the same shapes is captured once, on tensors of its own: what it reads is copied there, and
what it gives is copied out, for the next replay writes there again. Rows are best grown inside the pass: that is some
two hundred small kernels too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from tfive.tree.fast.cuda_graph import CudaGraphs, Graph, first_line

_ROOM = 2
"""A part (one in so many) of the device's memory that must be free for a shape to be captured: a graph keeps what its
pass works in, and what comes later (an optimizer's first step, say) must find room."""
_APART = 0.02
"""Largest relative error of a captured pass against the same launched kernel by kernel."""

Named = dict[str, Tensor]

Work = Callable[[Sequence[Tensor]], Named]
"""From what a pass reads beside weights to what it gives; nothing of it may wait for the host."""


_WORD = torch.int64
"""What copies move at a time: PyTorch moves what is not contiguous number by number, however small these are."""


def _in_words(target: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
    """Both as longer numbers where they are of one type and rows of features, which are contiguous, hold such."""
    size = target.dtype.itemsize
    fits = target.dtype == source.dtype and target.ndim > 1 and size < _WORD.itemsize
    for one in (target, source) if fits else ():
        whole = (one.shape[-1], one.storage_offset(), *one.stride()[:-1])
        fits = fits and one.stride(-1) == 1 and all(number * size % _WORD.itemsize == 0 for number in whole)
    return (target.view(_WORD), source.view(_WORD)) if fits else (target, source)


def copy_all(targets: Iterable[Tensor], sources: Iterable[Tensor]) -> None:
    """Copies of many tensors, those of one type by few kernels."""
    by_type: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in (_in_words(*both) for both in zip(targets, sources, strict=True)):
        both = by_type.setdefault(target.dtype, ([], []))
        both[0].append(target)
        both[1].append(source)
    for some, others in by_type.values():
        torch._foreach_copy_(some, others)


def apart(found: Named, wanted: Named) -> float:
    """The largest relative error of several tensors."""
    pairs = [(found[name].float(), value.float()) for name, value in wanted.items()]
    return float(torch.stack([(a - b).norm() / b.norm().clamp(min=1e-20) for a, b in pairs]).max())


class Captured:
    """A pass of one shape: the tensors the graph reads, and those it leaves its results in."""

    def __init__(self, graphs: CudaGraphs, work: Work, given: Sequence[Tensor]) -> None:
        self.given = [value.clone() for value in given]
        self.results: Named = {}

        def run() -> None:
            self.results = work(self.given)

        self.graph: Graph = graphs.capture(run, warm_up=1)

    def __call__(self, given: Sequence[Tensor]) -> Named:
        copy_all(self.given, given)
        self.graph.replay()
        found = {name: torch.empty_like(value) for name, value in self.results.items()}
        copy_all(found.values(), self.results.values())
        return found


@dataclass
class ReplayedPasses:
    """`work(given)`, captured for shapes that come again where `wanted` and the device has graphs."""

    wanted: bool = True
    graphs: CudaGraphs | None = None
    """Those to capture with; made on the first occasion on a device that has them."""
    reason: str = ""
    """Why nothing is captured any more, if so."""

    shapes: ClassVar[int] = 12
    """How many shapes are captured; further ones run as they are."""
    frequent: ClassVar[bool] = True
    """Whether shapes come and go often; see `CudaGraphs`."""

    def __post_init__(self) -> None:
        self._seen: dict[Any, Sequence[Tensor] | None] = {}
        """Shapes that came once, which set libraries up, and what a capture is made on where that is kept."""
        self._captured: dict[Any, Captured] = {}
        self._home: Any = None

    @property
    def count(self) -> int:
        """How many shapes are captured."""
        return len(self._captured)

    def __call__(self, key: Any, home: Any, work: Work, given: Sequence[Tensor]) -> Named:
        """What `work` gives. `key` tells everything that the pass depends on beside its tensors' values and shapes,
        `home` where the weights are: captured passes read them there."""
        device = given[0].device
        busy = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if not self.wanted or busy or torch.is_inference_mode_enabled() or (not self.graphs and device.type != "cuda"):
            return work(given)
        if home != self._home:
            self.release()
            self._home = home
        key = (key, tuple((value.shape, value.dtype) for value in given), device)
        if key in self._captured:
            return self._captured[key](given)
        first = key not in self._seen
        if first:
            self._seen[key] = self._example(given)
        if first or len(self._captured) >= self.shapes or not _spacious(device):
            return work(given)
        self.graphs = self.graphs or CudaGraphs(device, frequent=self.frequent)
        return self._tried(self.graphs, key, work, given)

    def _example(self, given: Sequence[Tensor]) -> Sequence[Tensor] | None:
        """What to keep of a shape's first call; None: it is captured on what the second was given."""
        return None

    def _tried(self, graphs: CudaGraphs, key: Any, work: Work, given: Sequence[Tensor]) -> Named:
        """What `work` gives launched kernel by kernel. This shape is captured, and kept if it gives the same; otherwise
        nothing is captured any more."""
        found = work(given)
        try:
            captured = Captured(graphs, work, given)
            self._judge(key, captured, apart(captured(given), found))
        except RuntimeError as error:
            self.refuse(f"cannot be captured: {first_line(error)}")
        return found

    def _judge(self, key: Any, captured: Captured, *off: float) -> None:
        """Keep a captured pass whose errors are small; one that is no number is not."""
        wrong = [error for error in off if not error <= _APART]
        if wrong:
            self.refuse(f"a captured pass differs by {wrong[0]:.2g}")
        else:
            self._captured[key] = captured
            self._seen[key] = None

    def refuse(self, why: str) -> None:
        """Capture nothing any more, and give back what captured passes keep."""
        self.wanted, self.reason = False, why
        self.release()
        if self.graphs is not None:
            self.graphs.close()  # the one that was refused, too

    def release(self) -> None:
        """Forget what was captured, which reads weights where they were."""
        self._seen.clear()
        if self._captured and self.graphs is not None:
            self.graphs.release()
        self._captured.clear()


def _spacious(device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    free, whole = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return (free + unused) * _ROOM >= whole

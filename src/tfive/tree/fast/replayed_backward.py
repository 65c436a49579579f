"""Passes with gradients by a replayed graph: forward, loss and backward captured as one.

Such a pass has an effect beside its results: it leaves gradients. A graph writes them where they lay when it was
captured, so it is one of that state too: whether a gradient is the first or is added to one that is there.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from tfive.tree.fast.cuda_graph import CudaGraphs, first_line
from tfive.tree.fast.replayed import Captured, Named, ReplayedPasses, Work, apart, copy_all

_SMALL = 1e-3
"""The error of a gradient that is a smaller part of all of them is told in this part of all: a sum that comes to nearly
nothing is all rounding."""

_SPARE = 16
"""A part (one in so many) of the device's memory that stays free of captured passes and all others."""
_LITTLE = "little memory is free for a pass that keeps its own"

Held = list[Tensor | None]


class Gradients(Protocol):
    """Where passes leave their gradients, one place a weight."""

    @property
    def held(self) -> Held:
        """Each weight's gradient so far, None where there is none."""

    def hold(self, held: Held) -> None:
        """Have these tensors, and no others, hold the gradients so far."""

    def fix(self) -> None:
        """Keep each gradient at one address from now on, that of today's where there is one."""

    def free(self) -> None:
        """Keep them wherever they come to lie."""


@dataclass(frozen=True)
class _Noted:
    """The tensors that held the gradients at some moment, and copies of what they held."""

    held: Held
    values: Held

    @staticmethod
    def of(gradients: Gradients) -> _Noted:
        held = gradients.held
        return _Noted(held, [None if gradient is None else gradient.clone() for gradient in held])

    def put_back(self, gradients: Gradients) -> None:
        """Have the gradients held as they were, with the same values."""
        copy_all(*([tensor for tensor in some if tensor is not None] for some in (self.held, self.values)))
        gradients.hold(self.held)


class _CapturedBackward(Captured):
    """A pass that begins where gradients were held when it was captured; afterwards they are held where it left them.

    Held tensors are told anew in every run of the work, so that a warm-up does not change what is captured after it.
    """

    def __init__(self, graphs: CudaGraphs, work: Work, given: Sequence[Tensor], gradients: Gradients) -> None:
        self.gradients, self.before, self.after = gradients, gradients.held, list[Tensor | None]()

        def noted(given: Sequence[Tensor]) -> Named:
            gradients.hold(self.before)
            results = work(given)
            self.after = gradients.held
            return results

        super().__init__(graphs, noted, given)

    def spoil(self) -> None:
        """Leave no numbers where the next replay must write gradients anew."""
        for before, after in zip(self.before, self.after, strict=True):
            if before is None and after is not None:
                after.fill_(math.nan)

    def __call__(self, given: Sequence[Tensor]) -> Named:
        if any(mine is not other for mine, other in zip(self.gradients.held, self.before, strict=True)):
            raise RuntimeError("gradients lie elsewhere than when the pass was captured")
        found = super().__call__(given)
        self.gradients.hold(self.after)
        return found


@dataclass
class ReplayedBackward(ReplayedPasses):
    """`work(given)`, which ends with a backward pass, captured for shapes that come again.

    A shape's second call is launched and captured, the latter on what the first was given. The replay, on what the
    second was given, is compared with the launched pass, its gradients included, which stay as the latter made them: a
    graph that has anything of its inputs in it is found out. `work` must keep nothing of autograd's: it was recorded on
    one stream, and would be asked for on another.
    """

    gradients: Gradients = field(kw_only=True)
    shapes: ClassVar[int] = 16
    frequent: ClassVar[bool] = False
    """Few shapes are captured, each with the memory of a whole pass."""

    def __call__(self, key: Any, home: Any, work: Work, given: Sequence[Tensor]) -> Named:
        """What `work` gives, its gradients held by `gradients`; the rest as for all `ReplayedPasses`."""
        there = tuple(gradient is not None for gradient in self.gradients.held)
        return super().__call__((key, there), home, work, given)

    def _example(self, given: Sequence[Tensor]) -> Sequence[Tensor] | None:
        if sum(example is not None for example in self._seen.values()) >= self.shapes:
            return None
        # Some may be views of much more.
        return [value.clone() for value in given]

    def _tried(self, graphs: CudaGraphs, key: Any, work: Work, given: Sequence[Tensor]) -> Named:
        try:
            self.gradients.fix()
            begun = _Noted.of(self.gradients)
        except torch.OutOfMemoryError:
            self.refuse(_LITTLE)
            return work(given)
        found = work(given)
        if not _fits_twice(given[0].device):
            self.refuse(_LITTLE)
            return found
        try:
            ended = _Noted.of(self.gradients)
        except torch.OutOfMemoryError:
            self.refuse(_LITTLE)
            return found
        if _tells(found.values(), begun.values, ended.values):
            # A pass that autograd still remembers would be asked on the stream it ran on.
            gc.collect()
            try:
                self._compare(graphs, key, work, given, found, begun, ended)
            finally:
                ended.put_back(self.gradients)
        return found

    def _compare(
        self,
        graphs: CudaGraphs,
        key: Any,
        work: Work,
        given: Sequence[Tensor],
        found: Named,
        begun: _Noted,
        ended: _Noted,
    ) -> None:
        """Capture the pass that began and ended so, and keep it if its replay ends so too."""
        gradients, example = self.gradients, self._seen[key] or given
        try:
            begun.put_back(gradients)
            captured = _CapturedBackward(graphs, work, example, gradients)
            begun.put_back(gradients)
            captured.spoil()
            off = apart(captured(given), found)
            self._judge(key, captured, off, _gradients_apart(begun.values, gradients.held, ended.values))
        except RuntimeError as error:
            self.refuse(f"cannot be captured: {first_line(error)}")

    def refuse(self, why: str) -> None:
        """Capture nothing any more, and give back what captured passes keep."""
        super().refuse(why)
        self.gradients.free()


def _fits_twice(device: torch.device) -> bool:
    """Whether a graph may keep the memory of the pass that just ran, and others still find as much as was ever used, in
    what this process has or can get of the device."""
    if device.type != "cuda":
        return True
    most, now = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
    free, whole = torch.cuda.mem_get_info(device)
    return 2 * most - now <= torch.cuda.memory_reserved(device) + free - whole // _SPARE


def _added(begun: Held, ended: Held) -> Tensor:
    """The norm of what was added to each gradient that there is."""
    parts = [
        (end if begin is None else end - begin).float().norm()
        for begin, end in zip(begun, ended, strict=True)
        if end is not None
    ]
    return torch.stack(parts) if parts else torch.zeros(1)


def _tells(found: Iterable[Tensor], begun: Held, ended: Held) -> bool:
    """Whether a pass gave and added what another can be compared with: numbers, and to gradients more than nothing."""
    whole = float(_added(begun, ended).norm())
    return math.isfinite(whole) and whole > 0 and all(bool(value.isfinite().all()) for value in found)


def _gradients_apart(begun: Held, found: Held, wanted: Held) -> float:
    """The largest error of what a pass added to a gradient, relative to what it should have added."""
    if [one is None for one in found] != [one is None for one in wanted]:
        return math.inf
    size = _added(begun, wanted)
    return float((_added(wanted, found) / size.clamp(min=_SMALL * float(size.norm()))).max())

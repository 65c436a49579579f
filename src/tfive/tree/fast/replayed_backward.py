"""Passes with gradients by a replayed graph: forward, loss and backward captured as one.

Such a pass has an effect beside its results: it leaves gradients. A graph writes them where they lay when it was
captured, so it is one of that state too: whether a gradient is the first or is added to one that is there.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from tfive.tree.fast.cuda_graph import CudaGraphs, first_line
from tfive.tree.fast.replayed import Captured, ReplayedPasses, Work, apart, copy_all
from tfive.tree.layout import Layout

_SMALL = 1e-3
"""The error of a gradient that is a smaller part of all of them is told in this part of all: a sum that comes to nearly
nothing is all rounding."""

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


class _CapturedBackward(Captured):
    """A pass that begins where gradients were held when it was captured; afterwards they are held where it left them.

    Held tensors are told anew in every run of the work, so that a warm-up does not change what is captured after it.
    """

    def __init__(
        self, graphs: CudaGraphs, work: Work, layout: Layout, given: Sequence[Tensor], gradients: Gradients
    ) -> None:
        self.gradients, self.after = gradients, list[Tensor | None]()
        before = gradients.held

        def noted(layout: Layout, given: Sequence[Tensor]) -> Sequence[Tensor]:
            gradients.hold(before)
            results = work(layout, given)
            self.after = gradients.held
            return results

        super().__init__(graphs, noted, layout, given)

    def __call__(self, layout: Layout, given: Sequence[Tensor]) -> list[Tensor]:
        found = super().__call__(layout, given)
        self.gradients.hold(self.after)
        return found


@dataclass
class ReplayedBackward(ReplayedPasses):
    """`work(layout, given)`, which ends with a backward pass, captured for shapes that come again.

    The first replay of a shape is compared with the pass launched kernel by kernel, its gradients included, which stay
    as the latter made them. `work` must keep nothing of autograd's: it was recorded on one stream, and would be asked
    for on another.
    """

    gradients: Gradients = field(kw_only=True)
    frequent: ClassVar[bool] = False
    """Few shapes are captured, each with the memory of a whole pass."""

    def __call__(
        self, key: Any, home: Any, work: Work, layout: Layout, given: Sequence[Tensor] = ()
    ) -> Sequence[Tensor]:
        """What `work` gives, its gradients held by `gradients`; the rest as for all `ReplayedPasses`."""
        places = tuple(None if gradient is None else gradient.data_ptr() for gradient in self.gradients.held)
        return super().__call__((key, places), home, work, layout, given)

    def _tried(
        self, graphs: CudaGraphs, key: Any, work: Work, layout: Layout, given: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        gradients = self.gradients
        gradients.fix()
        before, begun = _noted(gradients)
        found = work(layout, given)
        after, wanted = _noted(gradients)
        if not _tells(begun, wanted):
            return found
        # A pass that autograd still remembers would be asked on the stream it ran on.
        gc.collect()
        try:
            _put_back(gradients, before, begun)
            captured = _CapturedBackward(graphs, work, layout, given, gradients)
            _put_back(gradients, before, begun)
            off = apart(captured(layout, given), found)
            self._judge(key, captured, max(off, _gradients_apart(begun, gradients.held, wanted)))
        except RuntimeError as error:
            self._refuse(f"cannot be captured: {first_line(error)}")
        finally:
            _put_back(gradients, after, wanted)
        return found

    def _refuse(self, why: str) -> None:
        super()._refuse(why)
        self.release()
        self.gradients.free()


def _noted(gradients: Gradients) -> tuple[Held, Held]:
    """The tensors that hold the gradients now, and copies of what they hold."""
    held = gradients.held
    return held, [None if gradient is None else gradient.clone() for gradient in held]


def _put_back(gradients: Gradients, held: Held, values: Held) -> None:
    """Have the gradients held as they were, with the same values."""
    copy_all(*([tensor for tensor in some if tensor is not None] for some in (held, values)))
    gradients.hold(held)


def _added(begun: Held, ended: Held) -> Tensor:
    """The norm of what was added to each gradient that there is."""
    parts = [
        (end if begin is None else end - begin).float().norm()
        for begin, end in zip(begun, ended, strict=True)
        if end is not None
    ]
    return torch.stack(parts) if parts else torch.zeros(1)


def _tells(begun: Held, ended: Held) -> bool:
    """Whether a pass added what another can be compared with: something, and numbers."""
    whole = float(_added(begun, ended).norm())
    return math.isfinite(whole) and whole > 0


def _gradients_apart(begun: Held, found: Held, wanted: Held) -> float:
    """The largest error of what a pass added to a gradient, relative to what it should have added."""
    if [one is None for one in found] != [one is None for one in wanted]:
        return math.inf
    size = _added(begun, wanted)
    return float((_added(wanted, found) / size.clamp(min=_SMALL * float(size.norm()))).max())

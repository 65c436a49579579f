"""Training steps of small networks, launched as one: on CUDA recorded once and replayed.

A step of a calibration head is some 150 kernels of a few microseconds each; launching them one by one takes many times
as long as running them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer


class Recorder:
    """Records steps on one CUDA device, one after another: memory that a step worked in is the next one's."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self._last: torch.cuda.CUDAGraph | None = None

    @classmethod
    def on(cls, device: torch.device, wanted: bool) -> Recorder | None:
        """A recorder where one is wanted and of use."""
        return cls(device) if wanted and device.type == "cuda" else None

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Work on the recorder's stream, after all that was asked before and before all that is asked later."""
        around = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(around)
        with torch.cuda.stream(self.stream):
            yield
        around.wait_stream(self.stream)

    def record(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """The kernels of `work`, not run yet; call it `aside`. It must have run there before, and wait for nothing."""
        graph = torch.cuda.CUDAGraph()
        # Not `torch.cuda.graph`: that gives all cached memory back first, which costs more than a step saves.
        graph.capture_begin(pool=None if self._last is None else self._last.pool())
        try:
            work()
        finally:
            graph.capture_end()
        self._last = graph
        return graph


class Replayed:
    """`step(*rows)` on row numbers of fixed data, called often: recorded after `EAGER` calls of one shape.

    The step may change parameters and tensors in place, but must not ask what they hold. Calls of another shape (a
    last, smaller batch) are run as they are.
    """

    EAGER = 3
    """First calls, which let optimizers and libraries set themselves up."""

    def __init__(
        self,
        step: Callable[..., None],
        optimizers: Sequence[Optimizer],
        device: torch.device,
        recorder: Recorder | None,
    ) -> None:
        self.step, self.optimizers, self.device, self.recorder = step, optimizers, device, recorder
        self._rows: list[Tensor] = []
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, *rows: Tensor) -> None:
        """One step, as if run on the spot."""
        rows = tuple(one.to(self.device) for one in rows)
        if self.recorder is None:
            self.step(*rows)
            return
        if not self._rows:
            self._rows = [one.clone() for one in rows]
        with self.recorder.aside():
            if [one.shape for one in rows] != [one.shape for one in self._rows]:
                self.step(*rows)
                return
            for kept, given in zip(self._rows, rows, strict=True):
                kept.copy_(given)
            if self._calls < self.EAGER:
                self._calls += 1
                self.step(*self._rows)
                return
            if self._graph is None:
                with capturable(self.optimizers):
                    self._graph = self.recorder.record(lambda: self.step(*self._rows))
            self._graph.replay()


@contextmanager
def capturable(optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Lets fused optimizers be recorded; marked so for good they would warn whenever they are not."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    for group in groups:
        group["capturable"] = True
    try:
        yield
    finally:
        for group in groups:
            group["capturable"] = False

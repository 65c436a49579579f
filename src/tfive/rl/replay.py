"""Training steps of small networks, launched as one: on CUDA recorded once and replayed.

A step of a calibration head is some 150 kernels of a few microseconds each; launching them one by one takes many times
as long as running them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer


class Recording(Protocol):
    """Work that can be done again, on the tensors it was recorded with."""

    def replay(self) -> None: ...


class Recorder:
    """Records steps on one CUDA device, one after another: memory that a step worked in is the next one's, for good.

    Recordings live until `release`, all together: one that goes while another is in use may take what both worked in.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._first: torch.cuda.CUDAGraph | None = None
        """Never replayed: it keeps the memory for all others. That of graphs that are gone is of no use to new ones."""

    @classmethod
    def on(cls, device: torch.device, wanted: bool) -> Recorder | None:
        """A recorder where one is wanted and of use."""
        return cls(device) if wanted and device.type == "cuda" else None

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Work on the recorder's stream, after all that was asked before and before all that is asked later."""
        around = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(around)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            around.wait_stream(self.stream)

    def record(self, work: Callable[[], None]) -> Recording:
        """The kernels of `work`, not run yet; call it `aside`. It must have run there before, and wait for nothing."""
        self._make_room()
        if self._first is None:
            self._something()
            self._first = self._captured(self._something)
        self._graphs.append(self._captured(work))
        return self._graphs[-1]

    def _something(self) -> None:
        torch.zeros(1, device=self.device)

    def _captured(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # Collected garbage may hold a graph, and none may go while another is recorded.
        collecting = gc.isenabled()
        gc.disable()
        try:
            graph.capture_begin(pool=None if self._first is None else self._first.pool())
            try:
                work()
            except BaseException:
                # What went wrong is told, not that the recording could then not be ended either.
                with suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        finally:
            if collecting:
                gc.enable()
        return graph

    def _make_room(self) -> None:
        """While recording, memory that PyTorch keeps in store cannot be given back; where little else is free, it is
        given back before. (`torch.cuda.graph` does so always, which costs more than a step saves.)"""
        free, whole = torch.cuda.mem_get_info(self.device)
        if free < whole // 16:
            torch.cuda.empty_cache()

    def release(self) -> None:
        """Forget what was recorded."""
        self.stream.synchronize()
        self._graphs.clear()


@dataclass
class _Shape:
    """Calls with row numbers of one shape: where a recording finds them, how many there were, and the recording."""

    rows: list[Tensor]
    calls: int = 0
    recording: Recording | None = None


class Replayed:
    """`step(*rows)` on row numbers of fixed data, called often: recorded after `EAGER` calls of one shape.

    The step may change parameters and tensors in place, but must not ask what they hold.
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
        self._shapes: dict[tuple[int, ...], _Shape] = {}

    def __call__(self, *rows: Tensor) -> None:
        """One step, as if run on the spot."""
        rows = tuple(one.to(self.device) for one in rows)
        if self.recorder is None:
            self.step(*rows)
            return
        key = tuple(one.numel() for one in rows)
        shape = self._shapes.setdefault(key, _Shape([one.clone() for one in rows]))
        with self.recorder.aside():
            for kept, given in zip(shape.rows, rows, strict=True):
                kept.copy_(given)
            if shape.calls < self.EAGER:
                shape.calls += 1
                self.step(*shape.rows)
                return
            if shape.recording is None:
                with capturable(self.optimizers):
                    shape.recording = self.recorder.record(lambda: self.step(*shape.rows))
            shape.recording.replay()


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

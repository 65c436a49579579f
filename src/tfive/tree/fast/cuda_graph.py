"""The one wrapper of CUDA graphs: steps of many small kernels, captured once and launched as one.

A sampling step, or a step of a calibration head, is some 150 kernels of a few microseconds each; launching them one by
one takes many times as long as running them. `CudaGraphs` captures work on the tensors it uses; `ReplayedStep` is a
training step that is captured after a few calls and given each batch through tensors of its own.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from tfive.errors import RunFailed

_BROKEN: list[torch.cuda.CUDAGraph] = []
"""Captures that could not be ended, which PyTorch's allocator may still ask, and those made to get out of them; never
freed, whatever becomes of the `CudaGraphs` they were made with."""
_SPARE = 16
"""A part (one in so many) of the device's memory that captures leave free before cached memory is given back."""


class Graph(Protocol):
    """Captured work that can be done again, on the tensors it was captured with."""

    def replay(self) -> None: ...


class CudaGraphs:
    """CUDA graphs of one device, captured one after another; what one of them works in is the next one's memory too.

    They live as long as this object, or until `release`, all together: a graph that is freed while another is in use
    may take the memory both worked in.
    """

    trouble: str = ""
    """Why steps are not captured any more, if so."""
    _told: str = ""

    def __init__(self, device: torch.device, frequent: bool = False) -> None:
        """`frequent`: graphs are captured and released again and again. Then their memory outlives them, for the next
        ones, and capturing empties PyTorch's memory cache only where it would fail otherwise: what was cached must be
        asked of the device anew by whatever runs next, which costs more than such graphs save. Others empty it where
        little is free."""
        self.device, self.frequent = device, frequent
        self.stream = torch.cuda.Stream(device)
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._keeper: torch.cuda.CUDAGraph | None = None
        """Never replayed: it owns the memory. New graphs could not use that of graphs which are all gone."""
        self._broken = _BROKEN
        self._branches: list[CudaGraphs] = []
        self._random: torch.Generator | None = None

    @classmethod
    def on(cls, device: torch.device, wanted: bool, frequent: bool = False) -> CudaGraphs | None:
        """Graphs where they are wanted and the device has them, else None."""
        return cls(device, frequent) if wanted and device.type == "cuda" else None

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        """Work on a stream of its own, after all that was asked before and before all that is asked later."""
        around = torch.cuda.current_stream(self.device)
        if around == self.stream:
            yield
            return
        self.stream.wait_stream(around)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            around.wait_stream(self.stream)

    def branches(self, count: int) -> list[CudaGraphs]:
        """So many others of the device, the same whenever it is asked, whose work may run beside each other's: graphs
        of one of them share memory, those of two do not. What they worked in stays theirs until `close`."""
        while len(self._branches) < count:
            self._branches.append(CudaGraphs(self.device, self.frequent))
        return self._branches[:count]

    def begin(self) -> None:
        """What is asked `at_work` from now on runs after all that was asked before on the stream around."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))

    def end(self) -> None:
        """What is asked next on the stream around runs after all that was asked `at_work`."""
        torch.cuda.current_stream(self.device).wait_stream(self.stream)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """What is asked here runs on this stream, captured or not, and draws random numbers of its own."""
        default = torch.cuda.default_generators[self.stream.device_index]
        around = default.graphsafe_get_state()
        if self._random is None:
            self._random = default.clone_state()
        # Not a copy of the state: captured steps ask the very state they were captured with for their numbers.
        default.graphsafe_set_state(self._random)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            default.graphsafe_set_state(around)

    def capture(self, work: Callable[[], None], warm_up: int = 0) -> Graph:
        """The kernels of `work`, captured but not run. `work` must not wait for the host.

        Libraries set themselves up in first calls, which cannot be captured: `work` runs `warm_up` times before, on the
        side stream. With 0 the caller must have run it there.
        """
        with self.side_stream():
            for _ in range(warm_up):
                work()
            tries = self.frequent or self._roomy()
            if not tries:
                self._make_room()
            try:
                graph = self._kept(work)
            except torch.OutOfMemoryError:
                if not tries:
                    raise
                graph = None
            if graph is None:
                # Not in the handler, whose error holds what the failed capture had.
                self._make_room()
                graph = self._kept(work)
            self._graphs.append(graph)
        return graph

    def _kept(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """The captured work, in memory that outlives it where graphs are frequent."""
        if self.frequent and self._keeper is None:
            self._one_zero()
            self._keeper = self._captured(self._one_zero)
        return self._captured(work)

    def _one_zero(self) -> None:
        torch.zeros(1, device=self.device)

    def _pool(self) -> Any:
        owner = self._keeper or next(iter(self._graphs), None)
        return torch.cuda.graph_pool_handle() if owner is None else owner.pool()

    def _captured(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph, pool = torch.cuda.CUDAGraph(), self._pool()
        # Collected garbage may hold a graph, and none may be freed while another is captured.
        collecting = gc.isenabled()
        gc.disable()
        try:
            self._record(graph, pool, work)
        except BaseException as error:
            if not _ended(graph):
                self._leave(graph, pool, error)
            raise
        finally:
            if collecting:
                gc.enable()
        return graph

    def _record(self, graph: torch.cuda.CUDAGraph, pool: Any, work: Callable[[], None]) -> None:
        graph.capture_begin(pool=pool)
        try:
            work()
        except BaseException:
            # Report what went wrong, not that the capture could then not be ended either.
            with suppress(RuntimeError):
                graph.capture_end()
            raise
        graph.capture_end()

    def _leave(self, broken: torch.cuda.CUDAGraph, pool: Any, why: BaseException) -> None:
        """Bring PyTorch out of a capture that could not be ended, or fail the run: nothing may be launched otherwise.

        A capture that CUDA has given up is ended by an error, and PyTorch then leaves two things undone. Its allocator
        still records into the pool, which keeps it from giving cached memory back. And the generator of some versions
        still counts for the graph and refuses to draw; the end of any other capture sets it right.
        """
        other, elsewhere = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        self._broken += [broken, other]
        self._stop_recording(pool)
        try:
            self._record(other, elsewhere, self._one_zero)
        except RuntimeError:  # nothing can be captured; whether that matters, the draw says
            self._stop_recording(elsewhere)
        try:
            self._draw()
        except RuntimeError as error:
            raise RunFailed(
                f"engine.fast: a capture broke ({first_line(why)}), and the device draws no random numbers since "
                f"({first_line(error)}); a new process does (tfive resume)"
            ) from why

    def _stop_recording(self, pool: Any) -> None:
        with suppress(RuntimeError):  # it was not recording
            torch._C._cuda_endAllocateToPool(self.stream.device_index, pool)

    def _draw(self) -> None:
        """A random number, without any effect on later ones."""
        before = torch.cuda.get_rng_state(self.device)
        torch.rand(1, device=self.device)
        torch.cuda.set_rng_state(before, self.device)

    def _roomy(self) -> bool:
        """Whether the device has as much free as was ever used at once, and some to spare: then a capture finds its
        memory beside what is cached, which whatever runs next need not ask of the device anew."""
        free, whole = torch.cuda.mem_get_info(self.device)
        return free - whole // _SPARE >= torch.cuda.max_memory_allocated(self.device)

    def _make_room(self) -> None:
        """Give cached memory back to the device: during a capture PyTorch cannot."""
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()

    def new_trouble(self) -> str:
        """Why steps are launched kernel by kernel although they should be captured; empty where there is no reason, or
        none that was not told before."""
        told, self._told = self._told, self.trouble
        return "" if self.trouble == told else self.trouble

    def release(self) -> None:
        """Free the graphs captured so far; none of them may be replayed again."""
        self.stream.synchronize()
        self._graphs.clear()
        for branch in self._branches:
            branch.release()

    def close(self) -> None:
        """Free them with the memory that would outlive them."""
        self.release()
        self._keeper = None
        self._branches.clear()


def _ended(graph: torch.cuda.CUDAGraph) -> bool:
    """Whether a capture came to its end, by what PyTorch lets one ask only then."""
    try:
        graph.pool()
    except RuntimeError:
        return False
    return True


def first_line(error: BaseException) -> str:
    """What an error says, without its further lines; its kind where it says nothing."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


@dataclass
class _Shape:
    """Calls with inputs of one shape: the tensors a graph finds them in, how many calls there were, and the graph."""

    inputs: list[Tensor]
    calls: int = 0
    graph: Graph | None = None


class ReplayedStep:
    """`step(*inputs)`, called often with inputs of few shapes: captured after `EAGER` calls of one shape.

    The step may change parameters and tensors in place, but must not ask what they hold. Where it cannot be captured it
    is launched kernel by kernel from then on, and the graphs' `trouble` says why.
    """

    EAGER = 1
    """First calls, which let optimizers and libraries set themselves up; they cost as much as many replays."""

    def __init__(
        self,
        step: Callable[..., None],
        optimizers: Sequence[Optimizer],
        device: torch.device,
        graphs: CudaGraphs | None,
    ) -> None:
        self.step, self.optimizers, self.device, self.graphs = step, optimizers, device, graphs
        self._shapes: dict[tuple[int, ...], _Shape] = {}

    def __call__(self, *inputs: Tensor) -> None:
        """One step, as if run on the spot."""
        # Without waiting: a step that was asked for before may still be running.
        inputs = tuple(given.to(self.device, non_blocking=True) for given in inputs)
        if self.graphs is None or self.graphs.trouble:
            self.step(*inputs)
            return
        key = tuple(given.numel() for given in inputs)
        shape = self._shapes.get(key)
        if shape is None:
            shape = self._shapes[key] = _Shape([given.clone() for given in inputs])
        with self.graphs.side_stream():
            for static, given in zip(shape.inputs, inputs, strict=True):
                static.copy_(given)
            if shape.calls < self.EAGER:
                shape.calls += 1
                self.step(*shape.inputs)
                return
            if shape.graph is None:
                shape.graph = self._captured(self.graphs, shape)
            if shape.graph is not None:
                shape.graph.replay()
                return
        self.step(*inputs)

    def _captured(self, graphs: CudaGraphs, shape: _Shape) -> Graph | None:
        """A graph of this shape's step; None where there can be none, now and for good. A capture runs nothing."""
        try:
            with capturable(self.optimizers):
                return graphs.capture(lambda: self.step(*shape.inputs))
        except RuntimeError as error:
            graphs.trouble = first_line(error)
            return None


@contextmanager
def capturable(optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Lets fused optimizers be captured; marked so for good they would warn whenever they are not."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    for group in groups:
        group["capturable"] = True
    try:
        yield
    finally:
        for group in groups:
            group["capturable"] = False

"""CUDA graphs without a GPU: a graph is the work itself, run anew at every replay."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tfive.tree.fast.cuda_graph import CudaGraphs


class Again:
    """What was captured, run anew at every replay."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.work, self.replays = work, 0

    def replay(self) -> None:
        self.replays += 1
        self.work()


class PretendedGraphs(CudaGraphs):
    """Stands in for the graphs of a device. Warm-ups are run, and so is the work while it is captured: whoever warms up
    must bear one run more."""

    def __init__(self) -> None:
        self.graphs: list[Again] = []

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        yield

    def release(self) -> None:
        self.graphs.clear()

    def capture(self, work: Callable[[], None], warm_up: int = 0) -> Again:
        for _ in range(warm_up + 1 if warm_up else 0):
            work()
        self.graphs.append(Again(work))
        return self.graphs[-1]

"""CUDA graphs without a GPU: a graph is the work itself, run anew at every replay."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

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
        self._branches: list[CudaGraphs] = []
        self.drawn: Tensor | None = None
        """The state of the generator after its last draw at work."""

    def branches(self, count: int) -> list[CudaGraphs]:
        self._branches += [type(self)() for _ in range(count - len(self._branches))]
        return self._branches[:count]

    @property
    def lanes(self) -> list["PretendedGraphs"]:
        """Those made so far, and theirs."""
        own = [one for one in self._branches if isinstance(one, PretendedGraphs)]
        return own + [inner for one in own for inner in one.lanes]

    def begin(self) -> None:
        pass

    def end(self) -> None:
        pass

    @contextmanager
    def at_work(self) -> Iterator[None]:
        around = torch.get_rng_state()
        torch.set_rng_state(around if self.drawn is None else self.drawn)
        try:
            yield
        finally:
            self.drawn = torch.get_rng_state()
            torch.set_rng_state(around)

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

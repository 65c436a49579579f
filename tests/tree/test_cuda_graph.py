"""Replayed steps: which calls are captured, what a graph is given, and that learning with them is the same."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from pretended_graphs import Again, PretendedGraphs
from tfive.tree.fast.cuda_graph import CudaGraphs, ReplayedStep, capturable
from tfive_lab.bench.selfcheck import learned_heads

CPU = torch.device("cpu")


def test_a_step_is_captured_once_and_given_every_batch() -> None:
    graphs, seen = PretendedGraphs(), []

    def step(rows: Tensor) -> None:
        seen.append(rows.tolist())

    replayed = ReplayedStep(step, [], CPU, graphs)
    asked = [[0, 1], [4], [5, 6], [7, 8], [9, 10], [11], [14, 15]]
    for rows in asked:
        replayed(torch.tensor(rows))
    assert seen == asked
    # One call of a shape comes before its graph.
    assert [graph.replays for graph in graphs.graphs] == [4, 1]


def test_without_graphs_a_step_is_just_run() -> None:
    seen: list[int] = []
    replayed = ReplayedStep(lambda rows: seen.append(rows.numel()), [], CPU, None)
    for size in (2, 2, 2, 2, 1):
        replayed(torch.arange(size))
    assert seen == [2, 2, 2, 2, 1]
    assert CudaGraphs.on(CPU, wanted=True) is None


def test_optimizers_are_marked_only_while_captured() -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))], fused=True)
    with capturable([optimizer]):
        assert optimizer.param_groups[0]["capturable"]
    assert not optimizer.param_groups[0]["capturable"]


def test_heads_learn_the_same_by_replays() -> None:
    graphs = PretendedGraphs()
    replayed = learned_heads(CPU, graphs)
    # Three regressions and the saddle, each with whole batches and with the last, smaller one.
    assert len(graphs.graphs) > 4
    assert sum(graph.replays for graph in graphs.graphs) > 60
    for mine, other in zip(replayed, learned_heads(CPU, None), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0)


class Refused(PretendedGraphs):
    """A device that cannot capture."""

    def capture(self, work: Callable[[], None], warm_up: int = 0) -> Again:
        raise RuntimeError("operation not permitted when stream is capturing\nmore of it")


def test_a_step_that_cannot_be_captured_is_launched_and_says_so() -> None:
    seen: list[list[int]] = []
    graphs = Refused()
    replayed = ReplayedStep(lambda rows: seen.append(rows.tolist()), [], CPU, graphs)
    replayed(torch.tensor([0, 1]))
    assert not graphs.trouble
    replayed(torch.tensor([2, 3]))
    assert graphs.trouble == "operation not permitted when stream is capturing"
    replayed(torch.tensor([4, 5]))
    assert seen == [[0, 1], [2, 3], [4, 5]]


class Cramped(CudaGraphs):
    """A device whose memory PyTorch holds: the first capture fails, the one after it was given back does not."""

    def __init__(self, frequent: bool) -> None:
        self.frequent, self.emptied, self.failures = frequent, 0, 1
        self._graphs, self._keeper = [], None

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        yield

    def _one_zero(self) -> None: ...

    def _make_room(self) -> None:
        self.emptied += 1

    def _captured(self, work: Callable[[], None]) -> Any:
        if work != self._one_zero and self.failures:
            self.failures -= 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        return Again(work)


def test_frequent_graphs_empty_the_cache_only_where_memory_is_short() -> None:
    graphs = Cramped(frequent=True)
    graphs.capture(lambda: None)
    assert graphs.emptied == 1
    graphs.capture(lambda: None)
    assert graphs.emptied == 1
    with pytest.raises(torch.OutOfMemoryError):
        Cramped(frequent=False).capture(lambda: None)

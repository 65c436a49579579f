"""Replayed steps: which calls are captured, what a graph is given, and that learning with them is the same."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from pretended_graphs import Again, PretendedGraphs
from tfive.errors import RunFailed
from tfive.tree.fast.cuda_graph import CudaGraphs, ReplayedStep, capturable, first_line
from tfive_lab.bench.head_checks import learned_heads

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
    # Two calibrations side by side: in each three regressions, of which two run beside the third, and the saddle, all
    # with whole batches and with the last, smaller one.
    captured = [graph for lane in graphs.lanes for graph in lane.graphs]
    assert len(graphs.lanes) == 2 + 4
    assert not graphs.graphs
    assert len(captured) > 8
    assert sum(graph.replays for graph in captured) > 120
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


def test_an_error_that_says_nothing_is_named_by_its_kind() -> None:
    assert [first_line(error) for error in (RuntimeError(), RuntimeError("\nmore"), RuntimeError("one\nmore"))] == [
        "RuntimeError", "RuntimeError", "one",
    ]  # fmt: skip


class Card:
    """What PyTorch keeps of captures on a GPU, as far as its source says: a capture that CUDA has given up is ended by
    an error before the allocator and the generator have left it."""

    def __init__(self, *, older: bool = True) -> None:
        """`older`: one generator for all captures, that draws for a graph until one of them ends."""
        self.older, self.recording = older, list[object]()
        self.generator_counts = self.given_up = False
        self.usable = True
        """Whether captures can begin."""

    def end_allocation(self, index: int, pool: object) -> None:
        if pool not in self.recording:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.recording.remove(pool)


class CardGraph:
    """A graph of the card."""

    def __init__(self, card: Card) -> None:
        self.card, self.ended = card, False

    def capture_begin(self, pool: object) -> None:
        if pool in self.card.recording:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        self.taken = pool
        self.card.recording.append(pool)
        self.card.generator_counts = self.card.older
        if not self.card.usable:
            raise RuntimeError("operation not permitted")

    def capture_end(self) -> None:
        if self.card.given_up:
            self.card.given_up = False
            raise RuntimeError("operation failed due to a previous error during capture")
        self.card.recording.remove(self.taken)
        self.card.generator_counts = False
        self.ended = True

    def pool(self) -> object:
        if not self.ended:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return self.taken


class OnCard(CudaGraphs):
    """Graphs of the card."""

    def __init__(self, card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
        self.card, self.frequent, self.device = card, True, CPU
        self.stream: Any = SimpleNamespace(device_index=0)
        self._graphs, self._keeper, self._broken = [], None, []
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: CardGraph(card))
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", card.end_allocation)

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        yield

    def _draw(self) -> None:
        if self.card.generator_counts:
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")


class Waits:
    """A step that asks for what a tensor holds, by which CUDA gives up a capture; launched it may."""

    def __init__(self, card: Card) -> None:
        self.card, self.launched = card, 0

    def __call__(self, rows: Tensor) -> None:
        if self.card.recording:
            self.card.given_up = True
            raise RuntimeError("operation not permitted when stream is capturing")
        assert not self.card.generator_counts
        self.launched += 1


@pytest.mark.parametrize("older", [True, False])
def test_a_capture_that_breaks_halfway_is_left_before_anything_is_launched(
    older: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = Card(older=older)
    graphs, step = OnCard(card, monkeypatch), Waits(card)
    replayed = ReplayedStep(step, [], CPU, graphs)
    for _ in range(3):
        replayed(torch.arange(2))
    assert graphs.trouble == "operation not permitted when stream is capturing"
    assert step.launched == 3
    assert not card.recording
    # PyTorch may ask a capture that was not ended whose memory it is.
    assert len(graphs._broken) == 2


def test_a_capture_that_cannot_be_left_ends_the_run_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card()
    replayed = ReplayedStep(Waits(card), [], CPU, OnCard(card, monkeypatch))
    card.usable = False
    replayed(torch.arange(2))
    with pytest.raises(RunFailed, match=r"not permitted\), .* \(Offset increment outside .*tfive resume\)") as failed:
        replayed(torch.arange(2))
    assert "\n" not in str(failed.value)


def test_where_no_capture_begins_steps_are_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(older=False)
    graphs, step = OnCard(card, monkeypatch), Waits(card)
    replayed = ReplayedStep(step, [], CPU, graphs)
    card.usable = False
    for _ in range(3):
        replayed(torch.arange(2))
    assert (graphs.trouble, step.launched, card.recording) == ("operation not permitted", 3, [])


def test_a_capture_that_ends_after_an_error_needs_no_mending(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card()
    graphs = OnCard(card, monkeypatch)

    def work() -> None:
        raise ValueError("a mistake")

    with pytest.raises(ValueError, match="a mistake"):
        graphs.capture(work)
    assert (card.recording, card.generator_counts, graphs._broken) == ([], False, [])


class Cramped(CudaGraphs):
    """A device whose memory PyTorch holds: the first capture fails, the one after it was given back does not."""

    def __init__(self, frequent: bool) -> None:
        self.frequent, self.emptied, self.failures, self.device = frequent, 0, 1, CPU
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


def test_frequent_graphs_empty_the_cache_only_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = Cramped(frequent=True)
    graphs.capture(lambda: None)
    assert graphs.emptied == 1
    graphs.capture(lambda: None)
    assert graphs.emptied == 1
    monkeypatch.setattr(Cramped, "_roomy", lambda _: False)
    with pytest.raises(torch.OutOfMemoryError):
        Cramped(frequent=False).capture(lambda: None)


@pytest.mark.parametrize(("free", "emptied"), [(2, 2), (3, 0)])
def test_other_graphs_empty_it_where_little_is_free(free: int, emptied: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free << 30, 16 << 30))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 2 << 30)
    graphs = Cramped(frequent=False)
    graphs.failures = 0
    graphs.capture(lambda: None)
    graphs.capture(lambda: None)
    assert graphs.emptied == emptied
    # What looked free may not be: then it is given back after all, unless it was before.
    graphs.failures = 1
    if emptied:
        with pytest.raises(torch.OutOfMemoryError):
            graphs.capture(lambda: None)
    else:
        graphs.capture(lambda: None)
        assert graphs.emptied == 1

"""Tasks that are launched side by side come to what each comes to alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pretended_graphs import PretendedGraphs
from tfive.tree.fast.cuda_graph import CudaGraphs
from tfive.tree.fast.side_by_side import Task, alone, by_itself, together

Draws = Callable[[CudaGraphs | None], Task[Tensor]]


def drawing(seed: int, count: int, order: list[int]) -> Draws:
    """A task that seeds torch's generator and draws, waiting after each number; `order` tells who drew when."""

    def draws(recorder: CudaGraphs | None) -> Task[Tensor]:
        drawn = list[Tensor]()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for _ in range(count):
                drawn.append(torch.rand(1))
                order.append(seed)
                yield
        return torch.cat(drawn)

    return draws


@pytest.mark.parametrize("count", [3, 5])
def test_tasks_take_turns_and_draw_their_own_numbers(count: int) -> None:
    order: list[int] = []
    tasks = [drawing(1, 3, order), drawing(2, count, order)]
    expected = [alone(task(None)) for task in tasks]
    order.clear()
    before = torch.get_rng_state()
    graphs = PretendedGraphs()
    found = alone(together(graphs, tasks))
    assert order[:6] == [1, 2, 1, 2, 1, 2]
    assert [one.tolist() for one in found] == [one.tolist() for one in expected]
    assert torch.get_rng_state().equal(before)
    again = alone(together(graphs, tasks))
    assert [one.tolist() for one in again] == [one.tolist() for one in expected]
    assert len(graphs.lanes) == 2


def test_without_a_recorder_or_after_trouble_one_follows_the_other() -> None:
    troubled = PretendedGraphs()
    troubled.trouble = "no"
    for recorder in (None, troubled):
        order: list[int] = []
        alone(together(recorder, [drawing(1, 2, order), drawing(2, 2, order)]))
        assert order == [1, 1, 2, 2]
    assert not troubled.lanes


def test_what_needs_much_memory_goes_one_after_the_other() -> None:
    graphs, order, given = PretendedGraphs(), list[int](), list[object]()

    def noted(seed: int) -> Draws:
        def task(recorder: CudaGraphs | None) -> Task[Tensor]:
            given.append(recorder)
            return (yield from drawing(seed, 2, order)(recorder))

        return task

    alone(together(graphs, [noted(1), noted(2)], beside=False))
    assert order == [1, 1, 2, 2]
    assert given == [graphs, graphs], "steps are captured all the same"
    assert not graphs.lanes


def test_tasks_of_tasks_take_turns_too() -> None:
    order: list[int] = []

    def both(first: int) -> Callable[[CudaGraphs | None], Task[list[Tensor]]]:
        def task(recorder: CudaGraphs | None) -> Task[list[Tensor]]:
            return (yield from together(recorder, [drawing(first, 2, order), drawing(first + 1, 2, order)]))

        return task

    expected = [alone(drawing(seed, 2, [])(None)).tolist() for seed in (1, 2, 3, 4)]
    found = alone(together(PretendedGraphs(), [both(1), both(3)]))
    assert order == [1, 2, 3, 4, 1, 2, 3, 4]
    assert [one.tolist() for pair in found for one in pair] == expected


def test_an_error_ends_the_others_among_their_own_numbers() -> None:
    ended: list[str] = []

    def fails(recorder: CudaGraphs | None) -> Task[Tensor]:
        yield
        raise RuntimeError("out of memory")

    def waits(recorder: CudaGraphs | None) -> Task[Tensor]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            try:
                while True:
                    yield
            finally:
                ended.append("closed")

    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="out of memory"):
        alone(together(PretendedGraphs(), [waits, fails]))
    assert ended == ["closed"]
    assert torch.get_rng_state().equal(before)


def test_a_lane_that_cannot_capture_is_told() -> None:
    def refused(recorder: CudaGraphs | None) -> Task[int]:
        assert recorder is not None
        recorder.trouble = "not permitted"
        yield
        return 1

    graphs = PretendedGraphs()
    assert alone(together(graphs, [refused, refused])) == [1, 1]
    assert graphs.trouble == "not permitted"


def test_by_itself_is_the_task_done() -> None:
    def counted(up_to: int) -> Task[int]:
        for _ in range(up_to):
            yield
        return up_to

    assert by_itself(counted)(4) == 4

"""Replayed steps: which calls are captured, what a graph is given, and that learning with them is the same."""

import torch
from torch import Tensor

from pretended_graphs import PretendedGraphs
from tfive.tree.fast.cuda_graph import CudaGraphs, ReplayedStep, capturable
from tfive_lab.bench.selfcheck import learned_heads

CPU = torch.device("cpu")


def test_a_step_is_captured_once_and_given_every_batch() -> None:
    graphs, seen = PretendedGraphs(), []

    def step(rows: Tensor) -> None:
        seen.append(rows.tolist())

    replayed = ReplayedStep(step, [], CPU, graphs)
    asked = [[0, 1], [2, 3], [4], [5, 6], [7, 8], [9, 10], [11], [12], [13], [14, 15]]
    for rows in asked:
        replayed(torch.tensor(rows))
    assert seen == asked
    # Three calls of a shape come before its graph.
    assert [graph.replays for graph in graphs.graphs] == [3, 1]


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

"""Replayed steps: which calls are recorded, what a recording is given, and that learning with them is the same."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from tfive.rl.replay import Recorder, Replayed, capturable
from tfive_lab.bench.selfcheck import learned_heads

CPU = torch.device("cpu")


class Again:
    """What was recorded, run anew at every replay."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.work, self.replays = work, 0

    def replay(self) -> None:
        self.replays += 1
        self.work()


class Pretended(Recorder):
    """A recorder without a GPU: a recording is the work itself, on the tensors it was recorded with."""

    def __init__(self) -> None:
        self.recordings: list[Again] = []

    @contextmanager
    def aside(self) -> Iterator[None]:
        yield

    def record(self, work: Callable[[], None]) -> Again:
        self.recordings.append(Again(work))
        return self.recordings[-1]


def test_a_step_is_recorded_once_and_given_every_batch() -> None:
    recorder, seen = Pretended(), []

    def step(rows: Tensor) -> None:
        seen.append(rows.tolist())

    replayed = Replayed(step, [], CPU, recorder)
    asked = [[0, 1], [2, 3], [4], [5, 6], [7, 8], [9, 10], [11], [12], [13], [14, 15]]
    for rows in asked:
        replayed(torch.tensor(rows))
    assert seen == asked
    # Three calls of a shape come before its recording.
    assert [recording.replays for recording in recorder.recordings] == [3, 1]


def test_without_a_recorder_a_step_is_just_run() -> None:
    seen: list[int] = []
    replayed = Replayed(lambda rows: seen.append(rows.numel()), [], CPU, None)
    for size in (2, 2, 2, 2, 1):
        replayed(torch.arange(size))
    assert seen == [2, 2, 2, 2, 1]
    assert Recorder.on(CPU, wanted=True) is None


def test_optimizers_are_marked_only_while_recorded() -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))], fused=True)
    with capturable([optimizer]):
        assert optimizer.param_groups[0]["capturable"]
    assert not optimizer.param_groups[0]["capturable"]


def test_heads_learn_the_same_by_replays() -> None:
    recorder = Pretended()
    replayed = learned_heads(CPU, recorder)
    # Three regressions and the saddle, each with whole batches and with the last, smaller one.
    assert len(recorder.recordings) > 4
    assert sum(recording.replays for recording in recorder.recordings) > 60
    for mine, other in zip(replayed, learned_heads(CPU, None), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0)

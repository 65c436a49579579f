"""Who counts as hung: silent ranks, and those that others wait for; never the ones that wait."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from tfive.distributed.environment import LOST, Launched
from tfive.distributed.pulse import Pulse
from tfive.training.watchdog import Beat, Watch, Watchdog


def watch(*steps: tuple[int, str], now: float = 100.0) -> Watch:
    """Three seconds of patience; rank r's main thread made its last step at `steps[r][0]` and waits in `[1]`."""
    found = Watch(len(steps), 3.0, 0.0)
    for rank, (moment, waits) in enumerate(steps):
        found.learn(rank, Beat(1, 7, "actor", waits, 40 + rank, "here", 0), float(moment))
        found.learn(rank, Beat(2, 7, "actor", waits, 40 + rank, "here", 0), now)
    found.answered = now
    return found


def test_a_rank_that_others_wait_for_is_hung_and_they_are_not() -> None:
    assert watch((90, "gather"), (95, ""), (96, "gather")).hung(100) == [1]
    assert watch((90, "gather"), (98, ""), (96, "gather")).hung(100) == []
    assert watch((90, ""), (95, "")).hung(100) == [0, 1]
    assert watch((98, ""), (98, "")).hung(100) == []


def test_ranks_that_all_wait_in_different_collectives_hang_at_the_earlier_one() -> None:
    both = watch((90, "gather"), (90, "gradients"))
    both.seen[1].beat.steps = 6
    assert both.hung(100) == [1]
    assert (
        "rank 1 of 2 (process 41 on here) last heard of in phase actor, waiting in gradients: no sign for 3 s"
        in both.line([1])
    )


def test_a_silent_rank_and_a_silent_store_are_told() -> None:
    silent = watch((99, ""), (99, ""), now=99.5)
    assert silent.hung(102) == []
    silent.learn(0, Beat(3, 8, "actor", "gather", 40, "here", 0), 102.0)
    silent.answered = 102.0
    assert silent.hung(102.9) == [1]
    assert silent.hung(105.5) == [0]


class Shared:
    """A store in memory; `frozen` keys are those of a stopped process."""

    def __init__(self) -> None:
        self.kept: dict[str, str] = {"beat/1": '{"number": 1, "steps": 4, "phase": "calibrate", "node": 0}'}

    def set(self, key: str, value: str) -> None:
        self.kept[key] = value

    def check(self, keys: list[str]) -> bool:
        return all(key in self.kept for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.kept[key].encode() for key in keys]


def test_the_hung_process_is_named_and_ended_and_then_this_one(capsys: pytest.CaptureFixture[str]) -> None:
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    sleeper.send_signal(signal.SIGSTOP)
    store, ended, over = Shared(), [], threading.Event()
    store.kept["beat/1"] = store.kept["beat/1"].replace("}", f', "process": {sleeper.pid}, "host": "here"}}')

    def end(status: int) -> None:
        ended.append(status)
        over.set()

    pulse = Pulse()
    with Watchdog(Launched(0, 2), pulse, lambda: store, 0.5, end):
        deadline = time.monotonic() + 60
        while not over.wait(0.05) and time.monotonic() < deadline:
            pulse.at("actor")
    assert ended == [LOST]
    assert sleeper.wait(60) == -signal.SIGKILL
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert (
        f"rank 1 of 2 (process {sleeper.pid} on here) last heard of in phase calibrate: no sign for 0.5 s; all "
        in error
    )


def test_a_rank_that_stops_before_its_first_beat_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    store, ended, over = Shared(), [], threading.Event()
    del store.kept["beat/1"]

    def end(status: int) -> None:
        ended.append(status)
        over.set()

    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    known = [Beat(), Beat(process=sleeper.pid, host="there", node=0)]
    with Watchdog(Launched(0, 2), Pulse(), lambda: store, 0.5, end, known=known):
        assert over.wait(60)
    assert ended == [LOST]
    assert sleeper.wait(60) == -signal.SIGKILL
    (line,) = capsys.readouterr().err.splitlines()
    said = f"rank 1 of 2 (process {sleeper.pid} on there) last heard of in phase start: no sign for 0.5 s"
    assert line.startswith(f"tfive: error: {said}")


def test_a_rank_whose_launcher_is_gone_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    parents, ended, over = iter([7, 7, 1]), [], threading.Event()
    monkeypatch.setattr(os, "getppid", lambda: next(parents, 1))

    def end(status: int) -> None:
        ended.append(status)
        over.set()

    store = Shared()
    store.kept |= {"beat/0": store.kept["beat/1"]}
    with Watchdog(Launched(1, 2, launch="job"), Pulse(), lambda: store, 1.0, end):
        assert over.wait(60)
    assert ended == [LOST]

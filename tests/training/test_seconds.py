"""A run that may take so many seconds of training ends with the window in which they have passed, as a finished one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tfive.telemetry import DIAGNOSE
from tfive.training import identity, live_status, loop, start
from tfive.training.live_status import LiveStatus
from tfive.training.recorder import Recorder
from tiny import configure

pytestmark = pytest.mark.model

PLAIN = ("method=ntp", "run.checkpoint_every=0", "run.develop_items=6", "run.develop_every=4", "window.windows=7")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


def test_the_window_in_which_the_seconds_pass_is_the_last(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "window_seconds", lambda recorder: 6.0 * recorder.state_dict()["step"])
    config = configure(home, *PLAIN, "run.seconds=10")
    summary = start.train(config, tmp_path / "run", quiet=True)
    assert summary["windows"] == 2
    # It is measured at its end, though no measurement was due there, and shows what was written then.
    assert [(one["window"], bool(one.get("samples"))) for one in summary["history"]] == [(0, True), (2, True)]
    assert summary["test_no_thought_loss_end"] < summary["test_no_thought_loss_start"]
    longer = start.train(configure(home, *PLAIN, "run.seconds=99"), tmp_path / "longer", quiet=True)
    assert (longer["windows"], [one["window"] for one in longer["history"]]) == (7, [0, 4, 7])
    # Of the windows that were, not of those the plan would have allowed.
    assert summary["draws"]["actor"] == pytest.approx(longer["draws"]["actor"] * 2 / 7)


def test_a_run_that_was_stopped_behind_its_last_window_ends_there(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Cut(Exception):
        pass

    def cut(self: loop.Loop) -> None:
        raise Cut

    config = configure(home, *PLAIN, "run.seconds=1e-6")
    with monkeypatch.context() as patch:
        patch.setattr(loop.Loop, "_measure_test", cut)
        with pytest.raises(Cut):
            start.train(config, tmp_path / "run", quiet=True)
    summary = start.resume(tmp_path / "run", quiet=True)
    assert summary["windows"] == 1
    assert summary["history"][-1]["window"] == 1


@pytest.mark.parametrize(("leads", "windows"), [(True, 2), (False, 7)])
def test_the_clock_of_the_leading_process_decides(leads: bool, windows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def any_of(flag: bool) -> bool:
        asked.append(flag)
        return flag

    settings = SimpleNamespace(run=SimpleNamespace(seconds=10))
    parts = SimpleNamespace(config=settings, method=SimpleNamespace(window=2, closed=True))
    world = SimpleNamespace(leads=leads, any_of=any_of)
    rank: Any = SimpleNamespace(assembly=parts, world=world, recorder=None, windows=7)
    monkeypatch.setattr(loop, "window_seconds", lambda recorder: 99.0)
    loop.Loop._look_at_the_clock(rank)
    assert rank.windows == windows
    assert asked == [leads]  # every process takes part in the answer


def test_measuring_and_diagnoses_are_no_training() -> None:
    now = [0.0]
    recorder = Recorder(None, quiet=True, clock=lambda: now[0])

    def spend(seconds: float, *phases: str) -> None:
        if phases:
            with recorder.phase(phases[0]):
                spend(seconds, *phases[1:])
        else:
            now[0] += seconds

    spend(4, "warmstart")
    spend(5, "develop")
    spend(1, "sample")
    spend(3, "update")
    spend(2, "update", "backward")
    spend(7, "update", DIAGNOSE)
    spend(9, "test")
    assert identity.training_seconds(recorder) == pytest.approx(4 + 6)
    assert identity.window_seconds(recorder) == pytest.approx(6), "the clock begins with the first window"


def test_the_time_left_is_that_of_the_clock_where_it_comes_first(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(None, quiet=True, clock=lambda: 0.0)
    config = configure(home, *PLAIN, "run.seconds=10")
    live = LiveStatus(config, SimpleNamespace(window=1, closed=True), recorder, None)  # type: ignore[arg-type]
    monkeypatch.setattr(live_status, "window_seconds", lambda recorder: 4.0)
    assert live.seconds_left() == pytest.approx(6)
    assert live.fraction() == pytest.approx(0.4)
    monkeypatch.setattr(live, "_by_plan", lambda: 2.0)
    assert live.seconds_left() == pytest.approx(2)

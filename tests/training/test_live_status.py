"""A run always says where it is: on a terminal at once, in a log every minute, in a notebook, in a file."""

from __future__ import annotations

import io
import sys
import threading
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stage import assembled
from tfive.config.config import Config
from tfive.training import live_status
from tfive.training import progress as progress_module
from tfive.training.cells import Cell
from tfive.training.compare import CellsStatus
from tfive.training.live_status import PROGRESS, LiveStatus, clock, planned_thoughts, thoughts_of_window
from tfive.training.progress import HEADLINE_EVERY, ProgressReport, Waiting
from tfive.training.recorder import Recorder


class Clock:
    """A clock that moves only when a test moves it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Heard(io.StringIO):
    """A stream that tells when something was written to it."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal, self.written = terminal, threading.Event()

    def isatty(self) -> bool:
        return self.terminal

    def write(self, text: str) -> int:
        if "loading" in text:
            self.written.set()
        return super().write(text)


@pytest.fixture(autouse=True)
def short_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "TICK", 0.005)


def test_a_terminal_shows_the_headline_at_once_and_nothing_is_left_of_it() -> None:
    screen = Heard(terminal=True)
    with ProgressReport(screen).showing(Waiting("loading nano")):
        assert screen.written.is_set()
    assert "loading nano, 0 s" in screen.getvalue()
    assert "\x1b[2K" in screen.getvalue().rpartition("loading nano")[2]


def test_a_log_gets_a_line_a_minute() -> None:
    log, time = Heard(terminal=False), Clock()
    report = ProgressReport(log, clock=time)
    with report.showing(Waiting("loading nano", time)):
        time.now += HEADLINE_EVERY
        assert log.written.wait(timeout=30)
    assert log.getvalue() == "  loading nano, 60 s\n"
    with report.showing(Waiting("loading nano", time)):
        time.now += HEADLINE_EVERY - 1
        threading.Event().wait(0.05)
    assert log.getvalue().count("\n") == 1


def test_other_programs_find_the_line_in_a_file_while_the_work_goes_on(tmp_path: Path) -> None:
    file, seen = tmp_path / PROGRESS, ""
    with ProgressReport(Heard(terminal=True)).showing(Waiting("loading nano"), file, drawn=False):
        while not seen:
            seen = file.read_text("utf-8") if file.is_file() else ""
    assert seen == "loading nano, 0 s\n"
    assert list(tmp_path.iterdir()) == []


def test_a_vanished_folder_does_not_end_the_work(tmp_path: Path) -> None:
    with ProgressReport(Heard(terminal=False)).showing(Waiting("loading"), tmp_path / "gone" / PROGRESS, drawn=False):
        threading.Event().wait(0.05)
    assert not (tmp_path / "gone").exists()


def test_a_notebook_gets_a_bar_that_is_updated_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    updated = threading.Event()

    class Handle:
        def update(self, text: str) -> None:
            shown.append(text)
            updated.set()

    def put(text: str, display_id: bool) -> Handle:
        assert display_id
        shown.append(text)
        return Handle()

    shell, page = types.ModuleType("IPython"), types.ModuleType("IPython.display")
    shell.__dict__["get_ipython"] = lambda: SimpleNamespace(kernel=object())
    page.__dict__.update(display=put, HTML=lambda text: text)
    monkeypatch.setitem(sys.modules, "IPython", shell)
    monkeypatch.setitem(sys.modules, "IPython.display", page)
    with ProgressReport(sys.stderr).showing(Waiting("loading <nano>")):
        assert updated.wait(timeout=30)
    assert shown[-1] == '<progress max="1"></progress> <code>loading &lt;nano&gt;, 0 s</code>'


def test_loops_inside_a_headline_keep_their_bars() -> None:
    screen = Heard(terminal=True)
    report = ProgressReport(screen, show_after=0.0)
    with report.showing(Waiting("loading nano")):
        assert list(report.track(range(3), "reading")) == [0, 1, 2]
    assert list(report.track(range(2), "again")) == [0, 1]


def test_a_window_that_opens_has_its_own_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_status, "_resident", lambda: 1_250_000_000)
    status, method, recorder = a_status(Clock())
    with recorder.phase("open"):
        method.window = 1
        assert status.line().startswith("window 1 of 6, open")


def test_thoughts_of_a_whole_run_are_counted_from_its_roles() -> None:
    config = Config.load("nano")
    assert planned_thoughts(config) == 6 * (192 + 96 + 24 + 96 + 48 + 192 + 24 + 6)
    reading = Config.load("nano", overrides=["window.reading=2"])
    assert planned_thoughts(reading) == 4 * (192 + 96 + 24 + 96 + 48 + 192 + 24 + 6) + 2 * 192
    again = Config.load("nano", overrides=["window.history=true"])
    assert planned_thoughts(again) == 6 * (96 + 24 + 96 + 48 + 192 + 6) + 192 + 24
    crossed = Config.load("nano", overrides=["window.history=true", "window.crossed=true"])
    assert planned_thoughts(crossed) == 6 * (192 + 6) + 192 + 24 + 96 + 24 + 96 + 48
    late = Config.load("nano", overrides=["window.history=true", "window.crossed=true", "window.reading=2"])
    assert planned_thoughts(late) == planned_thoughts(crossed) - 2 * 6
    assert [thoughts_of_window(late, number) for number in (1, 2, 4)] == [192 + 24, 192, 198]
    group = Config.load("nano", overrides=["method=quiet-star-grpo"])
    assert planned_thoughts(group) == 8 * (6 * 192 + 24)
    assert planned_thoughts(Config.load("nano", overrides=["method=ntp"])) == 0


def test_a_long_run_is_not_counted_window_by_window(monkeypatch: pytest.MonkeyPatch) -> None:
    counted, asked = live_status.thoughts_of_window, list[int]()

    def noted(config: Config, number: int) -> int:
        asked.append(number)
        return counted(config, number)

    monkeypatch.setattr(live_status, "thoughts_of_window", noted)
    for method in ("t5", "quiet-star-grpo"):
        short = Config.load("nano", overrides=[f"method={method}", "window.reading=2", "window.windows=9"])
        for first in range(1, 12):
            assert planned_thoughts(short, first) == sum(counted(short, number) for number in range(first, 10))
    asked.clear()
    planned_thoughts(Config.load("nano", overrides=["window.windows=100000"]))
    assert len(asked) < 5


def a_status(time: Clock, *overrides: str) -> tuple[LiveStatus, Any, Recorder]:
    method: Any = SimpleNamespace(window=0, phase="open", step=0, closed=True, standing=lambda: "2 of 5 attempts left")
    recorder = Recorder(quiet=True, clock=time)
    config = Config.load("nano", overrides=overrides)
    return LiveStatus(config, method, recorder, torch.device("cpu")), method, recorder


def test_the_line_says_window_phase_step_rate_time_left_and_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_status, "_resident", lambda: 1_250_000_000)
    time = Clock()
    status, method, recorder = a_status(time)
    assert status.line() == "window 1 of 6, open (0:00), 2 of 5 attempts left, 1.2 GB"
    with recorder.phase("develop"):
        assert status.line() == "before window 1 of 6, measuring (0:00), 2 of 5 attempts left, 1.2 GB"
    method.window, method.closed, method.phase, method.step = 1, False, "fit", 2
    time.now += 60
    recorder.count("critic_fit", trajectories=403)
    with recorder.phase("fit"):
        time.now += 3.9
        expected = 63.9 * (planned_thoughts(status.config) - 403) / 403
        assert status.line() == (
            f"window 1 of 6, fit 3 (0:03), 6.31 thoughts/s, about {clock(expected)} left, 2 of 5 attempts left, 1.2 GB"
        )
    assert status.fraction() == pytest.approx(403 / planned_thoughts(status.config))
    # Where this line is drawn, it answers a signal; a line of its own would be drawn over.
    status.stop.name = "SIGINT"
    assert status.line().startswith("SIGINT: saves and stops after this step, a second one ends at once, window 1 of 6")


def test_only_lines_that_stay_answer_a_signal() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert Recorder(stream=io.StringIO()).in_lines
    assert not Recorder(stream=Terminal()).in_lines
    assert not Recorder(stream=io.StringIO(), quiet=True).in_lines


def test_a_run_that_a_clock_ends_says_how_much_of_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_status, "_resident", lambda: 1_250_000_000)
    monkeypatch.setattr(live_status, "window_seconds", lambda recorder: 40.0)
    status, method, _ = a_status(Clock(), "run.seconds=1000", "window.windows=1000")
    method.window, method.closed = 3, False
    assert status.line().startswith("window 3, 0:40 of 16:40 trained, open (0:00), about 16:00 left")


def test_after_the_last_window_the_line_says_what_is_measured_and_no_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_status, "_resident", lambda: 1_250_000_000)
    time = Clock()
    status, method, recorder = a_status(time, "run.seconds=1000", "window.windows=1000")
    monkeypatch.setattr(live_status, "window_seconds", lambda recorder: 1012.0)
    method.window, method.closed = 11, True
    recorder.count("actor", trajectories=100)
    time.now += 100
    for phase, told in (("test", "measuring test texts"), ("benchmarks", "asking benchmarks")):
        with recorder.phase(phase, phase):
            time.now += 7
            line = status.line()
        assert line.startswith(f"window 11, 16:52 of 16:40 trained, {told} (0:07), ")
        assert "left, " not in line.replace("attempts left, ", "")
    for most in ("window.windows=20", "window.windows=11"):
        status, method, recorder = a_status(time, most)
        method.window, method.closed = 11, True
        recorder.count("actor", trajectories=100)
        time.now += 100
        with recorder.phase("benchmarks", "benchmarks"):
            line = status.line()
        assert ("left, " in line.replace("attempts left, ", "")) is (most == "window.windows=20")


def test_failed_rounds_do_not_make_the_end_come_nearer() -> None:
    time = Clock()
    status, method, recorder = a_status(time, "window.reading=1")
    method.window = 1
    recorder.count("actor", trajectories=192)
    time.now += 10
    status.close_window()
    later = planned_thoughts(status.config, 2)
    assert status.seconds_left() == pytest.approx(10 / 192 * later)
    method.window, method.closed = 2, False
    recorder.count("critic_fit", trajectories=5 * later)
    time.now += 200
    assert status.seconds_left() == pytest.approx(210 / (192 + 5 * later) * planned_thoughts(status.config, 3))


def test_without_thoughts_closed_windows_say_how_long_the_others_take() -> None:
    time = Clock()
    status, method, _ = a_status(time, "method=ntp")
    assert status.seconds_left() is None
    for number in (1, 2):
        method.window = number
        time.now += 20
        status.close_window()
    assert status.seconds_left() == 4 * 20
    time.now += 5
    assert status.seconds_left() == 4 * 20 - 5
    assert status.fraction() == pytest.approx(2 / 6)


@pytest.mark.parametrize(("seconds", "shown"), [(0.9, "0:00"), (75, "1:15"), (3725, "1:02:05")])
def test_a_time(seconds: float, shown: str) -> None:
    assert clock(seconds) == shown


@pytest.mark.model
def test_t5_tells_how_many_attempts_are_left(tmp_path: Path) -> None:
    method: Any = assembled(tmp_path, "window.reading=1", "window.windows=3", "anchor.conditioned=1.0").method
    assert method.standing() == ""
    method.window, method.phase = 1, "collect"
    assert method.standing() == "learning to read"
    method.window, method.phase = 2, "fit"
    assert method.standing() == ""
    method.qualifier.spent = 3
    assert method.standing() == "critics not yet qualified, 37 of 40 attempts left"
    method.qualifier.admitted = True
    assert method.standing() == ""


def test_a_study_shows_the_line_of_every_running_cell(tmp_path: Path) -> None:
    config = Config.load("nano")
    cells = tuple(Cell("t5", seed, config, tmp_path / f"t5-seed{seed}") for seed in (0, 1))
    cells[0].folder.mkdir()
    (cells[0].folder / PROGRESS).write_text("window 2 of 6, fit (0:03)\n", "utf-8")
    status = CellsStatus(5, 3)
    status.running = cells
    assert status.line().splitlines() == [
        "2 of 5 runs done",
        "  t5-seed0: window 2 of 6, fit (0:03)",
        "  t5-seed1: loading model and text",
    ]
    assert status.fraction() == pytest.approx(0.4)


def test_what_is_waited_for_is_told_before_libraries_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    from tfive.cli.options import loading

    screen = Heard(terminal=True)
    monkeypatch.setattr(sys, "stderr", screen)
    with loading():
        assert screen.written.is_set()
    before = screen.getvalue()
    with loading(quiet=True):
        pass
    assert screen.getvalue() == before

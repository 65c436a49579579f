"""The recorder: metrics as JSON lines, the account, timed phases, bars for a person only, and exact resumption."""

import io
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tfive.errors import UserError
from tfive.telemetry import Silent, Telemetry
from tfive.training import trackers
from tfive.training.progress import LINE_EVERY, ProgressReport
from tfive.training.recorder import AMOUNTS, METRICS, Recorder


class Clock:
    """A clock that moves only when a test moves it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Screen(io.StringIO):
    """A stream that says it is a terminal and remembers being written to."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn = threading.Event()

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if "reading" in text:
            self.drawn.set()
        return super().write(text)


class KeptTracker:
    """A tracker that keeps what it is given."""

    def __init__(self) -> None:
        self.seen: list[tuple[dict[str, float], int]] = []
        self.closed = False

    def write(self, values: Mapping[str, float], step: int) -> None:
        self.seen.append((dict(values), step))

    def samples(self, rows: Sequence[Mapping[str, str]], step: int) -> None:
        raise AssertionError("no samples were given")

    def close(self) -> None:
        self.closed = True


def lines(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]


def test_metrics_are_json_lines_and_reach_every_tracker(tmp_path: Path) -> None:
    clock, tracker = Clock(), KeptTracker()
    with Recorder(tmp_path, trackers=[tracker], clock=clock) as recorder:
        clock.now += 1.5
        recorder.metrics({"gain/content": 0.5}, step=3)
        recorder.metrics({"r2/first": 0.25, "r2/second": float("nan")}, step=4)
    assert lines(tmp_path) == [
        {"step": 3, "seconds": 1.5, "gain/content": 0.5},
        {"step": 4, "seconds": 1.5, "r2/first": 0.25, "r2/second": None},
    ]
    assert tracker.seen[0] == ({"gain/content": 0.5}, 3)
    assert tracker.seen[1][1] == 4
    assert tracker.closed


def test_phases_are_timed_by_path_and_role_even_when_they_fail() -> None:
    clock = Clock()
    recorder = Recorder(clock=clock)
    for _ in range(2):
        with recorder.phase("calibrate"):
            clock.now += 1
            with recorder.phase("sample", role="head_train"):
                clock.now += 2

    def fails() -> None:
        with recorder.phase("fit", role="critic_fit"):
            clock.now += 5
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert recorder.account()["seconds"] == {
        "calibrate/sample": {"head_train": 4.0},
        "calibrate": {"all": 6.0},
        "fit": {"critic_fit": 5.0},
    }


def test_account_adds_up_over_roles_and_refuses_what_it_does_not_count() -> None:
    recorder = Recorder()
    recorder.count("actor", trajectories=8, generated_tokens=96, actor_tokens=96, scored_tokens=400)
    recorder.count("actor", trajectories=8, generated_tokens=90, actor_tokens=90)
    recorder.count("head_train", trajectories=4, generated_tokens=48, head_updates=10)
    account = recorder.account()
    assert account["roles"]["actor"]["generated_tokens"] == 186
    assert account["total"] == dict(zip(AMOUNTS, (20, 234, 186, 400, 10)))
    with pytest.raises(ValueError, match="tokens_generated is not counted"):
        recorder.count("actor", tokens_generated=1)


def test_events_are_lines_of_their_own_and_reach_the_watcher(tmp_path: Path) -> None:
    clock = Clock()
    heard: list[tuple[str, str]] = []
    with Recorder(tmp_path, clock=clock) as recorder:
        recorder.on_event = lambda what, detail: heard.append((what, detail))
        recorder.at(2)
        recorder.event("critics admitted", "R² 0.21 and 0.25")
        recorder.event("actor paused", "two failures", window=3)
    assert lines(tmp_path) == [
        {"step": 2, "seconds": 0.0, "event": "critics admitted", "detail": "R² 0.21 and 0.25"},
        {"step": 3, "seconds": 0.0, "event": "actor paused", "detail": "two failures"},
    ]
    assert heard == [("critics admitted", "R² 0.21 and 0.25"), ("actor paused", "two failures")]


def test_resuming_goes_on_where_the_checkpoint_was_and_drops_later_lines(tmp_path: Path) -> None:
    clock = Clock()
    first = Recorder(tmp_path, clock=clock)
    first.at(1)
    first.count("pilot", trajectories=2)
    with first.phase("pilot"):
        clock.now += 4
    first.metrics({"kept": 1.0}, step=1)
    state = json.loads(json.dumps(first.state_dict()))
    first.metrics({"lost": 2.0}, step=1)
    first.close()

    second = Recorder(tmp_path, clock=clock)
    second.load_state_dict(state)
    clock.now += 3
    second.metrics({"again": 3.0}, step=1)
    second.close()
    assert lines(tmp_path) == [{"step": 1, "seconds": 4.0, "kept": 1.0}, {"step": 1, "seconds": 7.0, "again": 3.0}]
    assert second.account()["roles"]["pilot"]["trajectories"] == 2
    assert second.account()["seconds"] == {"pilot": {"all": 4.0}}


@pytest.mark.parametrize("content", ["", '{"step": 1, "seconds": 0.0, "a": 2.0}\n', "x" * 500])
def test_resuming_on_a_metrics_file_of_something_else_is_refused(tmp_path: Path, content: str) -> None:
    with Recorder(tmp_path, clock=Clock()) as recorder:
        recorder.metrics({"a": 1.0}, step=1)
        state = recorder.state_dict()
    (tmp_path / METRICS).write_text(content)
    with Recorder(tmp_path) as recorder, pytest.raises(UserError, match="not what the run had written"):
        recorder.load_state_dict(state)
    assert (tmp_path / METRICS).read_text() == content


def test_bar_appears_while_work_goes_on_and_disappears_after() -> None:
    screen = Screen()
    bars = ProgressReport(screen, show_after=0.01)

    def work() -> Iterator[int]:
        yield 1
        assert screen.drawn.wait(timeout=30), "no bar was drawn while an item was being worked on"
        yield 2

    assert list(bars.track(work(), "reading", total=2)) == [1, 2]
    assert "reading" in screen.getvalue()


def test_nothing_is_drawn_for_quick_work_for_quiet_runs_or_without_a_terminal() -> None:
    screen, pipe = Screen(), io.StringIO()
    assert list(Recorder(stream=screen).progress([1, 2, 3], "reading")) == [1, 2, 3]
    assert list(Recorder(stream=screen, quiet=True).progress(iter([1]), "reading")) == [1]
    assert list(Recorder(stream=pipe).progress([1], "reading")) == [1]
    assert screen.getvalue() == ""
    assert pipe.getvalue() == ""


def test_nested_bars_share_one_display() -> None:
    screen = Screen()
    bars = ProgressReport(screen, show_after=0.0)

    def inner() -> Iterator[int]:
        assert screen.drawn.wait(timeout=30)
        yield from range(3)

    seen = [(i, j) for i in bars.track(range(2), "reading") for j in bars.track(inner(), "inside")]
    assert seen == [(i, j) for i in range(2) for j in range(3)]


@pytest.mark.parametrize(
    ("total", "second"), [(100, "reading: 60 of 100, 1/s, 0:00:40 left"), (None, "reading: 60, 1/s")]
)
def test_without_a_terminal_long_work_gets_a_plain_line_now_and_then(total: int | None, second: str) -> None:
    clock, pipe = Clock(), io.StringIO()
    for _ in ProgressReport(pipe, clock=clock).track(range(61), "reading", total):
        clock.now += LINE_EVERY / 30
    first, *others = pipe.getvalue().splitlines()
    assert first.startswith("reading: 30")
    assert others == [second]


def test_a_tracker_that_is_asked_for_must_be_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    assert trackers.open_trackers((), tmp_path, "run", "tfive", {}) == []
    with pytest.raises(UserError, match=r"run.trackers = wandb: not installed; pip install 'wandb"):
        trackers.open_trackers(("wandb",), tmp_path, "run", "tfive", {})


def test_trackers_are_called_as_their_libraries_expect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, tuple[object, ...], dict[str, object]]] = []

    class Library:
        """Answers every call with itself and notes it."""

        def __getattr__(self, name: str) -> object:
            def call(*arguments: object, **named: object) -> object:
                calls.append((name, arguments, named))
                return self

            return call

    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(trackers.importlib, "import_module", lambda name: Library())
    sinks = trackers.open_trackers(("wandb", "trackio"), tmp_path, "nano-t5", "tfive", {"method": "t5"})
    with Recorder(trackers=sinks) as recorder:
        recorder.metrics({"r2.within.1": 1.0}, step=7)
        recorder.samples([{"before": "6 · 7 is", "thought": "a|`b`\n\x1b", "after": " 42"}], step=7)
    names = [name for name, _, _ in calls]
    written = ["log", "log", "add_scalar", "Table", "log", "log", "add_text"]
    assert names == ["init", "init", "SummaryWriter", *written, "finish", "finish", "close"]
    assert calls[0][2]["project"] == calls[1][2]["project"] == "tfive"
    assert calls[3] == ("log", ({"r2.within.1": 1.0},), {"step": 7})
    assert calls[5] == ("add_scalar", ("r2/within.1", 1.0, 7), {})
    assert calls[9][1][1] == "| before | thought | after |\n|---|---|---|\n| `6 · 7 is` | `a¦'b'  ` | ` 42` |"


def test_recorder_and_silent_are_telemetry(tmp_path: Path) -> None:
    def method(telemetry: Telemetry) -> list[int]:
        with telemetry.phase("sample", role="actor"):
            telemetry.count("actor", trajectories=1)
            telemetry.event("stage", "one")
            return list(telemetry.progress(range(2), "items"))

    assert method(Silent()) == [0, 1]
    with Recorder(tmp_path) as recorder:
        assert method(recorder) == [0, 1]
    assert len(lines(tmp_path)) == 1

"""Benchmarks during a run: on schedule, for every method, with what had been spent, and without a trace in the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tfive.cli.report import report_command
from tfive.errors import UserError
from tfive.evaluate.answer_gains import answer_gains
from tfive.evaluate.tasks import find_tasks, load_items
from tfive.inference.thought_model import ThoughtModel
from tfive.report import figures
from tfive.report.benchmarks import curves, read_benchmarks
from tfive.report.runs import Run
from tfive.training import start
from tfive.training.benchmarks import Benchmarks
from tfive.training.export import export
from tfive.training.settings import BenchmarkSettings
from tiny import configure

pytestmark = pytest.mark.model

METHOD = "method=anchor-only"
"""The cheapest method that thinks, has a gate and trains."""
COLOURS = """name = "colours"
kind = "choice"
count = 6
file = "colours.jsonl"
prompt = "options-v1"
context = "{question}"
continuation = "text"
"""
SUMS = """name = "sums"
kind = "math"
count = 4
file = "sums.jsonl"
prompt = "words-v1"
max_new_tokens = 3
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    configure(folder)
    rows = [{"id": str(n), "question": f"{n} boat", "choices": ["river", "mill"], "answer": n % 2} for n in range(6)]
    (folder / "colours.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "colours.task.toml").write_text(COLOURS)
    sums = [{"id": str(n), "question": f"{n} {n}?", "answer": str(2 * n)} for n in range(4)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums))
    (folder / "sums.task.toml").write_text(SUMS)
    return folder


def asked(home: Path) -> list[str]:
    names = 'benchmarks.gains=["colours", "sums"]', 'benchmarks.scores=["colours", "sums"]'
    return ["benchmarks.every=4", *names, "benchmarks.items=5", f"benchmarks.data={home}"]


@pytest.fixture(scope="module")
def measured(home: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    run = tmp_path_factory.mktemp("runs") / "anchored"
    return run, start.train(configure(home, *asked(home), METHOD), run, quiet=True)


def test_every_measurement_is_recorded_with_what_was_spent(measured: tuple[Path, dict[str, Any]]) -> None:
    points = read_benchmarks(Run("anchor-only", 0, measured[0]))
    # Two windows of four steps: before, after each.
    assert [point["steps"] for point in points] == [0, 4, 8]
    assert points[0]["tokens"] == 0 == points[0]["seconds"]
    assert points[1]["tokens"] > 0 < points[1]["seconds"] < points[2]["seconds"]
    for number, point in enumerate(points):
        assert set(point["tasks"]) == {"colours", "sums"}
        for found in point["tasks"].values():
            assert found["thought_gain_low"] <= found["thought_gain"] <= found["thought_gain_high"]
            assert ("mixed_gain" in found) == (number > 0)
            assert 0 <= found["useful_fraction"] <= 1
            assert found["worst_1_percent"] <= found["thought_gain"]
            assert found["score_low"] <= found["score"] <= found["score_high"]
        # At most five of the six options; all four sums.
        assert (5 * point["tasks"]["colours"]["score"]) % 1 == pytest.approx(0, abs=1e-9)
        assert (measured[0] / "benchmarks" / f"step-{4 * number:06d}" / "sums.generated.jsonl").is_file()
    extra = measured[1]["account"]["roles"]["extra"]["trajectories"]
    assert extra >= 3 * (5 + 4)


def test_the_last_gains_are_those_of_the_exported_model(
    home: Path, measured: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    export(measured[0], tmp_path / "out")
    model = ThoughtModel.from_pretrained(tmp_path / "out")
    (task,) = find_tasks(["sums"], home)
    items = load_items(task, home).items
    again = answer_gains(model, task, items, seed=0, rows=3).summary()
    last = read_benchmarks(Run("anchor-only", 0, measured[0]))[-1]["tasks"]["sums"]
    assert again["thought_gain"] == pytest.approx(last["thought_gain"], abs=1e-5)
    assert again["mixed_gain"] == pytest.approx(last["mixed_gain"], abs=1e-5)


def test_measuring_changes_nothing_of_the_run(
    home: Path, measured: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    bare = start.train(configure(home, METHOD), tmp_path / "bare", quiet=True)
    for mine, other in zip(measured[1]["history"], bare["history"], strict=True):
        assert {**mine, "cost": None} == {**other, "cost": None}


def test_a_method_that_does_not_think_is_measured_too(home: Path, tmp_path: Path) -> None:
    start.train(configure(home, *asked(home), "method=ntp"), tmp_path / "ntp", quiet=True)
    points = read_benchmarks(Run("ntp", 0, tmp_path / "ntp"))
    assert [point["steps"] for point in points] == [0, 4, 8]
    assert all("thought_gain" in found and "score" in found for point in points for found in point["tasks"].values())
    assert not any("mixed_gain" in found for point in points for found in point["tasks"].values())


def test_the_report_draws_them(measured: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(figures, "draw_study", lambda *_: [])
    report_command([str(measured[0])], as_json=False)
    pages = (measured[0] / "report" / "report.md").read_text("utf-8")
    for name in ("benchmark_scores.png", "benchmark_gains.png"):
        assert name in pages
        assert (measured[0] / "report" / name).stat().st_size > 1000


def test_a_mean_stands_only_where_every_task_was_measured() -> None:
    points = [
        {"steps": 0, "tasks": {"a": {"score": 0.5}, "b": {"score": 0.1}}},
        {"steps": 4, "tasks": {"a": {"score": 0.7}, "b": {}}},
    ]
    found = curves(points, "score")
    assert [(point["steps"], value) for point, value in found["mean"]] == [(0, pytest.approx(0.3))]
    assert [value for _, value in found["a"]] == [0.5, 0.7]
    assert curves(points, "mixed_gain") == {}


@pytest.mark.parametrize(
    ("steps", "every", "due"), [(4, 10, [0, 3, 5, 8, 9]), (10, 10, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9])]
)
def test_the_schedule_counts_steps(steps: int, every: int, due: list[int]) -> None:
    """Windows of four steps reach 10 in the third, 20 in the fifth, 30 in the eighth; the ninth is the last."""
    planned = Benchmarks(BenchmarkSettings(every=every, gains=("csqa",)), (), (), 0)
    assert [window for window in range(10) if planned.due(window, steps, 9)] == due


def test_bad_requests_are_one_line_and_nothing_is_written(home: Path, tmp_path: Path) -> None:
    for wrong, reason in [
        (["benchmarks.every=4"], "belong together"),
        (['benchmarks.gains=["csqa"]'], "belong together"),
        ([*asked(home), 'benchmarks.scores=["nope"]'], "task 'nope': not known"),
        ([*asked(home), "benchmarks.thoughts=often"], "give none, answer"),
        ([*asked(home), f"benchmarks.data={tmp_path}"], "not known and .*colours.task.toml does not exist"),
    ]:
        with pytest.raises(UserError, match=reason):
            start.train(configure(home, *wrong), tmp_path / "run", quiet=True)
        assert not (tmp_path / "run").exists()

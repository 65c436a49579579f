"""`benchmarks/smollm2_study.py`: which cells there are, what the search takes, whose clock counts, what a page says."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from recorded import run
from safetensors.numpy import load_file, save_file

import scripts
from tfive.errors import UserError
from tfive.report.runs import training_seconds
from tfive.training.loop import Stopped


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return scripts.benchmark("smollm2_study")


def cell(runs: Path, study: str, label: str, seed: int, level: float = 0.1, **more: Any) -> Path:
    """A cell as its folder would look."""
    folder = runs / study / f"{label}-seed{seed}"
    if "failure" in more:
        folder.mkdir(parents=True)
    else:
        run(folder, label.partition("+")[0], seed, level, seconds=more.pop("window_seconds", 10.0))
    result = {"label": label, "seed": seed, "study": study, "disturbed": True, "seconds": 60.0, **more}
    (folder / "cell.json").write_text(json.dumps(result), "utf-8")
    return folder


def test_every_cell_is_a_configuration_and_methods_get_equally_many_trials(script: ModuleType, tmp_path: Path) -> None:
    assert {len(trials) for trials in script.TRIALS.values()} == {3}
    assert set(script.TRIALS) == set(script.METHODS) - {"base"}
    for label, seed in script.cells("search", 1):
        config = script.configuration("search", label, seed, tmp_path, [])
        assert config.method == label.partition("+")[0]
        assert (config.run.develop_after, config.window.windows) == (0, 3)
        cell(tmp_path, "search", label, seed)
    for study in ("main", "clock", "ablations"):
        for label, seed in script.cells(study, 2):
            config = script.configuration(study, label, seed, tmp_path, [])
            assert config.run.develop_after == 256
            assert config.run.seed == seed
    changed = {
        label: script.configuration("ablations", label, 0, tmp_path, []) for label, _ in script.cells("ablations", 1)
    }
    assert changed["t5+ablation-minimum"].calibration.mode == "minimum"
    pairs = ("same", "disjoint", "bracket")
    assert [changed[f"t5+ablation-pair-{pair}"].critic.pair for pair in pairs] == list(pairs)
    plain = script.configuration("main", "t5", 0, tmp_path, [])
    assert {config.optimizer.lr for config in changed.values()} == {plain.optimizer.lr}


def test_the_search_takes_the_best_planned_trial_and_lists_all(script: ModuleType, tmp_path: Path) -> None:
    low, high, failed = script.TRIALS["t5"]
    cell(tmp_path, "search", f"t5+{low}", 100, level=0.1)
    cell(tmp_path, "search", f"t5+{high}", 100, level=0.2)
    assert script.chosen(tmp_path) == {}
    cell(tmp_path, "search", f"t5+{failed}", 100, failure="critics did not qualify")
    cell(tmp_path, "search", "t5+optimizer.lr=1.0", 100, level=0.9)
    assert script.chosen(tmp_path) == {"t5": high}
    assert len(script.trials(tmp_path)) == 4
    assert script.configuration("main", "t5", 0, tmp_path, []).optimizer.lr == 2e-4
    with pytest.raises(UserError, match="rlp: the search of rlp is not finished"):
        script.configuration("main", "rlp", 0, tmp_path, [])


def test_seconds_come_from_the_clock(script: ModuleType, tmp_path: Path) -> None:
    cell(tmp_path, "main", "t5", 0, window_seconds=50.0)
    (before,) = script.runs_of("main", tmp_path)
    assert before.disturbed
    assert before.step_seconds == [25.0, 25.0]
    cell(tmp_path, "clock", "t5", 1, window_seconds=30.0)
    (still,) = script.runs_of("main", tmp_path)
    assert still.step_seconds == [25.0, 25.0], "a clock that shared its device is none"
    cell(tmp_path, "clock", "t5", 0, window_seconds=10.0, disturbed=False)
    (after,) = script.runs_of("main", tmp_path)
    assert not after.disturbed
    assert after.step_seconds == [5.0, 5.0]
    assert [training_seconds(one["cost"]) for one in after.history] == [0.0, 10.0, 20.0]
    assert after.summary["laps"][-1]["seconds"]["fit"] == 18.0
    cell(tmp_path, "ablations", "t5+ablation-minimum", 0, window_seconds=40.0)
    # Variants have no clock, and beside them a method's seconds are as little its own.
    plain, ablated = script.runs_of("ablations", tmp_path)
    assert (plain.label, plain.step_seconds, plain.disturbed) == ("t5", [25.0, 25.0], True)
    assert (ablated.step_seconds, ablated.disturbed) == ([20.0, 20.0], True)


def test_windows_with_more_thoughts_take_longer(script: ModuleType, tmp_path: Path) -> None:
    """Three windows on the clock: one that warms up, one of 100 thoughts in 4 s, one of 200 in 6 s."""
    seconds = ({"fit": 9.0}, {"fit": 12.0, "update": 1.0}, {"fit": 17.0, "update": 2.0, "fit/inner": 7.0})
    laps = [{"seconds": spent, "trajectories": count} for spent, count in zip(seconds, (100, 200, 400))]
    clock = script.Clock.of(laps)
    assert clock.thoughts == [100, 100, 200]
    assert clock.window(1, 100) == {"fit": 9.0}
    assert clock.window(1, 150)["fit"] == pytest.approx(10.0)
    for thoughts, wanted in ((100, 3.0), (200, 5.0), (150, 4.0), (0, 3.0)):
        found = clock.window(2, thoughts)
        assert found["fit"] == pytest.approx(wanted)
        assert found["update"] == pytest.approx(1.0)
    for drawn in ((50, 100, 150), (50, 100, 151)):
        alike = script.Clock.of([lap | {"trajectories": count} for lap, count in zip(laps, drawn)])
        assert alike.window(2, 999)["fit"] == 4.0
    quicker = script.Clock.of([lap | {"trajectories": count} for lap, count in zip(laps, (100, 300, 400))])
    assert quicker.window(2, 9999)["fit"] == 4.0, "more thoughts are never charged less"
    assert script.Clock.of(laps[:1]).window(2, 300) == {"fit": 9.0}


def test_seconds_of_two_kinds_do_not_meet(script: ModuleType, tmp_path: Path) -> None:
    for label in ("t5", "rlp", "base"):
        cell(tmp_path, "main", label, 0, **{"optimizer.lr": 0.1})
    cell(tmp_path, "clock", "t5", 0, disturbed=False, **{"optimizer.lr": 0.1})
    assert script.clocks(tmp_path) == {}
    other = cell(tmp_path, "clock", "rlp", 0, disturbed=False, **{"optimizer.lr": 0.2})
    assert script.clocks(tmp_path) == {}, "a clock of other settings is none"
    (other / "cell.json").write_text((tmp_path / "clock" / "t5-seed0" / "cell.json").read_text("utf-8"), "utf-8")
    assert set(script.clocks(tmp_path)) == {"t5", "rlp"}
    summary = json.loads((other / "summary.json").read_text("utf-8"))
    for change in ({"place": {"device_name": "another"}}, {"laps": []}):
        (other / "summary.json").write_text(json.dumps(summary | change), "utf-8")
        assert script.clocks(tmp_path) == {}


def test_the_page_shows_the_clock_and_who_shared_a_device(script: ModuleType, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for seed in (0, 1):
        cell(runs, "main", "t5", seed, window_seconds=50.0)
    cell(runs, "clock", "t5", 0, window_seconds=7.0, disturbed=False)
    found = script.results(runs)
    assert [row["disturbed"] for row in found["main"]["runs"]] == [True, True]
    text = script.markdown("t", script.blocks_of(found, tmp_path))
    assert "| t5 | 7.00 / 7.00 | 50 / 50 | 14.0 | 3.500 | fit 86%, open 14% |" in text
    assert "step_time" not in text
    assert text.index("## Step time") < text.index("7.00 / 7.00") < text.index("## Thoughts and tokens by role")


def test_the_pair_that_the_search_took_is_not_an_ablation(script: ModuleType, tmp_path: Path) -> None:
    assert "t5+ablation-pair-bracket" in dict(script.to_do("ablations", 1, tmp_path))
    for trial in script.TRIALS["t5"]:
        cell(tmp_path, "search", f"t5+{trial}", 100, level=0.9 if "bracket" in trial else 0.1)
    left = dict(script.to_do("ablations", 1, tmp_path))
    assert "t5+ablation-pair-bracket" not in left
    assert "t5+ablation-pair-same" in left


def test_methods_stand_beside_the_control(script: ModuleType, tmp_path: Path) -> None:
    for label, level in (("t5", 0.3), ("anchor-only", 0.1)):
        for seed in (0, 1):
            folder = cell(tmp_path, "main", label, seed, level=level)
            items = load_file(folder / "develop" / "window-00002.safetensors")
            items["mixed_gain_other"] = items["mixed_gain"] + 0.25
            items["random_gain"] = items["thought_gain"] - 0.5
            save_file(items, folder / "develop" / "window-00002.safetensors")
    cell(tmp_path, "main", "t5", 2, level=0.9)
    mine, control = script.beside_the_control(script.runs_of("main", tmp_path))
    # Seed 2 has no control, and its own gate gains as much with another's thought.
    assert (mine["label"], mine["seeds"], control["label"]) == ("t5", [0, 1, 2], "anchor-only")
    assert (mine["thought_gain"]["mean"], mine["thought_gain"]["seeds"]) == (pytest.approx(0.2, abs=1e-6), 2)
    assert mine["mixed_own_minus_other"]["mean"] == pytest.approx(-0.5 / 3, abs=1e-6)
    assert control["own_minus_random"]["mean"] == pytest.approx(0.5, abs=1e-6)
    assert "thought_gain" not in control
    (_, table) = script._control([mine, control])
    assert table.rows[1][2] == "–"


def test_openings_are_measured_against_the_first(script: ModuleType, tmp_path: Path) -> None:
    for place, (label, seed) in enumerate(script.cells("openings", 3)[:2]):
        config = script.configuration("openings", label, seed, tmp_path, [])
        assert (config.method, config.thought.open, config.thought.close) == ("base", script.OPENINGS[place], ")")
        folder = cell(tmp_path, "openings", label, seed, level=0.1 * place)
        items = load_file(folder / "develop" / "window-00002.safetensors")
        items["content_gain"] = items["content_gain"] + 0.5 * place
        save_file(items, folder / "develop" / "window-00002.safetensors")
    first, second = script.openings(tmp_path)
    assert first["content_gain_apart"] is None
    assert second["content_gain_apart"]["mean"] == 0.5
    assert second["thought_gain"]["mean"] - first["thought_gain"]["mean"] == pytest.approx(0.1, abs=1e-3)
    (_, table) = script._openings([first, second])
    assert table.rows[1][0] == f"`{script.OPENINGS[1]}`"
    assert script.configuration("openings", script.opening_label("—"), 0, tmp_path, []).thought.close == "—"


def test_the_table_and_its_page_hold_every_cell(script: ModuleType, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    right = dict.fromkeys(script.SCORED, "1101")
    for seed in (0, 1):
        cell(runs, "main", "t5", seed, level=0.3, verdicts=right)
        asked = (*script.SCORED, *(script.WRITTEN if seed else ()))
        cell(runs, "main", "base", seed, level=0.0, verdicts=dict.fromkeys(asked, "0001"))
    cell(runs, "main", "rlp", 0, failure="no luck")
    cell(runs, "search", f"t5+{script.TRIALS['t5'][0]}", 100)
    out, page = tmp_path / "found.json", tmp_path / "docs" / "page.md"
    assert script.main(["table", "--runs", str(runs), "--out", str(out), "--page", str(page)]) == 0
    found = json.loads(out.read_text("utf-8"))
    scores = {(row["label"], row["task"]): row for row in found["scores"]}
    assert scores["t5", "piqa"]["mean"] == 0.75
    assert scores["base", "csqa"]["each"] == [0.25, 0.25]
    assert scores["base", script.WRITTEN[0]]["each"] == [0.25]
    # Items 1101 against 0001, twice: +1, +1, 0, 0.
    assert scores["t5", "piqa"]["minus_base"]["mean"] == 0.5
    assert "minus_base" not in scores["base", "piqa"]
    assert ("t5", script.WRITTEN[0]) not in scores
    assert [row["state"] for row in found["main"]["runs"]].count("failed") == 1
    assert found["costs"][0] == {"study": "search", "cells": 1, "failed": 0, "seconds": 60}
    text = page.read_text("utf-8")
    assert "no luck" in text
    assert "0.7500" in text
    script.main(["table", "--render", "--out", str(out), "--page", str(page)])
    assert page.read_text("utf-8") == text


def test_cells_to_do_are_those_without_a_result(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cell(tmp_path, "main", "t5", 0)
    script.main(["list", "main", "--seeds", "1", "--runs", str(tmp_path)])
    assert capsys.readouterr().out.split() == [
        "rlp", "0", "quiet-star-grpo", "0", "quiet-star-ppo", "0", "anchor-only", "0", "ntp", "0", "base", "0",
    ]  # fmt: skip
    with pytest.raises(UserError, match="there is no such folder"):
        script.main(["table", "--runs", str(tmp_path / "absent")])


def test_all_runs_what_is_to_do_in_order(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_cell(asked: Any) -> dict[str, Any]:
        cell(asked.runs, asked.study, asked.label, asked.seed)
        return {"label": asked.label, "shared": asked.shared, "overrides": asked.overrides}

    monkeypatch.setattr(script, "run_cell", run_cell)
    cell(tmp_path, "clock", "rlp", 0)
    asked = ["all", "clock", "--runs", str(tmp_path), "--set", "model.device=cpu"]
    assert script.main(asked) == 0
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["label"] for one in told] == ["t5", "quiet-star-grpo", "quiet-star-ppo", "anchor-only", "ntp"]
    assert all(not one["shared"] and one["overrides"] == ["model.device=cpu"] for one in told)
    assert not list(script.to_do("clock", 1, tmp_path))


def test_benchmarks_over_training_start_at_the_base_model(script: ModuleType, tmp_path: Path) -> None:
    last, half = dict.fromkeys(script.SCORED, "1101"), dict.fromkeys(script.SCORED, "1001")
    cell(tmp_path, "main", "t5", 0, verdicts=last, earlier=[{"window": 1, "verdicts": half}])
    cell(tmp_path, "main", "base", 0, verdicts=dict.fromkeys(script.SCORED, "0001"))
    cell(tmp_path, "clock", "t5", 0, window_seconds=7.0, disturbed=False)
    (row,) = script.score_course(script.runs_of("main", tmp_path))
    assert (row["label"], row["disturbed"]) == ("t5", False)
    assert [(one["window"], one["seconds"], one["mean"]) for one in row["points"]] == [
        (0, 0.0, 0.25), (1, 7.0, 0.5), (2, 14.0, 0.75),
    ]  # fmt: skip


def test_diagnostics_are_what_t5_wrote_window_by_window(script: ModuleType, tmp_path: Path) -> None:
    folder = cell(tmp_path, "main", "t5", 3)
    lines: list[dict[str, Any]] = [
        {"step": 1, "event": "qualification: failed", "detail": "…"},
        {"step": 1, "event": "qualification: passed", "detail": "…"},
        {"step": 1, "event": "stage", "detail": "alternating"},
        {"step": 2, "event": "qualification: passed", "detail": "…"},
        {
            "step": 1,
            "window": 1.0,
            "retention": 0.04,
            "r2.1": 0.3,
            "weight_deviation": 0.1,
            "offset": 0.5,
            "r2_per_step.1.1": 0.2,
            "r2_per_step.2.1": -0.4,
            "r2_per_step.2.2": None,
        },
        {"step": 2, "window": 2.0, "retention": 0.02, "r2.1": 0.5, "weight_deviation": 0.0},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    first, second = script.diagnostics(script.runs_of("main", tmp_path))
    assert (first["passed"], first["failed"], first["paused"], first["r2_1"]) == (1, 1, 0, 0.3)
    assert (second["seed"], second["window"], second["passed"], second["failed"]) == (3, 2, 1, 0)
    (_, table) = script._diagnostics([first, second])
    assert [row[3] for row in table.rows] == ["-0.100", "–"]
    assert [row[5] for row in table.rows] == ["0.0400", "0.0200"]
    assert [row[6] for row in table.rows] == ["1/1", "0/1"]
    assert [row[8] for row in table.rows] == ["+0.500 ± –", "– ± –"]
    late = {"window": 9, "r2_steps": [[0.5, -0.25], []]}
    (_, table, _, steps) = script._variant_critics([first, second | late, second | late | {"label": "t5+x"}])
    assert [*steps.rows] == [("t5", "1", "+0.50", "-0.25"), ("t5+x", "1", "+0.50", "-0.25")]
    assert first["r2_steps"] == [[0.2], [-0.4]]
    assert [row[:3] for row in table.rows] == [("t5", "1", "+0.500"), ("t5+x", "1", "+0.500")]
    assert [row[5] for row in table.rows] == ["2.0/1.0/0.0", "1.0/0.0/0.0"]


def test_changes_stand_beside_their_methods(script: ModuleType, tmp_path: Path) -> None:
    for label in ("t5", "quiet-star-ppo", "rlp"):
        cell(tmp_path, "main", label, 0)
    for label, seed in script.cells("changes", 1):
        method, *settings = label.split("+")
        cell(tmp_path, "changes", label, seed)
        for trial in script.TRIALS[method]:
            if not (tmp_path / "search" / f"{method}+{trial}-seed100").exists():
                cell(tmp_path, "search", f"{method}+{trial}", 100)
        chosen = script.configuration("changes", label, seed, tmp_path, []).leaves()
        for key, _, value in (one.partition("=") for one in settings if "=" in one):
            assert f"{chosen[key]}" == value
        assert chosen["qualify.mode"] == ("fixed" if "ablation-no-qualification" in settings else "gate")
    found = {run.label for run in script.runs_of("changes", tmp_path)}
    assert found == {"t5", "quiet-star-ppo", *(label for label, _ in script.cells("changes", 1))}


class Trainer:
    """Stands in for `train`: notes what was asked for and writes what a run would, or fails."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.asked = error, []

    def __call__(self, config: Any, folder: Path, *, quiet: bool) -> None:
        self.asked.append(config.method)
        run(folder, config.method, config.run.seed, 0.1)
        if self.error is not None:
            (folder / "summary.json").unlink()
            raise self.error


def test_a_cell_that_was_stopped_is_no_result(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "train", Trainer(Stopped("SIGTERM: saved in x")))
    with pytest.raises(Stopped):
        script.main(["all", "search", "--runs", str(tmp_path)])
    assert len(list(script.to_do("search", 1, tmp_path))) == 18


def test_all_goes_on_behind_a_cell_that_broke_and_says_so(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "train", Trainer(RuntimeError("out of memory")))
    assert script.main(["all", "search", "--runs", str(tmp_path)]) == 1
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(told) == 18
    assert all(one["broken"] == "RuntimeError: out of memory" for one in told)
    assert len(list(script.to_do("search", 1, tmp_path))) == 18


def test_what_was_trained_is_not_trained_again_when_the_benchmarks_broke(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer()
    monkeypatch.setattr(script, "train", trainer)

    def broken(config: Any, folder: Path, written: Any) -> dict[str, Any]:
        raise RuntimeError("no room")

    monkeypatch.setattr(script, "benchmarks", broken)
    with pytest.raises(RuntimeError, match="no room"):
        script.main(["cell", "base", "0", "--runs", str(tmp_path)])
    monkeypatch.setattr(script, "benchmarks", lambda config, folder, written: {"verdicts": {}})
    assert script.main(["cell", "base", "0", "--runs", str(tmp_path)]) == 0
    assert trainer.asked == ["base"]
    assert json.loads((tmp_path / "main" / "base-seed0" / "cell.json").read_text("utf-8"))["train_seconds"] > 1


def test_the_share_of_the_thought_is_half_the_variance_of_two_of_them(script: ModuleType, tmp_path: Path) -> None:
    folder = cell(tmp_path, "main", "t5", 0)
    gains = {"thought_gain": [0.0, 1.0, 2.0, 3.0], "content_gain": [0.5, -0.5, 0.5, -0.5]}
    path = folder / "develop" / "window-00002.safetensors"
    save_file({name: np.array(values, dtype=np.float32) for name, values in gains.items()}, path)
    (row,) = script.variances(script.runs_of("main", tmp_path))
    assert (row["gain"], row["content"], row["of_thought"]) == (1.25, 0.25, 0.1)


def test_benchmarks_are_asked_of_every_checkpoint_newest_first(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1, 2):
        (tmp_path / "checkpoints" / f"checkpoint-{number:08d}").mkdir(parents=True)
    asked: list[tuple[str, ...]] = []

    def export(folder: Path, out: Path) -> dict[str, Any]:
        out.mkdir()
        return {"window": 5 * len(list((folder / "checkpoints").iterdir()))}

    def evaluate(wanted: Any, *, quiet: bool) -> None:
        wanted.out.mkdir()
        asked.append(wanted.names)

    def answers_of(where: Path, task: str) -> tuple[list[Any], list[Any]]:
        right = len(list((tmp_path / "checkpoints").iterdir())) == 2
        ways = dict.fromkeys(("raw", "per_character", "per_byte"), right)
        return [{"id": "a", "correct": right, "equivalent": None, "sample": 0}], [{"id": "a", **ways}]

    monkeypatch.setattr(script, "export", export)
    monkeypatch.setattr(script, "evaluate", evaluate)
    monkeypatch.setattr(script, "answers_of", answers_of)
    monkeypatch.setattr(script, "generated_values", lambda records: {"pass@1": {"a": float(records[0]["correct"])}})
    found = script.benchmarks(script.configuration("main", "base", 0, tmp_path, []), tmp_path, script.WRITTEN)
    assert asked == [script.SCORED, script.WRITTEN, script.SCORED], "written answers at the end alone"
    assert found["verdicts"] == dict.fromkeys((*script.SCORED, *script.WRITTEN), "1")
    assert found["earlier"] == [{"window": 5, "verdicts": dict.fromkeys(script.SCORED, "0")}]

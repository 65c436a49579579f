"""The SmolLM2 study tabulates its cells: whose seconds count, what is compared with what, what the page says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import clock
import numpy as np
import page
import page_critics
import plan
import pytest
import results
import search
import study
from recorded_cells import cell
from safetensors.numpy import load_file, save_file

from tfive.report.blocks import markdown
from tfive.report.runs import training_seconds


def test_seconds_come_from_the_clock(tmp_path: Path) -> None:
    cell(tmp_path, "main", "t5", 0, window_seconds=50.0)
    (before,) = clock.runs_of("main", tmp_path)
    assert before.disturbed
    assert before.step_seconds == [25.0, 25.0]
    cell(tmp_path, "clock", "t5", 1, window_seconds=30.0)
    (still,) = clock.runs_of("main", tmp_path)
    assert still.step_seconds == [25.0, 25.0], "a clock that shared its device is none"
    cell(tmp_path, "clock", "t5", 0, window_seconds=10.0, disturbed=False)
    (after,) = clock.runs_of("main", tmp_path)
    assert not after.disturbed
    assert after.step_seconds == [5.0, 5.0]
    assert [training_seconds(one["cost"]) for one in after.history] == [0.0, 10.0, 20.0]
    assert after.summary["laps"][-1]["seconds"]["fit"] == 18.0
    cell(tmp_path, "ablations", "t5+ablation-minimum", 0, window_seconds=40.0)
    # Variants have no clock, and beside them a method's seconds are as little its own.
    plain, ablated = clock.runs_of("ablations", tmp_path)
    assert (plain.label, plain.step_seconds, plain.disturbed) == ("t5", [25.0, 25.0], True)
    assert (ablated.step_seconds, ablated.disturbed) == ([20.0, 20.0], True)


def test_windows_with_more_thoughts_take_longer(tmp_path: Path) -> None:
    """Three windows on the clock: one that warms up, one of 100 thoughts in 4 s, one of 200 in 6 s."""
    seconds = ({"fit": 9.0}, {"fit": 12.0, "update": 1.0}, {"fit": 17.0, "update": 2.0, "fit/inner": 7.0})
    laps = [{"seconds": spent, "trajectories": count} for spent, count in zip(seconds, (100, 200, 400))]
    timed = clock.Clock.of(laps)
    assert timed.thoughts == [100, 100, 200]
    assert timed.window(1, 100) == {"fit": 9.0}
    assert timed.window(1, 150)["fit"] == pytest.approx(10.0)
    for thoughts, wanted in ((100, 3.0), (200, 5.0), (150, 4.0), (0, 3.0)):
        found = timed.window(2, thoughts)
        assert found["fit"] == pytest.approx(wanted)
        assert found["update"] == pytest.approx(1.0)
    for drawn in ((50, 100, 150), (50, 100, 151)):
        alike = clock.Clock.of([lap | {"trajectories": count} for lap, count in zip(laps, drawn)])
        assert alike.window(2, 999)["fit"] == 4.0
    quicker = clock.Clock.of([lap | {"trajectories": count} for lap, count in zip(laps, (100, 300, 400))])
    assert quicker.window(2, 9999)["fit"] == 4.0, "more thoughts are never charged less"
    assert clock.Clock.of(laps[:1]).window(2, 300) == {"fit": 9.0}


def test_seconds_of_two_kinds_do_not_meet(tmp_path: Path) -> None:
    for label in ("t5", "rlp", "base"):
        cell(tmp_path, "main", label, 0, **{"optimizer.lr": 0.1})
    cell(tmp_path, "clock", "t5", 0, disturbed=False, **{"optimizer.lr": 0.1})
    assert clock.clocks(tmp_path) == {}
    other = cell(tmp_path, "clock", "rlp", 0, disturbed=False, **{"optimizer.lr": 0.2})
    assert clock.clocks(tmp_path) == {}, "a clock of other settings is none"
    (other / "cell.json").write_text((tmp_path / "clock" / "t5-seed0" / "cell.json").read_text("utf-8"), "utf-8")
    assert set(clock.clocks(tmp_path)) == {"t5", "rlp"}
    summary = json.loads((other / "summary.json").read_text("utf-8"))
    changes: list[dict[str, Any]] = [{"place": {"device_name": "another"}}, {"laps": []}]
    for change in changes:
        (other / "summary.json").write_text(json.dumps(summary | change), "utf-8")
        assert clock.clocks(tmp_path) == {}


def test_the_page_shows_the_clock_and_who_shared_a_device(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for seed in (0, 1):
        cell(runs, "main", "t5", seed, window_seconds=50.0)
    cell(runs, "clock", "t5", 0, window_seconds=7.0, disturbed=False)
    found = results.results_of(runs)
    assert [row["disturbed"] for row in found["main"]["runs"]] == [True, True]
    text = markdown("t", page.blocks_of(found, tmp_path))
    assert "| t5 | 7.00 / 7.00 | 50 / 50 | 14.0 | 3.500 | fit 86%, open 14% |" in text
    assert "step_time" not in text
    assert text.index("## Step time") < text.index("7.00 / 7.00") < text.index("## Thoughts and tokens by role")


def test_methods_stand_beside_the_control(tmp_path: Path) -> None:
    for label, level in (("t5", 0.3), ("anchor-only", 0.1)):
        for seed in (0, 1):
            folder = cell(tmp_path, "main", label, seed, level=level)
            items = load_file(folder / "test" / "window-00002.safetensors")
            items["mixed_gain_other"] = items["mixed_gain"] + 0.25
            items["random_gain"] = items["thought_gain"] - 0.5
            save_file(items, folder / "test" / "window-00002.safetensors")
    cell(tmp_path, "main", "t5", 2, level=0.9)
    mine, control = results.beside_the_control(clock.runs_of("main", tmp_path))
    # Seed 2 has no control, and its own gate gains as much with another's thought.
    assert (mine["label"], mine["seeds"], control["label"]) == ("t5", [0, 1, 2], "anchor-only")
    assert (mine["thought_gain"]["mean"], mine["thought_gain"]["seeds"]) == (pytest.approx(0.2, abs=1e-6), 2)
    assert mine["mixed_own_minus_other"]["mean"] == pytest.approx(-0.5 / 3, abs=1e-6)
    assert control["own_minus_random"]["mean"] == pytest.approx(0.5, abs=1e-6)
    assert "thought_gain" not in control
    (_, table) = page.control_blocks([mine, control])
    assert table.rows[1][2] == "–"


def test_openings_are_measured_against_the_first(tmp_path: Path) -> None:
    for place, (label, seed) in enumerate(plan.cells("openings", 3)[:2]):
        config = search.configuration("openings", label, seed, tmp_path, [])
        assert (config.method, config.thought.open, config.thought.close) == ("base", plan.OPENINGS[place], ")")
        folder = cell(tmp_path, "openings", label, seed, level=0.1 * place)
        items = load_file(folder / "test" / "window-00002.safetensors")
        items["content_gain"] = items["content_gain"] + 0.5 * place
        save_file(items, folder / "test" / "window-00002.safetensors")
    first, second = results.openings(tmp_path)
    assert first["content_gain_apart"] is None
    assert second["content_gain_apart"]["mean"] == 0.5
    assert second["thought_gain"]["mean"] - first["thought_gain"]["mean"] == pytest.approx(0.1, abs=1e-3)
    (_, table) = page.opening_blocks([first, second])
    assert table.rows[1][0] == f"`{plan.OPENINGS[1]}`"
    assert search.configuration("openings", plan.opening_label("—"), 0, tmp_path, []).thought.close == "—"


def test_the_table_and_its_page_hold_every_cell(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    right = dict.fromkeys(plan.SCORED, "1101")
    for seed in (0, 1):
        cell(runs, "main", "t5", seed, level=0.3, verdicts=right)
        asked = (*plan.SCORED, *(plan.WRITTEN if seed else ()))
        cell(runs, "main", "base", seed, level=0.0, verdicts=dict.fromkeys(asked, "0001"))
    cell(runs, "main", "rlp", 0, failure="no luck")
    cell(runs, "search", f"t5+{plan.TRIALS['t5'][0]}", 100)
    out, page = tmp_path / "found.json", tmp_path / "docs" / "page.md"
    assert study.main(["table", "--runs", str(runs), "--out", str(out), "--page", str(page)]) == 0
    found = json.loads(out.read_text("utf-8"))
    scores = {(row["label"], row["task"]): row for row in found["scores"]}
    assert scores["t5", "piqa"]["mean"] == 0.75
    assert scores["base", "csqa"]["each"] == [0.25, 0.25]
    assert scores["base", plan.WRITTEN[0]]["each"] == [0.25]
    # Items 1101 against 0001, twice: +1, +1, 0, 0.
    assert scores["t5", "piqa"]["minus_base"]["mean"] == 0.5
    assert "minus_base" not in scores["base", "piqa"]
    assert ("t5", plan.WRITTEN[0]) not in scores
    assert [row["state"] for row in found["main"]["runs"]].count("failed") == 1
    assert found["costs"][0] == {"study": "search", "cells": 1, "failed": 0, "seconds": 60}
    text = page.read_text("utf-8")
    assert "no luck" in text
    assert "0.7500" in text
    study.main(["table", "--render", "--out", str(out), "--page", str(page)])
    assert page.read_text("utf-8") == text


def test_benchmarks_over_training_start_at_the_base_model(tmp_path: Path) -> None:
    last, half = dict.fromkeys(plan.SCORED, "1101"), dict.fromkeys(plan.SCORED, "1001")
    cell(tmp_path, "main", "t5", 0, verdicts=last, earlier=[{"window": 1, "verdicts": half}])
    cell(tmp_path, "main", "base", 0, verdicts=dict.fromkeys(plan.SCORED, "0001"))
    cell(tmp_path, "clock", "t5", 0, window_seconds=7.0, disturbed=False)
    (row,) = results.score_course(clock.runs_of("main", tmp_path))
    assert (row["label"], row["disturbed"]) == ("t5", False)
    assert [(one["window"], one["seconds"], one["mean"]) for one in row["points"]] == [
        (0, 0.0, 0.25), (1, 7.0, 0.5), (2, 14.0, 0.75),
    ]  # fmt: skip


def test_diagnostics_are_what_t5_wrote_window_by_window(tmp_path: Path) -> None:
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
    first, second = results.diagnostics(clock.runs_of("main", tmp_path))
    assert (first["passed"], first["failed"], first["paused"], first["r2_1"]) == (1, 1, 0, 0.3)
    assert (second["seed"], second["window"], second["passed"], second["failed"]) == (3, 2, 1, 0)
    (_, table) = page_critics.diagnostics_blocks([first, second])
    assert [row[3] for row in table.rows] == ["-0.100", "–"]
    assert [row[5] for row in table.rows] == ["0.0400", "0.0200"]
    assert [row[6] for row in table.rows] == ["1/1", "0/1"]
    assert [row[8] for row in table.rows] == ["+0.500 ± –", "– ± –"]
    late = {"window": 9, "r2_steps": [[0.5, -0.25], []]}
    (_, table, _, steps) = page_critics.variant_critics_blocks(
        [first, second | late, second | late | {"label": "t5+x"}]
    )
    assert [*steps.rows] == [("t5", "1", "+0.50", "-0.25"), ("t5+x", "1", "+0.50", "-0.25")]
    assert first["r2_steps"] == [[0.2], [-0.4]]
    assert [row[:3] for row in table.rows] == [("t5", "1", "+0.500"), ("t5+x", "1", "+0.500")]
    assert [row[5] for row in table.rows] == ["2.0/1.0/0.0", "1.0/0.0/0.0"]


def test_changes_stand_beside_their_methods(tmp_path: Path) -> None:
    for label in ("t5", "quiet-star-ppo", "rlp"):
        cell(tmp_path, "main", label, 0)
    for label, seed in plan.cells("changes", 1):
        method, *settings = label.split("+")
        cell(tmp_path, "changes", label, seed)
        for trial in plan.TRIALS[method]:
            if not (tmp_path / "search" / f"{method}+{trial}-seed100").exists():
                cell(tmp_path, "search", f"{method}+{trial}", 100)
        chosen = search.configuration("changes", label, seed, tmp_path, []).leaves()
        for key, _, value in (one.partition("=") for one in settings if "=" in one):
            assert f"{chosen[key]}" == value
        # The study was run under the rule of Section 4.
        assert chosen["qualify.rule"] == ("fixed" if "ablation-no-qualification" in settings else "sustained")
    found = {run.label for run in clock.runs_of("changes", tmp_path)}
    assert found == {"t5", "quiet-star-ppo", *(label for label, _ in plan.cells("changes", 1))}


def test_the_share_of_the_thought_is_half_the_variance_of_two_of_them(tmp_path: Path) -> None:
    folder = cell(tmp_path, "main", "t5", 0)
    gains = {"thought_gain": [0.0, 1.0, 2.0, 3.0], "content_gain": [0.5, -0.5, 0.5, -0.5]}
    path = folder / "test" / "window-00002.safetensors"
    save_file({name: np.array(values, dtype=np.float32) for name, values in gains.items()}, path)
    (row,) = results.variances(clock.runs_of("main", tmp_path))
    assert (row["gain"], row["content"], row["of_thought"]) == (1.25, 0.25, 0.1)

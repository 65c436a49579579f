"""Courses of runs that may not have ended: what critics foresee by the token, and the seconds of a window."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import scripts
from tfive.errors import UserError

ROOT = Path(__file__).parents[2]


def module() -> Any:
    return scripts.script("studies/answers/by_window.py")


def test_scores_of_steps_are_taken_together() -> None:
    lines = [{"r2_per_step.1.1": 0.5, "r2_per_step.2.10": 0.3, "r2_per_step.1.11": None}, {"r2_per_step.1.2": 0.1}]
    assert module().foreseen(lines) == {"1-10": 0.3}


def test_seconds_are_those_of_later_windows(tmp_path: Path) -> None:
    spent = [(0, {}), (1, {"fit": 9.0}), (2, {"fit": 10.0, "update": 4.0}), (3, {"fit": 10.0, "update": 5.0})]
    last = (4, {"fit": 10.001, "update": 8.0, "update/inner": 2.0, "refit": 1.0})
    rows = [json.dumps({"window": window, "seconds": seconds}) for window, seconds in (*spent, last)]
    path = tmp_path / "costs.jsonl"
    path.write_text("\n".join(rows) + "\n", "utf-8")
    assert module().seconds_of_a_window(path) == {"update": 2.0, "refit": 0.5}
    path.write_text("\n".join(rows[:3]) + "\n", "utf-8")
    assert module().seconds_of_a_window(path) == {}


def test_a_folder_without_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no run in it"):
        module().main([str(tmp_path), "--code", "abc", "--out", str(tmp_path / "out.json")])
    assert not list(tmp_path.iterdir())
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "metrics.jsonl").touch()
    with pytest.raises(UserError, match=r"no machine\.json"):
        module().main([str(tmp_path), "--code", "abc", "--out", str(tmp_path / "out.json")])
    assert not (tmp_path / "out.json").exists()


def test_the_page_tells_what_was_recorded() -> None:
    found = json.loads((ROOT / "results" / "answers-credit.json").read_text("utf-8"))
    page = (ROOT / "docs" / "studies" / "answers.md").read_text("utf-8")
    plain, alike = (one for one in found["runs"] if one["method"] == "t5")
    assert (plain["gae.alpha"], alike["gae.alpha"]) == (1.0, 1000.0)
    for run, alpha in ((plain, "1"), (alike, "1000")):
        scores = [f"{score:.2f}".replace("-", "−") for score in run["r2_by_step"].values()]
        assert f"| R², `gae.alpha = {alpha}` | {' | '.join(scores)} |" in page
        last = run["measured"][-1]
        gains = (last["gain_vs_base"], last["content_gain"])
        shown = " | ".join(f"+{mean:.3f} ({low:.3f} … {high:.3f})" for mean, low, high in gains)
        assert f"| T⁵, α = {alpha} | {last['steps']} updates, {int(last['training_seconds'])} s | {shown} |" in page
    trained = [[window["actor_gain"] for window in run["windows"]][1:] for run in (plain, alike)]
    apart = [after - before for before, after in zip(*trained, strict=True)]
    mean = sum(apart) / len(apart)
    error = (sum((one - mean) ** 2 for one in apart) / (len(apart) - 1) / len(apart)) ** 0.5
    better = sum(one > 0 for one in apart)
    assert f"better by {mean:.3f} ± {error:.3f} (" in page
    assert f"better in {better} of {len(apart)};" in page

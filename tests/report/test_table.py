"""Tables and pages of made-up studies: pairing, cuts, refusals, and that every run is listed."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from recorded import run
from tfive.cli.report import brief, report_command, tabulated
from tfive.errors import UserError
from tfive.report import figures
from tfive.report.blocks import markdown
from tfive.report.runs import Run, mismatches, read_study
from tfive.report.sections import in_short, in_short_at_equal_cost, run_blocks, study_blocks, variant_blocks
from tfive.report.table import LIMITS, rows_csv, study_table


@pytest.fixture
def runs(tmp_path: Path) -> list[Run]:
    """Two methods on two seeds (b is 0.3 better and half as fast), one of them failed once, and one never began."""
    cells = [("a", 0, 0.1, 10.0), ("b", 0, 0.4, 20.0), ("a", 1, 0.1, 10.0), ("b", 1, 0.4, 20.0)]
    made = [
        Run(method, seed, run(tmp_path / f"{method}{seed}", method, seed, level, seconds=seconds))
        for method, seed, level, seconds in cells
    ]
    failed = tmp_path / "b2"
    failed.mkdir()
    return [*made, Run("b", 2, failed, "critics did not qualify"), Run("c", 0, tmp_path / "c0")]


def test_differences_are_paired_item_by_item(runs: list[Run]) -> None:
    found = study_table(runs)
    (row,) = found["differences"]
    assert (row["label"], row["seeds"]) == ("b", [0, 1])
    paired = row["measured"]["thought_gain"]
    assert paired["mean"] == pytest.approx(-0.3, abs=1e-5)
    own = found["methods"][0]["measured"]["thought_gain"]
    assert paired["high"] - paired["low"] < 0.05 * (own["high"] - own["low"])


def test_cuts_take_the_last_measurement_within_the_common_budget(runs: list[Run]) -> None:
    cuts = study_table(runs)["cuts"]
    (seconds,) = cuts["seconds"]
    assert seconds["budget"] == 20.0
    assert (seconds["method"]["used"], seconds["method"]["thought_gain"]) == (20.0, pytest.approx(0.2))
    assert (seconds["reference"]["used"], seconds["reference"]["thought_gain"]) == (20.0, pytest.approx(0.1))
    (windows,) = cuts["windows"]
    assert windows["method"]["thought_gain"] == pytest.approx(0.4)


def test_a_run_that_begins_behind_the_end_of_another_has_no_measurement_that_early(runs: list[Run]) -> None:
    """A warm start is paid before the first measurement, and one of them may take longer than all of another run."""
    late = runs[2]
    for one in late.history:
        one["cost"]["seconds"]["fit"] += 100.0
    found = study_table(runs)
    (seconds,) = found["cuts"]["seconds"]
    assert (seconds["budget"], seconds["method"]["used"]) == (20.0, 20.0)
    assert seconds["reference"] == dict.fromkeys(seconds["method"])
    (windows,) = found["cuts"]["windows"]
    assert windows["reference"]["thought_gain"] == pytest.approx(0.1)
    told = markdown("t", study_blocks(found))
    assert "no measurement of both that early: b" in told
    assert "| b | 20 | 20 / – | +0.200 / – |" in told


def test_step_time_leaves_inner_phases_and_the_first_window_apart(runs: list[Run]) -> None:
    assert runs[0].step_seconds == [5.0, 5.0]
    assert runs[0].warmup_seconds == 10.0
    # After windows of reading the warm-up is where critics are first fitted.
    laps = [{"window": 1, "seconds": {"open": 1.0, "update": 2.0}}]
    laps += [{"window": w, "seconds": {"open": 1.0, "update": 2.0 * w, "fit": 4.0 * w - 4.0}} for w in (2, 3)]
    read = Run("t5", 0, runs[0].folder)
    read.__dict__["summary"] = runs[0].summary | {"laps": laps, "windows": 3}
    assert (read.starting_windows, read.warmup_seconds) == (2, 5.0)
    assert read.step_seconds[read.starting_windows :] == [3.0]
    row = study_table(runs)["methods"][0]
    assert (row["step_time"]["mean"], row["step_time"]["steady_mean"]) == (5.0, 5.0)
    assert row["rollouts"] == {
        "actor_per_item": 1.0, "auxiliary_per_item": 2.5, "threshold_per_item": 7, "below_threshold": True,
    }  # fmt: skip


def test_a_group_is_not_below_its_own_threshold(tmp_path: Path) -> None:
    counts = {"items": 8, "group": 8, "threshold": 56}
    for name, actor, auxiliary, below in (("t5", 8, 55, True), ("t5", 8, 56, False), ("rlp", 64, 0, False)):
        folder = run(
            tmp_path / f"{name}{auxiliary}", name, 0, 0.1, rollouts=counts | {"actor": actor, "auxiliary": auxiliary}
        )
        assert study_table([Run(name, 0, folder)])["methods"][0]["rollouts"]["below_threshold"] is below


def test_every_run_is_listed_with_its_failure(runs: list[Run]) -> None:
    found = study_table(runs)
    states = [(row["label"], row["seed"], row["state"]) for row in found["runs"]]
    assert states[-2:] == [("b", 2, "failed"), ("c", 0, "missing")]
    assert [row["failed"] for row in found["methods"]] == [[], [2], []]
    page = markdown("title", study_blocks(found))
    assert "critics did not qualify" in page
    assert "What this does not show" in page
    assert "The checkpoint is the last one" in page
    lines = list(csv.DictReader(io.StringIO(rows_csv(found))))
    assert [line["method"] for line in lines] == ["a", "b", "c"]
    assert float(lines[1]["thought_gain_low"]) < 0.4 < float(lines[1]["thought_gain_high"])
    assert json.loads(json.dumps(found, allow_nan=False)) == json.loads(json.dumps(found))


@pytest.mark.parametrize("key", ["base_weights", "corpus", "positions", "precision", "evaluation.horizon"])
def test_what_differs_is_named_and_refused(tmp_path: Path, key: str) -> None:
    from recorded import IDENTITY

    mine = Run("a", 0, run(tmp_path / "a0", "a", 0, 0.1))
    other = Run("b", 0, run(tmp_path / "b0", "b", 0, 0.1, identity={**IDENTITY, key: "other"}))
    assert mismatches([mine, mine]) == []
    with pytest.raises(UserError, match=rf"cannot be compared: {key}: .* in a0, other in b0"):
        tabulated([mine, other])


def test_windows_of_unequal_steps_are_refused(tmp_path: Path) -> None:
    made = [Run(name, 0, run(tmp_path / name, name, 0, 0.1, actor_steps=steps)) for name, steps in (("a", 2), ("b", 4))]
    with pytest.raises(UserError, match=r"cannot be compared: window\.actor_steps: 2 in a, 4 in b"):
        tabulated(made)


def test_other_actor_texts_of_one_seed_are_refused(tmp_path: Path) -> None:
    made = [Run(name, seed, run(tmp_path / f"{name}{seed}", name, seed, 0.1)) for name in "ab" for seed in (0, 1)]
    assert mismatches(made) == []
    summary = json.loads((tmp_path / "b1" / "summary.json").read_text("utf-8"))
    summary["laps"][1]["actor_items"] = "others"
    (tmp_path / "b1" / "summary.json").write_text(json.dumps(summary), "utf-8")
    again = [Run(one.label, one.seed, one.folder) for one in made]
    assert mismatches(again) == ["actor items of window 2: a1 and b1 differ"]


def test_runs_of_other_machines_are_told_apart(tmp_path: Path) -> None:
    places = {"device": "cpu", "threads": 2}, {"device": "cuda:0", "threads": 2}
    made = [Run(name, 0, run(tmp_path / name, name, 0, 0.1, place=place)) for name, place in zip("ab", places)]
    page = markdown("t", study_blocks(study_table(made)))
    assert "Runs differ in where they computed (device); step times and equal seconds are of those alone" in page
    assert "where they computed" not in markdown("t", study_blocks(study_table(made[:1])))
    shared = Run("a", 0, made[0].folder, disturbed=True)
    assert "Some runs shared their machine" in markdown("t", study_blocks(study_table([shared])))


def test_variants_are_shown_without_their_costs(runs: list[Run]) -> None:
    found = study_table(runs)
    page = markdown("t", variant_blocks(found))
    assert "critics did not qualify" in page
    assert "minus each other method, paired by seed and position" in page
    assert "equal seconds" not in page
    assert "s a step" not in page


def test_seconds_of_another_machine_do_not_count(tmp_path: Path) -> None:
    here, there = {"device": "cpu", "threads": 2}, {"device": "cpu", "threads": 1}
    made = [
        Run(name, seed, run(tmp_path / f"{name}{seed}", name, seed, 0.1, seconds=seconds, place=place))
        for name, seed, seconds, place in (
            ("a", 0, 10.0, here), ("a", 1, 10.0, here), ("b", 0, 90.0, there), ("b", 1, 20.0, here)
        )
    ]  # fmt: skip
    found = study_table(made)
    assert [row["step_time"]["mean"] for row in found["methods"]] == [5.0, 10.0]
    assert found["cuts"]["seconds"][0]["method"]["used"] == 20.0
    assert found["methods"][1]["seeds"] == [0, 1]


def test_nothing_finished_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing to compare"):
        tabulated([Run("a", 0, tmp_path / "absent")])


def test_a_method_without_a_gate_has_no_mixed_gain(tmp_path: Path) -> None:
    found = study_table([Run("ntp", 0, run(tmp_path / "n", "ntp", 0, 0.1, mixed=False))])
    assert "mixed_gain" not in found["methods"][0]["measured"]
    assert "| ntp | – | – | – | – |" in markdown("t", study_blocks(found))


def test_report_of_a_run_and_of_a_study(tmp_path: Path, runs: list[Run]) -> None:
    folder = runs[0].folder
    (folder / "metrics.jsonl").write_text('{"step": 1, "seconds": 2.0, "event": "stage", "detail": "<b>"}\n', "utf-8")
    said = report_command([str(folder)], as_json=False)
    assert [Path(line).name for line in said.splitlines()] == ["report.md", "report.html"]
    text = (folder / "report" / "report.html").read_text("utf-8")
    assert "<b>" not in text
    page = (folder / "report" / "report.md").read_text("utf-8")
    assert "| 1 | 2 | stage | &lt;b> |" in page
    assert "Whether useful thoughts were learned cannot be told." in page
    cells = [{"label": one.label, "seed": one.seed, "folder": one.folder.name, "failure": one.failure} for one in runs]
    (tmp_path / "study.json").write_text(json.dumps({"cells": cells}), "utf-8")
    assert [one.state for one in read_study(tmp_path)] == ["done"] * 4 + ["failed", "missing"]
    said = report_command([str(tmp_path)], as_json=False)
    assert said.startswith("# Comparison: ")
    shown = [line.split("|")[1].strip() for line in said.splitlines() if line.startswith("| ")]
    assert shown == ["method", *dict.fromkeys(one.label for one in runs[:4])], "a row for every method, and no more"
    missing = [line for line in said.splitlines() if line.startswith("- not finished: ")]
    assert [f"{one.label} seed {one.seed}: " in line for one, line in zip(runs[4:], missing, strict=True)] == [True] * 2
    assert said.endswith("report.html")
    whole = json.loads((tmp_path / "report" / "table.json").read_text("utf-8"))
    told = [block.text for block in (*in_short(whole), *in_short_at_equal_cost(whole))]
    assert told
    assert all(line in said for line in told)
    whole["limits"].append("Some runs shared their machine.")
    whole["runs"][0]["note"] = "critics never qualified"
    said = brief("t", whole)
    assert "- Some runs shared their machine." in said
    assert f"- {runs[0].label}, seed {runs[0].seed}: critics never qualified" in said
    assert LIMITS[0] not in said
    found = json.loads(report_command([str(tmp_path)], as_json=True))
    assert found == json.loads((tmp_path / "report" / "table.json").read_text("utf-8"))
    if figures.available():
        assert {path.name for path in (tmp_path / "report").glob("*.png")} == {
            "curves.png", "controls.png", "step_time.png", "rollouts.png",
        }  # fmt: skip
    with pytest.raises(UserError, match="there is no such folder"):
        report_command([str(tmp_path / "c0")], as_json=False)
    # A run that has failed before it wrote anything is no page; one that said why has one.
    with pytest.raises(UserError, match="name the folder of a run"):
        report_command([str(tmp_path / "b2")], as_json=False)
    (tmp_path / "b2" / "status.json").write_text('{"state": "failed", "failure": "critics did not qualify"}', "utf-8")
    found = json.loads(report_command([str(tmp_path / "b2")], as_json=True))
    assert (found["state"], found["failure"]) == ("failed", "critics did not qualify")
    assert "critics did not qualify" in (tmp_path / "b2" / "report" / "report.md").read_text("utf-8")


def test_the_report_of_a_run_says_what_it_came_to(runs: list[Run]) -> None:
    text = markdown("T", run_blocks(runs[0]))
    assert "seed 0" in text
    assert "thought gain" in text


def test_in_short_says_who_is_told_apart_and_who_is_ahead(runs: list[Run]) -> None:
    found = study_table(runs)
    ends = {"above": (0.1, 0.3), "below": (-0.3, -0.1), "beside": (-0.1, 0.1)}
    found["differences"] = [
        {"label": label, "seeds": [0], "measured": {"content_gain": {"mean": 0.0, "low": low, "high": high}}}
        for label, (low, high) in ends.items()
    ]
    cut = {"budget": 1.0, "reference": {"content_gain": 0.1, "used": 1.0}}
    others = {"fast": (0.2, 1.0), "slow": (0.0, 1.0), "same": (0.1, 1.0), "early": (0.9, 0.0), "silent": (None, 1.0)}
    cuts = [
        cut | {"label": label, "method": {"content_gain": gain, "used": used}} for label, (gain, used) in others.items()
    ]
    found["cuts"] = dict.fromkeys(found["cuts"], cuts)
    lines = [block.text for block in (*in_short(found), *in_short_at_equal_cost(found))]
    assert lines[0].endswith("at equal steps: above above; below below; not told apart from beside.")
    assert lines[1].endswith(
        "against a: ahead: fast; behind: slow; equal: same; no measurement of both that early: early, silent."
    )


def test_a_run_that_departed_from_its_method_says_so_first(tmp_path: Path) -> None:
    note = "critics never qualified: all 4 actor updates used the batch baseline in place of critics"
    plain = Run("t5", 0, run(tmp_path / "plain", "t5", 0, 0.1, note=None))
    noted = Run("t5", 1, run(tmp_path / "noted", "t5", 1, 0.1, note=note))
    assert run_blocks(noted)[0].text == f"Note: {note}."
    assert "Note" not in run_blocks(plain)[0].text
    states = [row[2] for block in study_blocks(study_table([plain, noted])) for row in block.rows if "done" in row[2:3]]
    assert states == ["done"]
    page = markdown("Study", study_blocks(study_table([plain, noted])))
    assert f"done; {note}" in page


@pytest.mark.parametrize("content", [b"", b"\0" * 8, b"\xff" * 40])
def test_gains_of_something_else_are_one_line(tmp_path: Path, content: bytes) -> None:
    folder = run(tmp_path / "a0", "a", 0, 0.1)
    (folder / "test" / "window-00002.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=r"window-00002\.safetensors: holds no gains item by item"):
        report_command([str(folder)], as_json=True)

"""`studies/nano/compare.py`: the page it draws from stored tables, failures included."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import scripts
from recorded import run
from stage import assembled
from tfive.errors import UserError
from tfive.inference.thought_model import ThoughtModel
from tfive.report.runs import Run
from tfive.report.table import final, study_table
from tfive_lab.estimates import over_seeds

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return scripts.script("studies/nano/compare.py")


@pytest.fixture
def stored(script: ModuleType, tmp_path: Path) -> dict[str, Any]:
    """The three tables as they would be stored: one bar was never reached."""
    reached = [
        Run(script.bar_label(eta), 0, run(tmp_path / f"bar{eta}", "t5", 0, eta, seconds=10 + eta)) for eta in (0.0, 0.1)
    ]
    failed = Run(script.bar_label(0.4), 0, tmp_path / "bar0.4", "critics did not qualify")
    return {
        "main": study_table([Run(name, 0, run(tmp_path / name, name, 0, 0.1)) for name in ("t5", "rlp")]),
        "warmup": study_table([*reached, failed]),
        "rules": study_table([Run(label, 0, run(tmp_path / "rules" / label, "t5", 0, 0.1)) for label in script.RULES]),
        "parts": study_table([Run(label, 0, run(tmp_path / "parts" / label, "t5", 0, 0.1)) for label in script.PARTS]),
        "hindsight": study_table(
            [Run(label, 0, run(tmp_path / "warm" / label, "t5", 0, 0.1)) for label in script.HINDSIGHT]
        ),
        "ablations": study_table([Run("t5+ablation-minimum", 0, run(tmp_path / "minimum", "t5", 0, 0.1))]),
        "naive": study_table([Run("quiet-star-ppo", 0, run(tmp_path / "naive", "quiet-star-ppo", 0, 0.2))]),
    }


def test_a_point_of_the_sweep_is_its_last_score_and_its_measured_warmup(
    script: ModuleType, stored: dict[str, Any]
) -> None:
    points = script.warmup_points(stored["warmup"])
    assert [point["eta"] for point in points] == [0.0, 0.1, 0.4]
    assert [point.get("warmup_seconds") for point in points] == [10.0, 10.1, None]
    assert points[1]["thought_gain"] == pytest.approx(0.1)
    assert points[2]["state"] == "failed"


def test_the_page_is_drawn_from_the_file_alone(script: ModuleType, stored: dict[str, Any], tmp_path: Path) -> None:
    out, page = tmp_path / "results.json", tmp_path / "docs" / "comparison.md"
    page.parent.mkdir()
    script.main(["--render", "--out", str(out), "--page", str(page)])
    assert "has not been run yet" in page.read_text("utf-8")
    out.write_text(json.dumps(stored), "utf-8")
    script.main(["--render", "--out", str(out), "--page", str(page)])
    text = page.read_text("utf-8")
    assert "has not been run yet" not in text
    assert "critics did not qualify" in text
    for part in (
        "## Held-out gains",
        "## The warm-up sweep",
        "## Naive PPO",
        "## Two rules of qualification",
        "## Parts of T⁵",
        "| t5+ablation-single-critic | 0 |",
        "## After hindsight",
        "| anchor-only | 0 |",
        "## Ablations",
        "## What this does not show",
    ):
        assert part in text
    for line in text.splitlines():
        if line.startswith("!["):
            assert (page.parent / line.rpartition("(")[2].rstrip(")")).is_file()


def test_every_label_of_the_studies_is_a_configuration(script: ModuleType) -> None:
    from tfive.training.cells import configured

    for label in (*script.METHODS, *(script.bar_label(eta) for eta in script.BARS)):
        assert configured(["nano"], label, 0, script.SETTINGS).model.name == "nano"
    for name in script.ABLATIONS:
        assert configured(["nano"], f"t5+ablation-{name}", 0, script.SETTINGS).method == "t5"
    # Both rules of qualification, and no cell that goes on without critics.
    rules = [configured(["nano"], label, 0, script.SETTINGS).qualify for label in script.RULES]
    assert [rule.rule for rule in rules] == ["strict", "sustained"]
    assert {rule.on_failure for rule in rules} == {"stop"}
    # Each has one part fewer than the first, the last none of them.
    whole, *without, ppo = (configured(["nano"], label, 0, script.SETTINGS) for label in script.PARTS)
    assert (whole.calibration.mode, whole.qualify.rule, whole.spec.critics) == ("learned", "strict", 2)
    parts = [(one.calibration.mode, one.qualify.rule) for one in without]
    assert parts == [("average", "strict"), ("single", "strict"), ("learned", "fixed")]
    assert (ppo.spec.critics, ppo.spec.name) == (1, "quiet-star-ppo")
    # All after the same warm start.
    warm = [configured(["nano"], label, 0, (*script.SETTINGS, *script.WARM)) for label in script.HINDSIGHT]
    assert {(one.warmstart.source, one.warmstart.rounds, one.window.windows) for one in warm} == {("hindsight", 2, 6)}
    naive = configured(["nano"], "quiet-star-ppo", 0, script.NAIVE)
    assert (naive.window.windows, naive.run.develop_every) == (60, 10)
    assert naive.leaves()["ppo.frozen_windows"] == 20
    with pytest.raises(UserError, match="--only other"):
        script.main(["--only", "other"])


def test_the_note_on_parts_tells_what_the_runs_came_to() -> None:
    parts = json.loads((ROOT / "results" / "nano-study.json").read_text("utf-8"))["parts"]
    gains: dict[str, dict[int, float]] = {}
    for one in parts["runs"]:
        assert one["state"] == "done"
        gains.setdefault(one["label"], {})[one["seed"]] = float(final(one)["content_gain"])
    whole = gains.pop("t5")
    told = []
    for label in ("t5+ablation-no-calibration", "t5+ablation-single-critic", "t5+ablation-no-qualification",
                  "quiet-star-ppo"):  # fmt: skip
        apart = [whole[seed] - gains[label][seed] for seed in range(6)]
        middle, half = over_seeds(apart)
        assert half is not None
        shown = [f"{value:+.3f}".replace("-", "−") for value in (middle, middle - half, middle + half)]
        told.append("{} ({} … {})".format(*shown))
    text = "owes {} to the learned weight, {} to the second critic, {} to qualification, and {} to all three"
    assert text.format(*told) in parts["note"]
    assert parts["note"] in (ROOT / "docs" / "studies" / "comparison.md").read_text("utf-8")


@pytest.mark.model
def test_the_note_on_hindsight_tells_what_rewards_are_worth_there() -> None:
    study = json.loads((ROOT / "results" / "nano-study.json").read_text("utf-8"))
    found = study["hindsight"]
    ends = {(one["label"], one["seed"]): final(one) for one in found["runs"] if one["state"] == "done"}
    assert len(ends) == 12
    for name, text in (("thought_gain", "thought gain owes {} ({} … {}) to rewards"),
                       ("content_gain", "content gain {} ({} … {})")):  # fmt: skip
        apart = [ends["t5", seed][name] - ends["anchor-only", seed][name] for seed in range(3)]
        assert min(apart) > 0
        middle, half = over_seeds(apart)
        assert half is not None
        told = [f"{value:+.3f}".replace("-", "−") for value in (middle, middle - half, middle + half)]
        assert text.format(*told) in found["note"]
    # The same runs once before, by older code.
    before = json.loads((ROOT / "results" / "nano-hindsight.json").read_text("utf-8"))["seeds"]
    for one in before:
        assert ends["t5", one["seed"]]["content_gain"] == pytest.approx(one["test_content_gain_end"], abs=1e-5)
    page = (ROOT / "docs" / "studies" / "comparison.md").read_text("utf-8")
    assert found["note"] in page
    assert study["note"] in page


def test_losses_by_split_and_role_are_those_that_a_run_measures(tmp_path: Path) -> None:
    reuse = scripts.script("studies/nano/reuse.py")
    run_ = assembled(tmp_path)
    found = reuse.losses(ThoughtModel(run_.base.model, run_.loaded.tokenizer, run_.config.thought), run_.corpus)
    assert list(found) == [f"{one.split}/{one.role}" for one in run_.corpus.ranges]
    measured = run_.test.base_no_thought_BR[run_.test.texts.positions_BP >= 0]
    assert found["test/test"] == pytest.approx(float(measured.mean()), abs=1e-4)
    row = {"label": "t5", "seed": 0, "groups": {"train/pool_1": {"before": 1.785, "after": 0.991}}}
    assert "| t5 | 0 | train/pool_1 | 1.785 | 0.991 |" in reuse.table([row])


def test_the_page_tells_what_hindsight_came_to() -> None:
    page = (ROOT / "docs" / "studies" / "nano.md").read_text("utf-8")

    def seeds(name: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads((ROOT / "results" / name).read_text("utf-8"))["seeds"]
        return found

    own, control = seeds("nano-hindsight.json"), seeds("nano-hindsight-control.json")
    for name, one in [*(("T⁵", one) for one in own), *(("anchors alone", one) for one in control)]:
        assert one["warmstart"]["source"] == "hindsight"
        thought, content, mixed, constant = (
            f"{one[f'test_{key}']:+.3f}"
            for key in ("thought_gain_end", "content_gain_end", "mixed_gain_end", "mixed_gain_constant")
        )
        low, high = (f"{end:+.3f}" for end in one["test_content_gain_interval"])
        start, tokens = f"{one['test_thought_gain_start']:+.3f}", f"{one['generated_tokens']:,}"
        shown = (f"{name}, {one['seed']}", start, thought, f"{content} ({low} … {high})", mixed, constant, tokens)
        assert f"| {' | '.join(shown)} |" in page
    without = {one["seed"]: one["test_content_gain_end"] for one in seeds("nano-seeds.json")}
    added = [f"{one['test_content_gain_end'] - without[one['seed']]:.3f}" for one in own]
    assert f"hindsight adds {added[0]}, {added[1]} and {added[2]}" in page
    long = seeds("nano-long.json")
    assert {one["windows"] for one in long} == {16}
    for name in ("content", "thought"):
        ends = [f"{one[f'test_{name}_gain_end']:+.3f}" for one in long]
        assert f"{name} gains of {ends[0]}, {ends[1]} and {ends[2]}" in page
    lost = [f"{one['test_content_gain_end'] - other['test_content_gain_end']:+.3f}".replace("-", "−")
            for one, other in zip(own, long, strict=True)]  # fmt: skip
    assert f"minus this: {lost[0]}, {lost[1]} and {lost[2]}" in page
    drawn = sorted(round(one["generated_tokens"], -3) for one in long)
    assert f"draws {drawn[0]:,} to {drawn[-1]:,} tokens" in page
    more = seeds("nano-hindsight-rounds.json")
    assert [len(one["warmstart"]["rounds"]) for one in (*own, *more)] == [2] * 3 + [3] * 3
    for name, by in (("content", "by {}, {} and {} in content gain"), ("thought", "by {}, {} and {} in thought gain")):
        ends = [f"{one[f'test_{name}_gain_end']:+.3f}" for one in more]
        assert f"{name} gains of {ends[0]}, {ends[1]} and {ends[2]}" in page
        apart = [one[f"test_{name}_gain_end"] - other[f"test_{name}_gain_end"]
                 for one, other in zip(own, more, strict=True)]  # fmt: skip
        assert by.format(*(f"{one:.3f}" for one in apart)) in page
        middle, half = over_seeds(apart)
        assert half is not None
        told = f"{middle:+.3f}, {middle - half:+.3f} … {middle + half:+.3f}".replace("-", "−")
        assert told in page

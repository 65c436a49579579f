"""When critics do not qualify: the two rules, what is said, and the three ways to go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from t5_window import PLAIN, actor_weights, advance_to, changing, go_on, logged, noting, same, t5_of, window

from stage import assembled
from tfive.rl.trajectory import Trajectories
from tfive.training import start
from tiny import configure

pytestmark = pytest.mark.model

BASELINE = ("qualify.attempts=2", "qualify.on_failure=baseline")


def kinds(run: Any) -> list[str]:
    return [what.removeprefix("qualification: ") for what, _ in logged(run) if what.startswith("qualification: ")]


def test_strict_moves_no_actor_on_critics_that_failed_in_this_window(home: Path, verdicts: Any) -> None:
    """Algorithm 1: one failure in a later window already pauses, and the whole row of passes is asked for again."""
    run = assembled(home, "qualify.rule=strict", "qualify.consecutive=2", *PLAIN)
    method = t5_of(run)
    window(method)
    before = actor_weights(run)
    verdicts(True, False, True, True)
    done = advance_to(method, "pilot")
    assert done == ["open", "fit", "qualify", "qualify", "fit", "qualify", "qualify"]
    assert same(actor_weights(run), before)
    window(method)
    assert method.report["actor_updates"] == {"qualified": 4, "slipped": 0, "untested": 0, "baseline": 0}
    assert method.updates["qualified"] == 8
    assert method.note is None
    assert [detail for what, detail in logged(run) if what == "stage"][-2:] == ["recovery", "alternating"]


def test_the_baseline_goes_on_and_every_update_says_so(home: Path, verdicts: Any) -> None:
    verdicts(*[False] * 3)
    run = assembled(home, *BASELINE, *PLAIN)
    method = t5_of(run)
    acting: list[Trajectories] = []
    changing(run, "actor", noting(acting))
    before = actor_weights(run)
    # Two attempts, then an update without pilot and calibration.
    assert window(method) == ["open", *["fit"] * 2, "qualify", "fit", "qualify", "collect", *["update"] * 4, "close"]
    assert not same(actor_weights(run), before)
    assert method.report["actor_updates"] == {"qualified": 0, "slipped": 0, "untested": 0, "baseline": 4}
    assert method.report["mixture"] == "none"
    assert method.note == "critics never qualified: all 4 actor updates used the batch baseline in place of critics"
    # Critics have one attempt in the next window, and take over when they pass.
    assert window(method) == ["open", "fit", "qualify", "collect", *["update"] * 4, "close"]
    assert window(method) == ["open", "fit", "qualify", "pilot", "calibrate", "collect", *["update"] * 4, "close"]
    assert method.report["actor_updates"]["qualified"] == 4
    assert method.note is not None
    assert method.note.startswith("critics did not always qualify: 8 of 12 actor updates used the batch baseline")
    assert kinds(run).count("baseline") == 2
    said = dict(logged(run))
    assert said["qualification: failed"].startswith("attempt 1 of 1: ")
    # No critic has touched the sets of the first two windows.
    assert "critics" not in acting[0].snapshots


def test_waiting_has_no_end_and_says_so_after_every_round(home: Path, verdicts: Any) -> None:
    verdicts(*[False] * 5)
    run = assembled(home, "qualify.attempts=2", "qualify.on_failure=wait", *PLAIN)
    before = actor_weights(run)
    done = advance_to(run.method, "pilot")
    assert done.count("qualify") == 6
    assert same(actor_weights(run), before)
    assert kinds(run).count("waiting") == kinds(run).count("exhausted") == 2
    assert t5_of(run).note is None


def test_failures_say_which_attempt_what_is_needed_and_what_to_try(home: Path) -> None:
    run = assembled(home, "qualify.eta=0.99", *BASELINE, *PLAIN)
    window(run.method)
    failed = [detail for what, detail in logged(run) if what == "qualification: failed"]
    assert [detail.partition(":")[0] for detail in failed] == ["attempt 1 of 2", "attempt 2 of 2"]
    assert all("< η 0.99" in detail for detail in failed)
    suggested = [detail for what, detail in logged(run) if what == "qualification: suggests"]
    assert "; try " in suggested[0]
    # In full once: what fails for the same reasons, in a later window too, names them.
    window(run.method)
    suggested = [detail for what, detail in logged(run) if what == "qualification: suggests"]
    full = [detail for detail in suggested if "; try " in detail]
    assert len(full) < len(suggested)
    assert all(detail.startswith("as before: ") for detail in suggested if detail not in full)


def test_a_run_on_the_baseline_resumes_exactly(home: Path, verdicts: Any) -> None:
    overrides = (*BASELINE, "gate.passes=0")
    verdicts(*[False] * 9)
    run = assembled(home, *overrides)
    advance_to(run.method, "update")
    run.method.advance()
    other = assembled(home, *overrides)
    go_on(run, other)
    assert same(actor_weights(run), actor_weights(other))
    assert t5_of(run).updates == t5_of(other).updates == {"qualified": 0, "slipped": 0, "untested": 0, "baseline": 8}


def test_summary_console_and_metrics_begin_with_the_baseline(
    home: Path, tmp_path: Path, verdicts: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    verdicts(*[False] * 9)
    config = configure(home, *BASELINE, *PLAIN)
    summary = start.train(config, tmp_path / "run")
    said = "critics never qualified: all 8 actor updates used the batch baseline in place of critics"
    assert next(iter(summary.items())) == ("note", said)
    assert summary["actor_updates"] == {"qualified": 0, "slipped": 0, "untested": 0, "baseline": 8}
    shown = capsys.readouterr().err.splitlines()
    assert shown[shown.index("") + 1] == f"note: {said}"
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text("utf-8").splitlines()]
    assert [line["actor_updates.baseline"] for line in lines if "actor_updates.baseline" in line] == [4, 4]
    assert any(line.get("event") == "qualification: suggests" for line in lines)

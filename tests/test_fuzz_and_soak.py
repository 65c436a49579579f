"""What fuzzing and soaking rest on: outcomes are told apart, whole examples are fine, and counts outlive a call."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fuzz import outcome
from fuzz.draw import DEEP, DIGITS, as_json, as_toml
from fuzz.outcome import Tally
from soak import ranks
from soak.life import compare
from soak.run import Progress
from tfive.errors import RunFailed, UserError


def raising(error: BaseException) -> Callable[[], Any]:
    def call() -> None:
        raise error

    return call


def test_outcomes_are_told_apart() -> None:
    tally = Tally()
    calls = [lambda: None, raising(UserError("a line")), raising(OSError(28, "full")), raising(RunFailed("no"))]
    for call in (*calls, raising(KeyError("k")), raising(MemoryError()), raising(RecursionError())):
        tally.judge(call, "input")
    assert tally.counts == {"fine": 1, "refused": 2, "failed": 1, "found": 3}
    assert sorted(kind.split()[0] for kind in tally.findings) == ["KeyError", "MemoryError", "RecursionError"]


def test_of_each_finding_the_smallest_input_is_kept() -> None:
    tally = Tally()
    call = raising(KeyError("k"))
    for shown in ("long input", "short", "another long one"):
        tally.judge(call, shown)
    ((often, smallest, trace),) = tally.findings.values()
    assert (often, smallest) == (3, "'short'")
    assert "KeyError" in trace


def test_an_input_that_hangs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcome, "SECONDS", 1)
    tally = Tally()
    tally.judge(lambda: time.sleep(30), "input")
    assert tally.counts == {"found": 1}
    assert next(iter(tally.findings)).startswith("Hangs")


def test_what_python_would_not_write_is_written_out() -> None:
    assert as_json({"a": [DEEP, 1]}).startswith(b'{"a": [[[[')
    with pytest.raises(RecursionError):
        json.loads(as_json(DEEP.join(["", ""])))
    assert len(as_toml([DIGITS])) == 5002
    assert as_toml({"a": True, "b": [1.5, None]}) == '{"a" = true, "b" = [1.5, "none"]}'


def test_counts_go_on_where_they_stopped(tmp_path: Path) -> None:
    progress = Progress(tmp_path / "progress.json")
    progress.kills["t5"] = Counter({"collect": 2})
    progress.runs["t5"] += 1
    progress.conditions["full disk"] = Counter({"status 1": 3})
    progress.save()
    again = Progress(tmp_path / "progress.json")
    assert (again.total, again.runs, again.conditions) == (2, progress.runs, progress.conditions)


def test_runs_that_differ_do_not_pass(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        compare(tmp_path / "left", tmp_path / "right")


def test_ranks_die_in_the_order_of_a_run_and_are_counted_by_place() -> None:
    passed = [("fit: begin", 1), ("fit: begin", 0), ("close of window 1: end", 0), ("test: end", 1)]
    noted = [{"place": place, "rank": rank, "time": number} for number, (place, rank) in enumerate(passed)]
    planned = ranks.places(noted)
    assert planned[:2] == passed[:2]
    # Restoring is no place of an undisturbed run, and there is something to restore by then.
    assert planned[2:6] == [(place, rank) for place in ("restore: begin", "restore: end") for rank in (0, 1)]
    assert planned[6:] == passed[2:]
    own = {"deaths": [list(one) for one in passed], "runs": 1, "seconds": [1.0, 3.0, 2.0, 9.0]}
    assert [" ".join(line.split()) for line in ranks.shown("copies", own).splitlines()] == [
        "copies: 4 deaths in 1 runs, none differs", "fit rank 0: 1, rank 1: 1", "close of window 1 rank 0: 1",
        "test rank 1: 1", "ranks were there again after 2.5 s (median), 9.0 s at most",
    ]  # fmt: skip

"""The script that asks whether a run gives the same numbers again, on the CPU, where it must."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import scripts
from tfive.training import start
from tiny import configure

pytestmark = pytest.mark.model

METHOD = "method=anchor-only"


def test_a_run_equals_its_repetition_and_its_resumption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = scripts.script("benchmarks/repetition.py")
    resumed: list[Path] = []

    def noted(folder: Path, *, quiet: bool) -> dict[str, Any]:
        resumed.append(folder)
        return start.resume(folder, quiet=quiet)

    monkeypatch.setattr(room, "resume", noted)
    found = room.repetition(configure(tmp_path, METHOD, "run.deterministic=true"), tmp_path / "runs")
    assert (found["again"], found["resumed"], found["windows"]) == (True, True, 2)
    assert resumed == [tmp_path / "runs" / "resumed"]
    assert found["place"]["deterministic"]
    # Another seed is another run, and is told apart.
    other = start.train(configure(tmp_path, METHOD, "run.seed=1"), tmp_path / "other", quiet=True)
    first = start.resume(tmp_path / "runs" / "first")
    assert room.outcome(tmp_path / "other", other) != room.outcome(tmp_path / "runs" / "first", first)

"""`tfive theory`: rows for programs, a table for people, exit status, figures."""

import json
from pathlib import Path

import pytest

from tfive.cli.theory_check import theory
from tfive.errors import UserError
from tfive_lab.theory import figures as theory_figures
from tfive_lab.theory.statement import REGISTRY


def test_json_rows_and_table() -> None:
    labels = ["lem:moment-duality", "eq:harmful-ppo-example"]
    text, passed = theory(labels, 3, 0, as_json=True)
    rows = json.loads(text)
    assert passed
    assert [row["label"] for row in rows] == labels
    assert all(row["passed"] and row["margin"] >= 0 for row in rows)
    assert [row["worlds"] for row in rows] == [12, 0]
    table, _ = theory(labels, 1, 0, quiet=True)
    assert "2 of 2 statements hold" in table
    assert "holds" in table


def test_a_failing_claim_is_named_with_its_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(REGISTRY["lem:moment-duality"], "on_world", lambda world: iter([-0.5]))
    table, passed = theory(["lem:moment-duality"], 0, 0, quiet=True)
    assert not passed
    assert "FAILS at harmful" in table


def test_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(theory_figures, "AXES", {"kappa": (0.1,)})
    monkeypatch.setattr(theory_figures, "TRAJECTORIES", (16,))
    said = theory_figures.draw(tmp_path / "figures", 1, quiet=True)
    assert "map.json" in said
    found = json.loads((tmp_path / "figures" / "map.json").read_text())
    assert [p["axis"] for p in found["points"]] == ["kappa"]
    drawn = sorted(path.name for path in (tmp_path / "figures").glob("*.png"))
    assert drawn == ["drift.png", "floor.png", "gain.png", "gradient_error.png", "head_data.png", "room.png"]
    with pytest.raises(UserError, match="--worlds 0"):
        theory_figures.draw(tmp_path, 0)

"""The clock of whole windows on the smallest run: what is timed, what is compared, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import scripts
from tfive.errors import UserError
from tfive_lab.bench.clock import clock, ratios, render, steady
from tiny import OVERRIDES, configure

pytestmark = pytest.mark.model
OWN = (*OVERRIDES, "window.probe=0")
FEW_PARTS = (*OWN, "window.actor_steps=2", "calibration.mode=average", "gate.passes=0")
"""A window without what only takes its time when all that it launches is listed."""


def test_runs_take_turns_from_the_same_start(tmp_path: Path) -> None:
    configure(tmp_path)
    kept: list[list[int]] = []

    def keep(report: dict[str, Any]) -> None:
        kept.append([len(rounds) for rounds in report["runs"].values()])
        json.dumps(report)

    labels = ["rlp+thought.group=4", "anchor-only"]
    report = clock([str(tmp_path / "tiny.toml")], labels, windows=3, rounds=2, overrides=OWN, keep=keep)
    assert kept == [[1, 0], [1, 1], [2, 1], [2, 2]]
    other, mine = report["runs"].values()
    # The same run again: the same thoughts, though in other seconds.
    assert [one["thoughts"] for one in other] == [3 * 16 * 4] * 2
    assert mine[0]["thoughts"] == mine[1]["thoughts"] > 0
    assert [len(one["windows_s"]) for one in (*other, *mine)] == [3] * 4
    shown = render(report)
    assert "| anchor-only |" in shown
    assert f"{100 * steady(mine) / steady(other):.1f} %" in shown


def test_critics_are_tested_and_a_window_is_profiled(tmp_path: Path) -> None:
    configure(tmp_path)
    label = "t5+critic.adapt=probe+critic.features=policy+qualify.attempts=1"
    report = clock([str(tmp_path / "tiny.toml")], [label], windows=3, rounds=1, overrides=FEW_PARTS, profile=True)
    ((found,),) = report["runs"].values()
    assert len([line for line in found["tests"] if line.startswith("qualification: failed")]) >= 1
    assert {"fit", "qualify", "update", "close"} <= set(found["phases_s"])
    assert {"fit", "qualify", "update", "close"} <= set(found["profile"]["parts"])
    assert "| update | " in render(report)
    assert found["launched"] == []
    found["launched"].append("critics: its steps cannot be captured: they are launched: why")
    assert f"{label}: critics: its steps cannot be captured" in render(report)
    assert found["profile"]["launches"] > 0
    assert report["ratios"] == {}
    assert f"{label}: a window of" in render(report)


def test_a_ratio_is_of_steady_windows_and_all_in_of_the_last_round() -> None:
    first = [{"windows_s": [9.0, 5.0, 2.0, 4.0]}, {"windows_s": [3.0, 3.0, 2.0, 2.0]}]
    second = [{"windows_s": [9.0, 9.0, 1.0, 1.5]}, {"windows_s": [2.0, 2.0, 1.5, 2.0]}]
    assert steady(first) == 2.0
    assert ratios({"rlp": first, "t5": second, "not yet": []}) == {"t5": {"steady": 0.75, "all_in": 0.75}}
    assert ratios({"rlp": first, "t5": []}) == {}


@pytest.mark.parametrize(
    ("labels", "given", "words"),
    [
        (["rlp"], {"windows": 2}, ["--windows 2", "3"]),
        (["rlp"], {"rounds": 0}, ["--rounds 0", "1 or more"]),
        (["rlp", "rlp"], {}, ["rlp, rlp", "once"]),
        (["rlp", "t5+text.sequence_length=24"], {}, ["t5+text.sequence_length=24", "changes text", "--set"]),
        (["rlp", "t6"], {}, ["t6"]),
        (["rlp", "t5+window.items=x"], {}, ["window.items"]),
    ],
)
def test_what_cannot_be_compared_is_refused(
    tmp_path: Path, labels: list[str], given: dict[str, Any], words: list[str]
) -> None:
    configure(tmp_path)
    with pytest.raises(UserError) as error:
        clock([str(tmp_path / "tiny.toml")], labels, overrides=OWN, **given)
    message = str(error.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


def test_the_script_writes_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configure(tmp_path)
    sets = [word for one in OWN for word in ("--set", one)]
    words = [str(tmp_path / "tiny.toml"), "--run", "anchor-only", "--run", "ntp", "--windows", "3", "--rounds", "1"]
    main = scripts.script("benchmarks/clock.py").main
    assert main([*words, *sets, "--out", str(tmp_path / "new" / "clock.json")]) == 0
    written = json.loads((tmp_path / "new" / "clock.json").read_text("utf-8"))
    assert capsys.readouterr().out == render(written) + "\n"
    assert list(written["ratios"]) == ["ntp"]

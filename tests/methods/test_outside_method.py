"""A method in one file outside the package: it trains nano, resumes, is compared with T⁵, and shows up everywhere."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import tfive
from tfive.errors import UserError
from tfive.methods import MethodSpec, register

pytestmark = pytest.mark.model

OUTSIDE = Path(__file__).parent / "outside" / "leave_one_out.py"
SMALL = (
    "window.items=18", "window.windows=2", "window.actor_steps=2", "actor.minibatches=2", "actor.reuse_passes=1",
    "run.develop_items=12", "gate.passes=1", "critic.passes=1", "thought.length=4", "thought.checkpoints=[4]",
    "window.probe=0", "text.sequences.test=4",
)  # fmt: skip
QUICK_T5 = "t5+qualify.rule=fixed+critic.warmup_rounds=1+calibration.mode=average"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as an installed package leaves it: the module, and an entry point of the group `tfive.methods`."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copy(OUTSIDE, folder)
    facts = folder / "leave_one_out-0.1.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: leave-one-out\nVersion: 0.1\n")
    (facts / "entry_points.txt").write_text("[tfive.methods]\nleave-one-out = leave_one_out:SPEC\n")
    return folder


def words(*command: str) -> list[str]:
    return [sys.executable, "-m", "tfive", *command]


def environment(site: Path) -> dict[str, str]:
    places = [str(site), str(Path(tfive.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places)), "OMP_NUM_THREADS": "1"}


def tfive_command(site: Path, *command: str) -> str:
    done = subprocess.run(words(*command), env=environment(site), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


ONE_PROCESS = """
import contextlib, io, json, sys
from tfive.cli.app import _call

found = []
for command in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        status = _call(command)
    found.append((status, out.getvalue(), err.getvalue()))
print(json.dumps(found))
"""


def several(site: Path, *commands: list[str]) -> list[tuple[int, str, str]]:
    """Status, output and errors of some commands, one after the other in a process that loads torch once."""
    words = [sys.executable, "-c", ONE_PROCESS, json.dumps(commands)]
    done = subprocess.run(words, env=environment(site), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [tuple(one) for one in json.loads(done.stdout)]


def settings(*more: str) -> list[str]:
    return [part for setting in (*SMALL, *more) for part in ("--set", setting)]


def summary_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text("utf-8"))
    return found


def test_it_is_one_short_file() -> None:
    assert len([line for line in OUTSIDE.read_text("utf-8").splitlines() if line.strip()]) <= 60


def test_it_shows_up_in_the_configuration(site: Path) -> None:
    (listed, methods, _), (valid, shown, _), (refused, _, said) = several(
        site,
        ["config", "methods"],
        ["config", "show", "nano", "--set", "method=leave-one-out", "--explain"],
        ["config", "check", "nano", "--set", "leave_one_out.scale=0"],
    )
    assert (listed, valid, refused) == (0, 0, 2)
    assert "leave-one-out" in methods
    assert 'method = "leave-one-out"' in shown
    assert "[leave_one_out]" in shown
    assert "Factor on every advantage" in shown
    assert said.count("\n") == 1
    assert "leave_one_out.scale = 0" in said


def test_it_is_compared_with_t5_and_resumes_to_the_same_numbers(site: Path, tmp_path: Path) -> None:
    study = tmp_path / "study"
    methods = f"{QUICK_T5},leave-one-out"
    tfive_command(site, "compare", "nano", "--methods", methods, "--seeds", "1", *settings(), "--out", str(study))
    page = (study / "report" / "report.md").read_text("utf-8")
    assert "leave-one-out" in page
    ran = summary_of(study / "cells" / "leave-one-out-seed0")
    assert ran["method"] == "leave-one-out"
    assert ran["windows"] == 2
    # Two windows of three texts with six items, four thoughts each.
    assert ran["account"]["roles"]["actor"]["trajectories"] == 2 * 18 * 4

    # The same run, stopped after its first checkpoint and resumed.
    run = tmp_path / "run"
    command = words("train", "nano", *settings("method=leave-one-out"), "--out", str(run), "--quiet")
    process = subprocess.Popen(command, env=environment(site), stderr=subprocess.PIPE, text=True)
    waited = time.monotonic() + 300
    while not list(run.glob("checkpoints/*/")) and process.poll() is None and time.monotonic() < waited:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 1, said
    assert "tfive resume" in said
    tfive_command(site, "resume", str(run), "--quiet")
    resumed = summary_of(run)
    for key in ("dev_thought_gain_end", "dev_content_gain_end", "dev_no_thought_loss_end", "generated_tokens"):
        assert resumed[key] == ran[key], key


def test_names_and_sections_are_not_taken_twice() -> None:
    with pytest.raises(UserError, match="registered twice"):
        register(MethodSpec(name="t5", summary="another", method="nowhere:Nothing"))
    with pytest.raises(UserError, match="settings and section belong together"):
        register(MethodSpec(name="half", summary="half", method="nowhere:Nothing", section="half"))

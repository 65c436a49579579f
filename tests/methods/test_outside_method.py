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


def environment(site: Path) -> dict[str, str]:
    places = [str(site), str(Path(tfive.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places)), "OMP_NUM_THREADS": "1"}


COMMANDS = """
import contextlib, io, json, os, signal, sys
import transformers.modeling_utils

before = set(sys.modules)
from tfive.cli.app import _call

def say(command):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        status = _call(command)
    print(json.dumps((status, out.getvalue(), err.getvalue())), flush=True)

*commands, stopped, resumed = json.loads(sys.argv[1])
for command in commands:
    say(command)
child = os.fork()
if child == 0:
    say(stopped)
    os._exit(0)
signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGTERM))
os.waitpid(child, 0)
print(json.dumps(os.path.exists(os.path.join(resumed[1], "summary.json"))))
say(resumed)
several = ("tfive.distributed.group", "tfive.distributed.shards")
print(json.dumps([name for name in set(sys.modules) - before if "fsdp" in name or name in several]))
"""
"""Says what came of each command; what is stopped is a process of its own, and at last come the modules for several."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("outside")


@pytest.fixture(scope="module")
def told(site: Path, home: Path) -> list[Any]:
    """Status, output and errors of some commands, one after the other in a process that loads torch once; the last but
    one is a run that is asked to stop after its first checkpoint, the last resumes it."""
    study, run = home / "study", home / "run"
    commands = [
        ["config", "methods"],
        ["config", "show", "nano", "--set", "method=leave-one-out", "--explain"],
        ["config", "check", "nano", "--set", "leave_one_out.scale=0"],
        ["compare", "nano", "--methods", f"{QUICK_T5},leave-one-out", "--seeds", "1", *settings(), "--out", str(study)],
        ["train", "nano", *settings("method=leave-one-out"), "--out", str(run), "--quiet"],
        ["resume", str(run), "--quiet"],
    ]
    words = [sys.executable, "-c", COMMANDS, json.dumps(commands)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, env=environment(site), **pipes) as process:
        waited = time.monotonic() + 300
        while not list(run.glob("checkpoints/*/")) and process.poll() is None and time.monotonic() < waited:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        out, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return [json.loads(line) for line in out.splitlines()]


@pytest.fixture(scope="module")
def said(told: list[Any]) -> list[tuple[int, str, str]]:
    return [tuple(one) for one in told[:5] + told[6:-1]]


def settings(*more: str) -> list[str]:
    return [part for setting in (*SMALL, *more) for part in ("--set", setting)]


def summary_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text("utf-8"))
    return found


def test_it_is_one_short_file() -> None:
    assert len([line for line in OUTSIDE.read_text("utf-8").splitlines() if line.strip()]) <= 60


def test_it_shows_up_in_the_configuration(said: list[tuple[int, str, str]]) -> None:
    (listed, methods, _), (valid, shown, _), (refused, _, why) = said[:3]
    assert (listed, valid, refused) == (0, 0, 2)
    assert "leave-one-out" in methods
    assert 'method = "leave-one-out"' in shown
    assert "[leave_one_out]" in shown
    assert "Factor on every advantage" in shown
    assert why.count("\n") == 1
    assert "leave_one_out.scale = 0" in why


def test_it_is_compared_with_t5_and_resumes_to_the_same_numbers(
    home: Path, told: list[Any], said: list[tuple[int, str, str]]
) -> None:
    (compared, _, why), (stopped, _, how), (finished, _, failed) = said[3:]
    assert compared == 0, why
    page = (home / "study" / "report" / "report.md").read_text("utf-8")
    assert "leave-one-out" in page
    ran = summary_of(home / "study" / "cells" / "leave-one-out-seed0")
    assert ran["method"] == "leave-one-out"
    assert ran["windows"] == 2
    # Two windows of three texts with six items, four thoughts each.
    assert ran["account"]["roles"]["actor"]["trajectories"] == 2 * 18 * 4

    # The same run, stopped after its first checkpoint, and resumed by another process.
    assert stopped == 1, how
    assert "tfive resume" in how
    assert not told[5], "it was summed up although it was stopped"
    assert finished == 0, failed
    resumed = summary_of(home / "run")
    for key in ("dev_thought_gain_end", "dev_content_gain_end", "dev_no_thought_loss_end", "generated_tokens"):
        assert resumed[key] == ran[key], key


def test_one_process_loads_nothing_of_several(told: list[Any]) -> None:
    assert told[-1] == []


def test_names_and_sections_are_not_taken_twice() -> None:
    with pytest.raises(UserError, match="registered twice"):
        register(MethodSpec(name="t5", summary="another", method="nowhere:Nothing"))
    with pytest.raises(UserError, match="settings and section belong together"):
        register(MethodSpec(name="half", summary="half", method="nowhere:Nothing", section="half"))

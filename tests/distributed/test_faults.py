"""Ranks may die, hang, fill the disk or be told to stop: the run ends bit for bit like an undisturbed one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from faulty import STACKS_AT

from forked import forked
from tfive.cli.app import _call
from tfive.training.run_folder import CHECKPOINTS, CONFIG
from tiny import OVERRIDES, configure
from training.test_resume import final_state, lines, same

HERE = Path(__file__).parent
LIMIT = 400.0
"""Seconds after which a launch counts as hanging; shortly before, every rank shows its stacks."""

SETTINGS = (
    *OVERRIDES, "run.seed=2", "window.windows=1", "window.probe=0", "qualify.rule=fixed", "critic.warmup_rounds=1",
    "run.checkpoint_phases=true", "run.explorer_items=0",
)  # fmt: skip

Fault = tuple[int, int, str, str]


def launch(*words: str, faults: tuple[Fault, ...] = (), differs: str = "") -> tuple[int, list[str]]:
    """`tfive WORDS --processes 2` with faults in its ranks: the status, and what was printed."""
    return ended(started(*words, faults=faults, differs=differs))


def started(*words: str, faults: tuple[Fault, ...] = (), differs: str = "") -> subprocess.Popen[str]:
    """The launcher."""
    command = forked("faulty:launcher", *words, "--processes", "2")
    own = {"FAULTS": json.dumps(faults), "DIFFERS": differs, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths()}
    own[STACKS_AT] = str(time.time() + LIMIT - 20)
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | own)


def ended(started: subprocess.Popen[str]) -> tuple[int, list[str]]:
    """Its status and what was printed when it is over, and with it every rank: all write to one pipe."""
    try:
        said, _ = started.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        started.kill()
        pytest.fail(f"hangs: {started.communicate()[0]}")
    return started.returncode, said.splitlines()


def paths() -> str:
    """Where forked processes find the modules of these tests."""
    return os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    configure(folder)
    return folder


def train(home: Path, out: str, *more: str, **options: Any) -> tuple[int, list[str]]:
    sets = [word for one in SETTINGS for word in ("--set", one)]
    return launch("train", str(home / "tiny.toml"), *sets, "--out", str(home / out), *more, **options)


def test_ranks_that_die_hang_or_stop_change_no_bit(home: Path) -> None:
    assert train(home, "whole", "--quiet") == (0, [])
    # One rank dies, then the one that writes, in the middle of it; then its disk is full.
    dies = ((0, 1, "phase:fit", "kill"), (1, 0, "mid-write", "kill"), (2, 0, "before-rename", "full"))
    status, said = train(home, "broken", faults=dies)
    assert status == 1, said
    *restarted, failed = [line for line in said if "starting all ranks again" in line or "error:" in line]
    assert restarted == [
        "rank 1 was ended by SIGKILL; starting all ranks again from the newest checkpoint (1 of 3 restarts)",
        "rank 0 was ended by SIGKILL; starting all ranks again from the newest checkpoint (2 of 3 restarts)",
    ], said
    assert failed.startswith(
        f"tfive: error: no checkpoint could be written in {home / 'broken' / CHECKPOINTS}: rank 0: "
    )
    assert "No space left on device; free space and resume" in failed
    folder = str(home / "broken")
    status, said = launch("resume", folder, "--quiet", faults=((0, 1, "phase:pilot", "terminate"),))
    assert status == 1, said
    assert said == [f"tfive: error: SIGTERM: saved in {folder}; go on with: tfive resume {folder}"]
    # A time limit so short is for the rank that hangs: on a busy machine others may take as long.
    config = home / "broken" / CONFIG
    config.write_text(config.read_text("utf-8").replace("timeout = 600.0", "timeout = 20.0"), "utf-8")
    status, said = launch("resume", folder, faults=((0, 1, "phase:update", "stop"),))
    assert status == 0, said
    (hung,) = [line for line in said if line.startswith("tfive: error:")]
    # A beat is some seconds old: the phase before may have been heard of last.
    assert re.search(
        r"rank 1 of 2 \(process \d+ on .+\) last heard of in phase (update|collect\b.*): no sign for 20 s", hung
    )
    assert [line for line in said if line.startswith("rank 1 was ended by SIGKILL; starting all ranks again")], said
    broken = final_state(home / "broken")
    broken["began"]["config"]["distributed.timeout"] = 600.0
    same(broken, final_state(home / "whole"))
    assert [row for row in lines(home / "broken") if "event" not in row] == [
        row for row in lines(home / "whole") if "event" not in row
    ]


@pytest.mark.parametrize(
    ("differs", "said"),
    [
        ("configuration", "rank 1: run.seed = 1, rank 0 has 2; give all ranks the same files and versions"),
        ("data", "rank 1: model file model.safetensors = another, rank 0 has "),
    ],
)
def test_ranks_that_differ_are_refused_by_one_of_them(home: Path, differs: str, said: str) -> None:
    status, lines = train(home, "refused", "--quiet", differs=differs)
    assert status == 2
    assert len(lines) == 1
    assert lines[0].startswith(f"tfive: error: {said}")
    assert not (home / "refused").exists()


def test_several_processes_without_a_rendezvous_are_refused(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert _call(["train", str(home / "tiny.toml"), "--out", str(home / "alone")]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert "WORLD_SIZE = 2 without RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT: there is no rendezvous" in said
    assert not (home / "alone").exists()

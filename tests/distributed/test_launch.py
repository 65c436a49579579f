"""The launcher: which ends it tries again, which it passes through, and what it says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_faults import paths
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import registry

from forked import forked
from tfive.cli import launch
from tfive.cli.app import _call
from tfive.cli.launch import require_memory, restart_line, started_by_launcher, whole_status
from tfive.distributed.environment import CRASHED, LOST
from tfive.errors import UserError

LIMIT = 400
"""Seconds after which a launch counts as hanging."""

RANK = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
what, folder = sys.argv[1:]
rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
inherited = (os.environ[name] for name in ("OMP_NUM_THREADS", "TORCH_CPP_LOG_LEVEL"))
# Whole when the other rank sees it, which may then end and take this one along.
with open(f"{folder}/begun-{what}-{rank}-{attempt}", "w") as file:
    file.write(" ".join(inherited))
os.replace(file.name, f"{folder}/{what}-{rank}-{attempt}")
while not os.path.exists(f"{folder}/{what}-{1 - int(rank)}-{attempt}"):
    time.sleep(0.01)
if what == "refused" and rank == "1":
    sys.exit(2)
if what == "failed" and rank == "0":
    sys.exit(1)
if rank == "1" and (what == "always" or (what == "killed" and attempt == "0")):
    os.kill(os.getpid(), signal.SIGKILL)
if what == "stopped" and rank == "0":
    os.kill(os.getppid(), signal.SIGTERM)
if what not in ("well", "killed") or (what == "killed" and attempt == "0"):
    time.sleep(600)
"""


def launches(rank: str, folder: str, *kinds: str) -> None:
    """Print the status of one launch after the other, in a process of its own."""
    how: dict[str, Any] = {"processes": 2, "restarts": 1, "patience": 30, "program": (rank,)}
    tempfile.tempdir = None  # the folder for temporary files is this process's own
    print(json.dumps({kind: launch.launch([kind, folder], **how) for kind in kinds}))


def test_ends_are_tried_again_or_passed_through(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK, "utf-8")
    kinds = ("well", "refused", "failed", "killed", "always", "stopped")
    command = forked("test_launch:launches", str(tmp_path / "rank.py"), str(tmp_path), *kinds)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = {**os.environ, "OMP_NUM_THREADS": "3", "TMPDIR": str(temporary), "PYTHONPATH": paths()}
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=True, env=environment)
    assert not list(temporary.iterdir())
    assert json.loads(done.stdout) == {
        "well": 0, "refused": 2, "failed": 1, "killed": 0, "always": 1, "stopped": 1,
    }  # fmt: skip
    begun = "starting 2 processes, each of which loads its libraries first"
    said = done.stderr.splitlines()
    assert said.count(begun) == len(kinds)
    assert [line for line in said if line != begun] == [
        "rank 1 was ended by SIGKILL; starting all ranks again from the newest checkpoint (1 of 1 restarts)",
        "rank 1 was ended by SIGKILL; starting all ranks again from the newest checkpoint (1 of 1 restarts)",
        "rank 1 was ended by SIGKILL; no restart is left of 1; go on with tfive resume",
        "tfive: error: SIGTERM: all ranks have ended; go on with tfive resume",
    ]
    started = {path.name: path.read_text() for path in tmp_path.iterdir() if path.is_file() and path.suffix != ".py"}
    once = {f"{kind}-{rank}-0" for kind in kinds for rank in (0, 1)}
    again = {f"{kind}-{rank}-1" for kind in ("killed", "always") for rank in (0, 1)}
    assert set(started) == once | again
    assert set(started.values()) == {"3 ERROR"}


@pytest.mark.parametrize("timing", [False, True])
@pytest.mark.parametrize(("ended", "status", "said"), [([0, 0], 0, ""), ([0, 75], 1, "SIGTERM: all ranks have ended")])
def test_a_signal_as_all_ranks_end_well_is_no_error(
    ended: list[int],
    status: int,
    said: str,
    timing: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nor one that comes as torch begins to time a function, whose own error then hides it."""

    class Agent:
        def __init__(self, *given: Any) -> None: ...

        def run(self) -> None:
            try:
                raise SignalException("asked to stop", signal.SIGTERM)
            finally:
                if timing:
                    raise UnboundLocalError("start")

        def kill(self) -> None: ...

        def statuses(self) -> list[int]:
            return ended

    monkeypatch.setattr(launch, "_agent_class", lambda: Agent)
    monkeypatch.setattr(launch, "_settings", lambda processes: {})
    monkeypatch.setattr(launch.logging, "disable", lambda level: None)
    monkeypatch.setattr(registry, "get_rendezvous_handler", lambda place: SimpleNamespace(shutdown=lambda: True))
    assert launch.launch(["train"], processes=2, restarts=0, patience=1.0, quiet=True) == status
    assert said in (told := capsys.readouterr().err)
    assert bool(told) == bool(said)
    # An error of another kind is one.
    monkeypatch.setattr(Agent, "run", lambda self: dict[str, int]()["rank"])
    with pytest.raises(KeyError, match="rank"):
        launch.launch(["train"], processes=2, restarts=0, patience=1.0, quiet=True)


def test_more_processes_than_the_machine_can_hold_are_refused() -> None:
    require_memory(8, 8 << 30)
    require_memory(99, None)
    said = r"--processes 99: their libraries alone take 27\.07 GiB, this machine has 8\.00 GiB; start fewer"
    with pytest.raises(UserError, match=said):
        require_memory(99, 8 << 30)


def test_the_most_telling_status_is_that_of_the_whole() -> None:
    assert whole_status([0, 0]) == 0
    assert whole_status([1, 0, 2]) == 2
    assert whole_status([LOST, -signal.SIGKILL]) == 1
    assert whole_status([130, LOST]) == 130
    assert whole_status([0, None]) == whole_status([]) == 1


def test_a_restart_names_the_rank_that_died_first() -> None:
    assert restart_line({0: LOST, 1: -signal.SIGTERM, 3: CRASHED}, 0, 2).startswith("rank 3 crashed; starting all")
    assert restart_line({0: LOST}, 2, 2).startswith("rank 0 lost another rank; no restart is left of 2")
    assert restart_line({2: 9}, 1, 2).startswith("rank 2 ended with status 9; starting all ranks again")
    assert "(2 of 2 restarts)" in restart_line({2: 9}, 1, 2)


def test_processes_are_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    assert not started_by_launcher(2)
    with pytest.raises(UserError, match="--page: it is served by one process"):
        started_by_launcher(2, page=True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="no rendezvous"):
        started_by_launcher(2)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert started_by_launcher(2)
    with pytest.raises(UserError, match="--processes 4: a launcher has started 2 a node already"):
        started_by_launcher(4)


def test_commands_are_started_as_they_were_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    heard: list[tuple[list[str], dict[str, Any]]] = []

    def launched(words: list[str], **how: Any) -> int:
        heard.append((words, how))
        return 7

    monkeypatch.setattr(launch, "launch", launched)
    typed = ["--corpus", "a.txt=2", "--corpus", "b.txt", "--pattern", "-x", "--json", "--processes", "3"]
    assert _call(["eval", "gains", "nano", *typed]) == 7
    assert _call(["eval", "nano", "--tasks", "piqa", "--limit", "4", "--processes", "2"]) == 7
    more = ["--set", "run.seed=3", "--json", "--quiet", "--trust-remote-code", "--processes", "2"]
    assert _call(["train", "nano", "--out", "runs/x", *more]) == 7
    (gains, how), (run, _), (train, _) = heard
    assert train == [
        "train", "nano", "--set", "run.seed=3", "--out", "runs/x", "--json", "--quiet", "--trust-remote-code",
    ]  # fmt: skip
    assert gains[:3] == ["eval", "gains", "nano"]
    wanted = {"--corpus=a.txt=2", "--corpus=b.txt", "--pattern=-x", "--json", "--processes=3", "--texts=64"}
    assert wanted <= set(gains)
    assert (how["processes"], how["restarts"]) == (3, 0)
    assert run[:3] == ["eval", "run", "nano"]
    assert {"--tasks=piqa", "--limit=4", "--processes=2"} <= set(run)
    assert not [word for word in run if word.startswith(("--json", "--quiet", "--data"))]
    assert (
        restart_line({1: -9}, 0, 0, "give the command again") == "rank 1 was ended by SIGKILL; give the command again"
    )


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("distributed.shard=3", "distributed.shard = 3: 2 processes cannot be divided"),
        ("distributed.profile=compact", "2 critics with 1 process each need 3 processes, this run has 2"),
        ("distributed.profile=round", "distributed.profile"),
    ],
)
def test_what_so_many_processes_cannot_do_is_refused_before_one_is_started(
    asked: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(launch, "launch", lambda words, **how: pytest.fail("processes were started"))
    assert _call(["train", "nano", "--processes", "2", "--set", asked]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line

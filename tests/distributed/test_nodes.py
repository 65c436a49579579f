"""Two launchers stand for two nodes. One is lost with its rank: the other goes on alone from the newest checkpoint."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from pathlib import Path

import pytest
from faulty import STACKS_AT
from test_faults import SETTINGS, paths

from forked import forked
from tfive.distributed.ports import free_port
from tfive.training.run_folder import CHECKPOINTS
from tiny import configure

LIMIT = 400.0
"""Seconds after which anything here counts as hanging."""


def answers(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("localhost", port)) == 0


def node(home: Path, port: int, log: Path) -> subprocess.Popen[bytes]:
    """A launcher of one process, one of at most two nodes."""
    words = [
        "--nnodes", "1:2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}",
        "--rdzv-id", "job", "--max-restarts", "3", "--local-addr", "localhost",
        "--rdzv-conf", "last_call_timeout=8,keep_alive_interval=2,keep_alive_max_attempt=5",
    ]  # fmt: skip
    sets = [word for one in (*SETTINGS, "window.windows=2") for word in ("--set", one)]
    # Forked as well: a second node that takes its time to import would find that the first has begun without it.
    command = forked("faulty:torchrun", *words, "--no-python", *forked("faulty:plain", "train"))
    command += [str(home / "tiny.toml"), *sets, "--out", str(home / "run")]
    own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    own |= {"PYTHONPATH": paths(), STACKS_AT: str(time.time() + LIMIT - 20)}
    with log.open("wb") as said:
        return subprocess.Popen(command, stdout=said, stderr=said, env=os.environ | own)


def until(check: str, home: Path, port: int, launchers: list[subprocess.Popen[bytes]]) -> None:
    """Wait for the first node's store, or for a checkpoint after the first."""
    deadline = time.monotonic() + LIMIT
    while True:
        saved = len(list((home / "run" / CHECKPOINTS).glob("checkpoint-*")))
        if answers(port) if check == "store" else saved > 1:
            return
        if time.monotonic() > deadline:
            pytest.fail(f"no {check} within {LIMIT} s: {[log.read_text('utf-8') for log in home.glob('said-*.txt')]}")
        assert all(launcher.poll() is None for launcher in launchers)
        time.sleep(0.2)


def test_a_run_goes_on_without_a_lost_node(tmp_path: Path) -> None:
    configure(tmp_path)
    port, launchers = free_port(), list[subprocess.Popen[bytes]]()
    assert port is not None
    try:
        for number in (0, 1):
            # The first node keeps the rendezvous.
            launchers.append(node(tmp_path, port, tmp_path / f"said-{number}.txt"))
            until("store", tmp_path, port, launchers)
        until("checkpoint", tmp_path, port, launchers)
        launchers[1].kill()  # and with it everything that it has started
        said = (tmp_path / "said-0.txt").read_text("utf-8")
        assert launchers[0].wait(LIMIT) == 0, said[-3000:]
    finally:
        for launcher in launchers:
            launcher.terminate()
            launcher.wait(60)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text("utf-8"))
    assert summary["windows"] == 2
    assert [place.get("processes", 1) for place in summary["places"]] == [2, 1]

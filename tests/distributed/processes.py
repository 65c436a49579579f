"""Several processes on this machine, over gloo, for tests, with a time limit: a hang fails with the stack of each.

`run_world(size, "module:function", …)` starts `size` processes that join a group and call the function with their
`World` and the arguments (JSON); it returns what each returned (JSON).
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from forked import forked
from tfive.distributed.launch import joined
from tfive.distributed.ports import free_port

HERE = Path(__file__).parent
LIMIT = 400.0
"""Seconds a world may take; a hang is a failure with every process's stack."""


def run_world(
    size: int, function: str, *arguments: Any, limit: float = LIMIT, joins: bool = True, **environment: str
) -> list[Any]:
    """What each of `size` processes returned, by rank; a process that fails or hangs fails the test with all output.

    With `joins` False the processes are started as a launcher would, and the function gets no world.
    """
    with tempfile.TemporaryDirectory() as kept:
        asked = {"function": function, "arguments": arguments, "kept": kept, "joins": joins}
        started = [_started(rank, size, asked, Path(kept), environment) for rank in range(size)]
        try:
            _wait(started, limit)
        finally:
            _end(started)
        codes = [process.returncode for process in started]
        assert not any(codes), f"exit codes {codes}\n{_said(Path(kept), size)}"
        return [json.loads((Path(kept) / f"result-{rank}.json").read_text("utf-8")) for rank in range(size)]


def _started(
    rank: int, size: int, asked: dict[str, Any], kept: Path, environment: dict[str, str]
) -> subprocess.Popen[bytes]:
    tests = HERE.parent
    own = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_port(kept)),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join(
            [str(HERE), str(tests), str(tests / "methods"), *filter(None, [os.environ.get("PYTHONPATH")])]
        ),
        "TFIVE_TEST_WORK": json.dumps(asked),
    }
    said = (kept / f"said-{rank}.txt").open("wb")
    with said:
        return subprocess.Popen(forked("processes:work"), env=os.environ | own | environment, stderr=said, stdout=said)


def _port(kept: Path) -> int:
    """One free port for the whole world."""
    file = kept / "port"
    if not file.exists():
        file.write_text(str(free_port()), "utf-8")
    return int(file.read_text("utf-8"))


def _wait(started: list[subprocess.Popen[bytes]], limit: float) -> None:
    """Until all are over, one has failed, or the time is up."""
    until = time.monotonic() + limit
    while time.monotonic() < until:
        codes = [process.poll() for process in started]
        if all(code is not None for code in codes) or any(codes):
            return
        time.sleep(0.05)


def _end(started: list[subprocess.Popen[bytes]]) -> None:
    """Ask what is still running for its stacks, then end it."""
    running = [process for process in started if process.poll() is None]
    for process in running:
        process.send_signal(signal.SIGUSR1)
    if running:
        time.sleep(1.0)
    for process in running:
        process.kill()
    for process in started:
        process.wait()


def _said(kept: Path, size: int) -> str:
    texts = [(kept / f"said-{rank}.txt").read_text("utf-8", "replace")[-6000:] for rank in range(size)]
    return "\n".join(f"--- rank {rank}\n{text}" for rank, text in enumerate(texts))


def work() -> None:
    """What a started process does: join, call the function, keep its result."""
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    asked = json.loads(os.environ["TFIVE_TEST_WORK"])
    torch.set_num_threads(1)
    module, _, name = asked["function"].partition(":")
    function = getattr(importlib.import_module(module), name)
    if asked["joins"]:
        with joined(torch.device("cpu"), 300.0) as world:
            result = function(world, *asked["arguments"])
    else:
        result = function(*asked["arguments"])
    Path(asked["kept"], f"result-{os.environ['RANK']}.json").write_text(json.dumps(result), "utf-8")

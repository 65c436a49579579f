"""Processes without the seconds that imports take: a server that has imported everything forks them.

`forked(*words)` is a command that anybody may start, a launcher too; `words` are "module:function" and its arguments.
It hands them, its environment and its output to a server, passes signals on, and ends as the forked process ended, by
the same signal where one ended it; when it is killed itself, so is that process. There are two servers, one for ranks
of even and one for ranks of odd number, whose sets of strings have another order. All workers of pytest share them.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

FORKS = "TFIVE_TEST_FORKS"
"""Environment variable with the servers' folder."""

IMPORTED = (
    "tfive.cli.app", "tfive.cli.evaluate_suite", "tfive.cli.launch", "tfive.training.start", "tfive.distributed.shards",
    "tfive.distributed.group", "torch.distributed.elastic.agent.server.local_elastic_agent",
    "torch.distributed.elastic.rendezvous.registry", "torch.distributed.run", "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama", "tiny", "pytest",
)  # fmt: skip
PASSED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def forked(*words: str) -> list[str]:
    """The command that has a server call words[0] ("module:function") with the others; servers begin with the first."""
    share_servers()
    with suppress(FileExistsError):
        os.mkdir(f"{os.environ[FORKS]}/begun")
        _start_servers(os.environ[FORKS])
    # Without the site's packages a client begins in hundredths of a second.
    return [sys.executable, "-I", "-S", __file__, *words]


def share_servers() -> None:
    """Servers that this process and those it starts ask for are the same; they end with it, whose pipe they read."""
    if FORKS not in os.environ:
        folder = os.environ[FORKS] = tempfile.mkdtemp(prefix="tfive-forks-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        os.mkfifo(f"{folder}/alive")
        os.open(f"{folder}/alive", os.O_RDWR)  # open for writing until this process ends, and in no other


def _start_servers(folder: str) -> None:
    alive = os.open(f"{folder}/alive", os.O_RDONLY)
    for seed in ("1", "2"):
        own = {"PYTHONHASHSEED": seed, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        # What a launch sets for its ranks; torch looks at it once, when it is imported.
        own |= {"TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")}
        subprocess.Popen(
            [sys.executable, __file__, "--serve", f"{folder}/{int(seed) - 1}"], stdin=alive, env=os.environ | own,
        )  # fmt: skip
    os.close(alive)


def serve(path: str) -> None:
    """Fork a process for every client, until standard input ends."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for name in IMPORTED:
        importlib.import_module(name)
    listening.bind(f"{path}.new")
    listening.listen(64)
    os.rename(f"{path}.new", path)  # now it answers
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers are not waited for
    while 0 not in select.select([0, listening.fileno()], [], [])[0]:
        client, _ = listening.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listening.close()
            _keep(client)
        client.close()


def _keep(client: socket.socket) -> None:
    """Fork the process and stay beside it until it ends."""
    told, outputs, _, _ = socket.recv_fds(client, 1 << 18, 2)
    child = os.fork()
    if child == 0:
        client.close()
        words, environment = json.loads(told)
        os._exit(_called(words, environment, outputs))
    for output in (0, *outputs):
        os.close(output)
    ended = os.pidfd_open(child)
    while ended not in select.select([ended, client.fileno()], [], [])[0]:
        passed = client.recv(1)
        os.kill(child, passed[0] if passed else signal.SIGKILL)
        if not passed:
            break
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with suppress(OSError):
        client.sendall(str(status).encode())
    os._exit(0)


def _called(words: Sequence[str], environment: dict[str, str], outputs: Sequence[int]) -> int:
    for number, output in enumerate(outputs, 1):
        os.dup2(output, number)
        os.close(output)
    # The server's own streams remember what kind of file they were opened on.
    sys.stdout, sys.stderr = (
        os.fdopen(number, "w", buffering, "utf-8", closefd=False) for number, buffering in ((1, -1), (2, 1))
    )
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = [one for one in environment.get("PYTHONPATH", "").split(os.pathsep) if one not in sys.path]
    sys.argv = list(words)
    status = 1
    try:
        module, _, name = words[0].partition(":")
        getattr(importlib.import_module(module), name)(*words[1:])
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - as Python ends a program
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def _client(words: Sequence[str]) -> None:
    path, parent = Path(os.environ[FORKS]) / str(int(os.environ.get("RANK", "0")) % 2), os.getppid()
    while not path.exists():
        select.select([], [], [], 0.02)  # it still imports
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.connect(str(path))

    def pass_on(asked: int, _: object) -> None:
        with suppress(OSError):  # it may have ended already
            server.send(bytes([asked]))

    for number in PASSED:
        signal.signal(number, pass_on)
    socket.send_fds(server, [json.dumps([list(words), dict(os.environ)]).encode()], [1, 2])
    while not select.select([server], [], [], 1.0)[0]:
        if os.getppid() != parent:
            sys.exit(1)  # whoever started this is gone, and nobody else would end it
    status = int(server.recv(64) or b"1")
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        serve(sys.argv[2])
    else:
        _client(sys.argv[1:])

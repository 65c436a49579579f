"""Ranks without the seconds that imports take: a server that has imported everything forks each rank.

A launcher starts this file instead of the command. It hands its arguments, environment and output to the server named
by `FORKS`, passes signals on, and ends as the forked rank ended, by the same signal where one ended it; when it is
killed itself, so is the rank.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress

PASSED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def serve(path: str, work: Callable[[list[str]], int]) -> int:
    """Start a server at the socket `path` that calls `work` with the arguments of each rank in a fork; its process."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(path)
    listening.listen()
    server = os.fork()
    if server:
        listening.close()
        return server
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers are not waited for
    while True:
        client, _ = listening.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listening.close()
            _keep(client, work)
        client.close()


def _keep(client: socket.socket, work: Callable[[list[str]], int]) -> None:
    """Fork the rank and stay beside it until it ends."""
    told, outputs, _, _ = socket.recv_fds(client, 1 << 20, 2)
    rank = os.fork()
    if rank == 0:
        client.close()
        os._exit(_rank(json.loads(told), outputs, work))
    for output in outputs:
        os.close(output)
    ended = os.pidfd_open(rank)
    while ended not in (ready := select.select([ended, client], [], [])[0]):
        passed = client.recv(1) if client in ready else b""
        os.kill(rank, passed[0] if passed else signal.SIGKILL)
        if not passed:
            break
    status = os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1])
    with suppress(BrokenPipeError):
        client.sendall(str(status).encode())
    os._exit(0)


def _rank(told: list[object], outputs: list[int], work: Callable[[list[str]], int]) -> int:
    arguments, environment = told
    assert isinstance(arguments, list)
    assert isinstance(environment, dict)
    for number, output in enumerate(outputs, 1):
        os.dup2(output, number)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = arguments
    try:
        return work(arguments)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def main() -> None:
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for number in PASSED:
        signal.signal(number, lambda asked, _: server.send(bytes([asked])))
    server.connect(os.environ["FORKS"])
    socket.send_fds(server, [json.dumps([sys.argv, dict(os.environ)]).encode()], [1, 2])
    status = int(server.recv(64))
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


if __name__ == "__main__":
    main()

"""Ports that are still free when a process that is only being started comes to listen on them."""

from __future__ import annotations

import random
import socket
from pathlib import Path

OUTGOING = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""Where Linux says which ports it gives to outgoing connections."""

LOWEST = 15_000
TRIES = 64


def free_port(host: str = "localhost") -> int | None:
    """A port on which nobody listens, and which the system gives to no connection: one that it gave away itself may be
    another connection's before a process has imported its libraries. None where there is no such port."""
    try:
        first = int(OUTGOING.read_text("ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return None
    drawn = random.Random()  # of the system, not of a run: two launches must not draw the same
    for _ in range(TRIES if first > LOWEST else 0):
        port = drawn.randrange(LOWEST, first)
        with socket.socket() as tried:
            try:
                tried.bind((host, port))
            except OSError:
                continue
        return port
    return None

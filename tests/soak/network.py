"""The network between two nodes is lost: `python tests/soak/network.py --work build/soak/network`, as root.

Two network namespaces are the nodes, joined by a bridge in a third one. Each has a launcher (torchrun) with one rank.
The bridge lets one node go: packets are dropped without a word to either side, as by a switch that fails. Where
namespaces cannot be made it says so and does nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "text"))

from soak.life import compare
from tfive.training.loop import CHECKPOINTS
from tiny import OVERRIDES, configure

TIMEOUT = 20
LIMIT = 900.0
"""Seconds after which anything here counts as hanging."""
CONF = "last_call_timeout=5,keep_alive_interval=2,keep_alive_max_attempt=5,read_timeout=30"
SETTINGS = (
    *OVERRIDES, "run.seed=2", "qualify.rule=fixed", "critic.warmup_rounds=1", "run.checkpoint_phases=true",
    f"distributed.timeout={TIMEOUT}",
)  # fmt: skip


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Wire:
    """Two namespaces with an address each, and what lies between them."""

    def __init__(self) -> None:
        self.hub, *self.nodes = (f"tfive-{name}-{os.getpid()}" for name in ("hub", "a", "b"))
        self.addresses = ("10.77.0.1", "10.77.0.2")

    def __enter__(self) -> Wire:
        for name in (self.hub, *self.nodes):
            ip("netns", "add", name)
        ip("-n", self.hub, "link", "add", "name", "hub", "type", "bridge")
        ip("-n", self.hub, "link", "set", "hub", "up")
        for number, (node, address) in enumerate(zip(self.nodes, self.addresses)):
            ip("-n", node, "link", "add", "wire", "type", "veth", "peer", "name", f"port{number}", "netns", self.hub)
            ip("-n", node, "addr", "add", f"{address}/24", "dev", "wire")
            for link in ("wire", "lo"):
                ip("-n", node, "link", "set", link, "up")
            ip("-n", self.hub, "link", "set", f"port{number}", "master", "hub", "up")
        return self

    def cut(self) -> None:
        """From now on nothing passes; both ends keep their link."""
        ip("-n", self.hub, "link", "set", "port1", "nomaster")

    def mend(self) -> None:
        ip("-n", self.hub, "link", "set", "port1", "master", "hub")

    def __exit__(self, *exception: object) -> None:
        for name in (self.hub, *self.nodes):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


class Nodes:
    """A launcher in each namespace, and what they say."""

    def __init__(self, wire: Wire, home: Path, name: str, nodes: str = "2") -> None:
        self.wire, self.home, self.folder, self.asked = wire, home, home / name, nodes
        shutil.rmtree(self.folder, ignore_errors=True)
        self.logs = [home / f"{name}-{node}.txt" for node in "ab"]
        for log in self.logs:
            log.unlink(missing_ok=True)
        self.launchers = [self.launched(number) for number in (0, 1)]

    def launched(self, number: int) -> subprocess.Popen[bytes]:
        words = [
            "--nnodes", self.asked, "--nproc-per-node", "1", "--rdzv-backend", "c10d",
            "--rdzv-endpoint", f"{self.wire.addresses[0]}:29400", "--rdzv-id", self.folder.name, "--max-restarts", "3",
            "--local-addr", self.wire.addresses[number],
            "--rdzv-conf", f"is_host={number == 0},{CONF}",
        ]  # fmt: skip
        sets = [word for one in SETTINGS for word in ("--set", one)]
        command = ["ip", "netns", "exec", self.wire.nodes[number], sys.executable, "-m", "torch.distributed.run"]
        command += [*words, "-m", "tfive", "train", str(self.home / "tiny.toml"), *sets, "--out", str(self.folder)]
        own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "wire", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with self.logs[number].open("ab") as said:
            return subprocess.Popen(command, stdout=said, stderr=said, env=os.environ | own)

    def said(self, number: int) -> str:
        return self.logs[number].read_text("utf-8", "replace")

    def saved(self) -> int:
        return max((int(path.name[-8:]) for path in (self.folder / CHECKPOINTS).glob("checkpoint-*")), default=0)

    def ended(self) -> list[int]:
        """Statuses of both launchers, when they end."""
        until(lambda: all(one.poll() is not None for one in self.launchers), "an end of both launchers")
        return [one.returncode for one in self.launchers]


def until(check: Callable[[], bool], what: str, running: Nodes | None = None) -> float:
    """Wait for it; the seconds that took."""
    began = time.monotonic()
    while not check():
        if running is not None and any(one.poll() for one in running.launchers):
            raise SystemExit(f"no {what}: {running.said(0)[-2000:]} {running.said(1)[-2000:]}")
        if time.monotonic() - began > LIMIT:
            raise SystemExit(f"no {what} within {LIMIT:g} s")
        time.sleep(0.2)
    return time.monotonic() - began


@contextmanager
def nodes(wire: Wire, home: Path, name: str, asked: str = "2") -> Iterator[Nodes]:
    found = Nodes(wire, home, name, asked)
    try:
        yield found
    finally:
        wire.mend()
        for launcher in found.launchers:
            if launcher.poll() is None:
                launcher.terminate()
                launcher.wait(120)


if __name__ == "__main__":
    home = Path(sys.argv[1]); home.mkdir(parents=True, exist_ok=True)
    configure(home)
    with Wire() as wire:
        t=time.time()
        if "whole" in sys.argv:
            with nodes(wire, home, "whole") as n:
                print("whole", n.ended(), time.time()-t, flush=True)
        if "short" in sys.argv:
            with nodes(wire, home, "short") as n:
                print(until(lambda: n.saved() > 1, "checkpoint", n), flush=True)
                wire.cut(); time.sleep(8); wire.mend()
                print("short", n.ended(), flush=True)
                compare(home/"whole", home/"short")
        if "long" in sys.argv:
            with nodes(wire, home, "long") as n:
                until(lambda: n.saved() > 1, "checkpoint", n)
                wire.cut(); t=time.time()
                for k in range(60):
                    print(round(time.time()-t), [l.poll() for l in n.launchers], flush=True)
                    time.sleep(3)
                    if any(l.poll() is not None for l in n.launchers): break
                print(n.said(0)[-3000:], "-----", n.said(1)[-6000:], flush=True)

"""The network between two nodes is lost: `python tests/soak/network.py --work build/soak/network`, as root.

Two network namespaces are the nodes, joined by a bridge in a third one. Each has a launcher (torchrun) with one rank.
The bridge lets one node go: packets are dropped without a word to either side, as by a switch that fails. Where
namespaces cannot be made it says so and does nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "text"))

from soak.life import compare
from tfive.training.run_folder import CHECKPOINTS
from tiny import OVERRIDES, configure

TIMEOUT = 20
LIMIT = 900.0
"""Seconds after which anything here counts as hanging."""
NAMED = re.compile(r"rank (\d) of 2 \(process \d+ on .+\) last heard of in phase \w.*: no sign for \d+ s")
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
        try:
            self._laid()
        except (OSError, subprocess.CalledProcessError):
            self.__exit__()
            raise
        return self

    def _laid(self) -> None:
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

    def cut(self) -> None:
        """From now on nothing passes; both ends keep their link."""
        ip("-n", self.hub, "link", "set", "port1", "nomaster")

    def mend(self) -> None:
        ip("-n", self.hub, "link", "set", "port1", "master", "hub")

    def __exit__(self, *exception: object) -> None:
        for name in (self.hub, *self.nodes):
            with suppress(OSError):  # no such command: nothing was made
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


def interrupted(wire: Wire, home: Path) -> str:
    """Nothing passes for less than `distributed.timeout`: the run waits and goes on."""
    with nodes(wire, home, "interrupted") as found:
        until(lambda: found.saved() > 1, "checkpoint", found)
        wire.cut()
        time.sleep(TIMEOUT * 0.4)
        wire.mend()
        assert found.ended() == [0, 0], found.logs
        assert not any(NAMED.search(found.said(number)) for number in (0, 1)), found.logs
    compare(home / "undisturbed", home / "interrupted")
    return "waited out, the same to the bit"


def lost(wire: Wire, home: Path) -> str:
    """Nothing passes for longer: each side names the rank of the other and its phase, and ends; the launcher that keeps
    the rendezvous waits, the other one meets it again, or ends and is started again."""
    with nodes(wire, home, "lost") as found:
        until(lambda: found.saved() > 1, "checkpoint", found)
        wire.cut()
        seconds = until(lambda: all(NAMED.search(found.said(number)) for number in (0, 1)), "line of both sides")
        for number in (0, 1):
            named = NAMED.search(found.said(number))
            assert named is not None
            assert int(named[1]) == 1 - number, found.logs
        wire.mend()
        again = _met_again(found)
        assert found.ended() == [0, 0], found.logs
    compare(home / "undisturbed", home / "lost")
    return f"named by both sides after {seconds:.0f} s; {again}; the same to the bit"


def _met_again(found: Nodes) -> str:
    """Wait for the end, and start the launcher once more that has given up."""
    until(lambda: any(one.poll() is not None for one in found.launchers), "end")
    if found.launchers[1].poll() in (None, 0):
        return "the launchers met again"
    found.launchers[1] = found.launched(1)
    return "the other launcher gave up and was started again"


def smaller(wire: Wire, home: Path) -> str:
    """The same with `--nnodes 1:2`, and the network stays away: the node that keeps the rendezvous goes on alone."""
    with nodes(wire, home, "smaller", "1:2") as found:
        until(lambda: found.saved() > 1, "checkpoint", found)
        wire.cut()
        seconds = until(lambda: found.launchers[0].poll() is not None, "end of the first node")
        assert found.launchers[0].returncode == 0, found.logs
    summary = json.loads((home / "smaller" / "summary.json").read_text("utf-8"))
    assert [place.get("processes", 1) for place in summary["places"]] == [2, 1]
    return f"the first node went on alone and ended {seconds:.0f} s after the cut"


TRIED: dict[str, Callable[[Wire, Path], str]] = {"interrupted": interrupted, "lost": lost, "smaller": smaller}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--work", type=Path, default=Path("build/soak/network"), help="folder of runs")
    parser.add_argument("--only", nargs="+", choices=tuple(TRIED), default=list(TRIED))
    asked = parser.parse_args()
    home = asked.work.absolute()
    home.mkdir(parents=True, exist_ok=True)
    configure(home)
    with ExitStack() as stack:
        try:
            wire = stack.enter_context(Wire())
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"lost network: skipped (no network namespaces here: {error})")
            return 0
        if not (home / "undisturbed" / "summary.json").is_file():
            with nodes(wire, home, "undisturbed") as found:
                assert found.ended() == [0, 0], found.logs
        for name in asked.only:
            print(f"{name}: {TRIED[name](wire, home)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

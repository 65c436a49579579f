"""What a device does to runs: kills, no memory in any phase, memory over a long run.

    python tests/soak/device.py --device cuda --out build/device.json
    python tests/soak/device.py --device cuda --only growth --seconds 3600 --out build/growth.json

Runs of T⁵ on the embedded model with `run.deterministic`, by the command line's own functions, in forked processes, so
that this one never touches the device. Killed or out of memory, each must end as documented, leave a folder that
`tfive resume` goes on with, and come out bit for bit as the undisturbed one. On a CPU the allocator does not fail by
itself: the error is raised where a device would raise it. `make soak` runs the first where there is a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import shutil
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # asking for a device must not open it: forked processes do
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "text"))

import torch

from soak.life import compare
from soak.starved import PLACES, Place
from tfive.cli.app import main as tfive
from tfive.config.config import Config
from tfive.training.live_status import _resident as resident_bytes
from tfive.training.start import train
from tfive.training.status_files import Stopped
from tfive.training.summary import SUMMARY
from tiny import OVERRIDES, configure

SETTINGS = (
    "run.deterministic=true", "window.windows=2", "window.items=96", "qualify.rule=fixed", "run.develop_items=48",
    "run.develop_every=1", "run.checkpoint_phases=true", "text.sequences.test=24",
)  # fmt: skip
"""Two short windows of nano, in which no test keeps any phase from being reached."""

TINY = (
    "run.seed=2", "qualify.rule=fixed", "critic.head_lr=3e-2", "critic.lr=1e-3", "run.checkpoint_phases=true",
    "run.deterministic=true",
)  # fmt: skip
FOREVER = ("window.windows=5000", "optimizer.lr=1e-7", "run.keep=1", "run.checkpoint_phases=false")
"""A run that only its alarm ends, whose policy stays what it is."""
ALLOWED = 16 << 20
"""Bytes by which what is held may be more at the end of a long run than after its first quarter: lists of measurements
grow by a few KiB a window, and an allocator rounds."""


@dataclass
class Outcome:
    """How one story went."""

    name: str
    fine: bool = False
    said: str = ""
    seconds: float = 0.0
    numbers: dict[str, Any] = field(default_factory=dict)


def life(
    arguments: list[str], log: Path, prepare: Callable[[], None] | None = None, kill_after: float | None = None
) -> int | None:
    """A command in a forked process: its exit status, None where it was killed after so many seconds.

    What it prints goes to `log`; `prepare` runs in the process first.
    """
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        status = 70
        try:
            with log.open("w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            if prepare is not None:
                prepare()
            tfive(arguments)
        except SystemExit as end:
            status = int(end.code or 0)
        except BaseException:  # noqa: BLE001 - the parent hears of it by the status and finds it in the log
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    if kill_after is not None:
        handle = os.pidfd_open(child)
        if not select.select([handle], [], [], kill_after)[0]:
            os.kill(child, signal.SIGKILL)
        os.close(handle)
    status = os.waitpid(child, 0)[1]
    return None if os.WIFSIGNALED(status) else os.waitstatus_to_exitcode(status)


class Bench:
    """Where the stories are played: one undisturbed run, and a folder for each."""

    def __init__(self, home: Path, device: str, overrides: list[str], *, tiny: bool = False) -> None:
        """`tiny`: the smallest model of the tests, in place of the embedded one."""
        self.home, self.device, self.source = home, device, "nano"
        settings = [*SETTINGS, f"text.cache={home / 'cache'}"]
        if tiny:
            configure(home)
            self.source, settings = str(home / "tiny.toml"), [*OVERRIDES, *TINY]
        self.overrides = [*settings, f"model.device={device}", *overrides]
        self.undisturbed = home / "undisturbed"
        self.seconds = 0.0

    def start(self, folder: Path, prepare: Callable[[], None] | None = None, kill_after: float | None = None) -> Any:
        """Begin a run in `folder`, or go on with the one that is there."""
        if (folder / "config.toml").is_file():
            arguments = ["resume", str(folder), "--quiet"]
        else:
            shutil.rmtree(folder, ignore_errors=True)
            arguments = [
                "train",
                self.source,
                *(f"--set={one}" for one in self.overrides),
                "--out",
                str(folder),
                "--quiet",
            ]
        return life(arguments, self.log(folder), prepare, kill_after)

    def log(self, folder: Path) -> Path:
        return self.home / f"{folder.name}.log"

    def undisturbed_run(self) -> None:
        """The run that all others are compared with."""
        began = time.monotonic()
        status = self.start(self.undisturbed)
        if status != 0:
            raise SystemExit(
                f"the undisturbed run ended with status {status}:\n{self.log(self.undisturbed).read_text()}"
            )
        self.seconds = time.monotonic() - began

    def goes_on(self, folder: Path) -> None:
        """The run in `folder` comes to its end, bit for bit where the undisturbed one is."""
        status = self.start(folder)
        assert status == 0, f"could not go on, status {status}: {self.log(folder).read_text()[-600:]}"
        compare(self.undisturbed, folder)
        shutil.rmtree(folder)

    def killed(self, number: int, kills: int) -> Outcome:
        """One run, killed so many times at random moments, then brought to its end."""
        folder, rng = self.home / f"killed-{number}", random.Random(1000 + number)
        found, struck, span = Outcome(f"kill -9, run {number + 1}"), 0, self.seconds
        for _ in range(3 * kills):
            status = self.start(folder, kill_after=rng.uniform(0.05, 0.8) * span)
            struck += status is None
            assert status in (None, 0), f"status {status}: {self.log(folder).read_text()[-600:]}"
            if struck == kills:
                break
            if (folder / SUMMARY).is_file():
                # It was too quick: the undisturbed run, the first of all, also compiled kernels.
                self.goes_on(folder)
                span *= 0.6
        self.goes_on(folder)
        found.said, found.numbers = f"{struck} kills, the same to the bit", {"kills": struck}
        found.fine = struck > 0
        return found

    def starved(self, place: Place) -> Outcome:
        """One run without memory at a place: one line, status 1, and it goes on when there is memory again."""
        folder = self.home / f"starved-{place.name.replace(' ', '-')}"
        found = Outcome(f"no memory: {place.name}")
        errors: list[str] = []
        if place.resumed:
            # What fails is the reading of a checkpoint: there must be one, and something left to do.
            assert self.start(folder, prepare=lambda: PLACES["test"].starve(self.device)) == 1
        status = self.start(folder, prepare=lambda: place.starve(self.device))
        lines = [line for line in self.log(folder).read_text().splitlines() if line.strip()]
        if not (status == 0 and place.may_pass and self.device != "cpu"):
            assert status == 1, f"status {status}: {lines[-8:]}"
            errors = [line for line in lines if line.startswith("tfive: error:")]
            assert len(errors) == 1, f"not one line: {lines[-12:]}"
            assert not any("Traceback" in line for line in lines), f"a traceback: {lines[-12:]}"
            assert place.says in errors[0], errors[0]
            assert "resume" in errors[0], errors[0]
        self.goes_on(folder)
        found.said = "asks for none there" if not errors else errors[0].removeprefix("tfive: error: ")
        found.fine = True
        return found


def told(bench: Bench, name: str, story: Callable[[], Outcome]) -> int:
    """Play a story in a process of its own, which leaves its outcome as a file; returns the process."""
    child = os.fork()
    if child == 0:
        began = time.monotonic()
        try:
            found = story()
        except BaseException as error:  # noqa: BLE001 - it is what the table shows
            found = Outcome(name, said=" ".join(f"{type(error).__name__}: {error}".split())[:1500])
        found.seconds = round(time.monotonic() - began, 1)
        beside = bench.home / f"{name.replace(' ', '-')}.new"
        beside.write_text(json.dumps(asdict(found)), "utf-8")
        os.replace(beside, beside.with_suffix(".outcome"))
        os._exit(0)
    return child


def play(bench: Bench, stories: dict[str, Callable[[], Outcome]], together: int, limit: float) -> list[Outcome]:
    """All stories, so many at a time; those that no time was left for say so and are not fine."""
    waiting, running = list(stories), dict[int, str]()
    end = time.monotonic() + limit
    while waiting or running:
        while waiting and len(running) < together and time.monotonic() < end:
            name = waiting.pop(0)
            running[told(bench, name, stories[name])] = name
        if not running:
            break
        child, _ = os.waitpid(-1, 0)
        running.pop(child, None)
    found = []
    for name in stories:
        path = bench.home / f"{name.replace(' ', '-')}.outcome"
        said = json.loads(path.read_text("utf-8")) if path.is_file() else {"name": name, "said": "not tried: no time"}
        found.append(Outcome(**said))
    return found


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """SIGINT to this process after so many seconds."""
    signal.signal(signal.SIGALRM, lambda number, frame: os.kill(os.getpid(), signal.SIGINT))
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def growth(bench: Bench, seconds: float) -> Outcome:
    """One long run: what its process and the device hold at the end of every window must not grow."""
    samples: list[dict[str, float]] = []
    began = time.monotonic()

    def sample(report: dict[str, Any]) -> None:
        one = {"seconds": time.monotonic() - began, "resident": resident_bytes()}
        if bench.device != "cpu":
            one |= {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}
            one["most"] = torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        samples.append(one)

    config = Config.load(bench.source, overrides=[*bench.overrides, *FOREVER])
    with suppress(Stopped), _alarm(seconds):
        train(config, bench.home / "long", on_window=sample, quiet=True)
    found = Outcome(f"memory over {seconds:.0f} s", numbers={"windows": len(samples), "samples": samples})
    if len(samples) < 8:
        found.said = f"{len(samples)} windows are too few"
        return found
    said, fine = [f"{len(samples)} windows"], True
    quarter = len(samples) // 4
    for kind in samples[0].keys() - {"seconds"}:
        values = [one[kind] for one in samples]
        early, late = statistics.mean(values[quarter : 2 * quarter]), statistics.mean(values[-quarter:])
        slope = statistics.linear_regression(range(len(values) - quarter), values[quarter:]).slope
        found.numbers[kind] = {"first": values[0], "early": early, "late": late, "bytes_a_window": slope}
        said.append(f"{kind} {early / 2**20:.1f} → {late / 2**20:.1f} MiB ({slope / 2**10:+.1f} KiB a window)")
        fine = fine and late - early <= max(ALLOWED, 0.01 * early)
    found.said, found.fine = ", ".join(said), fine
    return found


def main() -> int:
    """Play what was asked for; 1 when anything was not as it must be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the stories without one")
    parser.add_argument("--only", choices=("kills", "memory", "growth"), action="append", help="part; kills and memory")
    parser.add_argument("--runs", type=int, default=2, help="runs that are killed")
    parser.add_argument("--kills", type=int, default=3, help="kills of each at most")
    parser.add_argument("--places", nargs="*", choices=sorted(PLACES), default=list(PLACES), help="where memory ends")
    parser.add_argument("--together", type=int, default=5, help="stories at the same time")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds after which no story is begun")
    parser.add_argument("--seconds", type=float, default=3600.0, help="length of the long run")
    parser.add_argument("--tiny", action="store_true", help="the smallest model of the tests, for a quick trial")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    parser.add_argument("--work", type=Path, default=Path("build/device"), help="folder of the runs, made anew")
    parser.add_argument("--out", type=Path, help="file for the outcomes as JSON")
    asked = parser.parse_args()
    began, home = time.monotonic(), asked.work.absolute()
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    bench, only = Bench(home, asked.device, asked.overrides, tiny=asked.tiny), asked.only or ["kills", "memory"]
    stories: dict[str, Callable[[], Outcome]] = {}
    if "kills" in only:
        stories |= {f"killed {n}": partial(bench.killed, n, asked.kills) for n in range(asked.runs)}
    if "memory" in only:
        stories |= {f"starved {name}": partial(bench.starved, PLACES[name]) for name in asked.places}
    if stories:
        bench.undisturbed_run()
        print(f"undisturbed run: {bench.seconds:.1f} s", flush=True)
    found = play(bench, stories, asked.together, asked.limit - (time.monotonic() - began))
    if "growth" in only:
        found += play(bench, {"long": lambda: growth(bench, asked.seconds)}, 1, asked.limit)
    for one in found:
        print(f"{'fine' if one.fine else 'NOT '} {one.seconds:7.1f} s  {one.name:28s} {one.said[:400]}", flush=True)
    took = time.monotonic() - began
    print(f"{sum(one.fine for one in found)} of {len(found)} as they must be, {took:.0f} s on {asked.device}")
    if asked.out is not None:
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        content = {"device": asked.device, "seconds": took, "undisturbed": bench.seconds}
        asked.out.write_text(json.dumps({**content, "outcomes": [asdict(one) for one in found]}, indent=1), "utf-8")
    return 0 if found and all(one.fine for one in found) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Seconds of a training window in one process, by several versions of the source, window by window in turn.

    python benchmarks/versions.py now=src before=/tmp/older/src --device cuda

Each version trains the same run (the embedded model, T⁵) in a process of its own; all are there at once, and one works
at a time, so that whatever else slows a machine slows them alike. The first window of each is not counted. Prints JSON:
medians, and how much longer each takes than the last version that was named.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SETTINGS = (
    "window.windows=1000", "window.items=96", "window.actor_steps=4", "qualify.rule=fixed", "critic.warmup_rounds=1",
    "calibration.mode=average", "run.develop_every=1000", "run.develop_items=12", "run.explorer_items=0",
    "run.checkpoint_every=0", "text.sequences.development=4", "text.sequences.test=4", "engine.fast=off",
)  # fmt: skip
"""Windows of equal work, by plain kernels, whose launches show every line of Python between them."""


def work(out: str, overrides: list[str]) -> None:
    """One version: a window whenever a line comes, and a line with its seconds back."""
    import torch

    import tfive
    from tfive.config.config import Config

    began = time.perf_counter()

    def turn(report: dict[str, object]) -> None:
        nonlocal began
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        print(f"seconds {time.perf_counter() - began}", flush=True)
        if not sys.stdin.readline():
            os._exit(0)  # nobody asks any more
        began = time.perf_counter()

    tfive.train(Config.load("nano", overrides=overrides), out, on_window=turn, quiet=True)


class Version:
    """A source tree at work."""

    def __init__(self, source: Path, out: Path, overrides: list[str]) -> None:
        words = [sys.executable, __file__, "--work", str(out), *overrides]
        beside = os.environ.get("PYTHONPATH")
        path = os.pathsep.join([str(source.resolve()), *([beside] if beside else [])])
        environment = os.environ | {"PYTHONPATH": path}
        self.process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def seconds(self) -> float:
        """Of the window that it was asked for."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("seconds "):
                return float(line.split()[1])
        raise SystemExit(f"a version ended with status {self.process.wait()}")

    def ask(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("versions", nargs="*", help="NAME=FOLDER of each version's src")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seconds", type=float, default=120.0, help="how long to go on, starting included")
    parser.add_argument("--set", action="append", default=[], help="settings of the run, as of tfive train")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.work:
        work(asked.work, asked.versions)
        return
    until = time.monotonic() + asked.seconds
    overrides = [*SETTINGS, f"model.device={asked.device}", *asked.set]
    with tempfile.TemporaryDirectory() as folder:
        named = [one.partition("=") for one in asked.versions]
        trees = {name: Version(Path(path), Path(folder) / name, overrides) for name, _, path in named}
        first = {name: tree.seconds() for name, tree in trees.items()}
        found: dict[str, list[float]] = {name: [] for name in trees}
        order = list(trees)
        while time.monotonic() < until or len(found[order[0]]) < 2:
            for name in order:
                trees[name].ask()
                found[name].append(trees[name].seconds())
            order.reverse()
        for tree in trees.values():
            tree.process.kill()
            tree.process.wait()
    medians = {name: statistics.median(some) for name, some in found.items()}
    last = medians[list(trees)[-1]]
    print(json.dumps({
        "windows": len(found[order[0]]), "median_seconds": medians,
        "longer": {name: round(own / last - 1, 4) for name, own in medians.items()},
        "spread": {name: [min(some), max(some)] for name, some in found.items()}, "first": first,
    }))  # fmt: skip


if __name__ == "__main__":
    main()

"""Structured fuzzing of everything tfive reads: `python tests/fuzz/run.py --examples 10000 --only configurations`.

Inputs stand near whole ones (a configuration, a checkpoint, a GGUF file, …) and are drawn by hypothesis. Three outcomes
are allowed: fine, one line with status 2, a clean status 1. Anything else is printed with the smallest input that gave
it, and the exit status is 1. `make fuzz` runs it; `make test` does not.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "text"))

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from fuzz.outcome import Tally
from fuzz.targets import TARGETS, Target
from fuzz.world import World
from tfive.errors import RunFailed
from tfive.report import figures
from tfive.training.loop import Loop

MEMORY = 8 << 30
"""Address space beyond what the process has before it reads anything (libraries for GPUs alone take several GiB): an
input that asks for more gets a MemoryError, and the machine keeps its own."""


def fuzz(target: Target, world: World, examples: int, number: int) -> Tally:
    """Draw that many inputs and judge what comes of each; the same number draws the same inputs."""
    tally = Tally()

    @seed(number)
    @settings(max_examples=examples, deadline=None, database=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(st.data())
    def each(data: st.DataObject) -> None:
        call, shown = data.draw(st.composite(lambda draw: target.draw(draw, world))())
        tally.judge(call, shown)

    each()
    return tally


def summed_up(loop: Loop) -> dict[str, Any]:
    """What is read is restored and summed up, not trained on."""
    if not loop.history:
        raise RunFailed("a run without a checkpoint would begin again here")
    return loop.summary(loop.history[0], loop.history[-1])


def address_space() -> int:
    """Bytes of address space that this process has taken."""
    return int(Path("/proc/self/statm").read_text("ascii").split()[0]) * resource.getpagesize()


def main() -> int:
    """Fuzz the chosen targets; 1 when anything was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=12_000, help="inputs in all, shared among the targets")
    parser.add_argument(
        "--only", action="append", choices=[target.name for target in TARGETS], help="this target alone"
    )
    parser.add_argument("--seed", type=int, default=0, help="which inputs")
    parser.add_argument("--work", type=Path, help="folder to work in; whole examples in it are used again")
    asked = parser.parse_args()
    figures.available = lambda: False  # drawing takes seconds and reads nothing that the table does not
    limit = address_space() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    with tempfile.TemporaryDirectory() as scratch:
        world = World(asked.work or Path(scratch) / "world")
        Loop.go = summed_up  # type: ignore[method-assign, assignment]
        chosen = [target for target in TARGETS if not asked.only or target.name in asked.only]
        total = sum(target.share for target in chosen)
        found = 0
        print("target            inputs    fine status 2 status 1  found  seconds")
        inputs = 0
        for target in chosen:
            began = time.monotonic()
            with open(os.devnull, "w") as nowhere:
                shown, sys.stdout, sys.stderr = (sys.stdout, sys.stderr), nowhere, nowhere
                try:
                    tally = fuzz(target, world, max(1, round(asked.examples * target.share / total)), asked.seed)
                finally:
                    sys.stdout, sys.stderr = shown
            counts = tally.counts
            inputs += counts.total()
            print(
                f"{target.name:16s} {counts.total():7d} {counts['fine']:7d} {counts['refused']:8d} "
                f"{counts['failed']:8d} {counts['found']:6d} {time.monotonic() - began:8.1f}",
                flush=True,
            )
            for kind, (often, smallest, trace) in sorted(tally.findings.items()):
                found += 1
                print(f"\n  {kind}, {often} times; smallest input:\n  {smallest[:1500]}\n{trace}", flush=True)
        print(f"{inputs} inputs, {found} kinds of findings")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

"""How far runs of one seed by 1, 2 and 4 processes drift apart in float32.

In exact arithmetic they are one run; in float32 sums are added in another order. Each process has one thread, so that
nothing else differs. Prints, window by window, how many thoughts on development texts are other ones, the difference of
gains and of the critics' scores, and at the end the distance of the weights beside how far they have moved.

    python studies/nano/processes.py --windows 2 --out runs/processes
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.numpy import load_file
from torch import Tensor

from tfive.training.checkpoint import CheckpointStore

MEASURES = ("development.thought_gain", "development.content_gain", "r2.1", "retention")


def run(folder: Path, processes: int, preset: str, windows: int, overrides: list[str]) -> None:
    """Train in `folder` unless a finished run is there."""
    if (folder / "summary.json").is_file():
        return
    sets = [f"window.windows={windows}", "run.develop_every=1", "run.checkpoint_every=0", *overrides]
    words = [word for one in sets for word in ("--set", one)]
    several = ["--processes", str(processes)] if processes > 1 else []
    command = [sys.executable, "-m", "tfive", "train", preset, *words, "--out", str(folder), "--quiet", *several]
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def thoughts(folder: Path, window: int) -> tuple[Any, Any]:
    """The thoughts kept of a window as texts, and their lengths."""
    kept = load_file(folder / "explorer" / f"window-{window:05d}.safetensors")
    ends = kept["piece_ends"].tolist()
    raw = kept["pieces"].tobytes()
    pieces = [raw[start:end] for start, end in zip([0, *ends], ends)]
    texts = [
        b"|".join(pieces[number] for number in row[:length]) for row, length in zip(kept["tokens"], kept["length"])
    ]
    return texts, kept["length"]


def metrics(folder: Path) -> dict[int, dict[str, float]]:
    """Every number of each window."""
    found: dict[int, dict[str, float]] = {}
    for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines():
        entry = json.loads(line)
        found.setdefault(int(entry["step"]), {}).update({k: v for k, v in entry.items() if isinstance(v, float)})
    return found


def weights(folder: Path) -> dict[str, Tensor]:
    """The actor's weights at the end."""
    found = CheckpointStore(folder / "checkpoints").newest().checkpoint
    if found is None:
        raise SystemExit(f"{folder}: no checkpoint")
    model: dict[str, Tensor] = found.tree["method"]["actor"]["model"]
    return model


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The Euclidean distance of two sets of weights."""
    return float(torch.stack([(one[name].double() - other[name].double()).square().sum() for name in one]).sum().sqrt())


def report(alone: Path, shared: Path, processes: int) -> None:
    """How `shared` differs from the run by one process."""
    one, other = metrics(alone), metrics(shared)
    windows = sorted(int(path.stem.removeprefix("window-")) for path in (alone / "explorer").glob("window-*"))
    for window in windows:
        mine, theirs = thoughts(alone, window)[0], thoughts(shared, window)[0]
        changed = sum(a != b for a, b in zip(mine, theirs, strict=True))
        parts = [f"{changed} of {len(mine)} thoughts differ"]
        for name in MEASURES:
            a, b = (found.get(window, {}).get(name) for found in (one, other))
            if a is not None and b is not None:
                parts.append(f"{name.removeprefix('development.')} {a:+.4f}, {abs(a - b):.0e} apart")
        print(f"1 and {processes} processes, window {window}: {', '.join(parts)}", flush=True)
    moved = json.loads((alone / "summary.json").read_text("utf-8"))["weight_change"]
    there = weights(alone)
    norm = distance(there, {name: torch.zeros_like(value) for name, value in there.items()})
    apart = distance(there, weights(shared)) / norm
    print(f"1 and {processes} processes, weights: apart by {apart:.2e} of their norm, after a change of {moved}")


def main() -> None:
    """Train what is missing and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=Path("runs/processes"))
    parser.add_argument("--preset", default="nano")
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--processes", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    asked = parser.parse_args()
    for count in (1, *asked.processes):
        run(asked.out / f"by-{count}", count, asked.preset, asked.windows, asked.overrides)
        if count > 1:
            report(asked.out / "by-1", asked.out / f"by-{count}", count)


if __name__ == "__main__":
    main()

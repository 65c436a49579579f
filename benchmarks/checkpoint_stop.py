"""How long a checkpoint stops training, and how long it then takes to reach the disk, for one process and several.

The state is an actor's: weights and two moments in float32, in tensors of a transformer's sizes. With several processes
it is either replicated (each holds all of it, and writes its share) or sharded (each holds a part). `slower` is how
much longer a fixed piece of work takes beside the write than without it. Prints JSON, one line a case.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tfive.distributed.launch import joined
from tfive.distributed.pieces import Piece
from tfive.distributed.world import World
from tfive.training.checkpoint import CheckpointStore

WIDTH = 1024


def state(megabytes: int, world: World, device: torch.device, sharded: bool) -> dict[str, Any]:
    """Three entries (weights, first and second moment) of matrices with `WIDTH` columns, `megabytes` in all."""
    rows = 4 * WIDTH
    count = max(1, megabytes * 2**20 // (3 * rows * WIDTH * 4))

    def made(number: int) -> Tensor | Piece:
        if not sharded:
            return torch.full((rows, WIDTH), float(number), device=device)
        own = world.share(rows)
        local = torch.full((own.stop - own.start, WIDTH), float(number), device=device)
        return Piece(local, (rows, WIDTH), (own.start, 0))

    return {name: [made(number) for number in range(count)] for name in ("weights", "first", "second")}


def work(device: torch.device) -> float:
    """Seconds of a fixed number of small steps, as a training step is made of."""
    own = torch.ones(256, 256, device=device)
    began = time.perf_counter()
    for _ in range(300):
        own = (own @ own).clamp(0, 1)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def measured(world: World, folder: Path, megabytes: int, device: torch.device, sharded: bool) -> dict[str, Any]:
    tree = state(megabytes, world, device, sharded)
    store = CheckpointStore(folder, keep=1, world=world)
    work(device)
    alone = statistics.median(work(device) for _ in range(5))
    stops, writes, beside = [], [], []
    for _ in range(3):
        world.barrier("before a save")
        began = time.perf_counter()
        store.begin(tree)
        stops.append(time.perf_counter() - began)
        beside.append(work(device))
        store.wait()
        writes.append(time.perf_counter() - began)
    size = sum(path.stat().st_size for path in store.paths()[-1].iterdir())
    return {
        "processes": world.size,
        "state": "sharded" if sharded else "replicated",
        "megabytes": round(size / 2**20),
        "stop_seconds": round(statistics.median(stops), 3),
        "write_seconds": round(statistics.median(writes), 3),
        "slower": round(statistics.median(beside) / alone, 2),
    }


def run_one(folder: Path, megabytes: int, device: torch.device, sharded: bool) -> None:
    """What each process does; the first one prints."""
    torch.set_num_threads(1)
    with joined(device, 600.0) as world:
        found = measured(world, folder, megabytes, device, sharded)
        if world.leads:
            print(json.dumps(found), flush=True)


def start(size: int, sharded: bool, options: argparse.Namespace) -> None:
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = [sys.executable, __file__, "--rank", "--megabytes", str(options.megabytes), "--device", options.device]
    words = [*common, "--folder", str(folder), *(["--sharded"] if sharded else [])]
    own = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    try:
        started = [
            subprocess.Popen(words, env={**os.environ, **own, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(size)
        ]
        codes = [process.wait() for process in started]
        if any(codes):
            raise SystemExit(f"{size} processes: one failed")
    finally:
        shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=400, help="size of the state")
    parser.add_argument("--processes", default="1,2,4", help="numbers of processes, separated by commas")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--folder", help="where to write; the system's temporary folder without it")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--sharded", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        run_one(Path(options.folder), options.megabytes, torch.device(options.device), options.sharded)
        return
    for size in map(int, options.processes.split(",")):
        for sharded in (False, True) if size > 1 else (False,):
            start(size, sharded, options)


if __name__ == "__main__":
    main()

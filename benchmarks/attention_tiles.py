"""Milliseconds of tiled attention by the size of its tiles, beside masked attention: how `tiled.SIZES` was found.

`python benchmarks/attention_tiles.py --out results` on a GPU; rows are those of an actor pass.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tfive.cli.options import script
from tfive.tree.attention import TreePass
from tfive.tree.fast.tiled import SIZES, Tile, Tiles, differences
from tfive.tree.grow import full_thoughts, grow
from tfive_lab.bench.work import Work, make_plan, make_texts

CANDIDATES = {
    "forward": (SIZES.forward, Tile(64, 4, 2), Tile(128, 8, 2), Tile(128, 8, 3)),
    "keys": (SIZES.keys, Tile(64, 8, 2), Tile(128, 8, 2), Tile(64, 4, 1)),
    "queries": (SIZES.queries, Tile(128, 8, 2), Tile(64, 4, 3)),
}


def milliseconds(call: Callable[[], Any]) -> float:
    """Device time of a call, the mean of ten after three."""
    for _ in range(3):
        call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(10):
        call()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 10


def measured(heads: tuple[int, int, int], budget: float) -> dict[str, Any]:
    """Milliseconds of every candidate within the budget, and of masked attention."""
    from tfive.tree.fast import tiled_kernels

    start, device, work = time.perf_counter(), torch.device("cuda"), Work()
    texts = make_texts(work, 1000).to(device)
    plan = make_plan(work, 1000)
    layout = grow(texts, plan, full_thoughts(texts, plan))
    queries, keys, features = heads
    nodes = layout.node_count
    query = torch.randn(work.texts, queries, nodes, features, device=device, dtype=torch.bfloat16, requires_grad=True)
    key, value = (
        torch.randn(work.texts, keys, nodes, features, device=device, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(2)
    )
    found: dict[str, Any] = {"apart": differences(*heads, device, torch.bfloat16)}
    masked = TreePass(layout, "folded")
    output = masked.attend(0, query, key, value, features**-0.5)
    slope = torch.randn_like(output)
    with torch.no_grad():
        found["masked forward"] = milliseconds(lambda: masked.attend(0, query, key, value, features**-0.5))
    leaves = (query, key, value)
    found["masked backward"] = milliseconds(lambda: torch.autograd.grad(output, leaves, slope, retain_graph=True))
    found["tiles made"] = milliseconds(lambda: Tiles.between(layout, 0).keys(64))
    tiles, scale = Tiles.between(layout, 0), features**-0.5
    three = (query.detach(), key.detach(), value.detach())
    forward = SIZES.forward
    out, mass = tiled_kernels.attend(*three, tiles.word_Bnw, tiles.queries(forward.rows), scale, forward)
    turned = slope.transpose(1, 2)
    calls: dict[str, Callable[[Tile], Any]] = {
        "forward": lambda t: tiled_kernels.attend(*three, tiles.word_Bnw, tiles.queries(t.rows), scale, t),
        "queries": lambda t: tiled_kernels.query_slope(
            three, (out, mass), turned, tiles.word_Bnw, tiles.queries(t.rows), scale, t
        ),
        "keys": lambda t: tiled_kernels.key_slope(
            three, mass, mass, turned, tiles.turned_Bmw, tiles.keys(t.rows), scale, t
        ),
    }
    for place in range(max(len(some) for some in CANDIDATES.values())):
        for name, some in CANDIDATES.items():
            if place < len(some) and time.perf_counter() - start < budget:
                tile = some[place]
                found[f"{name} {tuple(tile)}"] = milliseconds(lambda name=name, tile=tile: calls[name](tile))  # type: ignore[misc]
    return found | {"seconds": time.perf_counter() - start}


def main(given: list[str] | None = None) -> int:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--heads", default="16,8,128", help="query heads, key heads, features of a head")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds after which no further size is tried")
    parser.add_argument("--out", type=Path, help="folder for the JSON")
    asked = parser.parse_args(given)
    queries, keys, features = (int(part) for part in asked.heads.split(","))
    found = measured((queries, keys, features), asked.budget)
    print(json.dumps(found, indent=1))
    if asked.out is not None:
        asked.out.mkdir(parents=True, exist_ok=True)
        (asked.out / "attention-tiles.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    script(main)

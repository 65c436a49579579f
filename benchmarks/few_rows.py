"""Products of 128 rows, as a sampling step makes them, by kernels of Triton against cuBLAS.

`python benchmarks/few_rows.py --out results` on a GPU, 40 seconds there. Every shape is multiplied by as many weights
as a model has layers, so that none lies in a cache, in a replayed graph. Of many sizes of tiles the best are tried
once more with programs that start before the product before has ended, and that ask for their weights ahead. Nothing in
tfive uses these kernels: none was faster.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tfive.cli.options import script

ROWS = 128
SHAPES = {
    "query, key and value, 1.7B": (4096, 2048, False, 28),
    "output": (2048, 2048, True, 28),
    "gate and up": (12288, 2048, False, 28),
    "down": (2048, 6144, True, 28),
    "into a recurrent layer, 2B": (8224, 2048, False, 18),
    "query, key and value, 2B": (5120, 2048, False, 6),
    "vocabulary, 1.7B": (151936, 2048, False, 1),
    "vocabulary, 2B": (248320, 2048, False, 1),
}
"""Columns, features that are summed over, whether the product is added to what is there, and how many weights."""
BANDWIDTH = 4.8e12
"""Bytes a second of an H200, by its vendor."""


@triton.jit
def _product(
    x_ptr, w_ptr, out_ptr, part_ptr, count_ptr, M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, ADD: tl.constexpr,
    EARLY: tl.constexpr, AHEAD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tile, share = tl.program_id(0), tl.program_id(1)
    m, n = tl.arange(0, BM), tile * BN + tl.arange(0, BN)
    keep_m, keep_n = m < M, n < N
    span = K // SPLIT
    start = tl.multiple_of(share * span, BK)
    k = start + tl.arange(0, BK)
    w_at = w_ptr + n.to(tl.int64)[:, None] * K + k[None, :]
    x_at = x_ptr + m[:, None] * K + k[None, :]
    if EARLY:
        gdc_launch_dependents()
    if AHEAD:
        line = tl.arange(0, 8)
        for at in tl.range(0, span, 512):
            where = w_ptr + n.to(tl.int64)[:, None] * K + start + at + line[None, :] * 64
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [where], dtype=tl.int32, is_pure=False, pack=1
            )
    if EARLY:
        gdc_wait()
    total = tl.zeros((BM, BN), tl.float32)
    for _ in tl.range(0, span, BK, num_stages=STAGES):
        w = tl.load(w_at, mask=keep_n[:, None], other=0.0)
        x = tl.load(x_at, mask=keep_m[:, None], other=0.0)
        total = tl.dot(x, w.T, total)
        w_at += BK
        x_at += BK
    out_at, keep = out_ptr + m[:, None] * N + n[None, :], keep_m[:, None] & keep_n[None, :]
    last = True
    if SPLIT > 1:
        part = part_ptr + m[:, None] * N + n[None, :]
        tl.store(part + share * M * N, total, mask=keep)
        tl.debug_barrier()
        # Whoever comes last adds up all shares, in their order.
        last = tl.atomic_add(count_ptr + tile, 1, sem="acq_rel", scope="gpu") == SPLIT - 1
    if last:
        if SPLIT > 1:
            total = tl.zeros((BM, BN), tl.float32)
            for one in tl.static_range(SPLIT):
                total += tl.load(part + one * M * N, mask=keep, other=0.0, cache_modifier=".cg")
            tl.store(count_ptr + tile, 0)
        if ADD:
            total += tl.load(out_at, mask=keep, other=0.0).to(tl.float32)
        tl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=keep)


@dataclass(frozen=True)
class Way:
    """How a product is divided among programs, and how these begin."""

    columns: int
    features: int
    split: int
    warps: int
    stages: int
    early: bool = False
    ahead: bool = False

    def serves(self, n: int, k: int) -> bool:
        """Whether it divides the product evenly, into enough programs that fit a multiprocessor."""
        programs = triton.cdiv(n, self.columns) * self.split
        fits = (ROWS + self.columns) * self.features * 2 * self.stages <= 220_000
        few = programs <= 600 if n < 100_000 else self.split == 1
        return k % (self.split * self.features) == 0 and programs >= 96 and few and fits


WAYS = [
    Way(*sizes)
    for sizes in itertools.product((32, 64, 128), (64, 128), (1, 2, 4, 8), (4, 8), (3, 4, 5))
    if not (sizes[3] == 4 and sizes[0] == 128) and not (sizes[1] == 128 and sizes[4] == 5)
]


class Room:
    """What kernels that share a product write to before it is added up."""

    def __init__(self) -> None:
        self.parts = torch.empty(8 * ROWS * 12288, device="cuda")
        self.counts = torch.zeros(8192, dtype=torch.int32, device="cuda")

    def multiply(self, x: Tensor, w: Tensor, out: Tensor, add: bool, way: Way, *, compile_only: bool = False) -> None:
        """`out` by the kernel; or only its compilation."""
        n, k = w.shape
        given = {"BM": ROWS, "BN": way.columns, "BK": way.features, "SPLIT": way.split, "ADD": add}
        given |= {"EARLY": way.early, "AHEAD": way.ahead, "STAGES": way.stages}
        given |= {"num_warps": way.warps, "num_stages": way.stages, **({"launch_pdl": True} if way.early else {})}
        words = (x, w, out, self.parts, self.counts, len(x), n, k)
        if compile_only:
            _product.warmup(*words, grid=(1,), **given)
        else:
            _product[(triton.cdiv(n, way.columns), way.split)](*words, **given)


def microseconds(work: Callable[[], None], count: int) -> float:
    """Of one of `count` products of the work, replayed: the median of seven."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    taken = []
    for _ in range(8):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        taken.append(float(begin.elapsed_time(end)))
    return statistics.median(taken[1:]) * 1e3 / count


def tried(room: Room, n: int, k: int, add: bool, count: int) -> dict[str, Any]:
    """Microseconds of the library, and of every way with its error."""
    weights = [0.02 * torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
    x = torch.randn(ROWS, k, device="cuda", dtype=torch.bfloat16)
    out = torch.zeros(ROWS, n, device="cuda", dtype=torch.bfloat16)
    wanted = x.float() @ weights[0].float().t()

    def library() -> None:
        for w in weights:
            out.addmm_(x, w.t()) if add else torch.nn.functional.linear(x, w)

    def timed(way: Way) -> dict[str, Any]:
        out.zero_()
        room.multiply(x, weights[0], out, add, way)
        apart = float((out.float() - wanted).norm() / wanted.norm())

        def work() -> None:
            for w in weights:
                room.multiply(x, w, out, add, way)

        return {"way": asdict(way), "us": microseconds(work, count), "apart": apart}

    def further(found: list[dict[str, Any]]) -> Iterator[Way]:
        for one in sorted(found, key=lambda each: float(each["us"]))[:4]:
            for early, ahead in ((True, False), (False, True), (True, True)):
                yield replace(Way(**one["way"]), early=early, ahead=ahead)

    ways = [way for way in WAYS if way.serves(n, k)]
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(lambda way: room.multiply(x, weights[0], out, add, way, compile_only=True), ways))
    found = [timed(way) for way in ways]
    found += [timed(way) for way in further(found)]
    found.sort(key=lambda each: float(each["us"]))
    return {"floor_us": 2e6 * n * k / BANDWIDTH, "library_us": microseconds(library, count), "ways": found}


def main(given: list[str] | None = None) -> int:
    """Try, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="folder for the JSON")
    asked = parser.parse_args(given)
    report: dict[str, Any] = {"device": torch.cuda.get_device_name(), "rows": ROWS, "shapes": {}}
    room = Room()
    for name, shape in SHAPES.items():
        found = report["shapes"][name] = tried(room, *shape)
        best = found["ways"][0]
        print(f"{name}: floor {found['floor_us']:.2f}, library {found['library_us']:.2f}, best {best}", flush=True)
        if asked.out is not None:
            asked.out.mkdir(parents=True, exist_ok=True)
            (asked.out / "few-rows.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    script(main)

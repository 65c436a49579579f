"""Compile the kernels of some shapes into Triton's cache, by several processes, so that no measurement waits for it.

`python benchmarks/compile_kernels.py --shapes qwen3-1.7b,qwen3.5-2b --workers 12` on a GPU; nothing is launched there.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tfive.cli.options import script
from tfive.errors import UserError
from tfive.models.shape import known_shapes
from tfive.tree.fast import fused, tiled, training_ops
from tfive.tree.fast.agreement import KERNEL_BOUNDS
from tfive.tree.fast.delta_kernel import triton_differences
from tfive.tree.fast.delta_step import RecurrentHeads
from tfive.tree.fast.hf_fused import AttentionPart, fused_block, rotary_angles
from tfive.tree.grow import grow, small_texts
from tfive.tree.head import normaliser_kernel
from tfive.tree.hf import Backbone
from tfive_lab.bench.recurrent_cases import heads_of, path_case, step_case
from tfive_lab.bench.selfcheck import MODELS
from tfive_lab.bench.work import SHAPES, Work, make_plan, random_model


def attention_cases(facts: dict[str, Any], device: torch.device, dtype: torch.dtype) -> Iterator[Callable[[], Any]]:
    """What the choice of kernels for blocks that attend compares, at a shape's heads and widths."""
    few = {"num_hidden_layers": facts.get("full_attention_interval", 4), "vocab_size": 1024}
    backbone = Backbone(random_model(facts | few, device, dtype))
    with torch.no_grad():
        layout = grow(small_texts(1000).to(device), make_plan(Work(), 1000))
        turned = rotary_angles(backbone, layout)[0].shape[-1]
    block = fused_block(backbone.blocks[-1], turned, 1.0)
    if isinstance(block.mixer, AttentionPart):
        heads, width = block.mixer.heads, int(backbone.config.hidden_size)
        shape = training_ops.BlockShape(heads, width, block.down.part.in_features)
        yield lambda: fused.differences(fused.TritonOps(), heads, device, dtype)
        yield lambda: training_ops.differences(training_ops.TritonTraining(), shape, device, dtype)
        yield lambda: normaliser_kernel(device)
        if dtype == torch.bfloat16:
            yield lambda: tiled.differences(heads.queries, heads.keys, heads.features, device, dtype)


def recurrent_cases(
    heads: RecurrentHeads, device: torch.device, dtype: torch.dtype, thorough: bool = False
) -> Iterator[Callable[[], Any]]:
    """The same for recurrent layers, and some paths of the benchmark's work."""
    from tfive.tree.fast import delta_step_triton
    from tfive.tree.fast.delta_chunk import TritonRule
    from tfive.tree.fast.delta_step_choice import all_differences

    yield lambda: all_differences(delta_step_triton.step, heads, device, dtype, True)
    yield lambda: triton_differences(heads, device, dtype, thorough)
    if thorough or dtype == torch.float32:
        return
    work = Work()
    yield step_case(heads, work, device)[0]

    def paths() -> None:
        for case in ((8, work.tokens, 0), (8, work.length + 1, 8), (8, work.horizon, 8)):
            inputs = path_case(heads, *case, device)
            output, trace = TritonRule(exact=False)(*inputs)
            at = torch.arange(4, device=device)
            torch.autograd.grad(output.sum() + trace.state_after(at, at).sum(), inputs)

    yield paths


def cases(shape: str, device: torch.device) -> Iterator[Callable[[], Any]]:
    """All kernels of a shape, or of the self-check."""
    if shape == "selfcheck":
        for facts, dtype in itertools.product(MODELS.values(), KERNEL_BOUNDS):
            yield from attention_cases(facts, device, dtype)
        for dtype in KERNEL_BOUNDS:
            yield from recurrent_cases(RecurrentHeads(2, 4, 64, 64, 3), device, dtype, thorough=True)
        yield from recurrent_cases(RecurrentHeads(16, 16, 128, 128, 3), device, torch.bfloat16, thorough=True)
        return
    stored = known_shapes()
    facts = stored[next(key for key in stored if key.startswith(SHAPES[shape]))]
    yield from attention_cases(facts, device, torch.bfloat16)
    if "linear_num_key_heads" in facts:
        for dtype in KERNEL_BOUNDS:  # models are admitted in float32
            yield from recurrent_cases(heads_of(shape), device, dtype)


def compile_share(shapes: list[str], rank: int, workers: int) -> None:
    """Compile this worker's share of the kernels, and launch none."""
    from triton.runtime.jit import JITFunction

    launch, seen = JITFunction.run, dict[str, int]()

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        # Triton compiles anew for other types, for the number 1 and for multiples of 16.
        kinds = [x.dtype if isinstance(x, Tensor) else (x == 1, x % 16 == 0) for x in args] + sorted(options.items())
        turn = seen.setdefault(f"{self.fn.__name__} {kinds}", len(seen))
        return launch(self, *args, grid=grid, warmup=True, **options) if turn % workers == rank else None

    JITFunction.run = compile_only
    for shape in shapes:
        for case in cases(shape, torch.device("cuda")):
            case()


def main(given: list[str] | None = None) -> int:
    """Start the workers, or be one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shapes", default="qwen3-1.7b", help="separated by commas; `selfcheck` is one too")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--rank", type=int, help="be this worker")
    asked = parser.parse_args(given)
    if not torch.cuda.is_available():
        raise UserError("compile_kernels compiles for the CUDA device that is there; there is none here")
    if asked.rank is not None:
        compile_share(asked.shapes.split(","), asked.rank, asked.workers)
        return 0
    again = [sys.executable, __file__, "--shapes", asked.shapes, "--workers", str(asked.workers), "--rank"]
    running = [subprocess.Popen([*again, str(rank)]) for rank in range(asked.workers)]
    return max(worker.wait() for worker in running)


if __name__ == "__main__":
    script(main)

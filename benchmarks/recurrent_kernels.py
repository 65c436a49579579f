"""Kernels of recurrent layers one by one: how far from PyTorch, how long, and how many bytes they must move.

`python benchmarks/recurrent_kernels.py --shape qwen3.5-2b --out results`. With `--sweep` the sizes of programs are
tried as well, until `--budget` seconds are over.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tfive.cli.options import script
from tfive.errors import UserError
from tfive.models.shape import known_shapes
from tfive.tree.fast import delta_chunk, delta_step_triton, mixer
from tfive.tree.fast.delta_chunk import TritonRule
from tfive.tree.fast.delta_kernel import triton_differences
from tfive.tree.fast.delta_step import LayerMemory, RecurrentHeads, StepWeights
from tfive.tree.fast.delta_step_choice import step_differences
from tfive.tree.fast.mixer import TritonMixer
from tfive_lab.bench.work import SHAPES, Work


def heads_of(shape: str) -> RecurrentHeads:
    """The recurrent layers of a known shape."""
    facts = known_shapes()
    known: dict[str, Any] = facts[next(key for key in facts if key.startswith(SHAPES[shape]))]
    if "linear_num_key_heads" not in known:
        raise UserError(f"shape {shape} has no recurrent layers; use one of qwen3.5-2b, qwen3.5-9b")
    names = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
    keys, values, key_features, value_features = (int(known[name]) for name in names)
    return RecurrentHeads(keys, values, key_features, value_features, int(known["linear_conv_kernel_dim"]) - 1)


def milliseconds(call: Callable[[], Any], times: int = 20) -> float:
    """Median time of a call on the device, after two to warm up."""
    taken = []
    for turn in range(times + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        if turn > 1:
            taken.append(begin.elapsed_time(end))
    return statistics.median(taken)


def step_case(heads: RecurrentHeads, work: Work, device: torch.device) -> tuple[Callable[[], Any], int]:
    """One layer's step of all branches at the last place, and the bytes of states it reads."""
    branches, width = work.branches, 2048
    like = torch.randn(branches, width, device=device).bfloat16()
    memory = LayerMemory.empty(branches // work.group, branches, work.length + 1, heads, like)
    memory.state_XIEF.normal_()
    sizes = (heads.channels, heads.values * heads.value_features, heads.values, heads.values)
    joined = torch.randn(branches, sum(sizes), device=device).bfloat16()
    log_rate, bias = (torch.randn(heads.values, device=device).bfloat16() for _ in range(2))
    taps = torch.randn(heads.channels, heads.memory + 1, device=device).bfloat16()
    weights = StepWeights(heads, taps, log_rate, bias, torch.ones(heads.value_features, device=device).bfloat16(), 1e-6)
    place = torch.tensor([work.length], device=device)
    products: Any = joined.split(sizes, -1)
    moved = memory.state_XIEF.numel() * 2 + memory.key_QIZE.numel() * 4 + memory.write_QIZF.numel() * 4
    return lambda: delta_step_triton.step(products, weights, memory, place), moved


def path_case(heads: RecurrentHeads, paths: int, length: int, states: int, device: torch.device) -> list[Tensor]:
    """Rule inputs of paths in bfloat16, with an initial state where `states` is not 0."""
    count, keys = heads.values, heads.key_features
    query, key = (
        torch.nn.functional.normalize(torch.randn(paths, length, count, keys, device=device), dim=-1) for _ in range(2)
    )
    value = torch.randn(paths, length, count, heads.value_features, device=device)
    found = [x.bfloat16() for x in (query * keys**-0.5, key, value)]
    found += [-torch.rand(paths, length, count, device=device), torch.rand(paths, length, count, device=device)]
    if states:
        found.append(torch.randn(states, count, keys, heads.value_features, device=device) * 0.1)
    return [x.requires_grad_() for x in found]


def rule_times(inputs: list[Tensor], forks: int) -> dict[str, float]:
    """Reading, forking and going back, with gradients of everything."""
    rule, device = TritonRule(exact=False), inputs[0].device
    paths, length = inputs[0].shape[:2]
    at = torch.arange(forks, device=device)
    place = at % paths, (at * 37) % length + 1
    output, trace = rule(*inputs)
    state = trace.state_after(*place)
    grads = torch.randn_like(output), torch.randn_like(state)

    def back() -> None:
        torch.autograd.grad((output, state), inputs, grads, retain_graph=True)

    return {
        "read": milliseconds(lambda: rule(*inputs)),
        "fork": milliseconds(lambda: trace.state_after(*place)),
        "back": milliseconds(back),
    }


def mixer_times(heads: RecurrentHeads, paths: int, length: int, device: torch.device) -> dict[str, float]:
    """Convolution, gates and gated norm of the nodes, and their backward passes."""
    mixed, nodes = TritonMixer(), (paths, length)
    sequence = torch.randn(paths, length + heads.memory, heads.channels, device=device).bfloat16().requires_grad_()
    taps = torch.randn(heads.channels, heads.memory + 1, device=device).bfloat16().requires_grad_()
    output = torch.randn(*nodes, heads.values, heads.value_features, device=device).bfloat16().requires_grad_()
    gate = torch.randn(*nodes, heads.values * heads.value_features, device=device).bfloat16().requires_grad_()
    weight = torch.ones(heads.value_features, device=device).bfloat16().requires_grad_()
    found = mixed.heads(sequence, taps, heads, None)
    normed = mixed.gated_norm(output, gate, weight, 1e-6)
    grads = [torch.randn_like(x) for x in found]
    return {
        "heads": milliseconds(lambda: mixed.heads(sequence, taps, heads, None)),
        "heads back": milliseconds(lambda: torch.autograd.grad(found, (sequence, taps), grads, retain_graph=True)),
        "gated norm": milliseconds(lambda: mixed.gated_norm(output, gate, weight, 1e-6)),
        "gated norm back": milliseconds(
            lambda: torch.autograd.grad(normed, (output, gate, weight), gate.detach(), retain_graph=True)
        ),
    }


def checks(heads: RecurrentHeads, device: torch.device) -> dict[str, Any]:
    """How far every kernel is from PyTorch, by precision."""
    found = {}
    for dtype in (torch.bfloat16, torch.float32):
        found[str(dtype).removeprefix("torch.")] = {
            "step": step_differences(delta_step_triton.step, heads, device, dtype),
            "passes": triton_differences(heads, device, dtype, thorough=True),
        }
    return found


def times(heads: RecurrentHeads, work: Work, device: torch.device) -> Iterator[tuple[str, Any]]:
    """Milliseconds of one layer's kernels on the benchmark's work."""
    call, moved = step_case(heads, work, device)
    taken = milliseconds(call)
    yield "step", {"ms": taken, "TB/s": moved / taken / 1e9}
    yield "trunk", rule_times(path_case(heads, work.texts, work.tokens, 0, device), work.branches)
    yield "thoughts", rule_times(path_case(heads, work.branches, work.length + 1, work.branches, device), work.branches)
    segments = work.branches * len(work.checkpoints)
    yield "segments", rule_times(path_case(heads, segments, work.horizon, segments, device), 16)
    yield "around the trunk", mixer_times(heads, work.texts, work.tokens, device)


def sweep(heads: RecurrentHeads, work: Work, device: torch.device, until: float) -> Iterator[tuple[str, Any]]:
    """The same with other sizes of programs, as long as there is time."""
    call, _ = step_case(heads, work, device)
    trunk = path_case(heads, work.texts, work.tokens, 0, device)
    thoughts = path_case(heads, work.branches, work.length + 1, work.branches, device)
    for warps in (8, 2):
        if time.perf_counter() < until:
            delta_step_triton._WARPS = warps
            yield f"step warps {warps}", milliseconds(call)
    for features, warps in ((64, 4), (32, 4), (64, 8), (32, 8)):
        if time.perf_counter() < until:
            delta_chunk._FEATURES, delta_chunk._WARPS = features, {16: warps, 32: warps}
            yield f"trunk features {features} warps {warps}", rule_times(trunk, work.branches)
            yield f"thoughts features {features} warps {warps}", rule_times(thoughts, work.branches)
    for nodes in (8, 32):
        if time.perf_counter() < until:
            mixer._NODES = nodes
            yield f"mixer nodes {nodes}", mixer_times(heads, work.texts, work.tokens, device)


def compiled_ahead(heads: RecurrentHeads, work: Work, device: torch.device, rank: int, workers: int) -> None:
    """Compile this worker's share of the kernels into Triton's cache, and launch none."""
    from triton.runtime.jit import JITFunction

    launch, seen = JITFunction.run, dict[str, int]()

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        # Triton compiles anew for other types, for the number 1 and for multiples of 16.
        kinds = [x.dtype if isinstance(x, Tensor) else (x == 1, x % 16 == 0) for x in args] + sorted(options.items())
        turn = seen.setdefault(f"{self.fn.__name__} {kinds}", len(seen))
        return launch(self, *args, grid=grid, warmup=True, **options) if turn % workers == rank else None

    JITFunction.run = compile_only
    for dtype in (torch.bfloat16,):
        step_differences(delta_step_triton.step, heads, device, dtype, 1)
        triton_differences(heads, device, dtype)
    step_case(heads, work, device)[0]()
    paths = ((8, 64, 0), (8, work.length + 1, 8), (8, work.horizon, 8))
    for case in paths:
        inputs = path_case(heads, *case, device)
        output, trace = TritonRule(exact=False)(*inputs)
        at = torch.arange(4, device=device)
        torch.autograd.grad(output.sum() + trace.state_after(at, at).sum(), inputs)


def main(given: list[str] | None = None) -> int:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", default="qwen3.5-2b", choices=SHAPES)
    parser.add_argument("--sweep", action="store_true", help="try other sizes of programs")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds after which no further size is tried")
    parser.add_argument("--skip-checks", action="store_true")
    parser.add_argument("--compile", type=int, nargs=2, metavar=("RANK", "WORKERS"), help="only fill Triton's cache")
    parser.add_argument("--out", type=Path, help="folder for the JSON")
    asked = parser.parse_args(given)
    if not torch.cuda.is_available():
        raise UserError("recurrent_kernels times Triton's kernels, which need a CUDA device; there is none here")
    until = time.perf_counter() + asked.budget
    heads, work, device = heads_of(asked.shape), Work(), torch.device("cuda")
    if asked.compile:
        compiled_ahead(heads, work, device, *asked.compile)
        return 0
    report: dict[str, Any] = {"device": torch.cuda.get_device_name(), "shape": asked.shape, "ms": {}}
    if not asked.skip_checks:
        report["apart"] = checks(heads, device)
        print(json.dumps(report["apart"]), flush=True)
    found = times(heads, work, device)
    for name, taken in itertools.chain(found, sweep(heads, work, device, until) if asked.sweep else ()):
        report["ms"][name] = taken
        print(name, json.dumps(taken), flush=True)
        if asked.out is not None:
            asked.out.mkdir(parents=True, exist_ok=True)
            path = asked.out / f"recurrent-kernels-{asked.shape}.json"
            path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    script(main)

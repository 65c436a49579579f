"""Kernels of recurrent layers one by one: how far from PyTorch, how long, and how many bytes they must move.

`python benchmarks/recurrent_kernels.py --shape qwen3.5-2b --out results`. With `--sweep` the sizes of programs are
tried as well, until `--budget` seconds are over. `--against FILE` times the step alone, in turns with that of another
form of `delta_step_triton.py`: both in graphs of as many layers as the model has, so that no state stays in the cache.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from tfive.cli.options import script
from tfive.errors import UserError
from tfive.tree.fast import delta_chunk, delta_step_triton, mixer
from tfive.tree.fast.delta_chunk import TritonRule
from tfive.tree.fast.delta_kernel import triton_differences
from tfive.tree.fast.delta_step import RecurrentHeads, StepKernel
from tfive.tree.fast.delta_step_choice import step_differences
from tfive.tree.fast.mixer import TritonMixer
from tfive_lab.bench.recurrent_cases import heads_of, path_case, step_case
from tfive_lab.bench.work import SHAPES, Work


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


def layers_in_a_graph(cases: list[Callable[[], Any]], kernel: StepKernel) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    """The steps of some layers by a kernel, captured, and where their outputs will stand."""
    with patch.object(delta_step_triton, "step", kernel):
        for case in cases:  # compiled before it is captured
            case()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = [case() for case in cases]
    return graph, outputs


def in_turns(heads: RecurrentHeads, work: Work, device: torch.device, file: Path, layers: int = 18) -> dict[str, Any]:
    """Microseconds a layer of the step as it is and as `file` has it, and whether both give the same bits."""
    spec = importlib.util.spec_from_file_location("another_step", file)
    if spec is None or spec.loader is None:
        raise UserError(f"--against {file}: not a Python file; give another form of delta_step_triton.py")
    another = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(another)
    cases = [step_case(heads, work, device)[0] for _ in range(layers)]
    kernels = {"as it is": delta_step_triton.step, file.name: another.step}
    graphs = {name: layers_in_a_graph(cases, kernel) for name, kernel in kernels.items()}
    outputs, taken = [], dict[str, list[float]]()
    for _ in range(5):
        for name, (graph, found) in graphs.items():
            taken.setdefault(name, []).append(1000 * milliseconds(graph.replay) / layers)
            outputs.append([x.clone() for x in found])
    same = all(torch.equal(x, y) for each in outputs for x, y in zip(each, outputs[0], strict=True))
    return {"microseconds a layer": taken, "same bits": same}


def main(given: list[str] | None = None) -> int:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", default="qwen3.5-2b", choices=SHAPES)
    parser.add_argument("--sweep", action="store_true", help="try other sizes of programs")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds after which no further size is tried")
    parser.add_argument("--skip-checks", action="store_true")
    parser.add_argument("--against", type=Path, help="another form of delta_step_triton.py")
    parser.add_argument("--out", type=Path, help="folder for the JSON")
    asked = parser.parse_args(given)
    if not torch.cuda.is_available():
        raise UserError("recurrent_kernels times Triton's kernels, which need a CUDA device; there is none here")
    until = time.perf_counter() + asked.budget
    heads, work, device = heads_of(asked.shape), Work(), torch.device("cuda")
    report: dict[str, Any] = {"device": torch.cuda.get_device_name(), "shape": asked.shape, "ms": {}}
    if asked.against is not None:
        print(json.dumps(in_turns(heads, work, device, asked.against)))
        return 0
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

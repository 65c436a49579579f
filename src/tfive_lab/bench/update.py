"""Where the time of the actor's forward and backward pass goes: device time by family of kernels, host time, launches,
with all fused parts on, each of them off in turn, and none. All in one process, on the same thoughts."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.autograd import DeviceType

from tfive.tree.fast.fused import list_differences, list_trouble
from tfive.tree.fast.hf_training import TrainingChoice, block_shapes, trained_forward
from tfive.tree.fast.tiled import differences as tiled_differences
from tfive.tree.fast.training_ops import TorchTraining, TrainingOps
from tfive.tree.fast.training_ops import differences as training_differences
from tfive.tree.layout import Thoughts
from tfive.tree.settings import EngineOptions
from tfive_lab.bench.phases import PHASES, Clock, TreePhases, tree_phases
from tfive_lab.bench.work import Work

OPERATIONS = {
    "norms": ("norm", "norm_back"),
    "rotary": ("rotate", "rotate_back"),
    "gated products": ("gate", "gate_back"),
}
"""Parts of a trained block that can be left to plain PyTorch, by the operations they are made of."""
VARIANTS = ("none", "all", "packed", "without attention", "without head", *(f"without {part}" for part in OPERATIONS))
"""`none` is the models' own kernels; `packed` is all, with padding left out; `without x` is all but x."""
FAMILIES = (
    ("matrix products", r"gemm|nvjet|xmma|cublas|splitk|cutlass(?!.*fmha)"),
    ("attention", r"fmha|flash|sdpa|cudnn|^_attend|^_query_slope|^_key_slope|^_merge"),
    ("fused norms", r"^_norm|rms_norm|layer_norm"),
    ("fused rotary", r"^_rotate"),
    ("fused gated products", r"^_gate"),
    ("fused vocabulary", r"^_log|^_choose|^_block_sums"),
    ("copies", r"memcpy|memset|copy|cat"),
    ("sums", r"reduce|softmax|scan|sort"),
    ("elementwise", r"elementwise"),
)


def family(kernel: str) -> str:
    """What a kernel is for, by its name."""
    return next((name for name, pattern in FAMILIES if re.search(pattern, kernel.lower())), "other")


class _Mixed:
    """Fused operations, some of them replaced by plain PyTorch."""

    def __init__(self, fused: TrainingOps, left_out: tuple[str, ...]) -> None:
        plain = TorchTraining()
        for name in ("norm", "norm_back", "rotate", "rotate_back", "gate", "gate_back", "log_prob", "log_prob_slope"):
            setattr(self, name, getattr(plain if name in left_out else fused, name))


def variant(side: TreePhases, name: str) -> TreePhases:
    """The phases of `side` (which has sampled) with fused parts on or off."""
    options = side.engine
    if name in ("none", "without attention"):
        options = replace(options, attention="folded")
    options = replace(options, packed="on" if name == "packed" else "off")
    other = TreePhases(side.model, side.plan, side.texts, side.uniforms_BRT, options, side.law)
    other.thoughts, other.reading = side.thoughts, side.reading
    choice, fusion = side.tree.training, side.tree.fusion.fusion
    other.tree.share_fusion(side.tree)
    other.tree._training = choice
    part = name.removeprefix("without ")
    if name == "none":
        other.tree._training = TrainingChoice(None, None, "left out")
    elif name == "without head":
        other.tree._training = TrainingChoice(choice.forwards, None, "the head is left out")
    elif part in OPERATIONS and choice.ops is not None and fusion is not None:
        mixed: Any = _Mixed(choice.ops, OPERATIONS[part])
        forwards = [trained_forward(block, mixed) for block in fusion.blocks]
        other.tree._training = TrainingChoice(forwards, choice.ops, f"{part} are left out")
    return other


def profiled(call: Any, clock: Clock) -> dict[str, Any]:
    """Device milliseconds by family, kernels by time, and launches of one call; without a GPU the operations' own."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if clock.cuda:
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds, acc_events=True) as recorded:
        call()
        if clock.cuda:
            torch.cuda.synchronize(clock.device)
    rows: list[Any] = list(recorded.key_averages())
    device = [row for row in rows if row.device_type == (DeviceType.CUDA if clock.cuda else DeviceType.CPU)]
    spent = {row.key: (row.self_device_time_total if clock.cuda else row.self_cpu_time_total) / 1e3 for row in device}
    families: dict[str, float] = {}
    for key, milliseconds in spent.items():
        families[family(key)] = families.get(family(key), 0.0) + milliseconds
    longest = sorted(device, key=lambda row: -spent[row.key])[:20]
    return {
        "device_ms": sum(spent.values()),
        "by_family_ms": dict(sorted(families.items(), key=lambda item: -item[1])),
        "launches": sum(row.count for row in rows if "launchkernel" in row.key.lower()),
        "kernels": [{"name": row.key[:90], "ms": spent[row.key], "count": row.count} for row in longest],
    }


def _timed(side: TreePhases, phase: str, clock: Clock, repeats: int) -> dict[str, Any]:
    """Median seconds of a phase, and of its call until it has returned: what the host is busy for."""
    call = getattr(side, phase)
    call()
    whole, host = [], []
    for _ in range(repeats):
        if clock.cuda:
            torch.cuda.synchronize(clock.device)
        start = time.perf_counter()
        call()
        host.append(time.perf_counter() - start)
        if clock.cuda:
            torch.cuda.synchronize(clock.device)
        whole.append(time.perf_counter() - start)
    return {"seconds": statistics.median(whole), "host_seconds": statistics.median(host)}


def shortened(thoughts: Thoughts, used: float, close: int) -> Thoughts:
    """Thoughts of which most close after a random number of tokens and one in sixteen does not, so that they have
    `used` of their length on average; for shares from 0.1 to a half."""
    steps, longest = thoughts.tokens_BRT.shape[-1], (used - 1 / 16) / (15 / 16)
    draw = torch.Generator().manual_seed(0)
    drawn_BR = torch.randint(1, max(1, round(2 * longest * steps)) + 1, thoughts.length_BR.shape, generator=draw)
    open_BR = torch.rand(drawn_BR.shape, generator=draw) < 1 / 16
    length_BR = torch.where(open_BR, steps, drawn_BR.clamp(max=steps)).to(thoughts.length_BR)
    length_BR = torch.where(thoughts.valid_BR, length_BR, 0)
    closed_BR = thoughts.valid_BR & ~open_BR.to(thoughts.valid_BR.device)
    last_BRT = torch.arange(steps, device=length_BR.device) == length_BR[..., None] - 1
    tokens_BRT = torch.where(last_BRT & closed_BR[..., None], close, thoughts.tokens_BRT)
    cut = replace(thoughts, tokens_BRT=tokens_BRT, length_BR=length_BR, closed_BR=closed_BR)
    return replace(cut, tokens_BRT=tokens_BRT * cut.mask_BRT, log_q_BRT=cut.log_q_BRT * cut.mask_BRT)


def update_profile(
    model: Any,
    work: Work,
    *,
    repeats: int,
    budget: float,
    used: float = 1.0,
    replayed: bool = False,
    variants: tuple[str, ...] = VARIANTS,
    save: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """The report: the phases of the best settings, then the actor pass of every variant the `budget` (s) allows.
    `save` is handed the report as far as it is. The variants read thoughts that end after `used` of their length, and
    where that is less than all, write and score them, too; `replayed`: by captured passes."""
    start = time.perf_counter()
    side = tree_phases(model, work, EngineOptions(replayed_passes=replayed), variable=used < 1)
    clock = Clock(side.tree.device)
    side.sampling()
    report: dict[str, Any] = {
        "training": side.tree.training.reason,
        "fused_training": side.tree.training.forwards is not None,
        "attention": side.tree.kernel,
        "attention_reason": side.tree.tiled_trouble or "agrees with masked attention on this device",
        "sampling_lists": _lists(side),
        "set_up_s": time.perf_counter() - start,
        "phases": {},
        "actor": {},
        "left_out": [],
    }
    for phase in PHASES[:3]:
        report["phases"][phase] = _timed(side, phase, clock, repeats)
    report["layouts"] = side.tree.layouts.reason or "captured where shapes come again"
    report["kernels_apart"] = _apart(side)
    save(report)
    if used < 1 and side.thoughts is not None:
        side.thoughts = shortened(side.thoughts, used, side.plan.close_ids[0])
    report["mean_thought_length"] = float(side.written.length_BR[side.written.valid_BR].float().mean())
    wanted = None
    for name in variants:
        if time.perf_counter() - start > budget:
            report["left_out"].append(name)
            continue
        other = variant(side, name)
        found = _timed(other, "actor", clock, repeats)
        log_prob = other.actor().double()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norm = float(torch.stack([g.double().norm() for g in gradients]).norm())
        wanted = log_prob if wanted is None else wanted
        found |= {"log_prob_apart": float((log_prob - wanted).abs().mean()), "gradient_norm": norm}
        if used < 1:
            for phase in ("writing", "scoring"):
                found[f"{phase}_seconds"] = _timed(other, phase, clock, repeats)["seconds"]
            found["writing"] = profiled(other.writing, clock)
        clock.peak.clear()
        clock("peak", other.actor)
        report["actor"][name] = found | {"peak_bytes": clock.peak["peak"]} | profiled(other.actor, clock)
        model.zero_grad(set_to_none=True)
        save(report)
    for phase in PHASES[:2]:
        if time.perf_counter() - start < budget:
            report["phases"][phase] |= profiled(getattr(side, phase), clock)
    report["spent_s"] = time.perf_counter() - start
    return report


def _lists(side: TreePhases) -> str:
    """Whether sampling steps may compute lists of branches, or why not."""
    fusion = side.tree.fusion.fusion
    if fusion is None or side.tree.backbone.recurrent:
        return side.tree.fusion.reason if fusion is None else "there are none with recurrent layers"
    return fusion.list_trouble(next(side.model.parameters())) or "agree with all branches on this device"


def _apart(side: TreePhases) -> dict[str, dict[str, float]]:
    """How far the kernels in use are from PyTorch on this device, at the model's shape and precision."""
    device, dtype, found = side.tree.device, side.model.dtype, {}
    fusion, ops, heads = side.tree.fusion.fusion, side.tree.training.ops, side.tree.backbone.heads
    if fusion is not None and ops is not None:
        for shape in block_shapes(fusion, side.tree.backbone):
            found["training"] = training_differences(ops, shape, device, dtype)
            if list_trouble(shape.heads, device, dtype) is None:
                found["sampling lists"] = list_differences(fusion.ops, shape.heads, device, dtype)
    if side.tree.kernel == "tiled" and heads is not None:
        found["attention"] = tiled_differences(*heads, device, dtype)
    return found


def render(report: dict[str, Any]) -> str:
    """Seconds, launches and milliseconds by family, a line a variant."""
    lines = [f"trained blocks: {report['training']}; attention: {report['attention']} ({report['attention_reason']})"]
    lines.append(f"sampling lists: {report['sampling_lists']}")
    for name, found in {**report["phases"], **report["actor"]}.items():
        others = (
            f", {key} {found[f'{key}_seconds']:.4f} s" for key in ("writing", "scoring") if f"{key}_seconds" in found
        )
        lines.append(f"{name:<24}{found['seconds']:>8.4f} s, host {found['host_seconds']:.4f} s{''.join(others)}")
        for what, one in (("", found), ("writing: ", found.get("writing", {}))):
            if "device_ms" in one:
                parts = ", ".join(f"{part} {ms:.1f}" for part, ms in one["by_family_ms"].items())
                lines.append(f"    {what}{one['launches']} launches, {one['device_ms']:.1f} ms: {parts}")
    if report["left_out"]:
        lines.append(f"not reached within the budget: {', '.join(report['left_out'])}")
    return "\n".join(lines)

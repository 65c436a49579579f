"""`tfive bench engine`: the tree engine against plain rows on the same work, in one run, outputs compared.

Both use the same weights, the same thoughts and the same precision. Sampling reads the text and writes all
thoughts; scoring gives the loss of every checkpoint and of no thought; actor is the forward and backward pass of the
thoughts' log-probabilities; values is a critic's forward pass. `whole` is all four in a row.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from tfive.models.precision import choose_device, choose_dtype
from tfive.tree.settings import EngineOptions
from tfive_lab.bench.phases import PHASES, Clock, Measured, PlainPhases, TreePhases, empty, repeat, tree_phases
from tfive_lab.bench.plain_rows import PlainRows
from tfive_lab.bench.roofline import floors, weight_bytes
from tfive_lab.bench.work import SMALL, Work, find_model


def _differences(mine: Tensor, other: Tensor) -> dict[str, float]:
    gap = (mine.double() - other.double()).abs()
    return {"max": float(gap.max()), "mean": float(gap.mean())}


def _gradient_difference(mine: list[Tensor], other: list[Tensor]) -> float:
    """|a − b| / |b| over all parameters together."""
    gap = sum(float((a.float() - b.float()).square().sum()) for a, b in zip(mine, other, strict=True))
    return (gap / sum(float(b.float().square().sum()) for b in other)) ** 0.5


def compare(tree: Measured, plain: Measured) -> dict[str, Any]:
    """Differences between the outputs of both implementations on the same thoughts."""
    return {
        "log_prob": _differences(tree.results["actor"], plain.results["actor"]),
        "no_thought_loss": _differences(tree.results["scoring"][0], plain.results["scoring"][0]),
        "checkpoint_loss": _differences(tree.results["scoring"][1], plain.results["scoring"][1]),
        "value": _differences(tree.results["values"], plain.results["values"]),
        "gradient_relative": _gradient_difference(tree.gradients, plain.gradients),
    }


def mismatch(log_q: Tensor, log_prob: Tensor) -> dict[str, float]:
    """The gap d = log π − log q between training and sampling log-probabilities: means of e^d − 1 − d and of |d|."""
    gap = (log_prob - log_q).double()
    return {"mismatch_kl": float((gap.exp() - 1 - gap).mean()), "mismatch_mean_abs": float(gap.abs().mean())}


def _spread(log_prob_QT: Tensor) -> dict[str, float]:
    """Mean log-probability of an action and its standard error over thoughts; samplers must agree in it."""
    per_thought = log_prob_QT.double().mean(1)
    count = len(per_thought)
    return {"mean": float(per_thought.mean()), "se": float(per_thought.std(correction=count > 1) / count**0.5)}


def _extras(side: TreePhases, work: Work, clock: Clock, alone: dict[str, float], seed: int) -> dict[str, Any]:
    """What doubling the positions and recomputing activations cost."""
    wider = tree_phases(side.model, replace(work, positions=2 * work.positions), side.engine, seed)
    repeat(wider, clock, 1)
    doubled = repeat(wider, clock, 3)[0]
    del wider
    empty(clock)
    lean = tree_phases(side.model, work, replace(side.engine, activation_checkpointing=True), seed)
    lean.thoughts = side.thoughts
    lean.actor()
    seconds = statistics.median(clock("recomputing", lean.actor)[0] for _ in range(3))
    side.model.zero_grad(set_to_none=True)
    return {
        "doubled_positions": {"tree_s": doubled, "ratio": {p: doubled[p] / alone[p] for p in doubled}},
        "activation_checkpointing": {"actor_s": seconds, "peak_bytes": clock.peak["recomputing"]},
    }


def measure_tree(
    side: TreePhases, name: str, work: Work, clock: Clock, repeats: int
) -> tuple[Measured, dict[str, Any]]:
    """The tree engine's measurements, and its part of the report."""
    repeat(side, clock, 1)
    tree = Measured.of(side, side.model, clock, repeats)
    loop_s = statistics.median(clock("steps", side.steps)[0] for _ in range(repeats))
    step_s = statistics.median(clock("step", side.ten_steps)[0] for _ in range(repeats)) / 10
    recurrent = bool(side.tree.backbone.recurrent)
    rule = side.tree.rule if recurrent else None
    log_q_QT = tree.results["sampling"].log_q_BRT.flatten(0, 1)
    return tree, {
        **_circumstances(side.model, name, work, side.engine, clock.device),
        "delta_rule": None if rule is None else {"name": rule.name, "reason": rule.reason},
        "fused_blocks": {
            "used": side.tree.fusion.fusion is not None,
            "reason": side.tree.fusion.reason,
            "steps": side.tree.fusion.steps,
        },
        "tree_repeats": repeats,
        "tree_s": tree.seconds,
        **mismatch(log_q_QT, tree.results["actor"]),
        "peak_bytes": max(tree.peak[phase] for phase in PHASES),
        "tree_peak_bytes": tree.peak,
        "sampling_loop_s": loop_s,
        "sampling_step_s": step_s,
        "floor_s": floors(side.model, work, side.plan, clock.device),
    }


def measure_replayed(side: TreePhases, clock: Clock, repeats: int) -> dict[str, Any]:
    """The phases with replayed passes and without, round by round in turn: what replaying spares, and how far apart
    its losses, log-probabilities and gradients are from those of launched passes on the same thoughts."""
    other = TreePhases(
        side.model, side.plan, side.texts, side.uniforms_BRT, replace(side.engine, replayed_passes=True), side.law
    )
    other.tree.share_fusion(side.tree)
    for _ in range(3):  # the first sets up, the second captures
        other.sampling()
        other.scoring()
        other.actor()
    passes, updates = other.tree.passes, other.updates
    launched, replayed = [], []
    for _ in range(repeats):
        launched.append(repeat(side, clock, 1)[0])
        replayed.append(repeat(other, clock, 1)[0])
    other.thoughts = side.thoughts
    losses = [_differences(a, b) for a, b in zip(other.scoring(), side.scoring())]
    (mine, own), (wanted, gradients) = ((one.actor(), _gradients(one.model)) for one in (other, side))
    found = {
        "captured": passes.count,
        "captured_updates": updates.count,
        "reason": passes.reason or updates.reason,
        "loss_apart": max(one["max"] for one in losses),
        "log_prob_apart": _differences(mine, wanted)["max"],
        "gradient_apart": _gradient_difference(own, gradients),
        "launched_s": {name: statistics.median(one[name] for one in launched) for name in launched[0]},
        "replayed_s": {name: statistics.median(one[name] for one in replayed) for name in replayed[0]},
    }
    side.model.zero_grad(set_to_none=True)
    passes.release()
    updates.release()
    return found


def _gradients(model: PreTrainedModel) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def measure(
    model: PreTrainedModel,
    name: str,
    work: Work,
    *,
    engine: EngineOptions | None = None,
    repeats: int = 10,
    plain_repeats: int | None = None,
    batch_sizes: Mapping[str, tuple[int, ...]] | None = None,
    extras: bool = False,
    replayed: bool = False,
    plain: bool = True,
    seed: int = 0,
    keep: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """The report for a given model object. `extras` adds doubled positions and activation checkpointing, `replayed`
    the phases with replayed passes; `keep` gets what there is before the plain side, which takes longest, begins."""
    side = tree_phases(model, work, engine or EngineOptions(), seed)
    clock = Clock(side.tree.device)
    tree, report = measure_tree(side, name, work, clock, repeats)
    if extras:
        report |= _extras(side, work, clock, tree.seconds, seed)
    if replayed:
        report["replayed"] = measure_replayed(side, clock, repeats)
    if keep is not None:
        keep(report)
    if not plain:
        return report
    tokens_QT = tree.results["sampling"].tokens_BRT.flatten(0, 1)
    side.forget()
    empty(clock)

    other = PlainPhases(PlainRows(model, side.texts, side.plan), tokens_QT, {})
    wanted = batch_sizes or dict.fromkeys(PHASES, (32, 64, 128))
    sizes = {phase: tuple(sorted({min(size, work.branches) for size in some})) for phase, some in wanted.items()}
    sweep = other.sweep(sizes, clock)
    rows = Measured.of(other, model, clock, plain_repeats or repeats)
    with torch.no_grad():
        own_QT = other.path.policy(rows.results["sampling"], other.rows["values"])
    apart = compare(tree, rows)
    return report | {
        "plain_repeats": plain_repeats or repeats,
        "plain_s": rows.seconds,
        "speedup": rows.seconds["whole"] / tree.seconds["whole"],
        "speedup_by_phase": {phase: rows.seconds[phase] / tree.seconds[phase] for phase in tree.seconds},
        "max_abs_logprob_diff": apart["log_prob"]["max"],
        "apart": apart,
        "sampled_log_prob": {"tree": _spread(tree.results["actor"]), "plain": _spread(own_QT)},
        "plain_peak_bytes": rows.peak,
        "plain_rows": dict(other.rows),
        "plain_sweep_s": sweep,
    }


def _circumstances(
    model: PreTrainedModel, name: str, work: Work, engine: EngineOptions, device: torch.device
) -> dict[str, Any]:
    return {
        "model": name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "weight_bytes": weight_bytes(model),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "dtype": str(model.dtype).removeprefix("torch."),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "work": asdict(work),
        "engine": asdict(engine),
    }


def engine(
    shape: str | None = None,
    *,
    device: str = "auto",
    compute: str = "auto",
    work: Work | None = None,
    repeats: int | None = None,
    plain_repeats: int | None = None,
    settings: EngineOptions | None = None,
    extras: bool | None = None,
    replayed: bool = False,
    plain: bool = True,
    batch_sizes: Mapping[str, tuple[int, ...]] | None = None,
    seed: int = 0,
    keep: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Time the tree engine against plain rows; by default the embedded model on the best device, under a minute.

    `shape` names a random model instead. Numbers left open depend on the device: the full work of the paper's setting
    and ten repeats on a GPU, a small work and three repeats on a CPU. Without `plain` the tree is timed alone;
    `batch_sizes` are those each of its phases is tried with, the fastest counts.
    """
    place = choose_device(device)
    on_gpu = place.type == "cuda"
    model, name = find_model(shape, place, choose_dtype(compute, place))
    return measure(
        model,
        name,
        work or (Work() if on_gpu else SMALL),
        engine=settings,
        repeats=repeats or (10 if on_gpu else 3),
        plain_repeats=plain_repeats,
        batch_sizes=batch_sizes or dict.fromkeys(PHASES, (32, 64, 128) if on_gpu else (4, 16)),
        extras=on_gpu if extras is None else extras,
        replayed=replayed,
        plain=plain,
        seed=seed,
        keep=keep,
    )


def render(report: dict[str, Any]) -> str:
    """The report as a table for people."""
    work = report["work"]
    lines = [
        f"{report['model']} · {report['parameters'] / 1e6:.1f} M parameters · {report['dtype']} · {report['device']}",
        f"{work['texts']} texts × {work['tokens']} tokens × {work['positions']} positions × {work['group']}, "
        f"T {work['length']}, H {work['horizon']}, checkpoints {'/'.join(map(str, work['checkpoints']))}",
        "",
        f"{'phase':<16}{'plain s':>10}{'tree s':>10}{'speed-up':>10}{'floor s':>10}",
    ]
    floor, plain = report["floor_s"] or {}, report.get("plain_s")
    for phase, seconds in report["tree_s"].items():
        least = f"{floor[phase]:.3f}" if phase in floor else "–"
        before = f"{plain[phase]:>10.3f}" if plain else f"{'–':>10}"
        ratio = f"{report['speedup_by_phase'][phase]:>9.1f}×" if plain else f"{'–':>10}"
        lines.append(f"{phase:<16}{before}{seconds:>10.3f}{ratio}{least:>10}")
    step = f"sampling step {1e3 * report['sampling_step_s']:.2f} ms"
    step += f", {report['sampling_step_s'] / floor['sampling_step']:.1f} × its floor" if floor else ""
    lines += ["", f"{step} · peak memory {report['peak_bytes'] / 2**30:.2f} GiB"]
    lines.append(f"mismatch KL {report['mismatch_kl']:.1e} between sampling and training")
    if plain:
        lines.append(f"tree and plain log-probabilities at most {report['max_abs_logprob_diff']:.1e} apart")
    if "replayed" in report:
        both = report["replayed"]
        spent = " and ".join(
            f"{both[f'{how}_s']['without_values']:.3f} s {how} ({both[f'{how}_s']['sampling']:.3f}, "
            f"{both[f'{how}_s']['scoring']:.3f}, {both[f'{how}_s']['actor']:.3f})"
            for how in ("launched", "replayed")
        )
        why = f"; {both['reason']}" if both["reason"] else ""
        shapes = f"{both['captured']} + {both['captured_updates']} shapes"
        apart = f"losses {both['loss_apart']:.1e}, gradients {both['gradient_apart']:.1e} apart"
        lines.append(f"three phases: {spent}; {shapes}, {apart}{why}")
    if "doubled_positions" in report:
        lines.append(f"twice the positions cost {report['doubled_positions']['ratio']['whole']:.2f} × the time")
    return "\n".join(lines)

"""Replayed CUDA graphs against the same launched kernel by kernel: readings, scores, the actor's pass, its updates."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import fields, replace

import torch
from torch import Tensor

from tfive.rl.actor import Actor, StepStats
from tfive.rl.optimizer import MasterOptimizer
from tfive.rl.settings import ActorSettings, AnchorSettings, RatioSettings
from tfive.rl.trajectory import Trajectories
from tfive.tree.fast.replayed import ReplayedPasses
from tfive.tree.forward import TreeModel
from tfive.tree.layout import Record
from tfive.tree.settings import EngineOptions
from tfive_lab.bench.checks import FLOAT32, Check, Outputs, of_tree, relative
from tfive_lab.bench.phases import TreePhases, tree_phases
from tfive_lab.bench.work import Work

STEPS = 6
GRADIENTS = 1e-3
"""Largest relative difference of gradients, and of the losses that updates report."""


def _note(passes: ReplayedPasses) -> str:
    if passes.count:
        return f"{passes.count} shapes"
    return f"nothing was captured: {passes.reason or 'little memory is free'}"


def _unused(side: TreePhases, possible: bool) -> str | None:
    """Why nothing is replayed here, if so."""
    if side.tree.device.type != "cuda":
        return f"not used on {side.tree.device.type}"
    return None if possible else "not used: it has recurrent layers, or its blocks are not fused"


def replayed_passes(kind: str, side: TreePhases, work: Work, reference: Outputs) -> Iterator[Check]:
    """Readings, scores and the actor's pass by replayed graphs, once they are captured."""
    again = tree_phases(side.model, work, EngineOptions(replayed_passes=True))
    again.thoughts = side.thoughts
    why = _unused(side, again.tree.replays)
    if why is not None:
        yield Check(kind, "replayed readings and scores", None, None, why)
        return
    for _ in range(3):  # the first runs as it is, the second is captured
        found = of_tree(again)
    passes, updates = again.tree.passes, again.updates
    apart = found.apart(reference) if passes.count else None
    yield Check(kind, "replayed readings and scores", apart, FLOAT32 if passes.count else None, _note(passes))
    off = relative(found.gradients, reference.gradients) if updates.count else None
    yield Check(kind, "replayed gradients, relative", off, GRADIENTS if updates.count else None, _note(updates))


def _rolled(record: Record, rows: int) -> Record:
    """The same texts, or what belongs to them, in another order."""
    changes = {f.name: getattr(record, f.name).roll(rows, 0) for f in fields(record)}  # type: ignore[arg-type]
    return replace(record, **changes)  # type: ignore[type-var]


def _trajectories(side: TreePhases, step: int) -> Trajectories:
    """The sampled thoughts with made-up advantages; every second one ends early, others each step. Each step has the
    texts in another order."""
    texts, thoughts = _rolled(side.texts, step), _rolled(side.written, step)
    place_R = torch.arange(thoughts.length_BR.shape[1], device=thoughts.length_BR.device)
    thoughts = replace(thoughts, length_BR=thoughts.length_BR - (place_R + step) % 2)
    mask_BRT, draw = thoughts.mask_BRT, torch.Generator().manual_seed(step)
    advantage_BRT = torch.randn(mask_BRT.shape, generator=draw).to(mask_BRT.device) * mask_BRT
    old_BRT = thoughts.log_q_BRT * mask_BRT
    return Trajectories("actor", 0, texts, thoughts, log_old_BRT=old_BRT, advantage_BRT=advantage_BRT)


def updated(side: TreePhases, engine: EngineOptions) -> tuple[Actor, list[StepStats], list[Tensor]]:
    """The actor after a few updates of a copy of the model, in two parts each; what they saw, and the gradients' first
    moments, by the end."""
    model = copy.deepcopy(side.model)
    optimizer = MasterOptimizer(list(model.named_parameters()), lr=1e-4)
    anchor = AnchorSettings(next_token=0.5, conditioned=0.5)
    tree, rows = TreeModel(model, side.plan, engine), -(-len(side.texts.tokens_BS) // 2)
    actor = Actor(tree, optimizer, ActorSettings(), RatioSettings(), anchor, seed=0, rows=rows)
    seen = [actor.step(_trajectories(side, step)) for step in range(STEPS)]
    return actor, seen, [entry["first"] for entry in optimizer.state_dict()["parameters"].values()]


def replayed_updates(kind: str, side: TreePhases) -> Iterator[Check]:
    """The actor's updates by replayed graphs, whose gradients are added up in place."""
    name = "replayed updates"
    possible = TreeModel(side.model, side.plan, EngineOptions()).replays_training
    why = _unused(side, possible)
    if why is not None:
        yield Check(kind, name, None, None, why)
        return
    (_, losses, moments), (actor, own_losses, own) = (
        updated(side, EngineOptions(replayed_passes=replayed)) for replayed in (False, True)
    )
    note, used = _note(actor.updates), actor.updates.count > 0
    yield Check(kind, f"{name}: losses, relative", _losses_apart(own_losses, losses), GRADIENTS if used else None, note)
    yield Check(kind, f"{name}: gradients, relative", relative(own, moments), GRADIENTS if used else None, note)


def _losses_apart(mine: list[StepStats], other: list[StepStats]) -> float:
    """The largest relative difference of what two runs reported of their losses and gradients."""
    names = ("policy_loss", "anchor_loss", "conditioned_loss", "gradient_norm")
    return max(
        abs(getattr(one, name) - getattr(two, name)) / max(abs(getattr(two, name)), 1e-3)
        for one, two in zip(mine, other, strict=True)
        for name in names
    )

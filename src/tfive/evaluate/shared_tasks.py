"""A task evaluated by several processes: each answers a share of the items, one keeps all answers.

Items depend on nothing but themselves (random numbers are functions of the item), so their answers are those of one
process up to rounding, and lie in the same files in the same order.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tfive.distributed.transfer import transferred
from tfive.distributed.world import World
from tfive.evaluate.answer_gains import AnswerGains, answer_gains
from tfive.evaluate.equivalence import Verifier
from tfive.evaluate.records import GENERATED, OPTIONS, Answers, answers_file, read_answers
from tfive.evaluate.suite import TaskPlan, run_task
from tfive.evaluate.tasks import Item, Task
from tfive.inference.thought_model import ThoughtModel
from tfive.telemetry import Telemetry

ROUND = 64
"""Items that a process answers before all answers so far are kept: what a stop can lose."""

Records = dict[str, list[dict[str, Any]]]
"""Answers by their kind."""


def run_task_together(
    model: ThoughtModel,
    plan: TaskPlan,
    folder: Path,
    world: World,
    *,
    verifier: Verifier | None = None,
    telemetry: Telemetry | None = None,
) -> None:
    """`run_task` by all processes of `world`; the first one writes `folder`, and it alone must be able to."""
    if world.size == 1:
        run_task(model, plan, folder, verifier=verifier, telemetry=telemetry)
        return
    known: Records = transferred(world, _kept(folder, plan) if world.leads else None, 0)
    waiting = [item for item in plan.asked if not _answered(item, known, plan)]
    for start in range(0, len(waiting), ROUND * world.size):
        some = waiting[start : start + ROUND * world.size]
        own = some[world.share(len(some))]
        new = _asked(model, plan, own, known, verifier, telemetry, world)
        every = [json.loads(text) for text in world.gather_texts(json.dumps(new))]
        if world.leads:
            for kind in (GENERATED, OPTIONS):
                _add(answers_file(folder, plan.task.name, kind), [one for part in every for one in part[kind]])


def _kept(folder: Path, plan: TaskPlan) -> Records:
    """What an earlier call left."""
    files = {kind: answers_file(folder, plan.task.name, kind) for kind in (GENERATED, OPTIONS)}
    return {kind: [*read_answers(file)] if file.is_file() else [] for kind, file in files.items()}


def _answered(item: Item, known: Records, plan: TaskPlan) -> bool:
    written = sum(one["id"] == item.id for one in known[GENERATED])
    compared = any(one["id"] == item.id for one in known[OPTIONS])
    return (written >= plan.decoding.samples or not plan.generates) and (compared or not plan.compares)


def _asked(
    model: ThoughtModel,
    plan: TaskPlan,
    own: Sequence[Item],
    known: Records,
    verifier: Verifier | None,
    telemetry: Telemetry | None,
    world: World,
) -> Records:
    """New answers to these items, in a folder of this process's own until all have theirs."""
    if not own:
        return {GENERATED: [], OPTIONS: []}
    ids = {item.id for item in own}
    mine = replace(plan, items=replace(plan.items, items=tuple(own)), limit=None)
    with tempfile.TemporaryDirectory() as place:
        before: dict[str, int] = {}
        for kind, records in known.items():
            old = [one for one in records if one["id"] in ids]
            before[kind] = len(old)
            if old:
                _add(answers_file(Path(place), plan.task.name, kind), old)
        run_task(model, mine, Path(place), verifier=verifier, telemetry=telemetry, world=world)
        return {kind: records[before[kind] :] for kind, records in _kept(Path(place), plan).items()}


def _add(path: Path, records: Sequence[dict[str, Any]]) -> None:
    if records:
        with Answers(path) as answers:
            for one in records:
                answers.add(one)


def answer_gains_together(
    model: ThoughtModel, task: Task, items: Sequence[Item], world: World, *, seed: int = 0, rows: int = 8
) -> AnswerGains:
    """`answer_gains` by all processes of `world`, on every one of them."""
    if world.size == 1:
        return answer_gains(model, task, items, seed=seed, rows=rows)
    own = answer_gains(model, task, items[world.computed(len(items))], seed=seed, rows=rows, world=world)
    mixed = [0.0] * len(own.thought) if own.mixed is None else own.mixed
    both = torch.tensor([own.thought, mixed], dtype=torch.float64)
    thought, blended = world.gather(both, len(items), dim=1).tolist()
    there = world.share(len(items))
    tokens = world.sum_in_order([[float(own.thought_tokens if there.stop > there.start else 0)]], 1)[0]
    return AnswerGains(thought, None if own.mixed is None else blended, int(tokens))

"""What must fit together before several processes begin, and what they compare while they work."""

from __future__ import annotations

import json
from typing import Any

import torch

from tfive.config.config import Config
from tfive.distributed.roles import ranks_of_critics
from tfive.errors import UserError
from tfive.methods.method import Method


def require_possible(config: Config, size: int) -> None:
    """Refuse, in one line and before anything is loaded or written, what a run by `size` processes cannot do."""
    asked = config.distributed
    if asked.profile != "single" and not config.spec.critics:
        raise UserError(
            f"distributed.profile = {asked.profile}: method {config.method} has no critics to give processes to; use "
            "distributed.profile = single"
        )
    ranks_of_critics(asked.profile, size, config.spec.critics)
    if asked.shard > 1 and size % asked.shard:
        raise UserError(
            f"distributed.shard = {asked.shard}: {size} process{'es' * (size > 1)} cannot be divided into groups of "
            f"{asked.shard}; use a number that divides them, 1 for no shards or 0 for all"
        )
    if size > 1 and asked.shard != 1 and config.actor.adapt == "lora":
        raise UserError(
            f"distributed.shard = {asked.shard} with actor.adapt = lora: low-rank updates are small, and every process "
            "has all of them; use distributed.shard = 1 or actor.adapt = full"
        )
    if size > 1 and config.text.positions.variance > 0 and config.spec.trains and config.spec.thinks:
        raise UserError(
            f"text.positions.variance = {config.text.positions.variance:g}: the pilot works in one process; use "
            "text.positions.variance = 0, or train in one"
        )


def course_so_far(method: Method[Any]) -> str:
    """What every process must have come to: the window's decisions (what its report says in words and counts), and sums
    over the actor's weights.

    Processes that differ would wait for each other sooner or later; compared once a window, it is one line instead.
    Measured numbers are no part of it: those of heads, which every process fits for itself, may differ in a last bit.
    """
    model = method.parts.actor.engine.model
    sums = torch.stack([parameter.detach().sum(dtype=torch.float64) for parameter in model.parameters()])
    return json.dumps([method.window, method.phase, _decided(method.report), sums.tolist()])


def _decided(report: Any) -> Any:
    """A report without its measured numbers."""
    if isinstance(report, dict):
        return {name: _decided(value) for name, value in report.items()}
    if isinstance(report, list | tuple):
        return [_decided(value) for value in report]
    return None if isinstance(report, float) else report

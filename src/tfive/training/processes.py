"""What must fit together before several processes begin, and what they compare while they work."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

from tfive.config.config import Config
from tfive.distributed.roles import critics_each
from tfive.distributed.sharding import shard_width
from tfive.errors import UserError

if TYPE_CHECKING:
    from tfive.methods.method import Method
    from tfive.rl.actor import Actor


def require_possible(config: Config, size: int) -> None:
    """Refuse, in one line and before anything is loaded or written, what a run by `size` processes cannot do."""
    asked = config.distributed
    if asked.profile != "single" and not config.spec.critics:
        raise UserError(
            f"distributed.profile = {asked.profile}: method {config.method} has no critics to give processes to; use "
            "distributed.profile = single"
        )
    each = critics_each(asked.profile, size, config.spec.critics)
    shard_width(size - config.spec.critics * each, asked.shard)
    if each:
        shard_width(each, min(asked.shard, each))


def course_so_far(method: Method[Any]) -> str:
    """What every process must have come to: the window's decisions (what its report says in words and counts).

    Processes that differ would wait for each other sooner or later; compared once a window, it is one line instead.
    Measured numbers are no part of it: those of heads, which every process fits for itself, may differ in a last bit.
    """
    return json.dumps([method.window, method.phase, _decided(method.report)])


def weights_so_far(actor: Actor) -> str:
    """Sums over the actor's weights, the same on every process that has them."""
    sums = [parameter.detach().sum(dtype=torch.float64) for parameter in actor.engine.model.parameters()]
    return json.dumps(torch.stack(sums).tolist())


def _decided(report: Any) -> Any:
    """A report without its measured numbers."""
    if isinstance(report, dict):
        return {name: _decided(value) for name, value in report.items()}
    if isinstance(report, list | tuple):
        return [_decided(value) for value in report]
    return None if isinstance(report, float) else report

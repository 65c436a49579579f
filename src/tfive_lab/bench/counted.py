"""What a step costs by counting, as the table of docs/explanation/step-time.md: T⁵ with both kinds of critics, RLP.

The cost of T⁵ depends on its critics more than on anything else, so every figure of step time names them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from tfive.config.config import Config
from tfive.errors import UserError
from tfive.training.cost import nodes_per_item

PRESET = "qwen3.5-2b"
"""The preset whose critics are meant by `preset`: it follows the paper, which adapts whole critics."""
ONE_BLOCK = "one-block"
"""The critics of the preset `nano`, which the timed settings build on: one adapted block above shared features."""

WHOLE = "preset"
"""Whole critics, as in the presets."""
POLICY = "policy-features"
"""The same above the policy's own features, for which no pass is made."""
PROBE = "probe"
"""Value heads alone, on the policy's features two thirds up, for which no pass is made either."""

KINDS = f"{ONE_BLOCK}, {POLICY}, {PROBE} and {WHOLE}"


def critic_overrides(name: str) -> list[str]:
    """The settings that `--critics NAME` stands for, on top of the timed ones."""
    if name == ONE_BLOCK:
        return []
    if name == POLICY:
        return ['critic.features="policy"']
    if name == PROBE:
        return ['critic.features="policy"', 'critic.adapt="probe"', "critic.blocks=8"]
    if name == WHOLE:
        own = Config.load(PRESET).critic.model_dump(mode="json", exclude={"start"})
        return [f"critic.{key}={json.dumps(value)}" for key, value in own.items()]
    raise UserError(f"--critics {name}: not known; give some of {KINDS}, separated by commas")


def row_name(method: str, critics: str) -> str:
    """How a method is called in tables: the critics are named where they are not the timed settings' own."""
    return method if critics == ONE_BLOCK else f"{method}, {critics} critics"


def counted(columns: Sequence[tuple[str, Config]], layers: int) -> str:
    """Nodes per actor item by what they are for, one column each, with each sum in percent of the last column's."""
    found = {name: nodes_per_item(config, layers) for name, config in columns}
    purposes = list(dict.fromkeys(purpose for one in found.values() for purpose in one))
    rows = [
        [purpose, *(f"{one[purpose]:,.0f}" if one.get(purpose) else "–" for one in found.values())]
        for purpose in purposes
        if any(one.get(purpose) for one in found.values())
    ]
    sums = [sum(one.values()) for one in found.values()]
    rows.append(["**sum**", *(f"**{total:,.0f}**" for total in sums)])
    rows.append(["in % of the last", *(f"{total / sums[-1]:.1%}" for total in sums)])
    head = ["nodes an item", *found]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])

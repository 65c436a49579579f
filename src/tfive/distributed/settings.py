"""How several processes share the work of one run. How many there are comes from the launch, never from a file."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tfive.section import Section


class DistributedSettings(Section):
    """Roles, shards and patience of the processes of a run; a run in one process reads none of it."""

    profile: Literal["single", "compact", "cluster"] = "single"
    """Who fits the critics: in `single` all processes fit all of them, each on its share of the texts; in `compact` one
    process a critic, the last ones; in `cluster` a quarter of the processes each. Everything else is split over all."""

    shard: int = Field(1, ge=0, le=65_536)
    """Processes that hold master weights and moments between them, of the actor and of critics that adapt blocks: 1
    gives each a copy of its own, 0 spreads one copy over all; a number below that of all repeats the groups (one a
    node, say)."""

    timeout: float = Field(600.0, gt=0, le=1e6)
    """Seconds after which a process that does not answer counts as lost and ends the others."""

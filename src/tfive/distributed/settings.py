"""How several processes share the work of one run. How many there are comes from the launch, never from a file."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tfive.section import Section


class DistributedSettings(Section):
    """Roles, shards and patience of the processes of a run; a run in one process reads none of it."""

    profile: Literal["single", "compact", "cluster"] = "single"
    """Who does what: in `single` every process does everything on its share of the texts; in `compact` the last two
    processes fit a critic each and the others are the actor's; in `cluster` so do two groups of several processes."""

    shard: int = Field(1, ge=0, le=65_536)
    """Processes that hold one copy of the actor's master weights and moments between them: 1 gives each a copy of its
    own, 0 spreads one copy over all."""

    timeout: float = Field(600.0, gt=0, le=1e6)
    """Seconds after which a process that does not answer counts as lost and ends the others."""

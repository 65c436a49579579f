"""How several processes share the work of one run. How many there are comes from the launch, never from a file."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tfive.section import Section


class DistributedSettings(Section):
    """Roles, shards and patience of the processes of a run; a run in one process reads none of it."""

    profile: Literal["single", "compact", "cluster"] = "single"
    """Who has the actor and who the critics: in `single` all processes all of them, each with a share of the texts; in
    `compact` each critic one process, the last ones, and the actor the others; in `cluster` the critics up to half of
    the processes, a power of two each (of 24: 4 and 4, the actor 16). A process has weights and moments of its own role
    alone."""

    shard: int = Field(1, ge=0, le=65_536)
    """Processes that hold master weights and moments between them, of an actor that trains in full and of critics that
    adapt blocks: 1 gives each a copy of its own, 0 spreads one copy over all that have the role; a number below that
    repeats the groups (one a node, say). A critic with fewer processes has its shards over those."""

    timeout: float = Field(600.0, gt=0, le=1e6)
    """Seconds after which a process that does not answer counts as lost and ends the others."""

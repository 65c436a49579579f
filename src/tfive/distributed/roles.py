"""Which processes are the actor's and which a critic's (app:computational-cost): all of both, or groups of their own.

In a group of its own an actor or a critic has its weights and moments on the group's processes alone. The actor's
sample, score and update; each critic's fit it and say its values. What passes between the groups is trajectories and
values; every process has all of those, and takes every decision alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tfive.distributed.transfer import outlined, transferred
from tfive.distributed.world import SINGLE, World
from tfive.errors import UserError

CLUSTER_SHARE = 2
"""One of so many processes is a critic's in a cluster, at most: half of them. Each critic has a power of two, so that
groups end where nodes do."""


@dataclass(frozen=True)
class Role:
    """The processes that have an actor's or a critic's weights and work with them, as this process sees them."""

    every: World = SINGLE
    """All processes of the run."""
    members: World | None = SINGLE
    """Those of the role, for one of them; None for the others."""
    ranks: range = range(1)
    """Their numbers among all."""

    @classmethod
    def of_all(cls, world: World) -> Role:
        """A role that all processes have."""
        return cls(world, world, range(world.size))

    @property
    def apart(self) -> bool:
        """Whether some processes are not of the role."""
        return len(self.ranks) < self.every.size

    @property
    def texts(self) -> World:
        """All processes, of which the members alone have a share of the texts and all get what comes out."""
        return self.every.dealt(self.ranks) if self.apart else self.every

    def told(self, own: Any) -> Any:
        """What the first member gives (dictionaries, lists, tensors, numbers), on every process; all must call it."""
        return transferred(self.every, own, self.ranks[0]) if self.apart else own

    def state(self, own: Any) -> Any:
        """The members' state as every process may store it; None from those who have none. All must call it."""
        return outlined(self.every, own, self.ranks[0]) if self.apart else own


@dataclass(frozen=True)
class Roles:
    """The roles of a run."""

    actor: Role = Role()
    critics: tuple[Role, ...] = ()


def critics_each(profile: str, size: int, critics: int) -> int:
    """How many processes of `size` each critic has for itself; 0 where all have all."""
    if profile == "single" or not critics:
        return 0
    most = max(1, size // (CLUSTER_SHARE * critics))
    each = 1 if profile == "compact" else 1 << (most.bit_length() - 1)
    if size < critics * each + 1:
        raise UserError(
            f"distributed.profile = {profile}: {critics} critic{'s' * (critics > 1)} with {each} "
            f"process{'es' * (each > 1)} each need {critics * each + 1} processes, this run has {size}; start more, or "
            "use distributed.profile = single"
        )
    return each


def roles_of(profile: str, world: World, critics: int) -> Roles:
    """Who is what, the actor's processes first. Every process must call this, and equally often."""
    each = critics_each(profile, world.size, critics)
    if not each:
        return Roles(Role.of_all(world), (Role.of_all(world),) * critics)
    first = world.size - critics * each
    ranks = [range(first), *(range(first + number * each, first + (number + 1) * each) for number in range(critics))]
    # Every process takes part in making every group.
    actor, *others = [Role(world, world.part(own), own) for own in ranks]
    return Roles(actor, tuple(others))


def rank_duties(profile: str, size: int, critics: int) -> list[str]:
    """What each process of a run does, in words."""
    each = critics_each(profile, size, critics)
    if not each:
        return [_shown(range(size), "sample, score and update the actor" + ", and fit all critics" * (critics > 0))]
    first = size - critics * each
    duties = [_shown(range(first), "sample, score and update the actor; draw the window's next sets while critics fit")]
    for number in range(critics):
        own = range(first + number * each, first + (number + 1) * each)
        duties.append(_shown(own, f"fit critic {number + 1} and say its values; wait while the actor is updated"))
    return duties


def _shown(ranks: Sequence[int], duty: str) -> str:
    which = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}–{ranks[-1]}"
    return f"{which}: {duty}"

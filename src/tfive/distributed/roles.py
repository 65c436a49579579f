"""Which processes fit which critic (app:computational-cost): all of them, or a group of its own for each.

Everything else of a run (sampling, scoring, values, the actor's updates) is split over all processes in every profile.
With groups of their own the critics are fitted at the same time, each on all texts of the fitting set, and what comes
out goes to all processes.
"""

from __future__ import annotations

from dataclasses import dataclass

from tfive.distributed.world import World
from tfive.errors import UserError

CLUSTER_SHARE = 4
"""One of so many processes fits a given critic in a cluster: half of them fit one, as the rest wait."""


@dataclass(frozen=True)
class Fitter:
    """Who fits a critic."""

    world: World | None
    """The processes that do, for one of them; None for the others."""
    root: int = 0
    """The first of them, who tells the others what came out."""
    alone: bool = True
    """Whether they are not all."""


def ranks_of_critics(profile: str, size: int, critics: int) -> list[range] | None:
    """The processes that fit each of `critics`; None where all fit all."""
    if profile == "single" or not critics:
        return None
    each = 1 if profile == "compact" else max(1, size // CLUSTER_SHARE)
    if size < critics * each + 1:
        raise UserError(
            f"distributed.profile = {profile}: {critics} critics with {each} process{'es' * (each > 1)} each need "
            f"{critics * each + 1} processes, this run has {size}; start more, or use distributed.profile = single"
        )
    first = size - critics * each
    return [range(first + number * each, first + (number + 1) * each) for number in range(critics)]


def fitters(profile: str, world: World, critics: int) -> tuple[Fitter, ...]:
    """Who fits each critic, as this process sees it. Every process must call this, and equally often."""
    ranks = ranks_of_critics(profile, world.size, critics)
    if ranks is None:
        return tuple(Fitter(world, alone=False) for _ in range(critics))
    # Every process takes part in making every group.
    return tuple(Fitter(world.part(own), own[0]) for own in ranks)

"""Continuation losses of stored thoughts: every checkpoint, and the loss without a thought."""

from __future__ import annotations

from tfive.rollout.sample import micro_batches, with_scores
from tfive.rollout.trajectory import Trajectories
from tfive.tree.forward import TreeModel


def score(
    engine: TreeModel, trajectories: Trajectories, *, rows: int, snapshots: dict[str, str] | None = None
) -> Trajectories:
    """The trajectories with ℓ_0 and ℓ_τ of every checkpoint under the scorer `engine` (eq:continuation-ce)."""
    parts = []
    for part in micro_batches(len(trajectories.texts.tokens_BS), rows):
        some = trajectories.rows(part)
        parts.append(engine.score(some.texts, some.thoughts))
    return with_scores(trajectories, parts, snapshots)

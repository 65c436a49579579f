"""How many trajectories a window generates, and when that is fewer than group sampling would
(app:rollout-accounting)."""

from __future__ import annotations

from collections.abc import Mapping

AUXILIARY_ROLES = ("critic_fit", "qualify", "pilot", "head_train", "head_validate", "scale", "extra")
"""Everything generated beside the actor's own trajectories; retries, rejected attempts and probes are `extra`."""


def auxiliary_rollouts(counts: Mapping[str, int]) -> int:
    """n_aux of eq:total-rollout-budget: every newly generated trajectory that does not train the actor, counted
    once."""
    unknown = set(counts) - set(AUXILIARY_ROLES) - {"actor"}
    if unknown or min(counts.values(), default=0) < 0:
        raise ValueError(f"trajectory counts must be nonnegative and of known roles, got {dict(counts)}")
    return sum(count for role, count in counts.items() if role != "actor")


def total_rollouts(counts: Mapping[str, int]) -> int:
    """N_roll of the conditional-moment protocol (eq:total-rollout-budget)."""
    return counts.get("actor", 0) + auxiliary_rollouts(counts)


def repeated_rollouts(anchors: int, calibrate: int, admit: int, act: int, base: int) -> int:
    """N_roll of repeated-prefix calibration (eq:repeated-rollout-budget); both critics share every continuation."""
    return anchors * (calibrate + admit + act) + base


def fewer_than_groups(counts: Mapping[str, int], group: int) -> bool:
    """Whether the window generates fewer trajectories than groups of this size on the same actor items would
    (eq:grpo-rollout-threshold): n_aux < (G − 1)·n_act."""
    return auxiliary_rollouts(counts) < (group - 1) * counts.get("actor", 0)

"""How large a window is and how its fresh trajectories are shared among the roles (SPEC 6, `app:data-contracts`)."""

from __future__ import annotations

from pydantic import Field

from tfive.section import Section

TRAINING_ROLES = ("critic_fit", "pilot", "head_train", "head_validate", "actor", "scale", "probe")
"""Roles filled from the training split; `qualify` is filled from the calibration split."""


class WindowSettings(Section):
    """One window: N actor items, the other roles as trajectories per actor item, and the steps the actor may take."""

    items: int = Field(1024, ge=1)
    """N, the fresh actor trajectories of a window (one thought per selected position)."""

    windows: int = Field(100, ge=1)
    """Windows to complete before the run ends."""

    reading: int = Field(0, ge=0)
    """Windows at the start in which the anchors alone move the model: it learns to read its thoughts before anything
    rewards them. No critic is fitted meanwhile."""

    actor_steps: int = Field(8, ge=1)
    """PPO steps of a window, in which only the actor moves; at most actor.reuse_passes × actor.minibatches."""

    critic_fit: float = Field(1.0, ge=0)
    """Critic-fitting trajectories per actor item (n_V = N)."""

    qualify: float = Field(0.25, ge=0)
    """Held-out trajectories per actor item in one qualification test (N/4)."""

    pilot: float = Field(0.125, ge=0)
    """Pilot trajectories per actor item for the advantage normaliser (N/8)."""

    head_train: float = Field(0.5, ge=0)
    """Trajectories per actor item that teach the weight and mean heads (N/2)."""

    head_validate: float = Field(0.25, ge=0)
    """Trajectories per actor item that judge the frozen candidate (N/4)."""

    scale: float = Field(0.125, ge=0)
    """Trajectories per actor item that set the next window's reward scale (N/8)."""

    probe: float = Field(0.03125, ge=0)
    """Probe contexts per actor item for the drift diagnostics (N/32); continuations count as extra, 0 is none."""

    def count(self, role: str) -> int:
        """Trajectories of `role` in one window; a role with a positive share gets at least one."""
        if role == "actor":
            return self.items
        share: float = getattr(self, role)
        return max(1, round(self.items * share)) if share > 0 else 0

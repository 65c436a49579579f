"""Settings of a window: how many trajectories each role gets, and what comes before and in place of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from tfive.section import Section

TRAINING_ROLES = ("critic_fit", "pilot", "head_train", "head_validate", "actor", "scale", "probe")
"""Roles filled from the training split; `qualify` is filled from the calibration split."""

LEARNING = ("actor", "critic_fit")
"""Roles that share a pool of training texts; each other one has texts of its own."""

HALVES = ("pool_1", "pool_2")
"""The two halves of the pool, as `tfive data` names them: in one window the actor learns from one and the critics from
the other, in the next they change over."""

DERIVED_ROLES = {"scale": ("pilot", 1.0), "head_validate": ("head_train", 0.5)}
"""Role → the key of `[window]` it follows, and its part of that: the paper's N/8 and N/8, N/2 and N/4. They do not
depend on the method, because all methods of a comparison share one prepared corpus."""


OldLaw = Literal["none", "scored", "recorded"]
"""Where a set's log π_old comes from: nowhere; the pass that scores, which reads the same nodes by the same weights but
rounds otherwise than an update; or a pass like the update's own."""

OLD_LAW: dict[str, OldLaw] = {
    "critic_fit": "none", "qualify": "none", "pilot": "none", "scale": "none",
    "head_train": "scored", "head_validate": "scored",
}  # fmt: skip
"""Role → where its log π_old comes from, unless `recorded`. The first four do not read it; to the next two it is an
input of a head, and no ratio to an update's own pass is taken: the rounding of the scoring pass is harmless."""


class WindowSettings(Section):
    """One window: N actor items, the other roles as trajectories per actor item, and the steps the actor may take."""

    items: int = Field(1024, ge=1, le=10_000_000)
    """N, the positions at which the actor thinks in a window; each gives one trajectory, in a group G of them."""

    windows: int = Field(100, ge=1, le=1_000_000)
    """Windows to complete before the run ends."""

    reading: int = Field(0, ge=0, le=1_000_000)
    """Windows at the start in which the anchors alone move the model: it learns to read its thoughts before anything
    rewards them. No critic is fitted meanwhile. With gated reading it is at least 1 where thoughts are
    rewarded, unless a warm start has opened the gates."""

    curriculum: int = Field(0, ge=0, le=1_000_000)
    """Windows over which thoughts grow: from the first of `thought.checkpoints` over the next ones to `thought.length`,
    which they reach when these windows are over. 0: they may have their whole length from the start. Measured thoughts
    always may."""

    actor_steps: int = Field(8, ge=1, le=100_000)
    """PPO steps of a window, in which only the actor moves; at most actor.reuse_passes × actor.minibatches."""

    history: bool = False
    """Whether the actor's thoughts serve once more before they are learned from: when their advantages are fixed, they
    fit the critics for the next window, and at its end they set the next reward scale. Both are history by then, so
    later windows draw no thoughts for either; what tests, normalises and calibrates stays fresh. Critics that fail a
    test are fitted to fresh thoughts as ever."""

    critic_fit: float = Field(1.0, ge=0, le=64)
    """Critic-fitting trajectories per actor item (n_V = N)."""

    qualify: float = Field(0.25, ge=0, le=64)
    """Held-out trajectories per actor item in one qualification test (N/4)."""

    pilot: float = Field(0.125, ge=0, le=64)
    """Pilot trajectories per actor item for the advantage normaliser (N/8); as many more (role `scale`) set the next
    window's reward scale."""

    head_train: float = Field(0.5, ge=0, le=64)
    """Trajectories per actor item that teach the weight and mean heads (N/2); half as many (role `head_validate`, N/4)
    validate the frozen candidate."""

    probe: float = Field(0.03125, ge=0, le=64)
    """Probe contexts per actor item for the drift diagnostics (N/32); continuations count as extra, 0 is none."""

    def count(self, role: str) -> int:
        """Trajectories of `role` in one window; a role with a positive share gets at least one."""
        if role == "actor":
            return self.items
        key, factor = DERIVED_ROLES.get(role, (role, 1.0))
        share: float = factor * getattr(self, key)
        return max(1, round(self.items * share)) if share > 0 else 0

    @property
    def fitted_role(self) -> str:
        """The role whose thoughts a later window fits its critics to."""
        return "actor" if self.history else "critic_fit"

    def longest_thought(self, window: int, checkpoints: Sequence[int]) -> int:
        """Tokens that a thought of this window (from 1) may have at most: a reward checkpoint, so that every thought
        that is cut there is scored at its end."""
        if window > self.curriculum:
            return checkpoints[-1]
        return checkpoints[max(window - 1, 0) * (len(checkpoints) - 1) // self.curriculum]

    def training_texts(self, per_text: int) -> dict[str, int]:
        """Texts that each group of the training split must hold for one window, at `per_text` positions a text.

        A role that needs a few items still needs a whole text.
        """
        texts = {role: math.ceil(self.count(role) / per_text) for role in TRAINING_ROLES}
        half = max(texts.pop(role) for role in LEARNING)
        return dict.fromkeys(HALVES, half) | {role: count for role, count in texts.items() if count > 0}

    @staticmethod
    def key_of(role: str) -> str:
        """The key that decides how many trajectories a role gets."""
        return "window.items" if role == "actor" else f"window.{DERIVED_ROLES.get(role, (role, 1.0))[0]}"

"""A method from outside the package, in one file: each thought's baseline is the mean of the others at its position.

A thought is credited with its return (eq:dense-reward) beyond the mean of the other G − 1, which is unbiased and needs
no critic (Kool et al. 2019, "Buy 4 REINFORCE samples, get a baseline for free!").
"""

from __future__ import annotations

from typing import Self

from pydantic import Field

from tfive.methods import MethodSpec
from tfive.methods.method import Kit, Method, Parts
from tfive.rl.groups import with_group_advantages
from tfive.section import Section


class LeaveOneOutSettings(Section):
    """`leave-one-out`: how its advantages are scaled."""

    scale: float = Field(1.0, gt=0)
    """Factor on every advantage."""


class LeaveOneOut(Method[Parts]):
    """A group of thoughts per position; the others are each one's baseline."""

    made_by = ("policy", "scorer", "scale")

    def __init__(self, parts: Parts, *, scale: float, actor_steps: int, reading: int = 0) -> None:
        super().__init__(parts, actor_steps=actor_steps, reading=reading)
        self.scale = scale

    @classmethod
    def assemble(cls, kit: Kit) -> Self:
        return cls(Parts(**kit.common), scale=kit.settings.scale, **kit.windows)

    def open(self) -> str | None:
        super().open()
        self.fix_scale()
        return None

    def collect(self) -> str | None:
        """Fresh groups of thoughts, credited with the whole thought's return beyond the mean of the others."""
        acting = self.parts.rollout.collect("actor", self.window)
        reward_BR = self.scale * acting.need("returns_BRT")[..., 0]
        return self.act_on(
            with_group_advantages(acting, reward_BR, self.parts.actor.engine.plan.group, "leave_one_out")
        )


SPEC = MethodSpec(
    name="leave-one-out",
    summary="group of thoughts, the mean of the others as baseline",
    method=LeaveOneOut,
    settings=LeaveOneOutSettings,
    section="leave_one_out",
    group=4,
    first_roles=("scale",),
)

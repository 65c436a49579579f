"""RLP: reinforcement as a pretraining objective (Hatamizadeh et al., arXiv 2510.01265), in this paper's protocol.

A thought is worth what it tells about the very next token: log p_θ(x_{p+1} | x_≤p, z) − log p_φ(x_{p+1} | x_≤p), where
φ is a moving average of θ that never thinks. *Matched* is this file with the settings of every other method; *native*
is the preset `rlp-native`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from tfive.methods.method import Kit, Method, Parts
from tfive.rl.actor import StepStats
from tfive.rl.groups import with_group_advantages
from tfive.rl.teacher import Teacher
from tfive.rl.trajectory import Trajectories


@dataclass(frozen=True, kw_only=True)
class RLPParts(Parts):
    """The parts of any method, with the teacher. `rollout` and `teacher` score one token after the whole thought."""

    teacher: Teacher


class RLP(Method[RLPParts]):
    """A group of thoughts per position, each credited with its information gain beyond the group's mean."""

    stateful: ClassVar[tuple[str, ...]] = (*Method.stateful, "teacher")

    @classmethod
    def assemble(cls, kit: Kit) -> Self:
        rollout, shards = kit.common["rollout"], kit.common["actor"].shards
        own = {"decay": kit.settings.decay, "rows": rollout.passes, "world": rollout.world, "shards": shards}
        teacher = Teacher.of(rollout.engine, **own)
        return cls(RLPParts(**kit.common, teacher=teacher), **kit.windows)

    def collect(self) -> str | None:
        """The information gain of fresh thoughts against the teacher as it is now, relative to their group."""
        parts = self.parts
        if not parts.teacher.started:
            parts.teacher.follow(parts.actor.optimizer.masters())
        acting = parts.rollout.collect("actor", self.window, rewarded=False)
        gain_BR = (parts.teacher.losses(acting.texts) - acting.final_loss_BR) * acting.thoughts.valid_BR
        self.report["information_gain"] = float(gain_BR.sum() / acting.count)
        # G/(G−1)·(r − group mean), no deviation: the mean of the others is the baseline.
        return self.act_on(with_group_advantages(acting, gain_BR, self.group, "leave_one_out"))

    def learn(self, acting: Trajectories) -> StepStats:
        """Clipped ratios of thought tokens, averaged per thought and then over thoughts; then the teacher follows."""
        stats = self.parts.actor.step(acting, aggregate="thought")
        self.parts.teacher.follow(self.parts.actor.optimizer.masters())
        return stats

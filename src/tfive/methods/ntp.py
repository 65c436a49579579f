"""NTP: next-token likelihood on the texts every other method thinks about; it controls for seeing the corpus."""

from __future__ import annotations

from tfive.methods.window import Parts, Window
from tfive.rl.actor import StepStats
from tfive.rl.trajectory import Trajectories


class NextToken(Window[Parts]):
    """The same texts, minibatches and number of steps as any method; no thought is ever sampled."""

    name = "ntp"
    phases = ("open", "collect", "update", "close")
    made_by = ("policy",)

    def _collect(self) -> str:
        """The window's texts as they are."""
        return self._act(self.parts.rollout.texts("actor", self.window))

    def _learn(self, acting: Trajectories) -> StepStats:
        return self.parts.actor.step(acting, policy=False)

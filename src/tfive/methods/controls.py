"""The controls of a comparison: the model as it came, next-token training, anchors without a policy gradient."""

from __future__ import annotations

from typing import ClassVar

from tfive.methods.method import Method, Parts, Phase
from tfive.rl.actor import StepStats
from tfive.rl.trajectory import Trajectories


class Base(Method[Parts]):
    """The row `base`: no window at all; a run is over before it begins, and what remains is its first measurement."""

    def phases(self) -> tuple[Phase, ...]:
        return (Phase("open", self.open),)

    def finished(self, windows: int) -> bool:
        return True


class NextToken(Method[Parts]):
    """NTP: next-token likelihood on the texts every other method thinks about; it controls for seeing the corpus.

    The same texts, minibatches and number of steps as any method; no thought is ever sampled.
    """

    made_by: ClassVar[tuple[str, ...]] = ("policy",)

    def collect(self) -> str | None:
        """The window's texts as they are."""
        return self.act_on(self.parts.rollout.texts("actor", self.window))

    def learn(self, acting: Trajectories) -> StepStats:
        return self.parts.actor.step(acting, policy=False)


class AnchorOnly(Method[Parts]):
    """Thoughts are sampled and the anchors are trained on the same texts, but nothing rewards a thought.

    What a thought method gains beyond this row is what its policy gradient bought.
    """

    def collect(self) -> str | None:
        """Every window is one of reading."""
        return self.collect_for_reading()

    def learn(self, acting: Trajectories) -> StepStats:
        return self.parts.actor.step(acting, policy=False)

"""The control `anchor-only`: thoughts are sampled and the anchors are trained, but nothing rewards a thought.

What a thought method gains beyond this row is what its policy gradient bought.
"""

from __future__ import annotations

from tfive.methods.window import Parts, Window
from tfive.rl.actor import StepStats
from tfive.rl.trajectory import Trajectories


class AnchorOnly(Window[Parts]):
    """One thought an item, the anchors of every thought method on the same texts, no policy gradient."""

    name = "anchor-only"
    phases = ("open", "collect", "update", "close")

    def _collect(self) -> str:
        """Every window is one of reading: fresh thoughts, scored for the report and rewarded by nobody."""
        return self._read()

    def _learn(self, acting: Trajectories) -> StepStats:
        return self.parts.actor.step(acting, policy=False)

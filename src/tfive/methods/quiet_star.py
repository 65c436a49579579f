"""Quiet-STaR's hidden thoughts (Zelikman et al., arXiv 2403.09629) under two policy updates (tab:target-baselines).

Both get the reward of T⁵: the improvement of the continuation, scaled and clipped (eq:dense-reward). `quiet-star-ppo`
credits tokens by one critic that was warmed up for a fixed time; `quiet-star-grpo` credits a thought by comparing it
with the others of its position.
"""

from __future__ import annotations

from typing import ClassVar, TypeVar

from tfive.methods.fitting import CriticParts, FittedWindow
from tfive.methods.settings import GrpoSettings, PpoSettings
from tfive.methods.window import Parts, Window
from tfive.rl.gae import PilotNormaliser
from tfive.rl.groups import with_group_advantages
from tfive.rl.qualify import r_squared

P = TypeVar("P", bound=Parts)


class QuietStar(Window[P]):
    """What both have in common: rewards at a scale that past thoughts have set."""

    made_by: ClassVar[tuple[str, ...]] = ("policy", "scorer", "scale")

    def _open(self) -> str:
        following = super()._open()
        self._fix_scale()
        return following

    def _close(self) -> str:
        """As every method does, and the scale goes on."""
        # The next window's scale: by then these thoughts are historical (eq:reward-scale), and none more are needed.
        self.parts.rollout.update_scale(self.held["actor"])
        return super()._close()


class QuietStarGRPO(QuietStar[Parts]):
    """Group-relative: no critic, every token of a thought gets the whole thought's advantage."""

    name = "quiet-star-grpo"
    phases = ("open", "collect", "update", "close")

    def __init__(self, settings: GrpoSettings, parts: Parts, *, actor_steps: int, reading: int = 0) -> None:
        super().__init__(parts, actor_steps=actor_steps, reading=reading)
        self.settings = settings

    def _collect(self) -> str:
        """Φ_T of every thought, relative to its group."""
        acting = self.parts.rollout.collect("actor", self.window)
        whole_BR = acting.need("returns_BRT")[..., 0]
        group, rule = self.parts.actor.engine.plan.group, self.settings
        return self._act(with_group_advantages(acting, whole_BR, group, rule.normalisation, rule.epsilon))


class QuietStarPPO(QuietStar[CriticParts], FittedWindow[CriticParts]):
    """One critic, standard PPO: GAE on its values, normalised over the window's own batch. Nothing is qualified."""

    name = "quiet-star-ppo"
    phases = ("open", "fit", "collect", "update", "close")
    plain: ClassVar[tuple[str, ...]] = (*FittedWindow.plain, "round")
    made_by: ClassVar[tuple[str, ...]] = (*QuietStar.made_by, "critics")

    def __init__(self, settings: PpoSettings, parts: CriticParts, *, actor_steps: int, reading: int = 0) -> None:
        super().__init__(parts, actor_steps=actor_steps, reading=reading)
        self.settings = settings
        self.round = 0
        """Fitting rounds of this window that are over."""

    def _open(self) -> str:
        self.round = 0
        return super()._open()

    def _fit(self) -> str:
        """One pass of the critic; after so many rounds the actor moves, whatever the critic predicts."""
        if not self._fit_pass(self.round, warmup=self.first):
            return "fit"
        self.round += 1
        self.step = 0
        return "fit" if self.first and self.round < self.settings.warmup_rounds else "collect"

    def _collect(self) -> str:
        """GAE of fresh thoughts (eq:masked-gae), normalised by their own mean and deviation."""
        parts = self.parts
        fresh = parts.rollout.collect("actor", self.window)
        judged = parts.critics.judge(fresh)
        parts.critics.release()
        acting = parts.critics.advantages(fresh, judged).having(snapshots=parts.snapshots.current("critics"))
        (gae_BRT,), mask_BRT = acting.need("gae_2BRT"), acting.mask_BRT
        batch = PilotNormaliser.fit(gae_BRT, gae_BRT, mask_BRT, self.settings.epsilon)
        # Fresh texts, so this is how well the critic predicts; it decides nothing.
        self.report["r2"] = [r_squared(acting.need("returns_BRT"), judged.values_2BRT[0], mask_BRT).r2]
        following = self._act(acting.having(advantage_BRT=batch.normalise(gae_BRT, mask_BRT)))
        frozen = self.window <= self.reading_windows + self.settings.frozen_windows
        return "close" if frozen else following

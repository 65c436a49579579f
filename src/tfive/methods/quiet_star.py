"""Quiet-STaR's hidden thoughts (Zelikman et al., arXiv 2403.09629) under two policy updates (tab:target-baselines).

Both get the reward of T⁵: the improvement of the continuation, scaled and clipped (eq:dense-reward). `quiet-star-ppo`
credits tokens by one critic that was warmed up for a fixed time; `quiet-star-grpo` credits a thought by comparing it
with the others of its position.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self, TypeVar

import torch

from tfive.methods.fitting import CriticParts, FittedMethod
from tfive.methods.method import Kit, Method, Parts, Phase
from tfive.methods.settings import GrpoSettings, PpoSettings
from tfive.rl.credit import Credit
from tfive.rl.diagnosis import others_score
from tfive.rl.gae import PilotNormaliser
from tfive.rl.groups import with_group_advantages
from tfive.rl.qualify import r_squared
from tfive.rl.rollout import Draw
from tfive.tree.layout import TextBatch, Thoughts

P = TypeVar("P", bound=Parts)


class QuietStar(Method[P]):
    """What both have in common: rewards at a scale that past thoughts have set."""

    made_by: ClassVar[tuple[str, ...]] = ("policy", "scorer", "scale")

    def open(self) -> str | None:
        super().open()
        self.fix_scale()
        return None

    def close(self) -> str | None:
        """As every method does, and the scale goes on."""
        # The next window's scale: by then these thoughts are historical (eq:reward-scale), and none more are needed.
        # Thoughts that were scored behind shut gates say nothing about it.
        if self.parts.rollout.scale.updates:
            self.parts.rollout.update_scale(self.held["actor"])
        return super().close()


class QuietStarGRPO(QuietStar[Parts]):
    """Group-relative: no critic, every token of a thought gets the whole thought's advantage."""

    def __init__(self, settings: GrpoSettings, parts: Parts, *, actor_steps: int, reading: int = 0) -> None:
        super().__init__(parts, actor_steps=actor_steps, reading=reading)
        self.settings = settings

    @classmethod
    def assemble(cls, kit: Kit) -> Self:
        return cls(kit.settings, Parts(**kit.common), **kit.windows)

    def collect(self) -> str | None:
        """Φ_T of every thought, relative to its group."""
        acting = self.parts.rollout.collect("actor", self.window)
        whole_BR = acting.need("returns_BRT")[..., 0]
        return self.act_on(with_group_advantages(acting, whole_BR, self.group, self.settings.normalisation))


class QuietStarPPO(QuietStar[CriticParts], FittedMethod[CriticParts]):
    """One critic, standard PPO: GAE on its values, normalised over the window's own batch. Nothing is qualified."""

    saved: ClassVar[tuple[str, ...]] = (*FittedMethod.saved, "round")
    made_by: ClassVar[tuple[str, ...]] = (*QuietStar.made_by, "critics")

    def __init__(self, settings: PpoSettings, parts: CriticParts, **windows: Any) -> None:
        super().__init__(parts, **windows)
        self.settings = settings
        self.round = 0
        """Fitting rounds of this window that are over."""

    @classmethod
    def assemble(cls, kit: Kit) -> Self:
        parts = CriticParts(**kit.common, critics=kit.need_critics())
        return cls(kit.settings, parts, **kit.windows, history=kit.config.window.history)

    def phases(self) -> tuple[Phase, ...]:
        return (
            Phase("open", self.open),
            Phase("fit", self.fit),
            Phase("collect", self.collect),
            *([Phase("refit", self.refit)] if self.history else ()),
            Phase("update", self.update),
            Phase("close", self.close),
        )

    def open(self) -> str | None:
        self.round = 0
        super().open()
        return "collect" if self.fitted_before else None

    def fit(self) -> str | None:
        """One pass of the critic; after so many rounds the actor moves, whatever the critic predicts."""
        if not self.fit_pass(self.round):
            return "fit"
        self.round += 1
        self.step = 0
        return "fit" if self.first and self.round < self.parts.critics.settings.warmup_rounds else None

    def to_come(self) -> list[Draw]:
        return [Draw("actor", self.window)]

    def collect(self) -> str | None:
        """GAE of fresh thoughts (eq:masked-gae), normalised by their own mean and deviation."""
        parts = self.parts
        fresh = parts.rollout.collect("actor", self.window)
        values = parts.critics.evaluate(fresh)
        self.keep_for_refit(fresh)
        acting = parts.critics.advantages(fresh, values).having(snapshots=parts.snapshots.current("critics"))
        (gae_BRT,), mask_BRT = acting.need("gae_2BRT"), acting.mask_BRT
        batch = PilotNormaliser.fit(gae_BRT, gae_BRT, mask_BRT)
        # Fresh texts, so this is how well the critic predicts; it decides nothing.
        self.report["r2"] = [r_squared(acting.need("returns_BRT"), values.values_2BRT[0], mask_BRT).r2]
        self.report |= others_score(fresh)
        following = self.act_on(acting.having(advantage_BRT=batch.normalise(gae_BRT, mask_BRT)))
        if self.history:
            return following
        return "close" if self._waits else following

    def refit(self) -> str | None:
        following = super().refit()
        return "close" if following is None and self._waits else following

    @property
    def _waits(self) -> bool:
        """Whether the actor does not move in this window."""
        return self.window <= self.reading_windows + self.settings.frozen_windows

    @torch.no_grad()
    def credited(self, texts: TextBatch, thoughts: Thoughts) -> Credit | None:
        """The critic's values and advantages, normalised by these thoughts' own mean and deviation."""
        parts = self.parts
        if not parts.rollout.scale.updates or self.group > 1:
            return None
        given = parts.rollout.appraised(parts.actor.reader, texts, thoughts, self.window)
        values = parts.critics.evaluate(given)
        (gae_BRT,) = parts.critics.advantages(given, values).need("gae_2BRT")
        parts.critics.release()
        normalised_BRT = PilotNormaliser.fit(gae_BRT, gae_BRT, given.mask_BRT).normalise(gae_BRT, given.mask_BRT)
        return Credit(values.values_2BRT, normalised_BRT[None], given.need("returns_BRT"))

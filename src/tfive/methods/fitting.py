"""Methods with critics: how a round of fitting goes, whatever decides that the critics are good enough."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

from tfive.methods.method import Method, Parts
from tfive.rl.critics import Critics
from tfive.rl.rollout import Draw
from tfive.rl.trajectory import Trajectories


@dataclass(frozen=True, kw_only=True)
class CriticParts(Parts):
    """The parts of a method with critics."""

    critics: Critics


C = TypeVar("C", bound=CriticParts)


AGAIN = 1_000_000
"""The number of the fitting round over the actor's thoughts; rounds over fresh ones count from 0."""


class FittedMethod(Method[C]):
    """A method whose critics are fitted in rounds: a set of full returns, then passes over it.

    With `window.history` the last round of a window is over the actor's own thoughts, once their advantages are fixed
    and before the actor learns from them. The next window finds its critics fitted and draws no set for that.
    """

    stateful: ClassVar[tuple[str, ...]] = (*Method.stateful, "critics")
    history = False
    """`window.history`; a method that is only asked for its phases has none."""

    def __init__(self, parts: C, *, history: bool = False, **windows: Any) -> None:
        super().__init__(parts, **windows)
        self.history = history
        self.fitted: dict[str, Any] = {}
        """What the last window's refit measured, which is of this window's critics."""

    @property
    def fitted_before(self) -> bool:
        """Whether this window's critics were fitted at the end of the one before; to shorter thoughts they were not."""
        earlier = self.window > self.reading_windows + 1
        return self.history and earlier and not self.parts.rollout.grows(self.window)

    def open(self) -> str | None:
        """As every method does; critics that the last window fitted are in force from here on."""
        following = super().open()
        if self.fitted_before:
            self.parts.snapshots.renew("critics")
            self.report |= self.fitted
        return following

    def keep_for_refit(self, acting: Trajectories, *, afresh: bool | None = None) -> None:
        """Keep the actor's set, with what critics read of it, for the round that follows, with returns by the scale
        that the window's end will set from it (`afresh` as it will be then). Where there is no such round, or thoughts
        are about to grow, let go of what critics read."""
        rollout = self.parts.rollout
        if not self.history or rollout.grows(self.window + 1):
            self.parts.critics.release()
            return
        again = rollout.rewarded_next(acting, afresh=afresh)
        self.held["critic_fit"] = replace(again, states_BRTD=None, scoring_BRF=None)

    def refit(self) -> str | None:
        """One pass over the actor's thoughts. Their advantages are fixed, and the snapshot that made them stays in
        force until the next window opens with the critics that come of this."""
        if "critic_fit" not in self.held or self._pass_over(AGAIN):
            return None
        return "refit"

    @property
    def warming(self) -> bool:
        """Whether critics are still warmed up: the prediction before a fit is not yet worth staying near."""
        return self.first

    def fit_pass(self, number: int, *, ahead: Sequence[Draw] = ()) -> bool:
        """One pass of this window's fitting round `number` (from 0); True when the round is over (eq:value-loss).

        The first passes of a run train the value heads alone; the blocks below are unfrozen behind them. `ahead` are
        sets that follow the round under the same policy and are drawn with the fitting set.
        """
        if self.step == 0:
            self.held["critic_fit"] = self.parts.rollout.collect("critic_fit", self.window, number, ahead=ahead)
        self._draw_ahead()
        over = self._pass_over(number)
        if over:
            self.parts.snapshots.renew("critics")
        return over

    def _pass_over(self, number: int) -> bool:
        """One pass over the set that is held; True when the round is over, and with it the set's use."""
        parts, critics, warmup, again = self.parts, self.parts.critics, self.warming, number == AGAIN
        fitting = self.held["critic_fit"]
        if critics.clips(warmup) and fitting.values_2BRT is None:
            fitting = fitting.having(values_2BRT=critics.evaluate(fitting).values_2BRT)
            self.held["critic_fit"] = fitting
        # Returns of the actor's set are in a scale that comes into force with the next window.
        made_by = ("policy", "scorer") if again else ("policy", "scorer", "scale")
        parts.snapshots.require(fitting.snapshots, made_by, what="the fitting set")
        frozen_2BRT = fitting.need("values_2BRT") if critics.clips(warmup) else None
        losses = critics.fit_pass(fitting, frozen_2BRT, self.window, number * 1000 + self.step, warmup=warmup)
        found: dict[str, Any] = {"critic_loss": losses}
        if critics.fits is not None:
            self._say_trouble("critics", critics.fits.graphs)
        if critics.fits_squares(warmup):
            variance = float(fitting.need("returns_BRT")[fitting.mask_BRT].double().var(unbiased=False))
            # The loss is half the squared error.
            found["fit_r2"] = [1 - 2 * loss / max(variance, 1e-12) for loss in losses]
        if again:
            self.fitted = found
        else:
            self.report.pop("fit_r2", None)
            self.report |= found
        self.step += 1
        if critics.head_only and self.step >= critics.head_passes:
            critics.unfreeze()
        if self.step < critics.settings.passes + (critics.head_passes if self.first and number == 0 else 0):
            return False
        del self.held["critic_fit"]
        critics.release()
        return True

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "fitted": dict(self.fitted)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        # A checkpoint of before critics could be fitted to history has none.
        self.fitted = dict(state.get("fitted", {}))

    def to_come(self) -> list[Draw]:
        """Sets that this window will draw whatever the critics come to, in the order in which they are needed: all
        trajectories of a window are of the policy that opened it, so none has to wait for the critics."""
        return []

    def _draw_ahead(self) -> None:
        """Where critics have processes of their own, the actor's draw a later set while these make one pass."""
        if self.parts.critics.apart:
            for draw in self.to_come():
                if self.parts.rollout.draw_ahead(draw):
                    return

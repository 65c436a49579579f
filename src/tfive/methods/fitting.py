"""Methods with critics: how a round of fitting goes, whatever decides that the critics are good enough."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from tfive.methods.method import Method, Parts
from tfive.rl.critics import Critics
from tfive.rl.rollout import Draw


@dataclass(frozen=True, kw_only=True)
class CriticParts(Parts):
    """The parts of a method with critics."""

    critics: Critics


C = TypeVar("C", bound=CriticParts)


class FittedMethod(Method[C]):
    """A method whose critics are fitted in rounds: a fresh set of full returns, then passes over it."""

    stateful: ClassVar[tuple[str, ...]] = (*Method.stateful, "critics")

    def fit_pass(self, number: int, *, warmup: bool, ahead: Sequence[Draw] = ()) -> bool:
        """One pass of this window's fitting round `number` (from 0); True when the round is over (eq:value-loss).

        The first passes of a run train the value heads alone; the blocks below are unfrozen behind them. `ahead` are
        sets that follow the round under the same policy and are drawn with the fitting set.
        """
        parts, critics = self.parts, self.parts.critics
        if self.step == 0:
            fresh = parts.rollout.collect("critic_fit", self.window, number, ahead=ahead)
            if critics.clips(warmup):
                fresh = fresh.having(values_2BRT=critics.evaluate(fresh).values_2BRT)
            self.held["critic_fit"] = fresh
        fitting = self.held["critic_fit"]
        self._draw_ahead()
        parts.snapshots.require(fitting.snapshots, ("policy", "scorer", "scale"), what="the fitting set")
        frozen_2BRT = fitting.need("values_2BRT") if critics.clips(warmup) else None
        self.report["critic_loss"] = critics.fit_pass(
            fitting, frozen_2BRT, self.window, number * 1000 + self.step, warmup=warmup
        )
        if critics.fits is not None:
            self._say_trouble("critics", critics.fits.graphs)
        self.report.pop("fit_r2", None)
        if critics.fits_squares(warmup):
            variance = float(fitting.need("returns_BRT")[fitting.mask_BRT].double().var(unbiased=False))
            # The loss is half the squared error.
            self.report["fit_r2"] = [1 - 2 * loss / max(variance, 1e-12) for loss in self.report["critic_loss"]]
        self.step += 1
        if critics.head_only and self.step >= critics.head_passes:
            critics.unfreeze()
        if self.step < critics.settings.passes + (critics.head_passes if self.first and number == 0 else 0):
            return False
        parts.snapshots.renew("critics")
        del self.held["critic_fit"]
        critics.release()
        return True

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

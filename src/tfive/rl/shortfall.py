"""Why critics fail their test and what to try: tests on numbers that a failed attempt leaves behind.

R² can be too small for different reasons with different remedies, and the numbers tell some of them apart. Each test
below says what it compares; one that does not apply says nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tfive.rl.qualify import r_squared, r_squared_error
from tfive.rl.trajectory import Trajectories

SPREAD = 0.1
"""Returns whose deviation is below this share of their size hardly differ: thoughts cost (or gain) all alike."""

ROOM = 0.1
"""Nats per token. Where the text costs less than this without a thought, little is left for a thought to gain."""

CLEAR = 2.0
"""Standard errors that a difference must exceed to count."""

FEW = 8
"""Texts below which a standard error over texts says nothing itself."""


@dataclass(frozen=True)
class Attempt:
    """What one fresh test of both critics measured, as plain numbers."""

    r2: list[float | None]
    r2_error: list[float]
    """Standard errors of the two, over texts."""
    fit_r2: list[float] | None
    """R² on the fitting set in the last pass over it; None where the loss is not the squared error."""
    texts: int
    return_deviation: float
    return_size: float
    """Deviation and root mean square of the whole thoughts' returns, in units of the reward scale."""
    reward_scale: float
    no_thought_loss: float
    """Nats per token of the held-out continuations without a thought."""

    @classmethod
    def of(cls, tested: Trajectories, values_2BRT: Tensor, reward_scale: float, fit_r2: list[float] | None) -> Attempt:
        """The numbers of a test on these trajectories."""
        returns_BRT, mask_BRT, valid_BR = tested.need("returns_BRT"), tested.mask_BRT, tested.thoughts.valid_BR
        text_B11 = torch.arange(len(valid_BR), device=valid_BR.device)[:, None, None]
        whole = returns_BRT[..., 0][valid_BR].double()
        return cls(
            r2=[r_squared(returns_BRT, values, mask_BRT).r2 for values in values_2BRT],
            r2_error=[r_squared_error(returns_BRT, values, mask_BRT, text_B11) for values in values_2BRT],
            fit_r2=fit_r2,
            texts=int(valid_BR.any(-1).sum()),
            return_deviation=float(whole.std(unbiased=False)),
            return_size=float(whole.square().mean().sqrt()),
            reward_scale=reward_scale,
            no_thought_loss=float(tested.need("no_thought_BR")[valid_BR].mean()),
        )

    @property
    def weaker(self) -> int | None:
        """Which critic scored lower; None where returns do not vary."""
        scores = [score for score in self.r2 if score is not None]
        return None if len(scores) < len(self.r2) else self.r2.index(min(scores))


@dataclass(frozen=True)
class Finding:
    """One likely reason, and what to try."""

    suggests: str
    remedy: str


def findings(attempts: Sequence[Attempt], eta: float) -> list[Finding]:
    """What the numbers of a window's failed attempts suggest, the last one's first; never empty."""
    last = attempts[-1]
    number = last.weaker
    flat = _spread(last)
    if flat is not None or number is None:
        return [flat or _UNKNOWN]
    score, error = last.r2[number], last.r2_error[number]
    assert score is not None
    fitted = None if last.fit_r2 is None else last.fit_r2[number]
    rising = _rising(attempts)
    found = [
        _few_tests(last, score, error, eta),
        _few_fits(fitted, score, error, eta),
        # Critics that still learn have not shown what the prefix tells.
        rising or (_unpredictable(fitted, score, error, eta) if last.texts >= FEW else None),
        _no_room(last),
    ]
    return [one for one in found if one is not None] or [_UNKNOWN]


_UNKNOWN = Finding(
    "the numbers do not point to one reason",
    "more window.items or critic.passes, a critic with more reach (critic.adapt), other text.positions",
)


def _spread(last: Attempt) -> Finding | None:
    """Returns that hardly differ: their deviation is a small share of their size, or none at all."""
    if last.weaker is not None and last.return_deviation >= SPREAD * last.return_size:
        return None
    nats = last.return_deviation * last.reward_scale
    return Finding(
        f"returns without spread: whole thoughts differ by {nats:.2g} nats a token around {last.return_size:.2g} times "
        f"the reward scale, so there is hardly anything to predict",
        "window.reading = 2 with anchor.conditioned = 1 (the model first learns to read thoughts), a higher "
        "sampling.temperature, or longer thoughts",
    )


def _few_tests(last: Attempt, score: float, error: float, eta: float) -> Finding | None:
    """A test that cannot tell this R² from one that passes: η lies within two standard errors, or texts are so few that
    these are not known either."""
    if score >= eta or (last.texts >= FEW and score + CLEAR * error < eta):
        return None
    return Finding(
        f"too few items to tell: {last.texts} texts put R² at {score:.3f} ± {error:.3f}, and η is {eta:g}",
        "more window.items, or a larger share window.qualify; of a small text, more text",
    )


def _few_fits(fitted: float | None, score: float, error: float, eta: float) -> Finding | None:
    """Critics that know their fitting texts and no others."""
    if fitted is None or fitted < eta or fitted - score <= CLEAR * error:
        return None
    return Finding(
        f"too few items to learn from: R² is {fitted:.3f} on the texts that were fitted and {score:.3f} on others",
        "more window.items, a larger share window.critic_fit, or fewer critic.passes",
    )


def _rising(attempts: Sequence[Attempt]) -> Finding | None:
    """R² of the weaker critic that rose clearly from the first attempt to the last."""
    known = [(one.r2[one.weaker] or 0.0, one.r2_error[one.weaker]) for one in attempts if one.weaker is not None]
    (first, doubt), (last, error) = known[0], known[-1]
    if last - first <= CLEAR * math.hypot(doubt, error):
        return None
    return Finding(
        f"too little fitting: R² rises from attempt to attempt ({first:.3f} → {last:.3f})",
        "more qualify.attempts or critic.passes, or qualify.on_failure = wait",
    )


def _unpredictable(fitted: float | None, score: float, error: float, eta: float) -> Finding | None:
    """Not even the fitted texts are predicted, and the test is sharp enough to say so of others."""
    if fitted is None or fitted >= eta or score + CLEAR * error >= eta:
        return None
    return Finding(
        f"text without headroom at these positions: R² is {fitted:.3f} even on the texts that were fitted, so what a "
        "thought gains does not show in what stands before it",
        "other positions (text.positions) or another text (tfive eval headroom asks that of a text); if critics may be "
        "too weak, critic.adapt = full or a larger critic.lr. A lower qualify.eta would only let noise through",
    )


def _no_room(last: Attempt) -> Finding | None:
    """A text that is predicted well without thoughts."""
    if last.no_thought_loss >= ROOM:
        return None
    return Finding(
        f"text without headroom: its continuations cost {last.no_thought_loss:.3f} nats a token without a thought",
        "positions where the model is unsure (text.positions.entropy), or a harder text",
    )

"""Predictive qualification (app:predictive-qualification): held-out R² of both critics (eq:holdout-r2), the rule that
releases and pauses the actor, and the bound on the value risk (eq:value-risk-confidence)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from tfive.errors import UserError
from tfive.rl.clusters import cluster_sums, clustered_mean


@dataclass(frozen=True)
class Score:
    """One critic's held-out fit. `r2` is None when the returns do not vary: no predictor can beat a constant then."""

    r2: float | None
    squared_error: float
    return_variance: float
    count: int

    @property
    def flat(self) -> bool:
        return self.r2 is None


def r_squared(return_: Tensor, prediction: Tensor, mask: Tensor, weight: Tensor | None = None) -> Score:
    """R² over all valid prefixes pooled (eq:holdout-r2), computed in float64. `weight` turns sums into weighted sums,
    which gives the population R² of a distribution with known probabilities."""
    kept = mask.nonzero(as_tuple=True)
    if not len(kept[0]):
        raise ValueError("R² needs at least one valid prefix")
    return _score(_moments(return_, prediction, kept, weight).tolist(), len(kept[0]))


Kept = tuple[Tensor, ...]
"""Where a mask is true. The host waits for that, once for all that is read there."""


def _moments(return_: Tensor, prediction: Tensor, kept: Kept, weight: Tensor | None = None) -> Tensor:
    """float64 `[3]`: the squared error, the returns' variance and the largest |return|, still on the device."""
    target, guess = return_[kept].double(), prediction[kept].double()
    share = torch.ones_like(target) if weight is None else weight[kept].double()
    share = share / share.sum()
    error = (share * (target - guess).square()).sum()
    variance = (share * (target - (share * target).sum()).square()).sum()
    return torch.stack([error, variance, target.abs().max()])


def _score(moments: Sequence[float], count: int) -> Score:
    error, variance, largest = moments
    # Returns that differ by rounding alone carry no variance to explain.
    flat = variance <= (1e-7 * largest) ** 2
    return Score(None if flat else 1 - error / variance, error, variance, count)


def r_squared_error(return_: Tensor, prediction: Tensor, mask: Tensor, text: Tensor) -> float:
    """Standard error of R² (eq:holdout-r2) with texts as the independent draws, by linearisation.

    R² = 1 − E/S with E = Σe² and S = Σ(G − Ḡ)², so a text moves it by (ΔE − (1 − R²)ΔS)/S. `text` numbers the text of
    every entry. Infinite for one text, and where the returns do not vary.
    """
    score = r_squared(return_, prediction, mask)
    target, guess = return_[mask].double(), prediction[mask].double()
    if score.r2 is None:
        return math.inf
    moved = (target - guess).square() - (1 - score.r2) * (target - target.mean()).square()
    return clustered_mean(moved, text.expand_as(mask)[mask]).error / score.return_variance


def r_squared_per_step(return_T: Tensor, prediction_T: Tensor, mask_T: Tensor) -> list[Score | None]:
    """R² within each step t = 1 … T; None for a step that no thought reaches."""
    steps = [mask_T[..., t].nonzero(as_tuple=True) for t in range(return_T.shape[-1])]
    moments = [_moments(return_T[..., t], prediction_T[..., t], kept) for t, kept in enumerate(steps) if len(kept[0])]
    rows = iter(torch.stack(moments).tolist() if moments else [])
    return [_score(next(rows), len(kept[0])) if len(kept[0]) else None for kept in steps]


def r_squared_within(steps: Sequence[Score | None]) -> float | None:
    """R² of all prefixes against the mean return of their own step, from the scores of each step: what a critic knows
    beyond the step number. None if the returns vary in no step."""
    known = [score for score in steps if score is not None]
    if all(score.flat for score in known):
        return None
    error = sum(score.count * score.squared_error for score in known)
    return 1 - error / sum(score.count * score.return_variance for score in known)


@dataclass(frozen=True)
class Event:
    """One transition of the qualifier, for the log: which test, on which data, what happened and why."""

    kind: str
    test: int
    data: str
    detail: str


class Qualifier:
    """Decides from fresh tests whether the actor may move.

    `consecutive` passes in a row admit the actor; a failure before that starts the row again and uses up one of the
    window's `attempts` (fit, test, refit). Under the rule `strict` every window starts without admission (Algorithm 1).
    Under `sustained` admission lasts: one test per window, and `patience` failures in a row pause the actor and start a
    new round of attempts (Section 4). Unfreezing the backbones resets everything but the list of used data, since a
    test on reused outcomes proves nothing (app:window-refresh).
    """

    def __init__(
        self, eta: float, consecutive: int, patience: int, attempts: int, rule: Literal["strict", "sustained"]
    ) -> None:
        if not 0 <= eta < 1:
            raise UserError(f"qualify.eta = {eta} must lie in [0, 1)")
        if min(consecutive, patience, attempts) < 1:
            raise UserError("qualify.consecutive, qualify.patience and qualify.attempts must be at least 1")
        self.eta, self.consecutive, self.patience, self.attempts = eta, consecutive, patience, attempts
        self.rule: str = rule
        self.admitted = False
        self.paused = False
        self.given_up = False
        """Whether the actor has gone on without the critics since they were last admitted."""
        self.passes = 0
        self.failures = 0
        self.spent = 0
        self.tests = 0
        self.used: list[str] = []

    @property
    def limit(self) -> int:
        """Attempts of this window: one where the actor goes on without the critics anyway."""
        return 1 if self.given_up else self.attempts

    @property
    def exhausted(self) -> bool:
        """The window's attempts are spent without admission."""
        return not self.admitted and self.spent >= self.limit

    def open_window(self) -> None:
        """A window begins: its attempts are all there again, and under `strict` nothing is admitted."""
        self.spent = 0
        if self.rule == "strict":
            self.admitted, self.passes, self.failures = False, 0, 0

    def try_again(self) -> None:
        """Another round of attempts in this window: the actor waits for as long as it takes."""
        self.spent = 0

    def give_up(self) -> None:
        """The actor goes on without the critics until they are admitted."""
        self.given_up = True

    def test(self, data: str, first: Score, second: Score) -> list[Event]:
        """Take one fresh test of both critics into account; returns the transitions it caused, in order."""
        if self.exhausted:
            raise ValueError("the qualifier is exhausted; no further test can count")
        if data in self.used:
            raise ValueError(f"qualification data {data!r} was used before; every test needs fresh data")
        self.used.append(data)
        self.tests += 1
        passed, detail = self._criterion(first, second)
        if not passed and not self.admitted:
            detail = f"attempt {self.spent + 1} of {self.limit}: {detail}"
        events = [self._event("passed" if passed else "failed", data, detail)]
        if first.flat or second.flat:
            events.append(self._event("no_variance", data, "held-out returns do not vary; R² is undefined"))
        return events + (self._pass(data) if passed else self._fail(data))

    def _criterion(self, first: Score, second: Score) -> tuple[bool, str]:
        """Whether min(R²₁, R²₂) ≥ η (eq:holdout-r2), and the comparison in words."""
        if first.r2 is None or second.r2 is None:
            return False, "held-out returns have zero variance"
        weaker = min(first.r2, second.r2)
        shown = f"min(R²₁ {first.r2:.4f}, R²₂ {second.r2:.4f})"
        if not math.isfinite(weaker):
            return False, f"{shown} is not finite"
        return weaker >= self.eta, f"{shown} {'≥' if weaker >= self.eta else '<'} η {self.eta:g}"

    def _pass(self, data: str) -> list[Event]:
        self.failures = 0
        self.passes += 1
        if self.admitted or self.passes < self.consecutive:
            return []
        self.admitted, self.paused, self.given_up, self.spent = True, False, False, 0
        return [self._event("admitted", data, f"{self.passes} consecutive fresh passes")]

    def _fail(self, data: str) -> list[Event]:
        self.passes = 0
        self.failures += 1
        if self.admitted:
            if self.failures < self.patience:
                return [self._event("slipped", data, f"failure {self.failures} of {self.patience} before a pause")]
            self.admitted, self.paused, self.failures, self.spent = False, True, 0, 0
            return [
                self._event("paused", data, f"{self.patience} consecutive failures; the actor waits for the critics")
            ]
        self.spent += 1
        if self.exhausted:
            return [self._event("exhausted", data, f"{self.spent} of {self.limit} attempts failed")]
        return []

    def reset(self, reason: str) -> list[Event]:
        """Forget passes, failures and attempts, as when the backbones are unfrozen. Used data stay used."""
        self.admitted, self.paused, self.given_up = False, False, False
        self.passes = self.failures = self.spent = 0
        return [self._event("reset", "", reason)]

    def _event(self, kind: str, data: str, detail: str) -> Event:
        return Event(kind, self.tests, data, detail)

    _FLAGS = ("admitted", "paused", "given_up")
    _COUNTERS = ("passes", "failures", "spent", "tests")
    _RULES = ("eta", "consecutive", "patience", "attempts", "rule")

    def state_dict(self) -> dict[str, Any]:
        kept = {name: getattr(self, name) for name in (*self._FLAGS, *self._COUNTERS, *self._RULES)}
        return {**kept, "used": list(self.used)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.used = [str(name) for name in state["used"]]
        for name in (*self._FLAGS, *self._COUNTERS, *self._RULES):
            setattr(self, name, type(getattr(self, name))(state[name]))


@dataclass(frozen=True)
class RiskBound:
    """With probability ≥ 1 − δ, for both critics at once: population return risk ≤ `upper`
    (eq:value-risk-confidence)."""

    empirical: float
    slack: float
    units: int

    @property
    def upper(self) -> float:
        return self.empirical + self.slack


def value_risk_bound(
    return_: Tensor,
    prediction: Tensor,
    mask: Tensor,
    text_N: Tensor,
    return_bound: float,
    value_bound: float | None,
    delta: float,
) -> RiskBound:
    """Upper bound on E(G − V)² for one of the two critics, with texts as the independent draws
    (eq:value-risk-confidence).

    `value_bound` is the bound on |V| by construction of the head; None means an unbounded head, which is refused: no
    such risk bound exists for it. The risk is averaged over each text's valid prefixes, then over texts.
    """
    if value_bound is None or not math.isfinite(value_bound):
        raise UserError(
            "a value-risk bound needs a bounded value head (|V| ≤ 2·c_r by construction); this head has none"
        )
    if not 0 < delta < 1:
        raise UserError(f"delta = {delta} must lie strictly between 0 and 1")
    if float(prediction[mask].abs().max()) > value_bound * (1 + 1e-6):
        raise ValueError("a prediction exceeds the bound its head is said to enforce")
    if float(return_[mask].abs().max()) > return_bound * (1 + 1e-6):
        raise ValueError("a return exceeds its stated bound")
    rows = mask.sum(dim=-1)
    squared = torch.where(
        mask, (return_ - prediction).double().square(), torch.zeros_like(return_, dtype=torch.float64)
    ).sum(-1)
    total, mass = cluster_sums(squared / rows.clamp(min=1), rows.double(), text_N)
    keep = mass > 0
    risk = total[keep] / mass[keep]
    units = int(keep.sum())
    slack = (return_bound + value_bound) ** 2 * math.sqrt(math.log(2 / delta) / (2 * units))
    return RiskBound(float(risk.mean()), slack, units)

"""Methods whose actor waits for critics that predict: the tests of a window, and what follows when they fail.

Line 2 of Algorithm 1 (alg:t5-training) under one of two rules (`qualify.rule`), and `qualify.on_failure` for the case
that the paper leaves open: critics that do not pass however often they are refitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, ClassVar, Literal

from tfive.errors import RunFailed
from tfive.methods.fitting import C, FittedMethod
from tfive.rl.calibration.validation import ErrorBudget
from tfive.rl.diagnosis import agreement, others_score, step_scores, value_risks
from tfive.rl.qualify import Qualifier, r_squared
from tfive.rl.rollout import Draw
from tfive.rl.settings import QualifySettings
from tfive.rl.shortfall import Attempt, findings
from tfive.rl.trajectory import Trajectories

CREDITS = ("qualified", "slipped", "untested", "baseline")
"""Where an update's advantages come from: critics that passed in this window; critics that failed while patience lasts
(`sustained`); critics that no test decides about (`fixed`); the batch's other thoughts, no critic."""


class QualifiedMethod(FittedMethod[C]):
    """A method with two critics that are tested on fresh trajectories before the actor moves."""

    saved: ClassVar[tuple[str, ...]] = (
        *FittedMethod.saved, "stage", "attempt", "tests", "failed", "said", "credit", "updates",
    )  # fmt: skip
    made_by: ClassVar[tuple[str, ...]] = ("policy", "scorer", "scale")
    """All that is behind an actor's set that was credited without critics."""

    def __init__(self, parts: C, rule: QualifySettings, delta: float, **windows: Any) -> None:
        """`delta` is the failure probability that all bounds on the critics' risk share."""
        super().__init__(parts, **windows)
        lasting: Literal["strict", "sustained"] = "sustained" if rule.rule == "sustained" else "strict"
        self.rule = rule
        self.qualifier = Qualifier(rule.eta, rule.consecutive, rule.patience, rule.attempts, lasting)
        self.risk_budget = ErrorBudget(delta)
        self.stage = "head warm-up" if parts.critics.head_only else "full warm-up"
        self.attempt = 0
        """Fit-and-test rounds of this window."""
        self.tests = 0
        """Fresh tests of this window."""
        self.failed: list[dict[str, Any]] = []
        """Numbers of this window's failed attempts (`rl.shortfall.Attempt`)."""
        self.said: list[str] = []
        """What failed attempts, of earlier windows too, were last said to suggest: it is said in full once."""
        self.credit = ""
        """Where this window's advantages come from, a name of `CREDITS`."""
        self.updates = dict.fromkeys(CREDITS, 0)
        """Actor updates of the run by where their advantages came from."""

    def standing(self) -> str:
        """While the actor waits for critics that failed: how many attempts are left."""
        rule = self.qualifier
        if self.closed or rule.admitted or not rule.spent:
            return super().standing()
        if self.credit == "baseline":
            return f"critics not yet qualified, {self._baseline} in their place"
        return f"critics not yet qualified, {max(0, rule.limit - rule.spent)} of {rule.limit} attempts left"

    @property
    def _baseline(self) -> str:
        """What stands in for critics (`rl.batch_baseline`)."""
        return "batch baseline" if self.group == 1 else "mean of each position's other thoughts"

    def open(self) -> str | None:
        """A window begins with nothing fitted and nothing tested."""
        self.attempt = self.tests = 0
        self.failed, self.credit = [], ""
        self.qualifier.open_window()
        return super().open()

    def test_critics(self, ahead: Sequence[Draw] = (), *, given: Trajectories | None = None) -> str | None:
        """One fresh test of both critics (eq:holdout-r2), and what follows from it: the next phase where they are
        admitted, another test or another fit where they are not. `ahead` are sets drawn with the test's; none is drawn
        where thoughts that are new to the critics are `given`, which are read once more if they pass."""
        parts = self.parts
        fresh = parts.rollout.collect("qualify", self.window, self.tests, ahead=ahead) if given is None else given
        values_2BRT = parts.critics.evaluate(fresh).values_2BRT
        returns_BRT, mask_BRT = fresh.need("returns_BRT"), fresh.mask_BRT
        first, second = (r_squared(returns_BRT, values, mask_BRT) for values in values_2BRT)
        self.tests += 1
        if given is None:
            parts.critics.release()
        self.report["r2"] = [first.r2, second.r2]
        self.report |= step_scores(returns_BRT, values_2BRT, mask_BRT) | agreement(values_2BRT, mask_BRT)
        self.report |= others_score(fresh)
        self.report |= value_risks(fresh, values_2BRT, parts.rollout.reward.clip, self.risk_budget.take())
        if self.rule.rule == "fixed":
            return self._untested()
        events = self.qualifier.test(f"window {self.window} test {self.tests - 1}", first, second)
        for event in events:
            self.log(f"qualification: {event.kind}", event.detail)
        if self.qualifier.admitted:
            self.credit = "qualified" if events[0].kind == "passed" else "slipped"
            self.enter("alternating")
            return None
        # What was given stays for later; the sets that are drawn first need the room.
        parts.critics.release()
        if self.qualifier.passes:
            return "qualify"
        scale, fitted = parts.rollout.scale.value, self.report.get("fit_r2")
        self.failed.append(asdict(Attempt.of(fresh, values_2BRT, scale, fitted)))
        return self._after_failure(events[0].detail)

    def _after_failure(self, detail: str) -> str:
        """What follows from a failed attempt: another fit, or what `qualify.on_failure` says when none is left."""
        qualifier, then = self.qualifier, self.rule.on_failure
        found = findings([Attempt(**one) for one in self.failed], qualifier.eta)
        reasons = [one.suggests.partition(":")[0] for one in found]
        if reasons != self.said:
            self.said = reasons
            for one in found:
                self.log("qualification: suggests", f"{one.suggests}; try {one.remedy}")
        elif qualifier.exhausted:
            self.log("qualification: suggests", f"as before: {'; '.join(reasons)}")
        self.attempt += 1
        if self.stage == "alternating":
            self.enter("recovery")
        if qualifier.exhausted and then == "stop":
            raise RunFailed(
                f"critics did not qualify in {qualifier.limit} attempts: {detail}; {found[0].suggests}; try "
                f"{found[0].remedy}; or go on without critics: qualify.on_failure = baseline"
            )
        if qualifier.exhausted and then == "baseline":
            return self._go_on_without()
        if qualifier.exhausted:
            self.log("qualification: waiting", f"the actor waits; {qualifier.attempts} more attempts in this window")
            qualifier.try_again()
        self.parts.rollout.lighten_ready()
        self.held = {role: replace(one, lower_BND=None) for role, one in self.held.items()}
        return "fit"

    def _go_on_without(self) -> str:
        """This window's actor set is credited by the batch baseline; there are no critics to normalise or calibrate."""
        later = "" if self.qualifier.given_up else "; critics have one attempt in each later window until they qualify"
        self.qualifier.give_up()
        self.parts.rollout.drop_ready(kept=("actor", "scale"))
        self.credit = "baseline"
        what = f"window {self.window} goes on with the {self._baseline} in place of critics"
        self.log("qualification: baseline", f"{what}{later}")
        return "collect"

    def _untested(self) -> str | None:
        """An ablation of the gate: so many rounds before the actor's first step, one in every later window."""
        self.attempt += 1
        if self.first and self.attempt < self.parts.critics.settings.warmup_rounds:
            return "fit"
        self.credit = "untested"
        self.enter("alternating")
        return None

    def update(self) -> str | None:
        """One optimizer step on advantages whose makers are all still in force; only θ moves."""
        without = self.credit == "baseline"
        return self._update(QualifiedMethod.made_by if without else self.made_by, self.learn)

    def close(self) -> str | None:
        """As every method does, with the window's updates booked under where their advantages came from."""
        taken = {name: len(self.report["steps"]) if name == self.credit else 0 for name in CREDITS}
        self.updates = {name: self.updates[name] + count for name, count in taken.items()}
        self.report |= {"stage": self.stage, "actor_updates": taken}
        return super().close()

    @property
    def note(self) -> str | None:
        """Said first of a run some of whose updates used no critic."""
        without, total = self.updates["baseline"], sum(self.updates.values())
        if not without:
            return None
        which = "critics never qualified: all" if without == total else f"critics did not always qualify: {without} of"
        return f"{which} {total} actor updates used the {self._baseline} in place of critics"

    def enter(self, stage: str) -> None:
        """A stage of the critics' training; one that is new is logged."""
        if stage != self.stage:
            self.stage = stage
            self.log("stage", stage)

    def state_dict(self) -> dict[str, Any]:
        own = {"qualifier": self.qualifier.state_dict(), "risk_budget": self.risk_budget.state_dict()}
        return {**super().state_dict(), **own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.qualifier.load_state_dict(state["qualifier"])
        self.risk_budget.load_state_dict(state["risk_budget"])

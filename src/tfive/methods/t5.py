"""T⁵: twin-critic training for token-level thoughts. One window is Algorithm 1 of the paper (alg:t5-training).

`advance` does one micro-step and leaves a state that can be saved: a phase is entered again with what is left of it.
All randomness is a function of (seed, role, window, item, …), so a run that was stopped anywhere goes on exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from tfive.credit.calibrate import Candidate
from tfive.credit.mixture import FixedWeight, LearnedWeight, Mixture, fixed_mixture
from tfive.credit.pilot import PilotNormaliser
from tfive.credit.qualify import Qualifier, r_squared, r_squared_per_step
from tfive.credit.settings import CalibrationSettings, PilotSettings, QualifySettings
from tfive.credit.validate import SignalBounds, Validator, certify
from tfive.errors import RunFailed
from tfive.learn.settings import ActorSettings
from tfive.models.settings import CriticSettings
from tfive.parts.actor import Actor, StepStats
from tfive.parts.calibration import Calibrator
from tfive.parts.critics import Judged, TwinCritics
from tfive.parts.diagnosis import agreement, calibration_numbers, mean_stats
from tfive.parts.gate import Gate, experts
from tfive.parts.probe import Probe
from tfive.parts.rollout import Rollout
from tfive.protocol.settings import WindowSettings
from tfive.protocol.snapshots import Snapshots
from tfive.rollout.trajectory import Trajectories
from tfive.telemetry import Telemetry

PHASES = ("open", "fit", "qualify", "pilot", "calibrate", "collect", "update", "close")


@dataclass(frozen=True)
class T5Settings:
    """The sections of the configuration that decide the course of a window."""

    window: WindowSettings
    critic: CriticSettings
    qualify: QualifySettings
    pilot: PilotSettings
    calibration: CalibrationSettings
    actor: ActorSettings


@dataclass(frozen=True)
class T5Parts:
    """Who takes part in a window. Each may live elsewhere: they exchange trajectories and snapshot ids alone."""

    rollout: Rollout
    critics: TwinCritics
    calibrator: Calibrator
    actor: Actor
    snapshots: Snapshots
    telemetry: Telemetry
    gate: Gate | None = None
    probe: Probe | None = None


class T5:
    """The window as a state machine: every transition is part of the saved state and told to the telemetry."""

    name = "t5"

    def __init__(self, settings: T5Settings, parts: T5Parts) -> None:
        self.settings, self.parts = settings, parts
        rule = settings.qualify
        self.qualifier = Qualifier(rule.eta, rule.consecutive, rule.patience, rule.attempts)
        self.validator = Validator(settings.calibration.kappa, settings.calibration.delta)
        self.window = 0
        self.phase = "open"
        self.stage = "head warm-up" if parts.critics.head_only else "full warm-up"
        self.step = 0
        """Micro-step inside the phase: fitting pass, qualification test, or PPO step."""
        self.attempt = 0
        """Fit-and-test rounds of this window."""
        self.tests = 0
        """Fresh tests of this window."""
        self.normaliser: PilotNormaliser | None = None
        self.mixture: Mixture = FixedWeight()
        self.held: dict[str, Trajectories] = {}
        """Trajectories that later micro-steps of this window still need."""
        self.report: dict[str, Any] = {}
        """What this window measured so far."""

    @property
    def closed(self) -> bool:
        """Between two windows."""
        return self.phase == "open"

    def advance(self) -> str:
        """One micro-step; returns the phase it belonged to."""
        phase = self.phase
        steps: dict[str, Callable[[], str]] = {name: getattr(self, f"_{name}") for name in PHASES}
        with self.parts.telemetry.phase(phase):
            following = steps[phase]()
        if following != phase:
            self.step = 0
        self.phase = following
        return phase

    # Open: rollout copy = π_old = scorer = actor weights; the reward scale is fixed.
    def _open(self) -> str:
        parts = self.parts
        self.window += 1
        self.attempt = self.tests = 0
        self.held, self.report = {}, {"window": self.window}
        parts.snapshots.renew("policy")
        if parts.rollout.scale.updates == 0:
            parts.rollout.update_scale(parts.rollout.collect("scale", self.window, rewarded=False))
        self.report["reward_scale"] = parts.rollout.scale.value
        return "fit"

    # Line 1: warm up the value heads, then the full critics, on full returns (eq:value-loss).
    def _fit(self) -> str:
        parts, critics = self.parts, self.parts.critics
        settings = self.settings.critic
        if self.step == 0:
            self.held["critic_fit"] = parts.rollout.collect("critic_fit", self.window, self.attempt)
            judged = critics.judge(self.held["critic_fit"])
            self.held["critic_fit"] = self.held["critic_fit"].having(values_2BRT=judged.values_2BRT)
        fitting = self.held["critic_fit"]
        parts.snapshots.require(fitting.snapshots, ("policy", "scorer", "scale"), what="the fitting set")
        number = self.attempt * 1000 + self.step
        warmup = self.stage != "alternating"
        losses = critics.fit_pass(fitting, fitting.need("values_2BRT"), self.window, number, warmup=warmup)
        self.report["critic_loss"] = losses
        self.step += 1
        if self.stage == "head warm-up" and self.step >= settings.head_passes:
            critics.unfreeze()
            self._enter("full warm-up")
            for event in self.qualifier.reset("the critics' blocks were unfrozen"):
                self._tell(f"qualification: {event.kind}", event.detail)
        if self.step < settings.passes + (settings.head_passes if self.window == 1 and self.attempt == 0 else 0):
            return "fit"
        parts.snapshots.renew("critics")
        del self.held["critic_fit"]
        critics.release()
        return "qualify"

    # Line 2: m fresh tests with min(R²) ≥ η (eq:holdout-r2); if not, the actor waits and the critics are refitted.
    def _qualify(self) -> str:
        parts = self.parts
        fresh = parts.rollout.collect("qualify", self.window, self.tests)
        values_2BRT = parts.critics.judge(fresh).values_2BRT
        returns_BRT, mask_BRT = fresh.need("returns_BRT"), fresh.mask_BRT
        first, second = (r_squared(returns_BRT, values, mask_BRT) for values in values_2BRT)
        events = self.qualifier.test(f"window {self.window} test {self.tests}", first, second)
        self.tests += 1
        parts.critics.release()
        self.report["r2"] = [first.r2, second.r2]
        self.report["r2_per_step"] = [
            [None if s is None else s.r2 for s in r_squared_per_step(returns_BRT, v, mask_BRT)] for v in values_2BRT
        ]
        self.report |= agreement(values_2BRT, mask_BRT)
        for event in events:
            self._tell(f"qualification: {event.kind}", event.detail)
        if self.qualifier.admitted:
            self._enter("alternating")
            return "pilot"
        if self.qualifier.exhausted:
            raise RunFailed(
                f"critics did not qualify in {self.qualifier.attempts} attempts: {events[0].detail}; raise "
                "window.items or critic.passes, change critic.adapt, or lower qualify.eta"
            )
        if self.qualifier.passes:
            return "qualify"
        if self.qualifier.paused:
            self._enter("recovery")
        self.attempt += 1
        return "fit"

    # The critics are frozen; one normaliser for both, from independent trajectories (app:advantage-snapshots).
    def _pilot(self) -> str:
        parts = self.parts
        pilot, _ = self._judged("pilot")
        first, second = pilot.need("gae_2BRT")
        self.normaliser = PilotNormaliser.fit(first, second, pilot.mask_BRT, self.settings.pilot.epsilon)
        parts.snapshots.renew("normaliser")
        self.report["pilot_deviation"] = self.normaliser.deviation
        return "calibrate"

    # Line 3: learn w and h on the constrained saddle (eq:calibrated-weight).
    def _calibrate(self) -> str:
        parts, mode = self.parts, self.settings.calibration.mode
        fixed = fixed_mixture(mode)
        if fixed is not None:
            self.mixture = fixed
            return "collect"
        training, judged = self._judged("head_train")
        candidate = parts.calibrator.learn(parts.calibrator.data(training, judged, self._normaliser()), self.window)
        parts.telemetry.count("head_train", head_updates=int(candidate.trace[-1]["step"]))
        parts.snapshots.renew("weight")
        parts.snapshots.renew("auxiliary")
        self.report |= {"multiplier": candidate.multiplier, "head_moment": candidate.risk}
        with parts.telemetry.phase("validate"):
            self._validate(candidate)
        return "collect"

    # Line 4: the frozen candidate keeps Ĉ ≤ κQ̂ on other texts, or the fixed average is used (app:moment-validation).
    def _validate(self, candidate: Candidate) -> None:
        parts = self.parts
        judging, judged = self._judged("head_validate")
        data = parts.calibrator.data(judging, judged, self._normaliser())
        settings, bounds = self.settings.calibration, self._signal_bounds()
        enforced = settings.bounds == "enforce"
        verdict = self.validator.judge(candidate, data, f"window {self.window}", bounds, enforced)
        self.mixture = verdict.mixture
        parts.snapshots.renew("validation")
        self.report |= calibration_numbers(verdict, candidate, data)
        if settings.cross_fit:
            self.report |= parts.calibrator.offsets(data, verdict.mixture, self.window)
        if settings.certified:
            certificate = certify(
                verdict.bounds, settings.approximation_bound, settings.optimisation_bound, settings.sensitivity_bound
            )
            self.report |= {"risk_upper": certificate.risk_upper, "drift_upper": certificate.drift_upper}
        if not verdict.accepted:
            self._tell(f"validation: {verdict.reason}", f"the fixed average is used; Ĉ/Q̂ = {verdict.retention}")

    # Line 5: fresh trajectories and their mixed, detached advantages (eq:twin-advantage).
    def _collect(self) -> str:
        parts = self.parts
        acting, judged = self._judged("actor")
        acting = parts.calibrator.advantage(acting, judged, self._normaliser(), self.mixture)
        self.held["actor"] = acting.having(snapshots=parts.snapshots.current("weight", "validation"))
        self.held["scale"] = parts.rollout.collect("scale", self.window + 1, rewarded=False)
        parts.critics.release()
        if parts.probe is not None:
            self.held["probe"] = parts.probe.draw(self.window, self.mixture, self._normaliser())
            self.report |= parts.probe.report(self.held["probe"], self._normaliser(), "first")
        self.report["steps"] = []
        return "update"

    # Line 6: clipped PPO (eq:ppo); only θ moves.
    def _update(self) -> str:
        parts, settings = self.parts, self.settings
        acting = self.held["actor"]
        parts.snapshots.require(
            acting.snapshots, ("policy", "scorer", "scale", "critics", "normaliser", "weight"), what="the actor set"
        )
        reuse, minibatch = divmod(self.step, settings.actor.minibatches)
        rows = parts.actor.minibatches(len(acting.texts.tokens_BS), self.window, reuse)[minibatch]
        stats = parts.actor.step(acting.rows(rows))
        self.report["steps"].append(asdict(stats))
        self.step += 1
        return "update" if self.step < settings.window.actor_steps else "close"

    # Close: diagnose the last reuse step, take the next reward scale, fit the prediction gate to the new weights.
    def _close(self) -> str:
        parts, acting = self.parts, self.held["actor"]
        if parts.probe is not None:
            self.report |= parts.probe.report(self.held["probe"], self._normaliser(), "last")
        self.report |= mean_stats([StepStats(**one) for one in self.report.pop("steps")])
        parts.rollout.update_scale(self.held["scale"])
        if parts.gate is not None:
            predictions = experts(parts.actor.engine, acting.texts, acting.thoughts, rows=parts.actor.rows)
            self.report["gate_loss"] = parts.gate.fit(predictions, self.window)
        self.report |= {
            "stage": self.stage,
            "mixture": self.mixture.name,
            "actor_gain": float(acting.gain_BR.sum() / acting.count),
            "mean_thought_length": float(acting.mask_BRT.sum() / acting.count),
        }
        self.held = {}
        return "open"

    def _signal_bounds(self) -> SignalBounds | None:
        """|Ã| ≤ K and |h| ≤ K_h where construction enforces them: bounded critics and a bounded mean head.

        A GAE is a convex mixture of n-step advantages Φ_{t+n} − Φ_t + V(s_{t+n}) − V(s_t), so |A| ≤ 2c_r + 4c_r.
        """
        settings, parts, normaliser = self.settings, self.parts, self._normaliser()
        mean_bound = parts.calibrator.mean_head.bound
        if settings.calibration.bounds == "off" or not settings.critic.bounded or mean_bound is None:
            return None
        largest = 6 * parts.rollout.reward.clip
        return SignalBounds((largest + abs(normaliser.mean)) / normaliser.deviation, mean_bound)

    def _judged(self, role: str) -> tuple[Trajectories, Judged]:
        """A role's fresh trajectories with both GAEs from the frozen critics, and the critics' features of them."""
        parts = self.parts
        fresh = parts.rollout.collect(role, self.window)
        judged = parts.critics.judge(fresh)
        snapshots = parts.snapshots.current("critics", "normaliser")
        return parts.critics.advantages(fresh, judged).having(snapshots=snapshots), judged

    def _normaliser(self) -> PilotNormaliser:
        if self.normaliser is None:
            raise ValueError("the pilot has not run yet")
        return self.normaliser

    def _enter(self, stage: str) -> None:
        if stage != self.stage:
            self.stage = stage
            self._tell("stage", stage)

    def _tell(self, what: str, detail: str) -> None:
        """A transition, for whoever is looking and for the log."""
        self.parts.telemetry.event(what, detail, window=self.window)

    _PLAIN = ("window", "phase", "stage", "step", "attempt", "tests", "report")

    def state_dict(self) -> dict[str, Any]:
        parts = self.parts
        weight: dict[str, Any] | None = None
        if isinstance(self.mixture, LearnedWeight):
            weight = {"head": dict(self.mixture.head.state_dict()), "state_only": self.mixture.state_only}
        return {
            **{name: getattr(self, name) for name in self._PLAIN},
            "qualifier": self.qualifier.state_dict(),
            "validator": self.validator.state_dict(),
            "normaliser": None if self.normaliser is None else self.normaliser.state_dict(),
            "mixture": self.mixture.name,
            "weight": weight,
            "held": {role: held.state_dict() for role, held in self.held.items()},
            "snapshots": parts.snapshots.state_dict(),
            "rollout": parts.rollout.state_dict(),
            "critics": parts.critics.state_dict(),
            "calibrator": parts.calibrator.state_dict(),
            "actor": parts.actor.state_dict(),
            "gate": None if parts.gate is None else parts.gate.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        parts = self.parts
        for name in self._PLAIN:
            setattr(self, name, state[name])
        self.qualifier.load_state_dict(state["qualifier"])
        self.validator.load_state_dict(state["validator"])
        self.normaliser = PilotNormaliser.from_state_dict(state["normaliser"]) if state["normaliser"] else None
        device = parts.rollout.engine.device
        self.held = {role: Trajectories.from_state(held).to(device) for role, held in state["held"].items()}
        for part in ("snapshots", "rollout", "critics", "calibrator", "actor"):
            getattr(parts, part).load_state_dict(state[part])
        if parts.gate is not None:
            parts.gate.load_state_dict(state["gate"])
        self.mixture = fixed_mixture(state["mixture"]) or FixedWeight()
        if state["weight"] is not None:
            head = parts.calibrator.fresh_weight_head()
            head.load_state_dict(state["weight"]["head"])
            self.mixture = LearnedWeight(head, bool(state["weight"]["state_only"]), state["mixture"])

"""T⁵: twin-critic training for token-level thoughts. One window is Algorithm 1 of the paper (alg:t5-training).

`T5.phases` lists the phases of a window in order; each function below is one of them. A phase does one micro-step and
returns the phase that comes next, or None for the next one of the list; what is left of a phase is done when it is
entered again, so that a run can be saved between any two micro-steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch

from tfive.methods.method import Kit, Phase
from tfive.methods.mixing import MixedMethod, T5Parts, T5Settings
from tfive.rl.batch_baseline import with_batch_advantages
from tfive.rl.calibration.calibrator import Calibrator
from tfive.rl.calibration.mixture import Minimum, fixed_mixture
from tfive.rl.calibration.moments import CalibrationData
from tfive.rl.continuations import continued
from tfive.rl.credit import Credit
from tfive.rl.critics import CriticValues
from tfive.rl.drift_probe import Probe
from tfive.rl.gae import PilotNormaliser
from tfive.rl.rollout import Draw
from tfive.rl.trajectory import Trajectories
from tfive.telemetry import DIAGNOSE
from tfive.tree.layout import TextBatch, Thoughts


class T5(MixedMethod):
    """Algorithm 1: fit, qualify, normalise, calibrate and validate; only then does the actor move."""

    @classmethod
    def assemble(cls, kit: Kit) -> Self:
        """T⁵ with the heads that mix the critics' advantages, and probes if the configuration asks for them."""
        config, rollout, critics = kit.config, kit.common["rollout"], kit.need_critics()
        calibrator = Calibrator(
            rollout.engine,
            critics.critics[0].head.last.in_features,
            config.calibration,
            seed=config.run.seed,
            rows=rollout.passes,
            by=rollout.by,
            critics_see=config.critic.sees != "prefix",
        )
        window = config.window.model_copy(update={"reading": config.reading_windows})
        settings = T5Settings(window, config.critic, config.qualify, config.calibration)
        probe = _probe(kit, calibrator) if config.window.probe else None
        return cls(settings, T5Parts(**kit.common, critics=critics, calibrator=calibrator, probe=probe))

    def phases(self) -> tuple[Phase, ...]:
        """One window of Algorithm 1."""
        return (
            Phase("open", self.open),
            Phase("fit", self.fit),
            Phase("qualify", self.qualify),
            Phase("pilot", self.pilot),
            Phase("calibrate", self.calibrate),
            Phase("collect", self.collect),
            *([Phase("refit", self.refit)] if self.history else ()),  # line 1 of the next window (`methods.fitting`)
            Phase("update", self.update),
            Phase("close", self.close),
        )

    # Open: rollout copy = π_old = scorer = actor weights; the reward scale is fixed.
    def open(self) -> str | None:
        """A window begins with nothing tested, and with nothing fitted unless the one before has done that."""
        super().open()
        self.fix_scale()
        return "qualify" if self.fitted_before else None

    # Line 1: warm up the value heads, then the full critics, on full returns (eq:value-loss).
    def fit(self) -> str | None:
        """One pass of both critics over the fitting set."""
        critics = self.parts.critics
        heads_alone = critics.head_only
        tested = Draw("qualify", self.window, self.tests)
        over = self.fit_pass(self.attempt, ahead=[tested])
        if heads_alone and not critics.head_only:
            self.enter("full warm-up")
            for event in self.qualifier.reset("the critics' blocks were unfrozen"):
                self.log(f"qualification: {event.kind}", event.detail)
        return None if over else "fit"

    @property
    def warming(self) -> bool:
        return self.stage != "alternating"

    def to_come(self) -> list[Draw]:
        """The next test, and what follows critics that qualify. Where the window may go on without critics, only what
        it draws in any case."""
        test = Draw("qualify", self.window, self.tests)
        if "actor" in self.held:
            return [test]
        if self.rule.on_failure == "baseline" and self.rule.rule != "fixed":
            return [test, *self._next_scale()]
        return [test, *self._after_tests()]

    # Line 2: m fresh tests with min(R²) ≥ η (eq:holdout-r2); if not, the actor waits and the critics are refitted.
    def qualify(self) -> str | None:
        """One fresh test of both critics, and what follows from it (`methods.qualifying`). Critics that were fitted
        before are expected to pass, unless they did not in the window before."""
        if self.crosses and self.tests == 0:
            self.held["actor"] = self.parts.rollout.collect("actor", self.window, states=True, ahead=self._next_scale())
            return self.test_critics(given=self.held["actor"])
        expected = self.fitted_before and self.tests == 0 and not self.qualifier.given_up
        return self.test_critics(self._after_tests() if expected else ())

    # The critics are frozen; one normaliser for both, from independent trajectories (app:advantage-snapshots).
    def pilot(self) -> str | None:
        """Mean and deviation of both critics' GAEs on the pilot set; halves that are crossed normalise one another."""
        parts = self.parts
        if self.crosses:
            return None
        pilot, _ = self._evaluated("pilot", states=False, ahead=self._after_pilot())
        first, second = pilot.need("gae_2BRT")
        self.normaliser = PilotNormaliser.fit(first, second, pilot.mask_BRT)
        parts.snapshots.renew("normaliser")
        self.report["pilot_deviation"] = self.normaliser.deviation
        return None

    def _after_tests(self) -> list[Draw]:
        """The sets that a window draws behind critics that qualify."""
        return [Draw("pilot", self.window), *self._after_pilot()]

    def _next_scale(self) -> list[Draw]:
        """The set that sets the next window's reward scale; none where the actor's does, unless thoughts will grow."""
        own = not self.history or self.parts.rollout.grows(self.window + 1)
        return [Draw("scale", self.window + 1)] if own else []

    def _after_pilot(self) -> list[Draw]:
        """The sets that the rest of the window draws by the same weights. Neither their texts nor their random numbers
        depend on critics or heads, so they are fresh to both, whenever they are computed."""
        mode = self.settings.calibration.mode
        learns = fixed_mixture(mode) is None
        heads = [Draw(role, self.window, states=mode != "repeated") for role in ("head_train", "head_validate")]
        return [*(heads if learns else ()), Draw("actor", self.window, states=True), *self._next_scale()]

    # Line 3: learn w and h on the constrained saddle (eq:calibrated-weight).
    def calibrate(self) -> str | None:
        """The rule by which this window mixes the two advantages: fixed, or learned and validated."""
        fixed = fixed_mixture(self.settings.calibration.mode)
        if self.crosses:
            self.mix_crossed(fixed)
        elif fixed is not None:
            self.mixture = fixed
        else:
            (candidate,) = self.learn_weights([self._calibration_data("head_train")])
            # Line 4: a frozen candidate that keeps Ĉ ≤ κQ̂ on other texts, or the fixed average (app:moment-validation).
            with self.parts.telemetry.phase("validate"):
                self.report |= self.validate(candidate, self._calibration_data("head_validate"))
        self._say_trouble("calibration", self.parts.calibrator.graphs)
        return None

    # Line 5: fresh trajectories and their mixed, detached advantages (eq:twin-advantage).
    def collect(self) -> str | None:
        """The actor's set with its frozen advantages, the next window's reward scale, and the probes."""
        parts = self.parts
        if self.credit == "baseline":
            drawn = self.held.get("actor")
            self._collect_scale(ahead=[Draw("actor", self.window)] if drawn is None else [])
            acting = parts.rollout.collect("actor", self.window) if drawn is None else drawn
            self.keep_for_refit(acting, afresh=False)
            by_position = parts.critics.siblings > 1
            return self.act_on(with_batch_advantages(acting, self.group, by_position=by_position))
        if self.crosses:
            judged = acting = self.held["actor"]
        else:
            judged, values = self._evaluated("actor")
            acting = parts.calibrator.advantage(judged, values, self._normaliser(), self.mixture)
        self._collect_scale()
        self.keep_for_refit(judged, afresh=False)
        if parts.probe is not None:
            with parts.telemetry.phase(DIAGNOSE):
                self.held["probe"] = parts.probe.draw(self.window, self.mixture, self._normaliser())
                self.report |= parts.probe.report(self.held["probe"], self._normaliser(), "first")
        return self.act_on(acting.having(snapshots=parts.snapshots.current("weight", "auxiliary", "validation")))

    def _collect_scale(self, ahead: Sequence[Draw] = ()) -> None:
        """Thoughts for the next window's reward scale, where it gets some of its own."""
        if self._next_scale():
            self.held["scale"] = self.parts.rollout.collect("scale", self.window + 1, rewarded=False, ahead=ahead)

    # Line 6: clipped PPO (eq:ppo) in `Method.update`; only θ moves.

    # Close: diagnose the last reuse step, then as every method does.
    def close(self) -> str | None:
        """What the window came to."""
        probe = self.parts.probe
        if probe is not None and "probe" in self.held:
            with self.parts.telemetry.phase(DIAGNOSE):
                self.report |= probe.report(self.held["probe"], self._normaliser(), "last")
        self.report["mixture"] = "none" if self.credit == "baseline" else self.report.get("mixture", self.mixture.name)
        if self.history and not self.reading and "scale" not in self.held:
            # By then these thoughts are historical (eq:reward-scale).
            self.parts.rollout.update_scale(self.held["actor"], afresh=False)
        return super().close()

    @torch.no_grad()
    def credited(self, texts: TextBatch, thoughts: Thoughts) -> Credit | None:
        """Both critics' values and advantages as they are now, and their mixture as the last pilot and calibration left
        it. With `window.history` the critics have been fitted once more since."""
        parts = self.parts
        if self.normaliser is None or self.group > 1:
            return None
        given = parts.rollout.appraised(parts.actor.reader, texts, thoughts, self.window)
        values = parts.critics.evaluate(given)
        credited = parts.critics.advantages(given, values)
        parts.critics.release()
        mixed = parts.calibrator.advantage(credited, values, self.normaliser, self.mixture)
        weighed = not isinstance(self.mixture, Minimum)
        return Credit(
            values.values_2BRT,
            torch.stack([self.normaliser.normalise(gae, given.mask_BRT) for gae in credited.need("gae_2BRT")]),
            given.need("returns_BRT"),
            mixed.need("weight_BRT") if weighed else None,
            mixed.need("advantage_BRT"),
        )

    def _calibration_data(self, role: str) -> CalibrationData:
        """What calibration reads of a role's fresh trajectories; in `repeated` mode, of several continuations of each
        (eq:repeated-rollout-budget)."""
        settings = self.settings.calibration
        found, values = self._evaluated(role, settings.continuations if settings.mode == "repeated" else 0)
        return self.parts.calibrator.data(found, values, self._normaliser())

    def _evaluated(
        self, role: str, continuations: int = 0, *, states: bool = True, ahead: Sequence[Draw] = ()
    ) -> tuple[Trajectories, CriticValues]:
        """A role's fresh trajectories with both GAEs from the frozen critics, and the critics' features of them.

        The heads read the policy's `states` too; they come from passes that are made anyway.
        """
        parts = self.parts
        fresh = parts.rollout.collect(role, self.window, states=states and not continuations, ahead=ahead)
        if continuations:
            fresh = continued(parts.rollout, fresh, continuations)
        values = parts.critics.evaluate(fresh)
        snapshots = parts.snapshots.current("critics", "normaliser")
        return parts.critics.advantages(fresh, values).having(snapshots=snapshots), values


def _probe(kit: Kit, calibrator: Calibrator) -> Probe:
    config, actor, continuations = kit.config, kit.common["actor"], kit.config.calibration.continuations
    return Probe(
        kit.common["rollout"],
        kit.need_critics(),
        calibrator,
        continuations=continuations,
        forward=actor.policy_of,
        # A text of a probe has so many times the thoughts of one in an update.
        rows=max(1, actor.rows // continuations),
        clip=(config.actor.clip_low, config.actor.clip_high),
        ratio=config.ratio,
    )

"""How what two critics say becomes one advantage: a normaliser, a weight that is learned and validated, and the actor's
halves that learn from one another (`window.crossed`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from tfive.methods.fitting import CriticParts
from tfive.methods.qualifying import QualifiedMethod
from tfive.rl.calibration.calibrator import Calibrator
from tfive.rl.calibration.mean import MeanResponse
from tfive.rl.calibration.mixture import FixedWeight, LearnedWeight, Mixture, fixed_mixture
from tfive.rl.calibration.moments import CalibrationData
from tfive.rl.calibration.saddle import Candidate
from tfive.rl.calibration.settings import CalibrationSettings
from tfive.rl.calibration.validation import SignalBounds, Validator, certify
from tfive.rl.diagnosis import calibration_numbers, mean_numbers
from tfive.rl.drift_probe import Probe
from tfive.rl.gae import PilotNormaliser
from tfive.rl.halves import halves
from tfive.rl.settings import CriticSettings, QualifySettings, WindowSettings
from tfive.rl.trajectory import placed
from tfive.telemetry import DIAGNOSE


@dataclass(frozen=True)
class T5Settings:
    """The sections of the configuration that decide the course of a window."""

    window: WindowSettings
    critic: CriticSettings
    qualify: QualifySettings
    calibration: CalibrationSettings


@dataclass(frozen=True, kw_only=True)
class T5Parts(CriticParts):
    """The parts of any method with critics, and those that calibrate what the critics say."""

    calibrator: Calibrator
    probe: Probe | None = None


class MixedMethod(QualifiedMethod[T5Parts]):
    """A method with two tested critics whose advantages are mixed by a weight."""

    stateful: ClassVar[tuple[str, ...]] = (*QualifiedMethod.stateful, "calibrator")
    made_by: ClassVar[tuple[str, ...]] = (
        *QualifiedMethod.made_by, "critics", "normaliser", "weight", "auxiliary", "validation",
    )  # fmt: skip

    def __init__(self, settings: T5Settings, parts: T5Parts) -> None:
        window = settings.window
        rule, delta = settings.qualify, settings.calibration.delta
        windows = {"actor_steps": window.actor_steps, "reading": window.reading, "history": window.history}
        super().__init__(parts, rule, delta, **windows)
        self.settings = settings
        self.validator = Validator(settings.calibration.kappa, delta)
        self.normaliser: PilotNormaliser | None = None
        """Of halves that are crossed, the second's; and so is the mixture."""
        self.mixture: Mixture = FixedWeight()

    @property
    def crosses(self) -> bool:
        """Whether the actor's own thoughts test this window's critics, and its halves teach what mixes one another."""
        return self.settings.window.crossed and self.fitted_before

    def learn_weights(self, sets: Sequence[CalibrationData]) -> list[Candidate]:
        """A frozen candidate of each set; the next window learns from the last one's heads (eq:calibrated-weight)."""
        parts = self.parts
        found = parts.calibrator.learn_apart(sets, self.window)
        for candidate in found:
            parts.telemetry.count("head_train", head_updates=candidate.updates)
            parts.snapshots.renew("weight")
            parts.snapshots.renew("auxiliary")
        return found

    def mix_crossed(self, fixed: Mixture | None) -> None:
        """The actor's advantages: each half of its texts normalised and mixed by what the other half came to. Both
        learn from the heads of the window before, and those of the second go on."""
        parts, acting = self.parts, self.held["actor"]
        values = parts.critics.evaluate(acting)
        judged = replace(parts.critics.advantages(acting, values), lower_BND=None)
        mask_BRT = acting.mask_BRT
        parts.snapshots.renew("normaliser")
        items_B = acting.thoughts.valid_BR.sum(1).cpu() // self.group
        wanted = [self.settings.window.count(role) for role in ("head_train", "head_validate")]
        # Of each half: what normalises it, the texts that validate its mixture, and its own.
        both, teach = list[tuple[PilotNormaliser, Tensor, Tensor]](), list[CalibrationData]()

        def data(rows_n: Tensor, normaliser: PilotNormaliser) -> CalibrationData:
            return parts.calibrator.data(judged.rows(rows_n), values.rows(rows_n), normaliser)

        for half in halves(len(items_B), parts.rollout.seed, self.window):
            split = half.split(items_B, *wanted) if fixed is None else (half.teaching, half.teaching[:0])
            # Nothing of a candidate, its normaliser included, is of the texts that validate it.
            pilot = half.teaching[~torch.isin(half.teaching, split[1])]
            taught, tested, pilot, own = (placed(rows, mask_BRT.device) for rows in (*split, pilot, half.judged))
            first, second = judged.need("gae_2BRT")[:, pilot]
            normaliser = PilotNormaliser.fit(first, second, mask_BRT[pilot])
            both.append((normaliser, tested, own))
            if fixed is None:
                teach.append(data(taught, normaliser))
        candidates = self.learn_weights(teach) if fixed is None else []
        teach.clear()  # as large as all that the heads read, in float32
        mixed = {name: torch.zeros_like(acting.need("rewards_BRT")) for name in ("advantage_BRT", "weight_BRT")}
        found, names = list[dict[str, Any]](), list[str]()
        for number, (normaliser, tested, own) in enumerate(both):
            self.normaliser, self.mixture = normaliser, fixed or FixedWeight()
            found.append({"pilot_deviation": normaliser.deviation})
            if fixed is None:
                with parts.telemetry.phase("validate"):
                    found[-1] |= self.validate(candidates[number], data(tested, normaliser), f" half {number}")
            one = parts.calibrator.advantage(judged.rows(own), values.rows(own), normaliser, self.mixture)
            for name, tensor in mixed.items():
                tensor[own] = one.need(name)
            names.append(self.mixture.name)
        self.report |= mean_numbers(found)
        self.report["mixture"] = "/".join(dict.fromkeys(names))
        made_by = parts.snapshots.current("critics", "normaliser")
        self.held["actor"] = replace(judged, lower_BND=acting.lower_BND).having(snapshots=made_by, **mixed)

    def validate(self, candidate: Candidate, data: CalibrationData, which: str = "") -> dict[str, Any]:
        """Set the mixture: the frozen candidate's if it keeps Ĉ ≤ κQ̂ on these texts, else the fixed average
        (app:moment-validation). Returns what was measured; `which` tells several candidates of a window apart."""
        parts = self.parts
        settings, bounds = self.settings.calibration, self._signal_bounds()
        enforced = settings.bounds == "enforce"
        rounding = self._rounding(data)
        result = self.validator.validate(candidate, data, f"window {self.window}{which}", bounds, enforced, rounding)
        self.mixture = result.mixture
        parts.snapshots.renew("validation")
        found: dict[str, Any] = {"multiplier": candidate.multiplier, "head_moment": candidate.risk}
        found |= calibration_numbers(result, candidate, data)
        if settings.cross_fit:
            with parts.telemetry.phase(DIAGNOSE):
                response = candidate.mean_head  # each half's inputs have moments of their own
                like = response.average if isinstance(response, MeanResponse) else None
                offsets = parts.calibrator.offsets(data, result.mixture, self.window, like)
            parts.telemetry.count("extra", head_updates=int(offsets.pop("cross_fit_updates", 0)))
            found |= offsets
        if settings.certified:
            certificate = certify(
                result.bounds, settings.approximation_bound, settings.optimisation_bound, settings.sensitivity_bound
            )
            found |= {"risk_upper": certificate.risk_upper, "drift_upper": certificate.drift_upper}
        if not result.accepted:
            kept = "–" if result.retention is None else f"{result.retention:.4g}"
            self.log(f"validation: {result.reason}", f"the fixed average is used; Ĉ/Q̂ = {kept}")
        return found

    def _signal_bounds(self) -> SignalBounds | None:
        """|Ã| ≤ K and |h| ≤ K_h where construction enforces them: bounded critics and a bounded mean head.

        A GAE is a convex mixture of n-step advantages Φ_{t+n} − Φ_t + V(s_{t+n}) − V(s_t), so |A| ≤ 2c_r + 4c_r, over
        the smallest unit of a position.
        """
        settings, parts, normaliser = self.settings, self.parts, self._normaliser()
        mean_bound = None if settings.calibration.mode == "repeated" else parts.calibrator.mean_head.bound
        if settings.calibration.bounds == "off" or not settings.critic.bounded or mean_bound is None:
            return None
        largest = 6 * parts.rollout.reward.clip / parts.critics.least_unit
        return SignalBounds((largest + abs(normaliser.mean)) / normaliser.deviation, mean_bound)

    def _rounding(self, data: CalibrationData) -> float:
        """By how much a normalised advantage may differ from its exact value: a GAE adds at most T differences of
        rewards and values (eq:masked-gae), each rounded relative to its largest term, and is divided by σ_pilot and
        by its position's unit, where it has one."""
        parts, unit = self.parts, self._normaliser().deviation * self.parts.critics.least_unit
        rewards, values = 2 * parts.rollout.reward.clip, float(data.weight_inputs.value_NT2.abs().max())
        return torch.finfo(data.first_NT.dtype).eps * parts.rollout.engine.plan.length * (rewards + 2 * values) / unit

    def _normaliser(self) -> PilotNormaliser:
        if self.normaliser is None:
            raise ValueError("the pilot has not run yet")
        return self.normaliser

    def state_dict(self) -> dict[str, Any]:
        weight: dict[str, Any] | None = None
        if isinstance(self.mixture, LearnedWeight):
            weight = {"head": dict(self.mixture.head.state_dict()), "state_only": self.mixture.state_only}
        return {
            **super().state_dict(),
            "validator": self.validator.state_dict(),
            "normaliser": None if self.normaliser is None else self.normaliser.state_dict(),
            "mixture": self.mixture.name,
            "weight": weight,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.validator.load_state_dict(state["validator"])
        self.normaliser = PilotNormaliser.from_state_dict(state["normaliser"]) if state["normaliser"] else None
        self.mixture = fixed_mixture(state["mixture"]) or FixedWeight()
        if state["weight"] is not None:
            head = self.parts.calibrator.fresh_weight_head()
            head.load_state_dict(state["weight"]["head"])
            self.mixture = LearnedWeight(head, bool(state["weight"]["state_only"]), state["mixture"])

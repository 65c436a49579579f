"""Settings of the credit room: reward, qualification, traces, pilot, calibration."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from tfive.section import Section


class RewardSettings(Section):
    """How a gain becomes a reward (eq:dense-reward, eq:reward-scale)."""

    clip: float = Field(3.0, gt=0)
    """c_r: potentials are clipped to ±this."""

    reference: Literal["no_thought", "foreign"] = "no_thought"
    """What a thought's loss is held against: that of the text without a thought (the paper), or with a thought of
    another text (of the place before, where a set has too few texts). No action of the thought changes either, so
    both point the same way; the second is closer, and what is left is the thought's content."""

    decay: float = Field(0.9, ge=0, lt=1)
    """Decay of the second moment of whole-thought gains across windows."""

    epsilon: float = Field(1e-8, gt=0)
    """Added to the second moment under the root."""


class QualifySettings(Section):
    """When critics are good enough for the actor to move."""

    mode: Literal["gate", "fixed"] = "gate"
    """`gate`: the actor waits for critics that pass. `fixed`: it waits for `rounds`, and tests are only reported (an
    ablation)."""

    rounds: int = Field(3, ge=1)
    """Fitting rounds before the actor's first step in `fixed` mode; later windows have one each."""

    eta: float = Field(0.1, ge=0, lt=1)
    """The weaker critic's held-out R² must reach this."""

    consecutive: int = Field(2, ge=1)
    """m: fresh tests in a row that admit."""

    patience: int = Field(2, ge=1)
    """Failures in a row, once admitted, that pause the actor."""

    attempts: int = Field(5, ge=1)
    """Failed tests before admission after which the run stops."""

    delta: float = Field(0.05, gt=0, lt=1)
    """Failure probability of the reported value-risk bound (bounded heads only)."""


class GaeSettings(Section):
    """Length-adaptive traces (eq:masked-gae)."""

    alpha: float = Field(1.0, gt=0)
    """λ(L) = 1 − 1/(αL); every reachable length must keep λ in [0, 1]."""


class PilotSettings(Section):
    """The shared normaliser of both critics' advantages."""

    epsilon: float = Field(1e-6, gt=0)
    """ε_A, added to the pilot variance under the root."""


class CalibrationSettings(Section):
    """Learning and judging the advantage weight (eq:calibrated-weight)."""

    mode: Literal["learned", "state", "repeated", "average", "minimum", "single"] = "learned"
    """`learned` is the paper's w(s, a); `state` hides the action from it; `repeated` learns w from several
    continuations of a prefix and no mean head; `average`, `minimum` and `single` need no learning."""

    kappa: float = Field(0.1, ge=0, lt=1)
    """Largest displacement from the fixed average, as a share of its energy."""

    weight_width: int = Field(64, ge=1)
    """Hidden width of the weight head."""

    mean_width: int = Field(64, ge=1)
    """Hidden width of the mean head."""

    layers: int = Field(2, ge=1)
    """Hidden layers of both heads."""

    dropout: float = Field(0.1, ge=0, lt=1)
    """Dropout inside both heads while they learn; a mean head without restraint memorises."""

    steps: int = Field(400, ge=0)
    """Steps of the weight."""

    batch: int = Field(256, ge=1)
    """Trajectories a step."""

    weight_lr: float = Field(1e-3, gt=0)
    """Learning rate of the weight head."""

    mean_lr: float = Field(1e-3, gt=0)
    """Learning rate of the mean head."""

    multiplier_lr: float = Field(0.5, gt=0)
    """Step of the projected multiplier β, per unit of violation C/Q − κ."""

    multiplier_start: float = Field(1.0, ge=0)
    """β before the first step of the first window."""

    multiplier_damping: float = Field(5.0, ge=0)
    """How much of the present violation is added to β as pressure on the weight; keeps the two from circling."""

    mean_steps: int = Field(1, ge=1)
    """Steps of the mean response's moving part per step of the weight."""

    warm_steps: int = Field(400, ge=0)
    """Longest regression of each part of the mean response before the weight moves."""

    weight_decay: float = Field(1e-2, ge=0)
    """AdamW decay of both heads."""

    stop_share: float = Field(0.25, ge=0, lt=1)
    """Share of head-training texts kept back to choose the step."""

    evaluate_every: int = Field(20, ge=1)
    """Steps between looks at the kept-back texts."""

    patience: int = Field(8, ge=1)
    """Looks without improvement that end head learning."""

    delta: float = Field(0.05, gt=0, lt=1)
    """Total failure probability spent over all validation checks of a run."""

    bounds: Literal["report", "enforce", "off"] = "report"
    """Hoeffding limits where bounds on signal and mean head hold by construction: shown, required, or left out."""

    certified: bool = False
    """Report U_R; refused unless the three bounds below are supplied."""

    approximation_bound: float | None = Field(None, ge=0)
    """Upper bound on the mean head's approximation error, for certified mode."""

    optimisation_bound: float | None = Field(None, ge=0)
    """Upper bound on the mean head's optimisation error, for certified mode."""

    sensitivity_bound: float | None = Field(None, ge=0)
    """Upper bound B on the mean update factor, for certified mode."""

    cross_fit: bool = True
    """Report the cross-fitted offset of the mixture and the average, visible and hidden parts, on validation texts."""

    folds: int = Field(2, ge=2)
    """Folds of texts of the cross-fitted offset."""

    continuations: int = Field(4, ge=2)
    """Independent continuations per probe context, and per anchor in `repeated` mode (head_train, head_validate)."""

    score_centering: bool = False
    """Subtract Ã·E_q[ρ∇log π] from the update (an ablation; exact only where nothing is clipped)."""

    @model_validator(mode="after")
    def _certified_needs_bounds(self) -> CalibrationSettings:
        missing = [
            name
            for name in ("approximation_bound", "optimisation_bound", "sensitivity_bound")
            if getattr(self, name) is None
        ]
        if self.certified and missing:
            raise ValueError(f"certified = true needs {', '.join(missing)}; supply them or set certified = false")
        return self

    @model_validator(mode="after")
    def _limits_need_a_mean_head(self) -> CalibrationSettings:
        if self.mode == "repeated" and (self.certified or self.bounds == "enforce"):
            key = "certified = true" if self.certified else "bounds = enforce"
            raise ValueError(f"{key} needs the mean head that mode = repeated does without; use mode = learned")
        return self

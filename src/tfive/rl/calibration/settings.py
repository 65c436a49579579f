"""Settings of the calibration: the two small heads, how they learn, and what a candidate must hold."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from tfive.section import Section


class CalibrationSettings(Section):
    """Learning and judging the advantage weight (eq:calibrated-weight)."""

    mode: Literal["learned", "state", "repeated", "average", "minimum", "single"] = "learned"
    """`learned` is the paper's w(s, a); `state` hides the action from it; `repeated` learns w from several
    continuations of a prefix and no mean head; `average`, `minimum` and `single` need no learning."""

    kappa: float = Field(0.1, ge=0, lt=1)
    """Largest displacement from the fixed average, as a share of its energy."""

    width: int = Field(64, ge=1, le=16_384)
    """Hidden width of the weight head w(s, a) and of the mean head h(c)."""

    mean_bound: float | None = Field(None, ge=1e-6, le=1e6)
    """Keep |h| below this by construction (for the Hoeffding bounds); none leaves it free."""

    dropout: float = Field(0.1, ge=0, lt=1)
    """Dropout inside both heads while they learn; a mean head without restraint memorises."""

    steps: int = Field(400, ge=0, le=1_000_000)
    """Steps of the weight."""

    batch: int = Field(256, ge=1, le=10_000_000)
    """Trajectories a step."""

    weight_lr: float = Field(1e-3, ge=1e-12, le=1)
    """Learning rate of the weight head."""

    mean_steps: int = Field(1, ge=1, le=1000)
    """Steps of the mean response's moving part per step of the weight."""

    warm_steps: int = Field(400, ge=0, le=1_000_000)
    """Longest regression of each part of the mean response before the weight moves."""

    evaluate_every: int = Field(20, ge=1, le=1_000_000)
    """Steps between evaluations on the held-out quarter of the head-training texts, which selects the step."""

    delta: float = Field(0.05, ge=1e-12, lt=1)
    """Total failure probability spent over all validation checks of a run, and as much over its qualification tests."""

    bounds: Literal["report", "enforce", "off"] = "report"
    """Hoeffding limits where bounds on signal and mean head hold by construction: shown, required, or left out."""

    certified: bool = False
    """Report U_R; refused unless the three bounds below are supplied."""

    approximation_bound: float | None = Field(None, ge=0, le=1e6)
    """Upper bound on the mean head's approximation error, for certified mode."""

    optimisation_bound: float | None = Field(None, ge=0, le=1e6)
    """Upper bound on the mean head's optimisation error, for certified mode."""

    sensitivity_bound: float | None = Field(None, ge=0, le=1e6)
    """Upper bound B on the mean update factor, for certified mode."""

    cross_fit: bool = True
    """Report the cross-fitted offset of the mixture and the average, visible and hidden parts, on validation texts."""

    continuations: int = Field(4, ge=2, le=1024)
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
            raise ValueError(f"certified = true needs {', '.join(missing)}; use calibration.certified = false")
        return self

    @model_validator(mode="after")
    def _limits_need_a_mean_head(self) -> CalibrationSettings:
        if self.mode == "repeated" and (self.certified or self.bounds == "enforce"):
            key = "certified = true" if self.certified else "bounds = enforce"
            said = f"{key} needs the mean head that mode = repeated does without"
            raise ValueError(f"{said}; use calibration.mode = learned")
        return self

"""How weights are updated: one section per kind of learning."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from tfive.section import Section


class OptimizerSettings(Section):
    """AdamW and its schedule. The keys are the keyword arguments of `learn.optimizer.MasterOptimizer`."""

    lr: float = Field(1e-5, gt=0)
    """Peak learning rate."""

    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    """Decay of the first and second moments, each in [0, 1)."""

    eps: float = Field(1e-8, gt=0)
    """Added to the root of the second moment."""

    weight_decay: float = Field(0.0, ge=0)
    """Decoupled decay; norms, biases and other vectors are left out."""

    clip_norm: float | None = Field(1.0, gt=0)
    """Largest global gradient norm; none = no clipping."""

    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after the warm-up."""

    warmup_steps: int = Field(0, ge=0)
    """Updates of linear warm-up."""

    final_fraction: float = Field(0.0, ge=0, le=1)
    """Where a linear or cosine schedule ends, as a fraction of `lr`."""

    bf16_update: Literal["master", "stochastic"] = "master"
    """How bfloat16 weights are trained: with a float32 master copy, or alone (4 bytes less) by stochastic rounding."""


class RatioSettings(Section):
    """Which law stands under the ratio, and what is done about the gap between the sampler and the recomputed
    policy."""

    denominator: Literal["recomputed", "sampler"] = "recomputed"
    """`recomputed`: π_old from the training forward. `sampler`: the law the thought was actually drawn from."""

    correction: Literal["none", "truncated", "mask"] = "none"
    """`truncated`: multiply by min(π_old/q, cap). `mask`: drop tokens with π_old/q outside [1/cap, cap]."""

    cap: float = Field(2.0, ge=1)
    """Bound used by the correction."""

    @model_validator(mode="after")
    def _sampler_needs_no_correction(self) -> RatioSettings:
        if self.denominator == "sampler" and self.correction != "none":
            raise ValueError(
                f"correction = {self.correction!r} corrects the recomputed denominator; use none with sampler"
            )
        return self


class ActorSettings(Section):
    """The clipped-PPO step (eq:ppo)."""

    clip_low: float = Field(0.8, gt=0, le=1)
    """ρ₋: below it, negative advantages stop pushing."""

    clip_high: float = Field(1.28, ge=1)
    """ρ₊: above it, positive advantages stop pushing."""

    reuse_passes: int = Field(2, ge=1)
    """Passes over the window's actor trajectories."""

    minibatches: int = Field(4, ge=1)
    """Optimizer steps per pass."""


class AnchorSettings(Section):
    """Likelihood losses beside the policy gradient."""

    next_token: float = Field(1.0, ge=0)
    """Weight of the next-token loss on the text itself; 0 leaves it out."""

    conditioned: float = Field(0.0, ge=0)
    """Weight of the next-token loss on the continuation given the thought; 0 leaves it out."""

    mixture: float = Field(0.0, ge=0, lt=1)
    """Share of the prediction after the thought in a mixture with the one without it, whose loss the conditioned anchor
    takes; only the former learns from it. 0: the prediction after the thought stands alone."""

"""How weights are updated: one section per kind of learning."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

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

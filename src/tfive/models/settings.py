"""Which base model, on what and how precisely it computes, and how the critics, heads and gate beside it are built."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tfive.section import Section


class ModelSettings(Section):
    """The base model that is mid-trained."""

    name: str = Field("nano", min_length=1)
    """`nano` (embedded), a hub id, a local folder, a `.gguf` file, or a wheel that contains one."""

    revision: str | None = None
    """Branch, tag or commit of a hub id; none means its default branch."""

    trust_remote_code: bool = False
    """Whether a hub model may run Python code of its own."""

    device: str = "auto"
    """`auto` (CUDA where there is one, else the CPU), `cpu`, `cuda` or `cuda:N`."""

    compute: Literal["auto", "bfloat16", "float32"] = "auto"
    """Precision of the compute copy; `auto` is bfloat16 on a GPU that has it and float32 on the CPU. Trained weights,
    moments and teachers are float32 in every case (see `bf16_update` for the one exception)."""


class CriticSettings(Section):
    """How a state-value critic is made from the base model, and how the two of a pair differ."""

    adapt: Literal["head", "top", "lora", "full"] = "full"
    """What is trained: the value head alone, the last `blocks` blocks, low-rank updates of those, or everything."""

    blocks: int = Field(4, ge=1)
    """Last blocks that `top` and `lora` adapt; the frozen rest is computed once per trajectory."""

    lora_rank: int = Field(16, ge=1)
    """Rank of each low-rank update."""

    lora_alpha: float = Field(32.0, gt=0)
    """Updates are scaled by `lora_alpha / lora_rank`."""

    width: int = Field(256, ge=0)
    """Hidden units of the value head; 0 makes it linear in the normalised features, with one bias a step."""

    bounded: bool = False
    """Keep |V| ≤ 2·c_r by construction (the bound eq:value-risk-confidence asks for)."""

    pair: Literal["same", "disjoint", "bracket"] = "same"
    """`same`: both fit all data (paper); `disjoint`: half each; `bracket`: a low and a high expectile (a variant)."""

    expectile: float = Field(0.7, gt=0.5, lt=1)
    """The upper expectile of a `bracket` pair; the lower one is its mirror image."""

    start: str | None = None
    """Folder of a saved critic pair to start from; none means fresh critics from the base model."""

    loss: Literal["clipped", "squared"] = "clipped"
    """Value loss of alternating training: clipped around the pre-fit prediction (eq:value-loss), or half-squared."""

    warmup_loss: Literal["clipped", "squared"] = "squared"
    """Value loss of both warm-ups, where the pre-fit prediction is not yet worth staying near."""

    clip: float = Field(0.2, gt=0)
    """ε_v of the clipped loss, in units of the shaped return."""

    lr: float = Field(1e-5, gt=0)
    """Learning rate of the adapted blocks."""

    head_lr: float = Field(1e-3, gt=0)
    """Learning rate of the value head."""

    weight_decay: float = Field(0.0, ge=0)
    """AdamW decay of both."""

    head_passes: int = Field(1, ge=0)
    """Passes of the value-head warm-up over its fitting set, before the blocks are unfrozen."""

    passes: int = Field(2, ge=1)
    """Passes over a window's fitting set."""

    minibatches: int = Field(8, ge=1)
    """Optimizer steps per pass."""


class HeadSettings(Section):
    """Further shape of the weight head w(s, a) and the mean head h(c); width, depth and dropout are `calibration`'s."""

    action_width: int = Field(16, ge=1)
    """Units the action's embedding is projected to before the weight head reads it."""

    mean_bound: float | None = Field(None, gt=0)
    """Keep |h| below this by construction (for the Hoeffding bounds); none leaves it free."""


class GateSettings(Section):
    """The prediction gate β_g and its loss (app:gate-behavior)."""

    enabled: bool = True
    """Whether a gate is trained and mixed gain is reported."""

    width: int = Field(64, ge=1)
    """Units each feature vector is projected to, and of the hidden layer."""

    no_harm: float = Field(1.0, ge=0)
    """Weight of the penalty on predictions that the mixture makes worse."""

    utility: float = Field(0.1, ge=0)
    """Weight of the term that ties the gate to the signed utility of the thought."""

    lr: float = Field(1e-3, gt=0)
    """Learning rate of the gate."""

    weight_decay: float = Field(1e-2, ge=0)
    """AdamW decay of the gate."""

    passes: int = Field(2, ge=1)
    """Passes over a window's actor trajectories."""

    batch: int = Field(64, ge=1)
    """Items of one optimizer step."""

    utility_scale: float = Field(1.0, gt=0)
    """σ_u, the utility in nats that counts as one."""

"""Settings of the tree engine: the shape of a thought, its sampling law, how ratios are formed, which kernels run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from pydantic import Field, field_validator, model_validator

from tfive.section import Section


class ThoughtSettings(Section):
    """The shape of a thought and of the text it is judged by."""

    length: int = Field(12, ge=1, le=65_536)
    """T: how many tokens a thought has (its longest length when `variable_length` is on)."""
    checkpoints: tuple[int, ...] = (4, 8, 12)
    """After how many thought tokens the continuation is scored; rising, the last one is `length`."""
    horizon: int = Field(16, ge=1, le=65_536)
    """H: how many following text tokens a thought is judged by."""
    open: str = " ("
    """The text that opens a thought (and the start of a learned opening)."""
    close: str = ")"
    """The text that closes a thought (and the start of a learned closing)."""
    delimiters: Literal["text", "none", "learned"] = "text"
    """`text`: `open`, `close` as vocabulary tokens; `none`: nothing; `learned`: input embeddings started from them."""
    variable_length: bool = False
    """Whether the model may end a thought early by sampling the close (then an action of its own)."""
    reading: Literal["inline", "gated"] = "inline"
    """How the text that follows reads a thought. `inline`: as text before it; `gated`: at the positions it has without
    a thought, through gates per layer and head that start shut (a thought then changes nothing)."""
    group: int | None = Field(None, ge=1, le=4096)
    """G: how many thoughts are sampled at each position; none is 8 for group-relative methods and 1 for the others.
    Controls that reward no thought draw one whatever is set."""

    @field_validator("checkpoints")
    @classmethod
    def _rising(cls, checkpoints: tuple[int, ...]) -> tuple[int, ...]:
        if not checkpoints or checkpoints[0] < 1 or any(b <= a for a, b in pairwise(checkpoints)):
            raise ValueError(f"{list(checkpoints)} must be rising numbers from 1 on")
        return checkpoints

    @model_validator(mode="after")
    def _consistent(self) -> ThoughtSettings:
        if self.checkpoints[-1] != self.length:
            fitting = [*(step for step in self.checkpoints if step < self.length), self.length]
            raise ValueError(
                f"the last of checkpoints {list(self.checkpoints)} must be length {self.length}; "
                f"use thought.checkpoints = {fitting} or thought.length = {self.checkpoints[-1]}"
            )
        if self.delimiters == "none" and self.variable_length:
            raise ValueError(
                "variable_length needs a close to sample; use thought.variable_length = false or "
                "thought.delimiters = text"
            )
        if self.delimiters != "none" and not (self.open and self.close):
            fixed = " and thought.variable_length = false" if self.variable_length else ""
            raise ValueError(f"open and close must not be empty; use thought.delimiters = none{fixed}")
        return self


class SamplingSettings(Section):
    """The sampling law q of thought tokens."""

    temperature: float = Field(1.0, ge=1e-2, le=100)
    """Divides the logits before sampling."""
    top_k: int = Field(0, ge=0, le=2**24)
    """Keep the k most likely tokens (0: all)."""
    top_p: float = Field(1.0, ge=1e-6, le=1)
    """Keep the smallest set of most likely tokens whose probability reaches p (1: all)."""
    parity: bool = False
    """Sample from the training forward itself, so that the first ratio is exactly 1 (slow; for checking)."""


Attention = Literal["auto", "sdpa", "folded", "tiled", "flex"]
Switch = Literal["auto", "on", "off"]

HEAD_BYTES = 1 << 28
"""Bytes of float32 vocabulary logits held at once: 256 MiB keep the products of the vocabulary head large and are a
small part of any device's memory."""


class EngineSettings(Section):
    """How the tree is computed; none of these changes what is computed."""

    fast: Switch = "auto"
    """Tiled or folded attention, fused norms and blocks (with gradients and without), CUDA graphs of sampling steps, of
    readings and scores and of the actor's updates, kernels of recurrent layers: `auto` uses each where it helps and was
    found to compute the same; `on` also refuses models whose blocks cannot be fused; `off` is transformers' own
    attention and plain PyTorch, launched kernel by kernel."""
    activation_checkpointing: bool = False
    """Recompute each block in the backward pass instead of keeping its activations."""

    def options(self) -> EngineOptions:
        """These settings with one switch for each part that `fast` turns on or off."""
        checkpointing = self.activation_checkpointing
        if self.fast == "off":
            return EngineOptions(
                attention="sdpa",
                delta_rule="torch",
                fused_norms="off",
                fused_blocks="off",
                fused_training="off",
                activation_checkpointing=checkpointing,
                cuda_graphs=False,
            )
        return EngineOptions(
            fused_norms=self.fast,
            fused_blocks=self.fast,
            fused_training=self.fast,
            activation_checkpointing=checkpointing,
            replayed_passes=True,
        )


@dataclass(frozen=True)
class EngineOptions:
    """What the engine is built with. Runs make it from `EngineSettings`; self-checks, benchmarks, tests and inference
    switch single parts."""

    attention: Attention = "auto"
    """`sdpa`: transformers' masked attention (the reference); `folded`: the same without repeating keys and values for
    grouped queries; `tiled`: kernels that skip what nobody sees (CUDA, bfloat16); `flex`: FlexAttention (no CPU
    backward); `auto`: tiled where it agrees with the others on this device, else folded."""
    delta_rule: Literal["auto", "torch", "triton", "fla"] = "auto"
    """The rule of recurrent layers: pure PyTorch, our kernels in Triton, flash-linear-attention, or (`auto`) the first
    of the latter two that agrees with PyTorch on the device, else PyTorch. With `triton` sampling has a step kernel."""
    head_bytes: int = HEAD_BYTES
    """Bytes of float32 vocabulary logits held at once."""
    max_nodes: int = 0
    """Most branch nodes of one text in one scoring pass (0: twice the text's); more are scored in several passes."""
    fused_norms: Switch = "auto"
    """Compute root-mean-square norms by one kernel instead of several: `auto` does so on CUDA, where launches cost."""
    fused_blocks: Switch = "auto"
    """Run blocks without gradients (reading, sampling, scoring) by a few kernels each: `auto` does so on CUDA, for
    models whose blocks were found to compute the same. Sampling then holds a copy of the weights that read the
    residual stream."""
    fused_training: Switch = "auto"
    """Run blocks with gradients (the actor's and the critics' passes) by few kernels too, where those without are and
    their gradients were found to be the same."""
    activation_checkpointing: bool = False
    cuda_graphs: bool = True
    """Capture sampling steps and those of the calibration heads as CUDA graphs (on CUDA devices only)."""
    replayed_passes: bool = False
    """Capture passes that read texts and score thoughts, too, and the actor's updates: forward, losses and backward of
    a part as one graph, where blocks are fused and nothing waits for the host (one process; no recurrent layers, gated
    reading, score centring, parity or recomputed activations). Captured updates keep the memory of a pass and of the
    accumulated gradients. Runs ask for all this; inference and evaluations meet too many shapes."""

    packed: Switch = "auto"
    """Leave padding out of passes over thoughts that closed early: `auto` does so on processors by the model's own
    blocks, and on a GPU in large passes that score or have gradients where thoughts may close early, and in sampling of
    many long thoughts by fused blocks, whose steps then shrink as thoughts close; `on` in all such passes and by all
    such blocks; `off` never. Passes that do are launched, not captured; sampling steps are captured in a few sizes.
    Recurrent layers and passes that are made again for their gradients read it."""

    def unfused(self) -> EngineOptions:
        """The same by the model's own blocks, for weights that cannot be copied to be compared (shards)."""
        return replace(self, fused_norms="off", fused_blocks="off", fused_training="off")

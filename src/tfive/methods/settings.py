"""Settings of single methods; what several of them share stands in the rooms below."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tfive.section import Section


class PpoSettings(Section):
    """`quiet-star-ppo`: one critic whose warm-up has a fixed length, whatever it predicts by then."""

    frozen_windows: int = Field(0, ge=0, le=1_000_000)
    """First windows in which the actor takes no step at all (app:historical-naive-ppo froze it for 20 of 60 steps)."""


class GrpoSettings(Section):
    """`quiet-star-grpo`: what a thought's return is compared with inside its group."""

    normalisation: Literal["std", "none", "leave_one_out"] = "std"
    """`std`: (r − mean) / (deviation + ε). `none`: r − mean. `leave_one_out`: r − mean of the others."""


class RlpSettings(Section):
    """`rlp`: the teacher that the information gain is measured against."""

    decay: float = Field(0.999, ge=0, lt=1)
    """Share of the teacher that an optimizer step leaves in place; the rest is taken from the model."""

"""What the run itself needs to know: its seed, how often it saves and measures, where it logs."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tfive.section import Section

Tracker = Literal["tensorboard", "wandb", "trackio"]


class RunSettings(Section):
    """Seed, checkpoints, measurements and trackers of one run."""

    seed: int = Field(0, ge=0, lt=2**63)
    """Every random number of the run is a function of this seed and of what is drawn."""

    texts_per_pass: int = Field(8, ge=1, le=65_536)
    """Texts in one forward or backward pass; it decides speed and memory, never what is computed."""

    texts_per_rollout: int | None = Field(None, ge=1, le=65_536)
    """The same for passes without gradients (sampling, scoring, reading features), which need less memory; none means
    `texts_per_pass`."""

    checkpoint_every: int = Field(1, ge=0, le=1_000_000)
    """Windows between two checkpoints; the last window is always saved, with 0 it alone."""

    checkpoint_phases: bool = False
    """Also save whenever a phase of a window ends: less to do again after a crash, more writing."""

    keep: int = Field(2, ge=1, le=1_000_000)
    """Checkpoints kept on disk; older ones are removed once a newer one is complete."""

    develop_every: int = Field(1, ge=1, le=1_000_000)
    """Windows between two measurements on the development split (gains and their controls)."""

    develop_items: int = Field(256, ge=1, le=10_000_000)
    """Development items measured each time; the last window measures the same ones."""

    develop_after: int = Field(0, ge=0, le=10_000_000)
    """Development texts passed over first: a search for settings and a final study can look at different ones."""

    trackers: tuple[Tracker, ...] = ()
    """Trackers asked for beside the JSON lines; TensorBoard is also used whenever it is installed."""

    project: str = Field("tfive", min_length=1)
    """Project name shown in W&B or trackio."""

    @property
    def rollout_texts(self) -> int:
        """Texts in one pass without gradients."""
        return self.texts_per_rollout or self.texts_per_pass

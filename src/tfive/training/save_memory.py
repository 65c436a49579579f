"""Host memory of a checkpoint that is written beside training: a copy of everything that is saved.

On a GPU the copy lies in the host's memory, on a CPU beside the run's own; either way it lasts until it is on disk.
Several processes copy what they write, each about the same share.
"""

from __future__ import annotations

from tfive.config.config import Config
from tfive.models.shape import ModelShape
from tfive.training.memory import Estimate, Row, readable_bytes, summed, trained_by_actor

ROLE = "checkpoint being written"
_NOT_SAVED = ("frozen base", "rollout and scoring")
"""What a run makes anew from the model's own files, or keeps for no longer than a pass."""


def checkpoint_bytes(table: Estimate, config: Config, shape: ModelShape) -> int:
    """Bytes that a checkpoint copies: trained weights with their masters, moments and averages, of every role. Heads of
    calibration and what a window holds of its thoughts are small and left out."""
    found = sum(row.bytes["weights"] + row.bytes["moments"] for row in table.rows if row.role not in _NOT_SAVED)
    # Of an average the exact numbers are saved; the copy that computes follows from them.
    averages = [row for row in table.rows if row.role in config.spec.averages]
    exact = 4 * trained_by_actor(config, shape)[0]
    return found - sum(row.bytes["weights"] - exact for row in averages)


def with_save(table: Estimate, config: Config, shape: ModelShape) -> Estimate:
    """The table of a run on the CPU while a checkpoint is written."""
    copied = checkpoint_bytes(table, config, shape)
    row = Row(ROLE)
    row.add("states", copied, f"a copy of weights and moments, {readable_bytes(copied)}")
    return summed([*table.rows, row])

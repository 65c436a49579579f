"""Room on disk that a run's folder takes: its checkpoints, and before the first one the rounds of its warm start."""

from __future__ import annotations

from dataclasses import dataclass

from tfive.config.config import Config
from tfive.models.shape import ModelShape
from tfive.training.memory import Estimate, readable_bytes
from tfive.training.save_memory import checkpoint_bytes

_ROUND = 14
"""Bytes a parameter of what a round of a warm start leaves: weights in bfloat16, masters and moments in float32."""


@dataclass(frozen=True)
class Room:
    """Bytes of one checkpoint, how many there are at most, of the model after a warm start, and of its rounds."""

    checkpoint: int
    checkpoints: int
    warm: int
    rounds: int

    @property
    def needed(self) -> int:
        """The most that there is at once."""
        return max(self.checkpoint * self.checkpoints + self.warm, self.rounds)

    def shown(self) -> str:
        """What takes the room."""
        many = f"up to {self.checkpoints} checkpoints (one being written)" if self.checkpoints > 1 else "one checkpoint"
        warm = f", {readable_bytes(self.warm)} for the model after its warm start" if self.warm else ""
        first = f" ({readable_bytes(self.rounds)} for rounds of it before)" if self.rounds else ""
        each = f"{many} of {readable_bytes(self.checkpoint)}{warm}{first}"
        return f"{readable_bytes(self.needed)} on disk: {each}; metrics and pages are not counted"

    def smaller(self) -> str:
        """What to do where less is free."""
        fewer = ["run.keep = 1"] if self.checkpoints > 2 else []
        fewer += ["run.checkpoint_every = 0 (the last window's alone)"] if self.checkpoints > 1 or self.rounds else []
        return f"set {' or '.join(fewer)}, or give --out on another disk" if fewer else "give --out on another disk"


def room(config: Config, table: Estimate, shape: ModelShape, *, on_gpu: bool) -> Room:
    """What is reckoned of this configuration; metrics and thoughts that are kept are small beside it, and a prepared
    text has a folder of its own."""
    run, warm = config.run, config.warmstart
    # An older one goes when a newer one is whole; the last window's is the only one where none is asked for between.
    most = run.keep + 1 if run.checkpoint_every or run.checkpoint_phases else 1
    rounds = 2 * _ROUND * shape.parameters if run.checkpoint_every and warm.source == "hindsight" else 0
    model = (2 if on_gpu else 4) * shape.parameters if warm.source != "off" else 0
    return Room(checkpoint_bytes(table, config, shape), most, model, rounds)

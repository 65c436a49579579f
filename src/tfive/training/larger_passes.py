"""Passes of more texts than a configuration asks for: fewer of them do a window's work, with less waiting for launches.

What is computed stays the same; only time and memory change.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from tfive.config.config import Config
from tfive.models.shape import ModelShape
from tfive.training.drawn import texts_drawn_together
from tfive.training.memory import estimate, passes_of_an_update, readable_bytes, texts_of_an_update

SHARE = 0.88
"""Of the device's memory that the estimate may fill; the rest is the allocator's and the estimate's error: the
measured peaks of the 2B and 4B shapes lie up to 12.5 % above it, all but 4 % of which is what admission used to leave.
"""


@dataclass(frozen=True)
class LargerPasses:
    """Sizes that fit as well, by their keys, and what they come to."""

    sizes: dict[str, int]
    total: int
    """Bytes of the whole estimate with them."""
    passes: tuple[int, int]
    """Passes of a window's draws and updates as configured, and with these sizes."""

    def shown(self) -> str:
        """A line for people."""
        before, after = self.passes
        asked = " ".join(f"--set {key}={size}" for key, size in self.sizes.items())
        fewer = f"{after} passes a window over texts instead of {before}"
        return f"larger passes are foreseen to fit: {asked} ({readable_bytes(self.total)}), {fewer}"


def larger_passes(config: Config, shape: ModelShape, memory: int) -> LargerPasses | None:
    """The largest sizes of passes that a window has use for and whose estimate leaves room on a device of this memory;
    None where those of the configuration are as large. Passes with gradients come first: they take most of the time."""
    now = config.run.texts_per_pass, config.run.rollout_texts
    for texts in _sizes(texts_of_an_update(config), now[0]):
        for drawn in _sizes(max(texts_drawn_together(config), default=1), now[1]):
            if (texts, drawn) == now:
                return None
            changed = _with(config, texts, drawn)
            total = estimate(changed, shape, on_gpu=True).total
            if total <= SHARE * memory:
                sizes = {"run.texts_per_pass": texts, "run.texts_per_rollout": drawn}
                asked = {key: size for key, size, old in zip(sizes, sizes.values(), now) if size != old}
                return LargerPasses(asked, total, (_passes(config), _passes(changed)))
    return None


def _sizes(useful: int, now: int) -> Iterator[int]:
    """The most that is of use, then halves of it as long as they are more than now, then what it is now."""
    while useful > now:
        yield useful
        useful = math.ceil(useful / 2)
    yield now


def _with(config: Config, texts: int, drawn: int) -> Config:
    run = config.run.model_copy(update={"texts_per_pass": texts, "texts_per_rollout": drawn})
    return config.model_copy(update={"run": run})


def _passes(config: Config) -> int:
    """How many passes a window's draws and its actor's updates are made of."""
    draws = sum(math.ceil(texts / config.run.rollout_texts) for texts in texts_drawn_together(config))
    return draws + config.window.actor_steps * passes_of_an_update(config)

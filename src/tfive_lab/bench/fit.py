"""How many texts a pass may take, so that a timed method uses the memory there is and no more."""

from __future__ import annotations

import torch

from tfive.config.config import Config
from tfive.errors import UserError
from tfive.models.shape import ModelShape, known_shapes, shape_from
from tfive.training.larger_passes import SHARE
from tfive.training.memory import estimate
from tfive_lab.bench.work import SHAPES

TRAINING, ROLLOUT = (16, 12, 8, 6, 4, 3, 2, 1), (64, 32, 16, 8, 4, 2, 1)
"""Texts a pass that are tried, with and without gradients."""
DRAWN = (16, 8, 4, 1)
"""Texts that are drawn at a time at least, the first of these for which any pass with gradients leaves room: groups of
eight of the 2B shape took 29 % longer to draw by eight texts instead of 16, and their update 9 % longer by four instead
of eight."""


def texts_that_fit(config: Config, shape: str | None, device: torch.device) -> Config:
    """The configuration with the most texts a pass that its memory estimate allows; as it is where nothing is known.

    Where not even one fits, blocks are computed again in the backward pass instead of being kept.
    """
    if device.type != "cuda" or shape is None or shape not in SHAPES:
        return config
    room = SHARE * torch.cuda.get_device_properties(device).total_memory
    facts = known_shapes()
    stored = next(key for key in facts if key.startswith(SHAPES[shape]))
    return fitted(config, shape_from(facts[stored], stored), room)


def fitted(config: Config, shape: ModelShape, room: float) -> Config:
    """The largest passes whose estimate stays within `room` bytes, blocks kept rather than computed again if possible.

    Passes without gradients get a size of their own: they need less, and small ones would only wait for launches.
    """
    for checkpointing in (False, True):
        for least in DRAWN:
            for texts in TRAINING:
                for rollout in (one for one in ROLLOUT if one >= max(least, texts)):
                    changed = sized(config, texts, rollout, checkpointing)
                    if estimate(changed, shape, on_gpu=True).total <= room:
                        return changed
    raise UserError(f"{shape.source}: method {config.method} does not fit in {room / 2**30:.0f} GiB, even text by text")


def sized(config: Config, texts: int, rollout: int, checkpointing: bool) -> Config:
    """The configuration with these sizes of passes."""
    engine = config.engine.model_copy(update={"activation_checkpointing": checkpointing})
    run = config.run.model_copy(update={"texts_per_pass": texts, "texts_per_rollout": rollout})
    return config.model_copy(update={"engine": engine, "run": run})


def smaller(config: Config) -> Config:
    """Half of it, for a device that ran out of memory; text by text, blocks are computed again."""
    texts, rollout = config.run.texts_per_pass, config.run.rollout_texts
    return sized(config, max(1, texts // 2), max(1, rollout // 2), texts == 1 or config.engine.activation_checkpointing)

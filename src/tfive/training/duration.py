"""How long a run takes, estimated before it starts: its work counted, over the speed this device shows in a product of
two matrices. Good to a factor of two or so, which is what one needs to choose a size."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch

from tfive.config.config import Config
from tfive.models.shape import ModelShape
from tfive.training.cost import nodes_per_item

PAUSE = 0.1
"""Seconds between bursts of products: whoever has slept is given a processor before those that have not."""
REACHED = {"cpu": 0.3, "cuda": 0.08}
"""Part of a matrix product's speed that a run reaches: on two CPU cores `nano` (134 s), on an H200 the study of
SmolLM2-135M. On a GPU it rises with the square root of the model's size."""

REACHED_AT_MOST = 0.35
_STUDY_PARAMETERS = 134_515_008

MEASURED_READINGS = 6.0
"""So many times is a development item read: its own thought sampled and scored, another's, an empty one, random tokens,
none."""


@dataclass(frozen=True)
class Duration:
    """Seconds of a whole run and of one of its windows, and what they were computed from."""

    seconds: float
    window: float
    basis: str

    def shown(self) -> str:
        """`about 4 min (…)`."""
        return f"about {readable(self.seconds)} ({self.basis})"


def readable(seconds: float) -> str:
    """`40 s`, `12 min`, `3.5 h`, `4.2 days`."""
    for limit, unit, name in ((90, 1, "s"), (5400, 60, "min"), (129_600, 3600, "h")):
        if seconds < limit:
            value = seconds / unit
            return f"{value:.0f} {name}" if value >= 10 or unit == 1 else f"{value:.1f} {name}"
    return f"{seconds / 86_400:.1f} days"


def product_speed(device: torch.device, seconds: float = 0.5, bursts: int = 8) -> float:
    """Floating-point operations a second in the fastest of several matrix products, which take about `seconds`: some at
    a time with pauses between them, since on a busy machine all of one stretch may be slow."""
    size, dtype = (4096, torch.bfloat16) if device.type == "cuda" else (512, torch.float32)
    matrix = torch.ones(size, size, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(bursts):
        time.sleep(PAUSE)
        spent = 0.0
        while spent < seconds / bursts:
            began = time.perf_counter()
            product = matrix @ matrix
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            took = time.perf_counter() - began
            best, spent = min(best, took), spent + took
            del product
    return 2 * size**3 / best


def expected(config: Config, shape: ModelShape, device: str, speed: float) -> Duration:
    """The duration of a run whose critics qualify at their first test in every window; `run.seconds` ends it with the
    window in which they pass."""
    reached = REACHED[device]
    if device == "cuda":
        reached = min(REACHED_AT_MOST, reached * (shape.parameters / _STUDY_PARAMETERS) ** 0.5)
    per_node = 2 * shape.parameters / (speed * reached)
    nodes = nodes_per_item(config, shape.layers)
    window = sum(nodes.values()) * config.window.items * per_node
    windows = config.window.windows
    if config.run.seconds is not None:
        windows = min(windows, math.ceil(config.run.seconds / window))
    ended = " by run.seconds" if windows < config.window.windows else ""
    measurements = 1 + -(-windows // config.run.develop_every)
    row = config.text.sequence_length / config.text.positions.per_text + config.thought.length
    measuring = MEASURED_READINGS * measurements * config.run.develop_items * row * per_node
    total = window * windows + measuring
    operations = total * speed * reached
    basis = (
        f"{windows} window{'s' * (windows != 1)} of {readable(window)}{ended}; {operations:.1e} operations counted, "
        f"at {reached:.0%} of the {speed / 1e9:,.0f} Gflop/s that a matrix product reaches here now; good to a factor "
        "of two"
    )
    return Duration(total, window, basis)

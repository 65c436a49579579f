"""Bytes that a process hands to collectives in one window, counted where `torch.distributed` takes them, and as a
profiler's trace has them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from tfive.config.config import Config
from tfive.distributed import shards
from tfive.distributed.world import World
from tfive.models.load import load_model
from tfive.telemetry import Silent
from tfive.training.build import build
from tfive.training.corpus import corpus_of
from tiny import configure

HANDED = {
    "all_reduce": ("all-reduce", 0),
    "all_gather": ("all-gather", 1),
    "broadcast": ("broadcast", 0),
    "all_gather_single": ("all-gather", 1),
    "all_gather_into_tensor": ("all-gather", 1),
    "reduce_scatter_single": ("reduce-scatter", 1),
    "reduce_scatter_tensor": ("reduce-scatter", 1),
}
"""Each function, the collective it is, and which of its arguments is the tensor that this process hands over."""

HELD = {"_all_gather": ("all-gather", 1), "_reduce_scatter": ("reduce-scatter", 1)}
"""The same of functions that the module of shards has taken before it is listened to."""


def _listen(counted: Counter[str]) -> None:
    for owner, names in ((dist, HANDED), (shards, HELD)):
        for name, (collective, argument) in names.items():
            made = getattr(owner, name, None)
            if made is not None:
                setattr(owner, name, _counting(made, counted, collective, argument))


def _counting(made: Callable[..., Any], counted: Counter[str], collective: str, argument: int) -> Callable[..., Any]:
    names = ("output_tensor", "input_tensor") if collective == "all-gather" else ("output", "input")

    def call(*given: Any, **named: Any) -> Any:
        tensor: Tensor = given[argument] if len(given) > argument else named[names[argument]]
        counted[collective] += tensor.numel() * tensor.element_size()
        return made(*given, **named)

    return call


def windows(world: World, folder: str, cases: dict[str, list[str]]) -> dict[str, dict[str, dict[str, int]]]:
    """Bytes by collective in the second window of every case, `counted` and `traced`."""
    counted: Counter[str] = Counter()
    _listen(counted)
    return {name: _window(world, configure(Path(folder), *overrides), counted) for name, overrides in cases.items()}


def _window(world: World, config: Config, counted: Counter[str]) -> dict[str, dict[str, int]]:
    loaded = load_model(config.model.name, device="cpu", dtype=torch.float32)
    method = build(config, loaded, corpus_of(config, loaded=loaded), Silent(), None, world).method
    while not method.finished(1):
        method.advance()
    counted.clear()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as traced:
        while not method.finished(2):
            method.advance()
    return {"counted": dict(counted), "traced": _traced(traced)}


SIZES = {"unsigned char": 1, "bool": 1, "float": 4, "long int": 8, "double": 8}
"""Bytes of an element by what the profiler calls its type."""


def _traced(profiled: Any) -> dict[str, int]:
    """Bytes by what gloo was asked for; it scatters a sum by making all of it."""
    found: Counter[str] = Counter()
    for event in profiled.profiler.kineto_results.events():
        backend, _, collective = event.name().partition(":")
        if backend == "gloo":
            found[collective] += math.prod(event.shapes()[0]) * SIZES[event.dtypes()[0]]
    return dict(found)

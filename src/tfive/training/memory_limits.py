"""Memory is reckoned before it is asked for, and running out of it is one line that says what to lower."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from tfive.config.config import Config
from tfive.distributed.environment import Launched
from tfive.errors import RunFailed, UserError, out_of_memory
from tfive.models.shape import ModelShape, find_shape, shape_from
from tfive.training.communication import Layout, bytes_per_rank, whole_copies
from tfive.training.memory import compute_bytes, estimate, readable_bytes
from tfive.training.remedies import fewer_copies, lower_and_resume, smaller_passes, smaller_weights
from tfive.training.save_memory import checkpoint_bytes
from tfive.tree.settings import EngineOptions

if TYPE_CHECKING:
    from tfive.models.load import Loaded

SLACK = 1.25
"""How far the estimate may lie above the device's memory before a run is refused: it is no measurement."""


def check_copies(config: Config, device: torch.device, place: Launched) -> None:
    """Refuse, before anything is loaded, a run whose processes could not hold their whole copies of the model."""
    shape = find_shape(config.model.name)
    if shape is not None:
        _require_room_for_copies(config, shape, device, place)


def check_size(config: Config, loaded: Loaded, device: torch.device, place: Launched) -> None:
    """Refuse a run whose texts and thoughts have more positions than the model, or whose tensors cannot fit in memory.

    What is asked for by mistake (a thousand thoughts a position, texts of a million tokens) is named here, before
    anything is written.
    """
    _require_positions(config, loaded)
    shape, there = _shape(loaded), memory_of_each(device, place)
    if shape is None or there is None:
        return
    _require_room_for_copies(config, shape, device, place)
    on_gpu = device.type == "cuda"
    found = estimate(config, shape, on_gpu=on_gpu)
    needed = bytes_per_rank(found, config, shape, Layout.of(config, place.size), compute_bytes(config, on_gpu))
    if not on_gpu and config.run.checkpoint_every:
        needed += checkpoint_bytes(found, config, shape) // place.size
    if needed > SLACK * there:
        row = max(found.rows, key=lambda one: sum(one.bytes.values()))
        column = max(row.bytes, key=lambda name: row.bytes[name])
        remedies = smaller_passes(config) if column in ("activations", "states") else smaller_weights(config)
        room = _shared(there, device, place)
        raise UserError(
            f"this run needs about {readable_bytes(needed)}{_each(place)}, {device} has {room}; most of it "
            f"{column} of {row.role} ({row.how.get(column, '')}); {' or '.join(remedies)}; see: tfive doctor"
        )


def engine_options(config: Config, loaded: Loaded) -> EngineOptions:
    """How a run's trees are computed. Captured passes keep memory of their own, and the first ones are captured before
    any update has shown what it needs: they are for runs that are reckoned to need at most half of what their process
    can get of the device (what is free of it, and no more than `torch.cuda.set_per_process_memory_fraction` allows)."""
    options, device = config.engine.options(), loaded.model.device
    if device.type != "cuda" or not options.replayed_passes:
        return options
    (free, whole), shape = torch.cuda.mem_get_info(device), _shape(loaded)
    allowed = whole * torch.cuda.get_per_process_memory_fraction(device)
    there = min(free + torch.cuda.memory_reserved(device), allowed)
    return replace(
        options, replayed_passes=shape is not None and 2 * estimate(config, shape, on_gpu=True).total <= there
    )


def _require_room_for_copies(config: Config, shape: ModelShape, device: torch.device, place: Launched) -> None:
    """Whole copies are counted, not estimated: what is larger than the memory cannot be held."""
    there, on_gpu = memory_of_each(device, place), device.type == "cuda"
    layout, compute = Layout.of(config, place.size), compute_bytes(config, on_gpu)
    found = whole_copies(estimate(config, shape, on_gpu=on_gpu), config, shape, layout, compute)
    copies = max(found.values(), key=lambda one: sum(one.values()))
    if there is None or sum(copies.values()) <= there:
        return
    shards = ", and shards do not make them smaller" if place.size > 1 else ""
    remedies = " or ".join(fewer_copies(config, place.size, copies, there))
    raise UserError(
        f"model.name = {config.model.name}: whole copies of weights take {copies_shown(copies)}{_each(place)}, "
        f"{device} has {_shared(there, device, place)}{shards}; {remedies}; see: tfive doctor"
    )


def copies_shown(copies: Mapping[str, int]) -> str:
    """The sum of whole copies, and what they are."""
    parts = ", ".join(f"{name} {readable_bytes(size)}" for name, size in copies.items())
    return f"{readable_bytes(sum(copies.values()))} ({parts})"


def _each(place: Launched) -> str:
    return " in each process" if place.size > 1 else ""


def _shared(there: int, device: torch.device, place: Launched) -> str:
    """What the device has for a process."""
    sharing = processes_on(device, place)
    return f"{readable_bytes(there)} for each of {sharing} processes" if sharing > 1 else readable_bytes(there)


def processes_on(device: torch.device, place: Launched) -> int:
    """How many processes compute on one device: all of a node on its processors, or as many as share a GPU."""
    here = place.local_size or place.size
    return math.ceil(here / max(1, torch.cuda.device_count())) if device.type == "cuda" else here


def memory_of_each(device: torch.device, place: Launched) -> int | None:
    """Bytes that each process has of the device, None where the system does not say."""
    there = device_memory(device)
    return None if there is None else there // processes_on(device, place)


def _require_positions(config: Config, loaded: Loaded) -> None:
    # With a model this has been imported already; `tfive doctor`, which reckons on paper, need not wait for it.
    from tfive.inference.thought_model import plan_for

    limit = getattr(loaded.model.config, "max_position_embeddings", None)
    if not isinstance(limit, int):
        return
    length = config.text.sequence_length
    reach = plan_for(config.thought, loaded.model, loaded.tokenizer).reach if config.spec.thinks else 0
    if length + reach > limit:
        most = limit - reach
        remedy = f"use text.sequence_length = {most} or less" if most >= 2 else "use a shorter thought.length"
        raise UserError(
            f"text.sequence_length = {length}: with a thought of up to {reach} more {length + reach} positions are "
            f"needed, {loaded.name} has {limit}; {remedy}"
        )


def _shape(loaded: Loaded) -> ModelShape | None:
    """The model's shape; None where its configuration does not say its sizes in the usual words."""
    try:
        return shape_from(loaded.model.config.to_dict(), loaded.name)
    except UserError:
        return None


def device_memory(device: torch.device) -> int | None:
    """Bytes the device has, None where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


@contextmanager
def out_of_memory_explained(
    phase: str, config: Config, tried: Callable[[], Mapping[str, int]] | None = None
) -> Iterator[None]:
    """Turns a failed allocation into a `RunFailed` that names the phase and what to lower; the run can be resumed.
    `tried`: texts a pass that did not fit either, by key of `run`, where fewer were tried than the configuration
    has."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        asked = _first_sentences(str(error)) or type(error).__name__
        if tried is not None:
            run = config.run.model_copy(update=dict(tried()))
            config = config.model_copy(update={"run": run})
        raise RunFailed(f"out of memory in phase {phase} ({asked}); {lower_and_resume(phase, config)}") from error


def _first_sentences(text: str, most: int = 160) -> str:
    """As many whole sentences of a message as go into `most` characters, without the last full stop; of a first one
    that is longer, whole words."""
    words = " ".join(text.split())
    if len(words) <= most:
        return words
    # A full stop inside a number has no space behind it.
    end = words.rfind(". ", 0, most + 1)
    return words[:end] if end > 0 else words[: max(words.rfind(" ", 0, most), 0) or most] + " …"

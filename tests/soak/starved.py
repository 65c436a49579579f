"""Places at which a run finds no memory: a device's allocator is made to fail there, when the run has got so far."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

from tfive.methods.method import Method
from tfive.rl import rollout as rollout_module
from tfive.rl.sampling import Wanted
from tfive.training import checkpoint as checkpoint_module
from tfive.training import start as start_module
from tfive.training.loop import Loop
from tfive.tree.forward import TreeModel

WINDOW = 2
"""Phases are starved in this window, when there is a checkpoint to go on from."""


@contextmanager
def no_memory(device: str) -> Iterator[None]:
    """Work inside finds no memory on the device that is not its own already, nor in what it gives back; a CPU raises
    at once in its place."""
    if device == "cpu":
        raise torch.OutOfMemoryError("a device would be out of memory here")
    held, give_back = list[Any](), torch.cuda.empty_cache
    torch.cuda.synchronize()
    give_back()
    whole = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    torch.cuda.set_per_process_memory_fraction(max(torch.cuda.memory_reserved(), 1) / whole)

    def take() -> None:
        size = 1 << 30
        while size >= 512:
            try:
                held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
            except torch.OutOfMemoryError:
                size //= 2

    def take_again() -> None:
        give_back()
        take()

    take()
    try:
        with patch.object(torch.cuda, "empty_cache", take_again):
            yield
    finally:
        held.clear()
        torch.cuda.set_per_process_memory_fraction(1.0)


@dataclass(frozen=True)
class Place:
    """Where memory ends, and what the line must say then."""

    name: str
    says: str
    owner: Any
    function: str
    when: Callable[..., bool] = lambda *arguments, **options: True
    """Of the function's arguments: whether this is the call that finds no memory."""
    may_pass: bool = False
    """Whether a device may not be asked for anything there."""
    resumed: bool = False
    """Whether it is a place of a run that goes on."""
    lasting: bool = False
    """Whether every such call finds none: what is made again with fewer texts a pass would fit otherwise."""
    error: Callable[[], BaseException] | None = None
    """What is raised instead of making the device's allocator fail: the host's memory ends."""

    def starve(self, device: str) -> None:
        """Make the function find no memory, the first time it is `when` or, `lasting`, from then on; for a
        process that does nothing else."""
        function, waiting = getattr(self.owner, self.function), [True]

        def called(*arguments: Any, **options: Any) -> Any:
            if not waiting or not self.when(*arguments, **options):
                return function(*arguments, **options)
            if not self.lasting:
                waiting.clear()
            if self.error is not None:
                raise self.error()
            with no_memory(device):
                return function(*arguments, **options)

        setattr(self.owner, self.function, called)


def _phase(name: str) -> Place:
    def reached(method: Any) -> bool:
        return bool(method.phase == name and method.window == WINDOW)

    return Place(name, f"out of memory in phase {name} (", Method, "advance", when=reached)


def _sampling(engine: TreeModel, sets: Sequence[Wanted], *arguments: Any, **options: Any) -> bool:
    """Whether the actor's set is among those drawn together."""
    return any((one.window, one.role) == (WINDOW, "actor") for one in sets)


def _scoring() -> Callable[..., bool]:
    """Scoring has no window among its arguments: the calls are counted; the first ones measure the base model."""
    calls = iter(range(10**9))
    return lambda *arguments, **options: next(calls) >= 10


def _host_is_full() -> BaseException:
    return RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried to")


PLACES = {
    place.name: place
    for place in (
        *map(_phase, ("fit", "qualify", "pilot", "calibrate", "collect", "update", "close")),
        Place("sample", "out of memory in phase ", rollout_module, "sample_sets", when=_sampling, lasting=True),
        Place("score", "out of memory in phase ", TreeModel, "score", when=_scoring(), lasting=True),
        Place("first measurement", "out of memory in phase develop (", Loop, "_measured"),
        Place("measurement", "out of memory in phase develop (", Loop, "_measured",
              when=lambda loop, texts, window: window == WINDOW and texts.role == "develop"),
        Place("test", "out of memory in phase test (", Loop, "_measured",
              when=lambda loop, texts, window: texts.role == "test"),
        Place("save", "out of memory in phase save (", Loop, "_state", may_pass=True,
              when=lambda loop: loop.assembly.method.window == WINDOW),
        Place("save on the host", "not enough host memory for a copy of the state", checkpoint_module, "_host_copy",
              error=_host_is_full),
        Place("build", "out of memory in phase build (", start_module, "build"),
        Place("restore", "out of memory in phase restore (", Method, "load_state_dict", resumed=True, may_pass=True),
    )
}  # fmt: skip
"""By name."""

"""Several chains of small kernels on one device at once, each on a stream of its own.

A step of a small head is some 80 kernels that leave most of a GPU idle. A `Task` is a chain of such steps that tells
where its host would wait for the device, by a `yield`; `together` launches other tasks meanwhile. Each has its own
stream, its own memory for captured steps and its own random numbers, so it comes to what it comes to alone.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

from tfive.tree.fast.cuda_graph import CudaGraphs

Found = TypeVar("Found")
Given = ParamSpec("Given")
Task = Generator[None, None, Found]
"""Work that yields where its host is about to wait for the device, and returns what it found."""


def alone(task: Task[Found]) -> Found:
    """What the task finds, waiting wherever it must."""
    while True:
        try:
            next(task)
        except StopIteration as end:
            found: Found = end.value
            return found


def by_itself(make: Callable[Given, Task[Found]]) -> Callable[Given, Found]:
    """The function that makes a task, as one that does it `alone`."""

    @wraps(make)
    def found(*given: Given.args, **named: Given.kwargs) -> Found:
        return alone(make(*given, **named))

    return found


def together(
    recorder: CudaGraphs | None, tasks: Sequence[Callable[[CudaGraphs | None], Task[Found]]], beside: bool = True
) -> Task[list[Found]]:
    """What all tasks find, each made with the recorder it captures steps with; side by side where there is one
    that has met no trouble, else (or with `beside` off, since all that runs needs memory at once) one after the other.
    All that was asked of the device before is done before they begin, and they have ended before what is asked later
    begins."""
    if recorder is None or recorder.trouble or not beside or len(tasks) < 2:
        found = list[Found]()
        for make in tasks:
            found.append((yield from make(recorder)))
        return found
    lanes, done = recorder.branches(len(tasks)), dict[int, Found]()
    # Tasks seed the processor's generator too, and each restores what it met, which may be another's.
    with torch.random.fork_rng(devices=[]), ExitStack() as ends:
        running = {number: make(lane) for number, (lane, make) in enumerate(zip(lanes, tasks, strict=True))}
        for lane, task in zip(lanes, running.values(), strict=True):
            lane.begin()
            ends.callback(_end, task, lane, recorder)
        while running:
            for number, task in list(running.items()):
                with lanes[number].at_work():
                    try:
                        next(task)
                    except StopIteration as end:
                        done[number] = end.value
                        del running[number]
            if running:
                yield
    return [done[number] for number in range(len(tasks))]


def _end(task: Task[Found], lane: CudaGraphs, recorder: CudaGraphs) -> None:
    """Let what is asked next wait for the lane. A task that an error has left in the middle is closed among its own
    random numbers."""
    try:
        with lane.at_work():
            task.close()
    finally:
        lane.end()
        recorder.trouble = recorder.trouble or lane.trouble

"""Where a run computes, how precisely, and with how many threads.

The precision policy in one place: weights of the compute copy are in `compute`, and there is no autocast anywhere. What
must be float32 (value heads, gates, log-softmax, master weights, moments, teachers) is float32 by construction.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np
import torch

from tfive.errors import RunFailed, UserError
from tfive.models.precision import choose_device, choose_dtype

_NOT_DETERMINISTIC = re.compile(r"(\S+) does not have a deterministic implementation")
"""What torch says when deterministic kernels are required and there is none."""


def refuse_several_processes() -> None:
    """For work that is not split: each of several processes would do all of it, so a distributed launch is refused."""
    for name, alone in (("WORLD_SIZE", "1"), ("RANK", "0")):
        value = os.environ.get(name, alone)
        if value != alone:
            raise UserError(
                f"environment {name} = {value}: this command works in one process; start it without torchrun, or "
                f"unset {name}"
            )


@dataclass(frozen=True)
class Placement:
    """A choice of device, precision, threads and determinism; it takes effect with `apply`."""

    device: torch.device
    compute: torch.dtype
    threads: int
    deterministic: bool

    def apply(self, seed: int) -> None:
        """Make the choice effective for this process.

        Every random number of tfive is counter-based; the global seeds are for libraries that draw their own.
        """
        torch.set_num_threads(self.threads)
        torch.set_float32_matmul_precision("highest")
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cudnn.benchmark = False
        if self.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(self.deterministic)
        switches: Any = torch.utils.deterministic
        switches.fill_uninitialized_memory = False
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)

    def no_autocast(self) -> torch.autocast:
        """A context in which a caller's autocast has no effect."""
        return torch.autocast(self.device.type, enabled=False)

    def describe(self) -> dict[str, Any]:
        """What a run records about where it ran; equal numbers need equal entries."""
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"
        return {
            "device": str(self.device),
            "device_name": name,
            "compute": str(self.compute).removeprefix("torch."),
            "threads": self.threads,
            "deterministic": self.deterministic,
            "torch": torch.__version__,
            "transformers": version("transformers"),
        }


def place(
    device: str = "auto",
    compute: str = "auto",
    deterministic: bool = False,
    *,
    process: int | None = None,
    threads: int | None = None,
) -> Placement:
    """The placement of `model.device`, `model.compute` and `run.deterministic`, with all cores this process may use or
    as many `threads`.

    Deterministic kernels are always on for the CPU, where they cost nothing; on GPUs they are slower and asked for.
    `process` is this one's number among several on this machine, each of which has the GPU of its number; None is for
    work that one process does alone, and refuses a launch of several.
    """
    if process is None:
        refuse_several_processes()
    chosen = choose_device(device)
    if process is not None and chosen.type == "cuda" and device in ("auto", "cuda"):
        chosen = choose_device(f"cuda:{process % torch.cuda.device_count()}")
    cores = usable_cores()
    used = cores if threads is None else min(threads, cores)
    return Placement(chosen, choose_dtype(compute, chosen), used, deterministic or chosen.type == "cpu")


@contextmanager
def kernels_named() -> Iterator[None]:
    """A kernel without a deterministic implementation ends the run with a line that names it."""
    try:
        yield
    except RuntimeError as error:
        found = _NOT_DETERMINISTIC.search(str(error))
        if found is None:
            raise
        raise RunFailed(
            f"run.deterministic: the kernel {found[1]} has no deterministic implementation on this device; set "
            "run.deterministic=false, or engine.fast=off to do without fast paths"
        ) from error


def usable_cores() -> int:
    """Cores this process may run on, no more than OMP_NUM_THREADS allows."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = os.environ.get("OMP_NUM_THREADS", "")
    return min(cores, int(limit)) if limit.isdigit() and int(limit) > 0 else cores

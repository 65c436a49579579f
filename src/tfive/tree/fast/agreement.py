"""Whether Triton's kernels may be used on a device: they are compared with what they replace, and the reason is kept
where they are not."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch

from tfive.errors import out_of_memory

KERNEL_BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 0.02}
"""Largest relative error (by norm) of a sound kernel, by type."""


def kernel_trouble(
    differences: Callable[[], dict[str, float]],
    features: Collection[int],
    device: torch.device,
    dtype: torch.dtype,
    *,
    most: int = 256,
    types: Collection[torch.dtype] = tuple(KERNEL_BOUNDS),
    bound: Callable[[str, torch.dtype], float] = lambda _, dtype: KERNEL_BOUNDS[dtype],
) -> str | None:
    """Why kernels are not used for heads of so many `features`, or None: `differences`, by name, are within bounds.

    They are for CUDA and some `types`, and take powers of two from 16 to `most`.
    """
    if device.type != "cuda":
        return f"there are no kernels for {device.type}"
    if dtype not in types:
        return f"there are no kernels for {dtype}"
    unfit = [n for n in features if n & (n - 1) or not 16 <= n <= most]
    if unfit:
        return f"heads have {unfit[0]} features; the kernels take a power of two from 16 to {most}"
    try:
        apart = differences()
    except ImportError as error:
        return f"Triton cannot be imported: {error}"
    except Exception as error:  # a compiler fails in many ways; the reason is returned, not lost
        if out_of_memory(error):
            raise  # the run is short of memory; the kernels are not at fault
        return f"they fail on {device}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    wrong = [f"their {name} are off by {off:.2g}" for name, off in apart.items() if not off <= bound(name, dtype)]
    return f"{', '.join(wrong)} on {device}" if wrong else None

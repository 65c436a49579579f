"""Whether Triton's sampling step may run recurrent layers on a device: it is compared with `delta_step.torch_step`."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from tfive.tree.fast.agreement import kernel_trouble
from tfive.tree.fast.delta_step import LayerMemory, RecurrentHeads, StepKernel, StepWeights, torch_step


def step_differences(
    kernel: StepKernel,
    heads: RecurrentHeads,
    device: torch.device,
    dtype: torch.dtype,
    steps: int = 19,
    once: bool = False,
) -> dict[str, float]:
    """How far `kernel` is from `torch_step` in float32 after each of some steps, at most: |a − b| / |b|. `once` is how
    it rounds."""
    generator, branches = torch.Generator().manual_seed(0), 6

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    values = heads.values * heads.value_features
    state = 0.3 * random(branches // 2, heads.values, heads.key_features, heads.value_features)
    tail = random(branches, heads.memory, heads.channels)
    fixed = (random(heads.channels, heads.memory + 1), random(heads.values).float(), random(heads.values).float())
    norm = 1 + 0.1 * random(heads.value_features)
    given = [[random(branches, n) for n in (heads.channels, values, heads.values, heads.values)] for _ in range(steps)]
    found: list[dict[str, Tensor]] = []
    for some, kind in ((torch_step, torch.float32), (kernel, dtype)):
        weights = StepWeights(heads, fixed[0].to(kind), fixed[1], fixed[2], norm.to(kind), 1e-6, once)
        held = LayerMemory.empty(branches // 2, branches, steps, heads, state.to(kind), once)
        held.state_XIEF.copy_(state)
        held.past_QLU[:, : heads.memory].copy_(tail)
        outputs = []
        for place, each in enumerate(given):
            mixed, gate, strength, rate = (x.to(kind) for x in each)
            at = torch.tensor([place], device=device)
            outputs.append(some((mixed, gate, strength, rate), weights, held, at))
        found.append({"outputs": torch.stack(outputs), "writes": held.write_QIZF, "inputs": held.past_QLU})
    return {
        name: float((found[1][name].double() - want.double()).norm() / want.double().norm())
        for name, want in found[0].items()
    }


def all_differences(
    kernel: StepKernel, heads: RecurrentHeads, device: torch.device, dtype: torch.dtype, once: bool
) -> dict[str, float]:
    """The same of both forms of the kernel: for windows longer than it reads at once, and for short ones."""
    short = step_differences(kernel, heads, device, dtype, 12, once)
    return step_differences(kernel, heads, device, dtype, once=once) | {
        f"{name}, short": x for name, x in short.items()
    }


@cache
def step_trouble(heads: RecurrentHeads, device: torch.device, dtype: torch.dtype, once: bool = False) -> str | None:
    """Why Triton's step is not used for such layers on this device, or None: it agrees. `once` is how it rounds."""

    def compared() -> dict[str, float]:
        from tfive.tree.fast import delta_step_triton

        return all_differences(delta_step_triton.step, heads, device, dtype, once)

    return kernel_trouble(compared, (heads.key_features, heads.value_features), device, dtype)


def choose_step(
    heads: RecurrentHeads, device: torch.device, dtype: torch.dtype, once: bool = False
) -> tuple[StepKernel | None, str]:
    """Triton's step where it agrees with PyTorch on this device, else None, and why."""
    trouble = step_trouble(heads, device, dtype, once)
    if trouble is not None:
        return None, trouble
    from tfive.tree.fast import delta_step_triton

    return delta_step_triton.step, "Triton's kernel agrees with PyTorch on this device"

"""Kernels are used where they are meant for and agree; otherwise the reason is one line."""

from __future__ import annotations

import torch

from tfive.tree.fast.agreement import KERNEL_BOUNDS, kernel_trouble

CUDA = torch.device("cuda")


def test_the_reason_is_told() -> None:
    calls = []

    def apart() -> dict[str, float]:
        calls.append(1)
        return {"outputs": 0.01, "gradients": float("nan")}

    def failing() -> dict[str, float]:
        raise RuntimeError("no such instruction\nand more")

    half = torch.bfloat16
    assert kernel_trouble(apart, (64,), torch.device("cpu"), half) == "there are no kernels for cpu"
    assert kernel_trouble(apart, (64,), CUDA, torch.float16) == "there are no kernels for torch.float16"
    assert "48 features; the kernels take a power of two from 16 to 128" in str(
        kernel_trouble(apart, (64, 48), CUDA, half, most=128)
    )
    assert not calls
    assert kernel_trouble(apart, (64,), CUDA, half) == "their gradients are off by nan on cuda"
    assert kernel_trouble(failing, (64,), CUDA, half) == "they fail on cuda: RuntimeError: no such instruction"
    assert kernel_trouble(lambda: {"outputs": 0.01}, (64,), CUDA, half) is None
    assert "outputs are off" in str(kernel_trouble(lambda: {"outputs": 0.01}, (64,), CUDA, torch.float32))
    strict = kernel_trouble(lambda: {"drawn": 0.01}, (64,), CUDA, half, bound=lambda name, _: 1e-6)
    assert strict == "their drawn are off by 0.01 on cuda"
    assert set(KERNEL_BOUNDS) == {torch.float32, torch.bfloat16}

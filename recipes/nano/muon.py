"""Muon for the matrices, AdamW for the rest.

The learning rate is a tensor on the device, so that no step waits for the host. Muon (Jordan et al., 2024) replaces a
matrix's momentum by the nearest orthogonal matrix, found with five Newton–Schulz iterations; the factor 0.2·√(longer
side) (Liu et al., 2025, "Muon is scalable for LLM training") gives updates AdamW's size. Matrices of one shape are
stacked and treated at once, since one of them is far too small for a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5


def orthogonal(stack: Tensor) -> Tensor:
    """Each matrix of the stack [N, rows, columns] with its singular values pushed towards 1."""
    a, b, c = COEFFICIENTS
    tall = stack.shape[1] > stack.shape[2]
    x = stack.mT if tall else stack
    x = (x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)).to(torch.bfloat16)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(stack.dtype)


class MuonWithAdamW:
    """Both optimisers over a model's parameters; `lr` is read anew at every step."""

    def __init__(self, model: nn.Module, lr: Tensor, decay: float = 0.1, momentum: float = 0.95) -> None:
        matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name]
        others = [p for name, p in model.named_parameters() if p.dim() != 2 or "embed" in name]
        on_gpu = lr.is_cuda
        self.lr, self.decay, self.momentum = lr, decay, momentum
        self.adamw = torch.optim.AdamW(
            others, lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=on_gpu, capturable=on_gpu
        )
        shapes = sorted({tuple(p.shape) for p in matrices})
        self.stacks: list[list[Tensor]] = [[p for p in matrices if tuple(p.shape) == shape] for shape in shapes]
        self.averages = [torch.zeros(len(stack), *stack[0].shape, device=lr.device) for stack in self.stacks]

    def zero_grad(self) -> None:
        self.adamw.zero_grad(set_to_none=True)
        for p in (p for stack in self.stacks for p in stack):
            p.grad = None

    @torch.no_grad()
    def step(self) -> None:
        self.adamw.step()
        for stack, average in zip(self.stacks, self.averages, strict=True):
            gradient = torch.stack([p.grad for p in stack if p.grad is not None])
            average.lerp_(gradient, 1 - self.momentum)
            update = orthogonal(torch.lerp(gradient, average, self.momentum))
            scale = 0.2 * max(average.shape[1:]) ** 0.5
            torch._foreach_mul_(stack, 1 - self.lr * self.decay)
            torch._foreach_sub_(stack, list((update * (self.lr * scale)).unbind()))

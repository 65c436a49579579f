"""The Triton kernel behind a product that was computed in parts: it adds them to the residual stream and norms what
comes of it, which the next product reads.

Local shape letters: s parts, x rows.
"""

# mypy: allow-untyped-defs
# (kernel parameters are pointers and compile-time constants, for which there are no Python types)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tfive.tree.fast.training_kernels import warps


@triton.jit
def _join(
    part_ptr, residual_ptr, weight_ptr, out_ptr, size, width, epsilon,
    S: tl.constexpr, D: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    row, d = tl.program_id(0).to(tl.int64), tl.arange(0, D)
    keep, at = d < width, row * width + d
    total = tl.load(residual_ptr + at, mask=keep, other=0.0).to(tl.float32)
    for s in tl.static_range(S):
        total += tl.load(part_ptr + s * size + at, mask=keep, other=0.0)
    stream = total.to(residual_ptr.dtype.element_ty)
    tl.store(residual_ptr + at, stream, mask=keep)
    if NORM:
        x = stream.to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, 0) / width + epsilon)
        weight = tl.load(weight_ptr + d, mask=keep, other=0.0).to(tl.float32)
        tl.store(out_ptr + at, x * scale * weight, mask=keep)


def join(part_sxD: Tensor, residual_xD: Tensor, norm: tuple[Tensor, float] | None) -> Tensor | None:
    """See `fused.TorchOps.join`; parts are float32, and all rows contiguous."""
    parts, rows, width = part_sxD.shape
    weight_D, epsilon = norm or (residual_xD, 0.0)
    out_xD = None if norm is None else torch.empty_like(residual_xD)
    _join[(rows,)](
        part_sxD, residual_xD, weight_D, residual_xD if out_xD is None else out_xD, rows * width, width, epsilon,
        S=parts, D=triton.next_power_of_2(width), NORM=norm is not None, num_warps=warps(width),
    )  # fmt: skip
    return out_xD

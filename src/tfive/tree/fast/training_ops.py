"""What trained blocks and the vocabulary head compute between their matrix products, forward and backward.

`TorchTraining` says in plain PyTorch what each operation and its backward pass mean and serves where there are no
kernels (tests, CPUs); `TritonTraining` is the same by `training_kernels.py`. Before the kernels are used on a device
they are compared with the former, at the model's own shape and precision, and the reason is kept when they are not.

Local shape letters: Y query heads, X key/value heads, E head features, n nodes of a row, x = B·n, q and k widths of the
query's and key's projections, t rotated features, I features inside a feed-forward layer, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tfive.tree.fast.agreement import kernel_trouble
from tfive.tree.fast.fused import Angles, Heads, Norms, Ops, TorchOps, TritonOps

Three = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class BlockShape:
    """The sizes the kernels of a trained block depend on."""

    heads: Heads
    width: int
    """D: features of the residual stream."""
    inner: int
    """I."""


class TrainingOps(Protocol):
    """The operations of a trained block; see `TorchTraining`."""

    def norm(
        self, hidden_xD: Tensor, weight_D: Tensor, epsilon: float, room_xD: Tensor | None = None
    ) -> tuple[Tensor, Tensor]: ...

    def norm_back(
        self, slope_xD: Tensor, through_xD: Tensor | None, hidden_xD: Tensor, weight_D: Tensor, scale_x: Tensor
    ) -> tuple[Tensor, Tensor]: ...

    def rotate(self, products: Three, norms: Norms | None, angles: Angles, heads: Heads, rows: int) -> Three: ...

    def rotate_back(
        self, slopes: Three, products: tuple[Tensor, Tensor], norms: Norms | None, angles: Angles, gated: bool
    ) -> tuple[Three, tuple[Tensor, Tensor] | None]: ...

    def gate(self, gate_xI: Tensor, up_xI: Tensor) -> Tensor: ...

    def gate_back(self, slope_xI: Tensor, gate_xI: Tensor, up_xI: Tensor) -> tuple[Tensor, Tensor]: ...

    def log_prob(
        self, logits_xV: Tensor, target_x: Tensor, forbidden_V: Tensor | None, fill: float
    ) -> tuple[Tensor, Tensor]: ...

    def log_prob_slope(
        self, logits_xV: Tensor, target_x: Tensor, normaliser_x: Tensor, forbidden_V: Tensor | None, out_xV: Tensor
    ) -> None: ...


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _norm_back(slope: Tensor, unit: Tensor, scale: Tensor, weight: Tensor) -> Tensor:
    """Gradient of what was normed, over the last dimension, from wide factors."""
    steep = slope * weight
    return (steep - unit * (steep * unit).mean(-1, keepdim=True)) * scale


def _turned_back(slope_xHE: Tensor, angles: Angles) -> Tensor:
    """Backward of the rotary embedding: each pair is rotated the other way."""
    cos, sin, turned = angles[0][:, None], angles[1][:, None], angles[0].shape[-1]
    part, rest = slope_xHE[..., :turned], slope_xHE[..., turned:]
    low, high = (part * sin).chunk(2, -1)
    return torch.cat([part * cos + torch.cat([high, -low], -1), rest], -1)


class TorchTraining:
    """The meaning of every operation: computed in float32 at least and rounded at its end."""

    def norm(
        self, hidden_xD: Tensor, weight_D: Tensor, epsilon: float, room_xD: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Root-mean-square norm of each row times the weight, and what each row was multiplied with, `[x]`; the rows
        themselves are copied to `room_xD`."""
        if room_xD is not None:
            room_xD.copy_(hidden_xD)
        wide_xD = _wide(hidden_xD)
        scale_x = (wide_xD.square().mean(-1) + epsilon).rsqrt()
        return (wide_xD * scale_x[:, None] * _wide(weight_D)).to(hidden_xD.dtype), scale_x

    def norm_back(
        self, slope_xD: Tensor, through_xD: Tensor | None, hidden_xD: Tensor, weight_D: Tensor, scale_x: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Gradients of the rows, that of the residual stream (`through_xD`) added, and of the weight (float32, or
        rounded to the weight's type)."""
        slope, unit = _wide(slope_xD), _wide(hidden_xD) * scale_x[:, None]
        back_xD = _norm_back(slope, unit, scale_x[:, None], _wide(weight_D))
        if through_xD is not None:
            back_xD = back_xD + through_xD
        return back_xD.to(hidden_xD.dtype), (slope * unit).sum(0)

    def rotate(self, products: Three, norms: Norms | None, angles: Angles, heads: Heads, rows: int) -> Three:
        """Queries `[B, Y, n, E]` and keys `[B, X, n, E]`, normed and rotated, and values, from the products of query
        `[x, q]`, key and value `[x, k]` of B = `rows` rows."""
        return _rotated(TorchOps(), products, norms, angles, heads, rows)

    def rotate_back(
        self, slopes: Three, products: tuple[Tensor, Tensor], norms: Norms | None, angles: Angles, gated: bool
    ) -> tuple[Three, tuple[Tensor, Tensor] | None]:
        """Gradients of the three products (0 for output gates), and of the norms' weights (as in `norm_back`)."""
        features, found, sums = slopes[0].shape[-1], [], []
        turning = (_wide(angles[0]), _wide(angles[1]))
        for index, (slope, product) in enumerate(zip(slopes, products)):
            split = 2 if gated and index == 0 else 1
            back = _turned_back(_wide(slope.transpose(1, 2).flatten(0, 1)), turning)
            if norms is not None:
                own = _wide(product).unflatten(-1, (-1, split, features))[:, :, 0]
                scale = (own.square().mean(-1, keepdim=True) + norms[2]).rsqrt()
                sums.append((back * own * scale).sum((0, 1)))
                back = _norm_back(back, own * scale, scale, _wide(norms[:2][index]))
            if split == 2:
                back = torch.cat([back, torch.zeros_like(back)], -1)
            found.append(back.flatten(1).to(product.dtype))
        value = slopes[2].transpose(1, 2).flatten(0, 1).flatten(1)
        return (found[0], found[1], value), (sums[0], sums[1]) if sums else None

    def gate(self, gate_xI: Tensor, up_xI: Tensor) -> Tensor:
        """SiLU of the gate times the rest."""
        return (F.silu(_wide(gate_xI)) * _wide(up_xI)).to(gate_xI.dtype)

    def gate_back(self, slope_xI: Tensor, gate_xI: Tensor, up_xI: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of gate and rest."""
        slope, gate, up = _wide(slope_xI), _wide(gate_xI), _wide(up_xI)
        share = gate.sigmoid()
        of_gate = slope * up * share * (1 + gate * (1 - share))
        return of_gate.to(gate_xI.dtype), (slope * gate * share).to(up_xI.dtype)

    def log_prob(
        self, logits_xV: Tensor, target_x: Tensor, forbidden_V: Tensor | None, fill: float
    ) -> tuple[Tensor, Tensor]:
        """Log-probability of each target, and the log-normaliser; forbidden entries have the logit `fill`."""
        if forbidden_V is not None:
            logits_xV = logits_xV.masked_fill(forbidden_V, fill)
        normaliser_x = logits_xV.logsumexp(-1)
        return logits_xV.gather(-1, target_x[:, None])[:, 0] - normaliser_x, normaliser_x

    def log_prob_slope(
        self, logits_xV: Tensor, target_x: Tensor, normaliser_x: Tensor, forbidden_V: Tensor | None, out_xV: Tensor
    ) -> None:
        """Derivative of each row's log-probability by its logits into `out_xV`; 0 for forbidden entries."""
        slope_xV = -(logits_xV - normaliser_x[:, None]).exp()
        slope_xV.scatter_add_(1, target_x[:, None], torch.ones_like(normaliser_x)[:, None])
        if forbidden_V is not None:
            slope_xV = slope_xV.masked_fill(forbidden_V, 0)
        out_xV.copy_(slope_xV)


def _rotated(ops: Ops, products: Three, norms: Norms | None, angles: Angles, heads: Heads, rows: int) -> Three:
    """`TorchTraining.rotate` by the operation of fused blocks, into tensors that hold head after head."""
    nodes, like = len(products[0]) // rows, products[0]
    query = like.new_empty(rows, heads.queries, nodes, heads.features)
    key, value = (like.new_empty(rows, heads.keys, nodes, heads.features) for _ in range(2))
    slot_n = torch.arange(nodes, device=like.device)
    ops.rotate(products, None, norms, angles, heads.gated, slot_n, query.transpose(1, 2), key, value)
    return query, key, value


class TritonTraining:
    """The same by Triton; ImportError where it is not installed."""

    def __init__(self) -> None:
        from tfive.tree.fast import training_kernels

        self._ops = TritonOps()
        self.norm = training_kernels.norm
        self.norm_back = training_kernels.norm_back
        self.rotate_back = training_kernels.rotate_back
        self.gate_back = training_kernels.gate_back
        self.log_prob = training_kernels.log_prob
        self.log_prob_slope = training_kernels.log_prob_slope

    def rotate(self, products: Three, norms: Norms | None, angles: Angles, heads: Heads, rows: int) -> Three:
        """See `TorchTraining.rotate`."""
        return _rotated(self._ops, products, norms, angles, heads, rows)

    def gate(self, gate_xI: Tensor, up_xI: Tensor) -> Tensor:
        """See `TorchTraining.gate`."""
        return self._ops.gate(gate_xI, up_xI, None)


def _results(ops: TrainingOps, shape: BlockShape, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """What the operations make of random inputs (the same for every type, rounded to bfloat16)."""
    # Sizes that compile to the kernels of real passes: multiples of 16, as those mostly are.
    generator, heads, rows, nodes = torch.Generator().manual_seed(0), shape.heads, 2, 48

    def random(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator).bfloat16().to(device, dtype)

    hidden, slope, through, weight = *(random(rows * nodes, shape.width) for _ in range(3)), 1 + random(shape.width)
    room = torch.full_like(hidden, torch.nan)
    normed, scale = ops.norm(hidden, weight, 1e-6, room)
    plain, _ = ops.norm(hidden, weight, 1e-6)
    back, weight_slope = ops.norm_back(slope, through, hidden, weight, scale)
    alone, _ = ops.norm_back(slope, None, hidden, weight, scale)
    found = {"norm": normed, "norm's gradient": back, "its weight's": weight_slope, "without a residual": alone}
    found |= {"norm's copy": room, "norm without a copy": plain}

    width = heads.keys * heads.features
    query, key, value = (
        random(rows * nodes, heads.queries * heads.features * (2 if heads.gated else 1)),
        *(random(rows * nodes, width) for _ in range(2)),
    )
    norms = (1 + random(heads.features), 1 + random(heads.features), 1e-6) if heads.normed else None
    angle = torch.rand(rows * nodes, heads.turned // 2, generator=generator).repeat(1, 2).to(device) * 6.3
    angles = (angle.cos().bfloat16().to(dtype), angle.sin().bfloat16().to(dtype))
    turned = ops.rotate((query, key, value), norms, angles, heads, rows)
    slopes = (random(*turned[0].shape), random(*turned[1].shape), random(*turned[2].shape))
    backs, sums = ops.rotate_back(slopes, (query, key), norms, angles, heads.gated)
    found |= dict(zip(("queries", "keys", "values"), turned))
    found |= dict(zip(("query's gradient", "key's gradient", "value's gradient"), backs))
    found |= {} if sums is None else dict(zip(("query norm's gradient", "key norm's gradient"), sums))

    gate, up, slope = (random(rows * nodes, shape.inner) for _ in range(3))
    of_gate, of_up = ops.gate_back(slope, gate, up)
    found |= {"gated product": ops.gate(gate, up), "gate's gradient": of_gate, "the rest's gradient": of_up}
    return found | _vocabulary_results(ops, generator, device, dtype)


def _vocabulary_results(
    ops: TrainingOps, generator: torch.Generator, device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    # Logits are float32 whatever the weights are; only their gradient has the weights' type.
    logits = 4 * torch.randn(5, 9008, generator=generator).to(device)
    target = torch.tensor([0, 4096, 9007, 17, 5000], device=device)
    forbidden = torch.zeros(9008, dtype=torch.bool, device=device)
    forbidden[[3, 17, 8999]] = True
    found: dict[str, Tensor] = {}
    for name, banned in (("", None), (" with forbidden entries", forbidden)):
        log_prob, normaliser = ops.log_prob(logits, target, banned, -1e9)
        slope = torch.empty_like(logits, dtype=dtype)
        ops.log_prob_slope(logits, target, normaliser, banned, slope)
        found |= {f"log-probability{name}": log_prob, f"its gradient{name}": slope}
    return found


def differences(ops: TrainingOps, shape: BlockShape, device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """How far `ops` is from `TorchTraining` in float32, result by result: |a − b| / |b|."""
    wanted, got = _results(TorchTraining(), shape, device, torch.float32), _results(ops, shape, device, dtype)
    return {
        name: float((got[name].double() - want.double()).norm() / want.double().norm()) for name, want in wanted.items()
    }


@cache
def training_trouble(shape: BlockShape, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why Triton's training kernels are not used for such blocks on this device, or None: they agree."""

    def compared() -> dict[str, float]:
        return differences(TritonTraining(), shape, device, dtype)

    return kernel_trouble(compared, (shape.heads.features,), device, dtype)


def choose_training(
    setting: str, shape: BlockShape, device: torch.device, dtype: torch.dtype
) -> tuple[TrainingOps | None, str]:
    """The operations for the option `fused_training`, or None, and why."""
    if setting == "off":
        return None, "switched off"
    trouble = training_trouble(shape, device, dtype)
    if trouble is None:
        return TritonTraining(), "Triton's kernels agree with PyTorch on this device"
    return (TorchTraining(), "asked for") if setting == "on" and device.type != "cuda" else (None, trouble)

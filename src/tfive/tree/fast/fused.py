"""What fused blocks compute between their matrix products, in plain PyTorch, and whether Triton's kernels may do it.

`TorchOps` says what each operation means and serves where there are no kernels (tests, CPUs); `TritonOps` is the same
by `triton_kernels.py`. Before the kernels are used on a device they are compared with the former at the model's own
head shape and precision, and the reason is kept when they are not used. Nothing here has gradients.

Local shape letters: Y query heads, X key/value heads, E head features, n nodes of a row, x = B·n, m slots, q and k
widths of the query's and key's projections, t rotated features, I features inside a feed-forward layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tfive.errors import UserError
from tfive.tree.fast.agreement import KERNEL_BOUNDS, kernel_trouble
from tfive.tree.fast.listed import Listed, Lists
from tfive.tree.fast.updates import Outward
from tfive.tree.law import draw

Angles = tuple[Tensor, Tensor]
"""Cosines and sines the heads of a node are rotated by, each `[x, t]`."""

Division = tuple[Tensor, float]
"""What is left of a norm that was folded into a product: divide the products of a row by the root mean square of these
contiguous rows `[x, D]`, with this epsilon."""

Norms = tuple[Tensor, Tensor, float]
"""Weights of the query's and of the key's norm over head features, and their epsilon."""


@dataclass(frozen=True)
class Heads:
    """The shape of an attention layer as the kernels see it."""

    queries: int
    keys: int
    features: int
    turned: int
    """How many features of a head are rotated."""
    normed: bool
    gated: bool
    """Whether the query's projection carries an output gate beside every head."""


class Ops(Protocol):
    """The operations of a fused block; see `TorchOps`."""

    def rotate(
        self,
        products: tuple[Tensor, ...],
        division: Division | None,
        norms: Norms | None,
        angles: Angles,
        gated: bool,
        slot_n: Tensor,
        query_BnYE: Tensor,
        key_BXmE: Tensor,
        value_BXmE: Tensor,
    ) -> None: ...

    def attend(
        self,
        query_BRYE: Tensor,
        key_BXmE: Tensor,
        value_BXmE: Tensor,
        first_BR: Tensor,
        stop_BR: Tensor,
        place: Tensor,
        trunk: int,
        scale: float,
        gate_xq: Tensor | None,
        listed: Listed | None = None,
    ) -> Tensor: ...

    def norm(self, hidden_xD: Tensor, weight_D: Tensor, epsilon: float) -> Tensor: ...

    def join(self, part_sxD: Tensor, residual_xD: Tensor, norm: tuple[Tensor, float] | None) -> Tensor | None: ...

    def gate(self, gate_xI: Tensor, up_xI: Tensor, division: Division | None) -> Tensor: ...

    def draw(self, logits_xV: Tensor, uniform_x: Tensor) -> tuple[Tensor, Tensor]: ...

    def fold(self, weight_oD: Tensor, factor_D: Tensor, out_oD: Tensor) -> None: ...


def _divided(product: Tensor, division: Division | None) -> Tensor:
    if division is None:
        return product
    rows_xD, epsilon = division
    wide = rows_xD.to(torch.promote_types(rows_xD.dtype, torch.float32))
    return (product * (wide.square().mean(-1, keepdim=True) + epsilon).rsqrt()).to(product.dtype)


def _turned(head_xHE: Tensor, angles: Angles) -> Tensor:
    """Rotary embedding of the first t features, pairs half of t apart."""
    cos, sin, turned = angles[0][:, None], angles[1][:, None], angles[0].shape[-1]
    part, rest = head_xHE[..., :turned], head_xHE[..., turned:]
    low, high = part.chunk(2, -1)
    return torch.cat([part * cos + torch.cat([-high, low], -1) * sin, rest], -1)


def output_gate(gate_xq: Tensor, heads: int) -> Tensor:
    """The factor `[x, Y, E]` of the attention's output that gated layers project beside each query."""
    return gate_xq.unflatten(-1, (heads, 2, -1))[:, :, 1].sigmoid()


class TorchOps:
    """The meaning of every operation."""

    def rotate(
        self,
        products: tuple[Tensor, ...],
        division: Division | None,
        norms: Norms | None,
        angles: Angles,
        gated: bool,
        slot_n: Tensor,
        query_BnYE: Tensor,
        key_BXmE: Tensor,
        value_BXmE: Tensor,
    ) -> None:
        """Norm and rotate queries into `query_BnYE`, keys into the slots `slot_n` of each row, and put values there.

        `products` are those of query `[x, q]`, key and value `[x, k]`.
        """
        heads, features = query_BnYE.shape[2:]
        query, key, value = (_divided(x, division) for x in products)
        query = query.unflatten(-1, (heads, -1))[..., :features]
        key, value = (x.unflatten(-1, (-1, features)) for x in (key, value))
        if norms is not None:
            query = F.rms_norm(query, (features,), norms[0], norms[2])
            key = F.rms_norm(key, (features,), norms[1], norms[2])
        query_BnYE.copy_(_turned(query, angles).view(query_BnYE.shape))
        for slots, new in ((key_BXmE, _turned(key, angles)), (value_BXmE, value)):
            slots.index_copy_(2, slot_n, new.unflatten(0, (len(slots), -1)).transpose(1, 2).to(slots.dtype))

    def attend(
        self,
        query_BRYE: Tensor,
        key_BXmE: Tensor,
        value_BXmE: Tensor,
        first_BR: Tensor,
        stop_BR: Tensor,
        place: Tensor,
        trunk: int,
        scale: float,
        gate_xq: Tensor | None,
        listed: Listed | None = None,
    ) -> Tensor:
        """Attention of one node per branch, `[B, R, Y, E]`, or of `listed` branches alone, whose queries and outputs
        are `[1, x, Y, E]`.

        Slots hold the trunk, of which a branch sees `first … stop − 1`, then every branch's own nodes, of which it sees
        those up to `place` (int64 `[1]`). A branch that sees nothing gets zeros.
        """
        heads, branches = query_BRYE.shape[2], first_BR.shape[1]
        slot_m = torch.arange(key_BXmE.shape[2], device=place.device)
        own = (len(slot_m) - trunk) // branches
        mine_m = slot_m - trunk
        seen_BRm = (slot_m >= first_BR[..., None]) & (slot_m < stop_BR[..., None])
        branch_R1 = torch.arange(branches, device=place.device)[:, None]
        seen_BRm = seen_BRm | ((mine_m >= 0) & (mine_m // own == branch_R1) & (mine_m % own <= place))
        if listed is not None:  # each as a row of its own
            text_x = listed.index_x // branches
            query_BRYE, seen_BRm = query_BRYE.transpose(0, 1), seen_BRm.flatten(0, 1)[listed.index_x][:, None]
            key_BXmE, value_BXmE = key_BXmE[text_x], value_BXmE[text_x]
        grouped = query_BRYE.unflatten(2, (key_BXmE.shape[1], -1))
        wide = torch.promote_types(query_BRYE.dtype, torch.float32)
        score = torch.einsum("brxfe,bxme->brxfm", grouped.to(wide), key_BXmE.to(wide)) * scale
        weight = score.masked_fill(~seen_BRm[:, :, None, None], float("-inf")).softmax(-1).nan_to_num(0.0)
        output = torch.einsum("brxfm,bxme->brxfe", weight, value_BXmE.to(wide)).flatten(2, 3)
        if gate_xq is not None:
            output = output * output_gate(gate_xq, heads).unflatten(0, output.shape[:2])
        output = output.to(query_BRYE.dtype)
        return output if listed is None else output.transpose(0, 1)

    def norm(self, hidden_xD: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
        """Root-mean-square norm of each row times the weight."""
        return F.rms_norm(hidden_xD, weight_D.shape, weight_D, epsilon)

    def join(self, part_sxD: Tensor, residual_xD: Tensor, norm: tuple[Tensor, float] | None) -> Tensor | None:
        """Add all parts of a product to the residual stream, in place, and give the stream's norm (weight and epsilon)
        where it is asked for."""
        residual_xD.copy_(residual_xD.to(part_sxD.dtype) + part_sxD.sum(0))
        return None if norm is None else self.norm(residual_xD, *norm)

    def gate(self, gate_xI: Tensor, up_xI: Tensor, division: Division | None) -> Tensor:
        """SiLU of the gate times the rest."""
        return F.silu(_divided(gate_xI, division)) * _divided(up_xI, division)

    def draw(self, logits_xV: Tensor, uniform_x: Tensor) -> tuple[Tensor, Tensor]:
        """`law.draw`."""
        return draw(logits_xV, uniform_x)

    def fold(self, weight_oD: Tensor, factor_D: Tensor, out_oD: Tensor) -> None:
        """A matrix times the weight of the norm before it, into `out_oD`."""
        torch.mul(weight_oD, factor_D, out=out_oD)


class TritonOps:
    """The same by Triton; ImportError where it is not installed."""

    def __init__(self) -> None:
        from tfive.tree.fast import join_kernel, training_kernels, triton_kernels

        self._normed = training_kernels.norm
        self.join = join_kernel.join
        self.rotate = triton_kernels.rotate
        self.attend = triton_kernels.attend
        self.gate = triton_kernels.gate
        self.draw = triton_kernels.draw
        self.fold = triton_kernels.fold

    def norm(self, hidden_xD: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
        """See `TorchOps.norm`; by the kernel that training has."""
        rows_xD = hidden_xD.reshape(-1, hidden_xD.shape[-1]).contiguous()
        return self._normed(rows_xD, weight_D, epsilon)[0].view(hidden_xD.shape)


def _case(heads: Heads, device: torch.device, dtype: torch.dtype, rows: int, branches: int) -> Iterator[Tensor]:
    """Random inputs for every operation at a head shape."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    nodes = rows * branches
    width = heads.queries * heads.features * (2 if heads.gated else 1)
    yield from (random(nodes, width), *(random(nodes, heads.keys * heads.features) for _ in range(2)))
    angle = torch.rand(nodes, heads.turned // 2, generator=generator).repeat(1, 2).to(device) * 6.3
    yield from torch.cat([angle.cos(), angle.sin()], -1).to(dtype).chunk(2, -1)  # side by side, as they are looked up
    yield from (1 + 0.1 * random(heads.features), 1 + 0.1 * random(heads.features))


def list_differences(ops: Ops, heads: Heads, device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """The same of attention that a list of branches asks for: branches longer than kernels read at a time, and a text
    of which none is listed."""
    rows, branches, trunk, own, place = 3, 11, 70, 140, 130
    generator = torch.Generator().manual_seed(6)
    shapes = [(rows, branches, heads.queries, heads.features), (rows * branches, 2 * heads.queries * heads.features)]
    shapes += [(heads.keys, rows, trunk + branches * own, heads.features)] * 2
    inputs = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    first = torch.randint(trunk, (rows, branches), generator=generator).to(device)
    seen = (first, torch.full_like(first, trunk), torch.tensor([place], device=device), trunk, heads.features**-0.5)
    writing = torch.rand(rows, branches, generator=generator) < torch.tensor([[0.8], [0.0], [0.4]])
    listed = Lists(rows, branches, device).fill(writing.to(device), 14)
    found = []
    for some, kind in ((TorchOps(), torch.float32), (ops, dtype)):
        query, gate, *slots = (x.to(kind) for x in inputs)
        key, value = (x.transpose(0, 1) for x in slots)
        asked = query.flatten(0, 1)[listed.index_x][None]
        found.append(some.attend(asked, key, value, *seen, gate[listed.index_x] if heads.gated else None, listed))
    want, got = (x.double() for x in found)
    return {"attention of listed branches": float((got - want).norm() / want.norm())}


def differences(ops: Ops, heads: Heads, device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """How far `ops` is from `TorchOps` in float32, operation by operation: |a − b| / |b|."""
    rows, branches, trunk, own, place = 2, 70, 150, 4, 2
    inputs = list(_case(heads, device, dtype, rows, branches))
    ends = torch.randint(trunk, (2, rows, branches), generator=torch.Generator().manual_seed(4)).to(device)
    # Now and then a branch sees nothing of the trunk.
    first, stop = ends[0], torch.where(ends[1] % 7 == 0, ends[0], ends.amax(0) + 1)
    slot = trunk + torch.arange(branches, device=device) * own + place
    shape = (rows, heads.keys, trunk + branches * own, heads.features)
    past = [torch.randn(shape, generator=torch.Generator().manual_seed(i)).to(device, dtype) for i in (1, 2)]
    rows_xD = 3 * torch.randn(rows * branches, 72, generator=torch.Generator().manual_seed(5)).to(device, dtype)
    logits = 3 * torch.randn(6, 1300, generator=torch.Generator().manual_seed(3)).to(device)
    logits[:, ::3] = -1e9
    uniform = torch.linspace(0.01, 0.99, 6, dtype=torch.float64, device=device)
    found: list[dict[str, Any]] = []
    for some, kind in ((TorchOps(), torch.float32), (ops, dtype)):
        query, key, value, cos, sin, *weights = (x.to(kind) for x in inputs)
        norms = (weights[0], weights[1], 1e-6) if heads.normed else None
        keys, values = (x.to(kind, copy=True) for x in past)
        asked = query.new_empty(rows, heads.queries, branches, heads.features).transpose(1, 2)
        division = None if heads.gated else (rows_xD.to(kind), 1e-5)
        some.rotate((query, key, value), division, norms, (cos, sin), heads.gated, slot, asked, keys, values)
        at = torch.tensor([place], device=device)
        gate = query if heads.gated else None
        seen = some.attend(asked.contiguous(), keys, values, first, stop, at, trunk, heads.features**-0.5, gate)
        # The logits stay float32 whatever the weights are: so is what the head gives.
        token, log_q = some.draw(logits, uniform)
        folded = torch.empty_like(key)
        some.fold(key, value[0], folded)
        normed = some.norm(key, value[0], 1e-6)
        outer = nn.Linear(key.shape[1], 40, bias=False, device="meta")  # draws no random numbers
        outer.weight = nn.Parameter(value[:40].contiguous(), requires_grad=False)
        parts, streams = Outward(outer).apart(key, 4), [rows_xD.to(kind)[:, :40].contiguous() for _ in range(2)]
        joined = some.join(parts, streams[0], (rows_xD[0, :40].to(kind), 1e-6))
        some.join(parts, streams[1], None)
        found.append(
            {
                "queries": asked,
                "keys": keys,
                "values": values,
                "attention": seen,
                "norm": normed,
                "norm of joined parts": joined,
                "joined parts": streams[0],
                "parts joined without a norm": streams[1],
                "gated product": some.gate(key, value, division),
                "folded matrix": folded,
                "drawn tokens": token,
                "their log-probabilities": log_q,
            }
        )
    return {
        name: float((found[1][name].double() - want.double()).norm() / want.double().norm())
        for name, want in found[0].items()
    }


@cache
def triton_trouble(heads: Heads, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why Triton's kernels are not used for such heads on this device, or None: they agree."""

    def bound(name: str, dtype: torch.dtype) -> float:
        # Drawn tokens are the same ones, and logits are float32 whatever the weights are.
        return 1e-6 if "drawn" in name else KERNEL_BOUNDS[torch.float32 if "log" in name else dtype]

    def compared() -> dict[str, float]:
        return differences(TritonOps(), heads, device, dtype)

    return kernel_trouble(compared, (heads.features,), device, dtype, bound=bound)


@cache
def list_trouble(heads: Heads, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why sampling steps of Triton's kernels compute all branches on this device, or None: those of a list agree."""

    def compared() -> dict[str, float]:
        return list_differences(TritonOps(), heads, device, dtype)

    return kernel_trouble(compared, (heads.features,), device, dtype)


def choose_ops(setting: str, heads: Heads, device: torch.device, dtype: torch.dtype) -> tuple[Ops | None, str]:
    """The operations for the option `fused_blocks`, or None, and why."""
    if setting == "off":
        return None, "switched off"
    trouble = triton_trouble(heads, device, dtype)
    if trouble is None:
        return TritonOps(), "Triton's kernels agree with PyTorch on this device"
    if setting == "on" and device.type == "cuda":
        raise UserError(f"engine.fast = on: of no use here: {trouble}; set it to auto or off")
    return (TorchOps(), "asked for") if setting == "on" else (None, trouble)

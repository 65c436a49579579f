"""What stands around the delta rule in a layer, by Triton's kernels and with gradients: queries, keys and values from
the convolution's inputs, both gates, and the gated norm of the outputs. `TorchMixer` says what each means.

Local shape letters as in `deltanet.py`; H key heads, V = I · F.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tfive.tree.fast.delta_step import RecurrentHeads
from tfive.tree.recurrent.delta_rule import unit_rows, wide_dtype

_NODES, _ROWS, _TIMES = 16, 16, 8
"""Nodes of a program before the rule, heads of a program after it, and how often it goes on in the backward pass."""


class Mixer(Protocol):
    """The operations; see `TorchMixer`."""

    def heads(
        self, sequence_QLU: Tensor, taps_UJ: Tensor, heads: RecurrentHeads, document_QL: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]: ...

    def gates(
        self, strength_BNI: Tensor, rate_BNI: Tensor, log_rate_I: Tensor, bias_I: Tensor, real_BN: Tensor | None
    ) -> tuple[Tensor, Tensor]: ...

    def gated_norm(self, output_BNIF: Tensor, gate_BNV: Tensor, weight_F: Tensor, epsilon: float) -> Tensor: ...


class TorchMixer:
    """The meaning of every operation."""

    def heads(
        self, sequence_QLU: Tensor, taps_UJ: Tensor, heads: RecurrentHeads, document_QL: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (scaled), keys `[Q, L, H, E]` and values `[Q, L, I, F]` of paths, from their inputs with the J before
        them in front; an input of another document counts as zero."""
        wide, reach = wide_dtype(sequence_QLU.dtype), heads.memory
        length = sequence_QLU.shape[1] - reach
        total = sequence_QLU.new_zeros((), dtype=wide)
        for j in range(reach + 1):
            x = sequence_QLU[:, j : j + length].to(wide)
            if document_QL is not None and j < reach:
                earlier = F.pad(document_QL, (reach - j, 0), value=-1)[:, :length]
                x = x * (earlier == document_QL)[..., None]
            total = total + x * taps_UJ[:, j].to(wide)
        keys = heads.keys * heads.key_features
        both, value = F.silu(total).split([2 * keys, total.shape[-1] - 2 * keys], -1)
        query, key = unit_rows(both.unflatten(-1, (-1, heads.key_features))).split(heads.keys, -2)
        value = value.unflatten(-1, (heads.values, -1))
        query, key, value = (x.to(sequence_QLU.dtype) for x in (query * heads.key_features**-0.5, key, value))
        return query, key, value

    def gates(
        self, strength_BNI: Tensor, rate_BNI: Tensor, log_rate_I: Tensor, bias_I: Tensor, real_BN: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Decays and write strengths in the rule's precision, zero at nodes that are not real."""
        wide = wide_dtype(rate_BNI.dtype)
        decay = -log_rate_I.to(wide).exp() * F.softplus(rate_BNI.to(wide) + bias_I)
        beta = strength_BNI.to(wide).sigmoid()
        if real_BN is not None:
            decay, beta = decay * real_BN[..., None], beta * real_BN[..., None]
        return decay, beta

    def gated_norm(self, output_BNIF: Tensor, gate_BNV: Tensor, weight_F: Tensor, epsilon: float) -> Tensor:
        """Outputs normed head by head, times the norm's weight and SiLU of the gate, `[B, N, V]`."""
        wide = wide_dtype(output_BNIF.dtype)
        normed = F.rms_norm(output_BNIF.to(wide), weight_F.shape, weight_F.to(wide), epsilon)
        return (normed.flatten(-2) * F.silu(gate_BNV.to(wide))).to(gate_BNV.dtype)


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()


class _Heads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, sequence: Tensor, taps: Tensor, heads: RecurrentHeads, document: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        paths, length = sequence.shape[0], sequence.shape[1] - heads.memory
        query = sequence.new_empty(paths, length, heads.keys, heads.key_features)
        key = torch.empty_like(query)
        value = sequence.new_empty(paths, length, heads.values, heads.value_features)
        _each(heads, "convolve", sequence, taps, document, length, (query, key), (value, value), ())
        ctx.save_for_backward(sequence, taps, document)
        ctx.heads = heads
        return query, key, value

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        from tfive.tree.fast import mixer_triton as kernels

        sequence, taps, document = ctx.saved_tensors
        heads: RecurrentHeads = ctx.heads
        paths, length = sequence.shape[0], sequence.shape[1] - heads.memory
        query, key, value = (grad.contiguous() for grad in grads)
        slope = sequence.new_empty(paths, length, heads.channels)
        shares = slope.new_empty(paths * -(-length // _NODES), *taps.shape, dtype=torch.float32)
        _each(heads, "convolve_back", sequence, taps, document, length, (query, key), (value, value), (slope, shares))
        out, width = torch.empty_like(sequence), 256
        blocks = -(-(length + heads.memory) // _NODES)
        kernels.spread_back[(paths * blocks, -(-heads.channels // width))](
            slope, taps, slope if document is None else document, out, length, heads.channels,
            W=width, J=heads.memory, L=_NODES, PACKED=document is not None, num_warps=8,
        )  # fmt: skip
        return out, shares.sum(0).to(taps.dtype), None, None


def _each(
    heads: RecurrentHeads, name: str, sequence: Tensor, taps: Tensor, document: Tensor | None, length: int,
    both: tuple[Tensor, Tensor], value: tuple[Tensor, Tensor], slopes: tuple[Tensor, ...],
) -> None:  # fmt: skip
    """Launch a kernel of the convolution for the normed heads and for the values."""
    from tfive.tree.fast import mixer_triton as kernels

    kernel: Any = getattr(kernels, name)
    places, keys = sequence.shape[0] * -(-length // _NODES), 2 * heads.keys * heads.key_features
    for tensors, count, each, start, width, norm in (
        (both, heads.keys, 2 * heads.keys, 0, heads.key_features, True),
        (value, heads.values, heads.values, keys, heads.value_features, False),
    ):
        kernel[(places, each)](
            sequence, taps, sequence if document is None else document, *tensors, *slopes, length, start,
            heads.channels, heads.key_features**-0.5, 1e-6, N=count, W=width, J=heads.memory, L=_NODES, NORM=norm,
            PACKED=document is not None, num_warps=4,
        )  # fmt: skip


class _Gates(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, strength: Tensor, rate: Tensor, log_rate: Tensor, bias: Tensor, real: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        from tfive.tree.fast import mixer_triton as kernels

        nodes, count = strength.shape
        decay = torch.empty(nodes, count, dtype=torch.float32, device=rate.device)
        beta = torch.empty_like(decay)
        kernels.gates[(-(-nodes // 64),)](
            strength, rate, log_rate, bias, rate if real is None else real, decay, beta, nodes, strength.stride(0),
            rate.stride(0), HEADS=count, IP=_power(count), L=64, MASKED=real is not None, num_warps=4,
        )  # fmt: skip
        ctx.save_for_backward(strength, rate, log_rate, bias, real)
        return decay, beta

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        from tfive.tree.fast import mixer_triton as kernels

        strength, rate, log_rate, bias, real = ctx.saved_tensors
        nodes, count = strength.shape
        programs = -(-nodes // 64)
        strength_slope, rate_slope = (x.new_empty(x.shape) for x in (strength, rate))
        shares = torch.empty(programs, 2, count, dtype=torch.float32, device=rate.device)
        kernels.gates_back[(programs,)](
            strength, rate, log_rate, bias, rate if real is None else real, *(x.contiguous() for x in grads),
            strength_slope, rate_slope, shares, nodes, strength.stride(0), rate.stride(0),
            HEADS=count, IP=_power(count), L=64, MASKED=real is not None, num_warps=4,
        )  # fmt: skip
        log_rate_slope, bias_slope = shares.sum(0)
        return strength_slope, rate_slope, log_rate_slope.to(log_rate.dtype), bias_slope.to(bias.dtype), None


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, gate: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        from tfive.tree.fast import mixer_triton as kernels

        nodes, count, features = output.shape
        out = torch.empty(nodes, count * features, dtype=gate.dtype, device=gate.device)
        kernels.gated_norm[(-(-nodes * count // _ROWS),)](
            output,
            gate,
            weight,
            out,
            nodes * count,
            gate.stride(0),
            epsilon,
            HEADS=count,
            F=features,
            L=_ROWS,
            num_warps=4,
        )
        ctx.save_for_backward(output, gate, weight)
        ctx.epsilon = epsilon
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        from tfive.tree.fast import mixer_triton as kernels

        output, gate, weight = ctx.saved_tensors
        nodes, count, features = output.shape
        programs = -(-nodes * count // (_ROWS * _TIMES))
        output_slope, gate_slope = torch.empty_like(output), gate.new_empty(gate.shape)
        shares = torch.empty(programs, features, dtype=torch.float32, device=gate.device)
        kernels.gated_norm_back[(programs,)](
            output, gate, weight, grads[0].contiguous(), output_slope, gate_slope, shares, nodes * count,
            gate.stride(0), ctx.epsilon, HEADS=count, F=features, L=_ROWS, TIMES=_TIMES, num_warps=4,
        )  # fmt: skip
        return output_slope, gate_slope, shares.sum(0).to(weight.dtype), None


def _rows(x: Tensor) -> Tensor:
    """Rows of nodes whose features lie beside each other."""
    flat = x.flatten(0, 1)
    return flat if flat.stride(-1) == 1 else flat.contiguous()


class TritonMixer:
    """The same by Triton."""

    def heads(
        self, sequence_QLU: Tensor, taps_UJ: Tensor, heads: RecurrentHeads, document_QL: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `TorchMixer.heads`."""
        # Kernels step from row to row by a path's length; a tree's documents are columns of a wider table.
        document = None if document_QL is None else document_QL.contiguous()
        inputs = (sequence_QLU.contiguous(), taps_UJ.contiguous(), heads, document)
        found: tuple[Tensor, Tensor, Tensor] = _Heads.apply(*inputs)
        return found

    def gates(
        self, strength_BNI: Tensor, rate_BNI: Tensor, log_rate_I: Tensor, bias_I: Tensor, real_BN: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See `TorchMixer.gates`."""
        real = None if real_BN is None else real_BN.flatten().to(torch.int8)
        decay, beta = _Gates.apply(_rows(strength_BNI), _rows(rate_BNI), log_rate_I, bias_I, real)
        return decay.unflatten(0, rate_BNI.shape[:2]), beta.unflatten(0, rate_BNI.shape[:2])

    def gated_norm(self, output_BNIF: Tensor, gate_BNV: Tensor, weight_F: Tensor, epsilon: float) -> Tensor:
        """See `TorchMixer.gated_norm`."""
        found: Tensor = _GatedNorm.apply(output_BNIF.flatten(0, 1).contiguous(), _rows(gate_BNV), weight_F, epsilon)
        return found.unflatten(0, gate_BNV.shape[:2])


@torch.enable_grad()
def mixer_differences(
    mixer: Mixer, heads: RecurrentHeads, device: torch.device, dtype: torch.dtype
) -> dict[str, float]:
    """How far `mixer` is from `TorchMixer` in float32, results and gradients together: |a − b| / |b|."""
    generator, length = torch.Generator().manual_seed(0), 75

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    sequence, taps = random(2, length + heads.memory, heads.channels), random(heads.channels, heads.memory + 1)
    strength, rate, biases = random(2, length, heads.values), random(2, length, heads.values), random(2, heads.values)
    values = random(2, length, heads.values, heads.value_features)
    gate, weight = random(2, length, heads.values * heads.value_features), 1 + 0.1 * random(heads.value_features)
    document = (torch.rand(2, length, generator=generator) < 0.05).cumsum(1).to(device)
    real = (torch.rand(2, length, generator=generator) < 0.9).to(device)
    given = [sequence, taps, strength, rate, *biases, values, gate, weight]
    aims: list[Tensor] = []
    found: list[dict[str, list[Tensor]]] = []
    for some, kind in ((TorchMixer(), torch.float32), (mixer, dtype)):
        leaves = [x.to(kind).detach().requires_grad_() for x in given]
        results = {
            "heads": some.heads(leaves[0], leaves[1], heads, None),
            "heads of packed documents": some.heads(leaves[0], leaves[1], heads, document),
            "gates": some.gates(leaves[2], leaves[3], leaves[4], leaves[5], real),
            "gated norm": (some.gated_norm(leaves[6], leaves[7], leaves[8], 1e-6),),
        }
        each: dict[str, list[Tensor]] = {}
        for name, outputs in results.items():
            if len(found) == 0:
                aims += [random(*x.shape).float() for x in outputs]
            at = sum(len(done) for done in list(results.values())[: list(results).index(name)])
            goal = torch.stack([(x.float() * aims[at + i]).sum() for i, x in enumerate(outputs)]).sum()
            grads = torch.autograd.grad(goal, leaves, allow_unused=True)
            each[name] = [x.detach() for x in (*outputs, *grads) if x is not None]
        found.append(each)
    return {
        name: max(float((b.double() - a.double()).norm() / a.double().norm()) for a, b in zip(want, found[1][name]))
        for name, want in found[0].items()
    }

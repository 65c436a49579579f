"""Which gated delta rule runs: our own in PyTorch, or flash-linear-attention where it is installed and sound.

Its kernels give outputs and the final state of a path only, and are known to be wrong or to refuse on some pairs of GPU
and Triton version (fla-org/flash-linear-attention issues 640, 913 and 984, for instance). So before first use on a
device they are compared with `delta_rule.read_paths`, gradients too, and the reason is kept when they are not used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from tfive.errors import UserError
from tfive.tree.recurrent.delta_rule import CHUNK, read_paths, unit_rows
from tfive.tree.recurrent.deltanet import DeltaRule

Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Query, key, value, decay, write strength `[Q, L, I, …]` and state `[Q, I, E, F]` to outputs and the final state."""

_TOLERANCE = 0.02
"""Largest relative error (by norm) of a sound kernel on half-precision inputs."""


@dataclass(frozen=True)
class _KernelTrace:
    """Chunk-boundary states; the state between two of them is read again from the earlier one."""

    kernel: Kernel
    inputs: tuple[Tensor, ...]
    """Padded to whole chunks, `[Q, M·Z, I, …]`."""
    boundary_MQIEF: Tensor

    def state_after(self, path_X: Tensor, count_X: Tensor) -> Tensor:
        """State of a path after its first `count` tokens, `[X, I, E, F]`, with gradients."""
        chunk_X = (count_X // CHUNK).clamp(max=len(self.boundary_MQIEF) - 1)
        state = self.boundary_MQIEF.flatten(0, 1).index_select(0, chunk_X * self.boundary_MQIEF.shape[1] + path_X)
        flat_X = path_X * len(self.boundary_MQIEF) + chunk_X
        query, key, value, decay, beta = (
            x.unflatten(1, (-1, CHUNK)).flatten(0, 1).index_select(0, flat_X) for x in self.inputs
        )
        kept_XL1 = (torch.arange(CHUNK, device=count_X.device) < (count_X - chunk_X * CHUNK)[:, None])[..., None]
        return self.kernel(query, key, value, decay * kept_XL1, beta * kept_XL1, state)[1]


@dataclass(frozen=True)
class _PackedTrace:
    """A trace of documents, asked for by row."""

    documents: _KernelTrace
    path_QL: Tensor
    place_QL: Tensor

    def state_after(self, path_X: Tensor, count_X: Tensor) -> Tensor:
        """State of a row's newest document after the row's first `count` tokens."""
        last_X = (count_X - 1).clamp(min=0)
        count_X = torch.where(count_X > 0, self.place_QL[path_X, last_X] + 1, 0)
        return self.documents.state_after(self.path_QL[path_X, last_X], count_X)


class KernelRule:
    """The contract of `delta_rule.read_paths` on top of a kernel that knows neither forks nor packed documents."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __call__(
        self,
        query_QLIE: Tensor,
        key_QLIE: Tensor,
        value_QLIF: Tensor,
        decay_QLI: Tensor,
        beta_QLI: Tensor,
        state_XIEF: Tensor | None = None,
        starts_QL: Tensor | None = None,
    ) -> tuple[Tensor, _KernelTrace | _PackedTrace]:
        """Outputs `[Q, L, I, F]` and the trace to fork from."""
        inputs = (query_QLIE, key_QLIE, value_QLIF, decay_QLI, beta_QLI)
        if starts_QL is not None:
            return self._documents(inputs, starts_QL)
        paths, _, heads, features = key_QLIE.shape
        if state_XIEF is None:
            state_XIEF = decay_QLI.new_zeros(paths, heads, features, value_QLIF.shape[-1])
        return self._read(inputs, state_XIEF.repeat_interleave(paths // len(state_XIEF), 0))

    def _read(self, inputs: tuple[Tensor, ...], state_QIEF: Tensor) -> tuple[Tensor, _KernelTrace]:
        length = inputs[0].shape[1]
        padded = tuple(F.pad(x, (0, 0) * (x.dim() - 2) + (0, -length % CHUNK)) for x in inputs)
        boundary, outputs = [state_QIEF], []
        for query, key, value, decay, beta in zip(*(x.split(CHUNK, 1) for x in padded)):
            output, state = self.kernel(query, key, value, decay, beta, boundary[-1])
            outputs.append(output)
            boundary.append(state)
        return torch.cat(outputs, 1)[:, :length], _KernelTrace(self.kernel, padded, torch.stack(boundary[:-1]))

    def _documents(self, inputs: tuple[Tensor, ...], starts_QL: Tensor) -> tuple[Tensor, _PackedTrace]:
        """Every document as a path of its own, from the empty state."""
        rows, length = starts_QL.shape
        index_L = torch.arange(length, device=starts_QL.device)
        starts_QL = starts_QL | (index_L == 0)
        place_QL = index_L - torch.where(starts_QL, index_L, 0).cummax(1).values
        path_QL = (starts_QL.flatten().cumsum(0) - 1).view(rows, length)
        paths, longest = int(path_QL[-1, -1]) + 1, int(place_QL.max()) + 1
        # Places no token takes read one row of zeros at the end: no-ops.
        source = torch.full((paths, longest), rows * length, device=starts_QL.device)
        source[path_QL, place_QL] = torch.arange(rows * length, device=starts_QL.device).view(rows, length)
        unpacked = tuple(
            F.pad(x.flatten(0, 1), (0, 0) * (x.dim() - 2) + (0, 1))
            .index_select(0, source.flatten())
            .unflatten(0, source.shape)
            for x in inputs
        )
        heads, features = inputs[1].shape[2:]
        empty = inputs[3].new_zeros(paths, heads, features, inputs[2].shape[-1])
        output, trace = self._read(unpacked, empty)
        packed = output.flatten(0, 1).index_select(0, (path_QL * longest + place_QL).flatten())
        return packed.unflatten(0, (rows, length)), _PackedTrace(trace, path_QL, place_QL)


def fla_kernel() -> Kernel:
    """flash-linear-attention's chunked rule; ImportError where it is not installed."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    def kernel(
        query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        half = value.dtype if value.dtype == torch.float16 else torch.bfloat16
        query, key, value, beta = (x.to(half).contiguous() for x in (query, key, value, beta))
        output, last = chunk_gated_delta_rule(
            query, key, value, decay.float(), beta, scale=1.0, initial_state=state.float(), output_final_state=True
        )
        return output.float(), last

    return kernel


def kernel_trouble(kernel: Kernel, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why `kernel` is not to be trusted on this device, or None: it is compared with our own rule once."""
    generator = torch.Generator().manual_seed(0)
    shape = (2, 100, 2)
    query, key, value = (torch.randn(*shape, 128, generator=generator) for _ in range(3))
    decay, beta = -torch.rand(shape, generator=generator), torch.rand(shape, generator=generator)
    state = 0.1 * torch.randn(2, 2, 128, 128, generator=generator)
    raw = [unit_rows(query) * 128**-0.5, unit_rows(key), value, decay, beta, state]
    leaves = [x.to(device, dtype).float().requires_grad_() for x in raw]
    path, count = torch.arange(2, device=device), torch.tensor([100, 70], device=device)
    results = []
    for rule in (read_paths, KernelRule(kernel)):
        try:
            output, trace = rule(*leaves)
            forks = trace.state_after(path, count)
            grads = torch.autograd.grad(output.square().sum() + forks.square().sum(), leaves)
        except Exception as error:  # noqa: BLE001 - third-party kernels fail in many ways; the reason is returned, not lost
            return f"it fails on {device}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        results.append((output, forks, *grads))
    names = ("outputs", "states", *(f"gradients of {n}" for n in ("query", "key", "value", "decay", "beta", "state")))
    for name, want, got in zip(names, *results):
        off = float((got - want).detach().norm() / want.detach().norm())
        if not off < _TOLERANCE:
            return f"its {name} are off by {off:.2g} on {device}"
    return None


@dataclass(frozen=True)
class RuleChoice:
    """The rule that runs, its name, and why it is this one."""

    rule: DeltaRule
    name: str
    reason: str


@cache
def _fla_trouble(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cuda":
        return f"it has no kernels for {device.type}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in half precision only, the model in {dtype}"
    try:
        kernel = fla_kernel()
    except ImportError as error:
        return f"it cannot be imported: {error}"
    return kernel_trouble(kernel, device, dtype)


def choose_rule(setting: str, device: torch.device, dtype: torch.dtype) -> RuleChoice:
    """The rule for option `delta_rule`: `torch`, `fla` (refused where unsound), or `auto` (fla only where sound)."""
    if setting == "torch":
        return RuleChoice(read_paths, "torch", "asked for")
    trouble = _fla_trouble(device, dtype)
    if trouble is None and torch.are_deterministic_algorithms_enabled():
        trouble = "it does not promise deterministic gradients, which this run asks for"
    if trouble is None:
        return RuleChoice(KernelRule(fla_kernel()), "fla", "agrees with the PyTorch rule on this device")
    if setting == "fla":
        raise UserError(f"delta_rule = fla: of no use here: {trouble}; use torch or auto")
    return RuleChoice(read_paths, "torch", f"flash-linear-attention is not used: {trouble}")

"""Which gated delta rule runs: our own in PyTorch or Triton, or flash-linear-attention where it is installed and sound.

The latter's kernels give outputs and the final state of a path only, and are known to be wrong or to refuse on some
pairs of GPU and Triton version (fla-org/flash-linear-attention issues 640, 913 and 984, for instance). So before first
use on a device all kernels are compared with `delta_rule.read_paths`, gradients too, and the reason is kept when they
are not used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tfive.errors import UserError, out_of_memory
from tfive.tree.fast.agreement import kernel_trouble
from tfive.tree.fast.delta_step import RecurrentHeads
from tfive.tree.fast.kernel_recurrence import KernelRecurrence, finish_trouble
from tfive.tree.fast.mixer import Mixer, TritonMixer, mixer_differences
from tfive.tree.fast.recurrence_agreement import recurrence_differences
from tfive.tree.layout import Layout
from tfive.tree.recurrent.delta_rule import CHUNK, read_paths, unit_rows
from tfive.tree.recurrent.deltanet import DeltaRule, RecurrentParts, TreeRecurrence

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


@torch.enable_grad()
def rule_differences(
    rule: DeltaRule,
    device: torch.device,
    dtype: torch.dtype,
    features: tuple[int, int] = (128, 128),
    length: int = 100,
    stated: bool = True,
    narrow: bool = False,
    heads: int = 2,
) -> dict[str, float]:
    """How far `rule` is from our own on numbers of this precision, gradients included: |a − b| / |b|.

    `stated`: paths start from a state. `narrow`: queries, keys and values come in `dtype`, not in float32.
    """
    generator = torch.Generator().manual_seed(0)
    shape, (keys, values) = (2, length, heads), features
    query, key = (torch.randn(*shape, keys, generator=generator) for _ in range(2))
    value = torch.randn(*shape, values, generator=generator)
    decay, beta = -torch.rand(shape, generator=generator), torch.rand(shape, generator=generator)
    state = 0.1 * torch.randn(2, heads, keys, values, generator=generator)
    raw = [unit_rows(query) * keys**-0.5, unit_rows(key), value, decay, beta, *([state] if stated else [])]
    leaves = [x.to(device, dtype).to(dtype if narrow and i < 3 else torch.float32) for i, x in enumerate(raw)]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    path, count = torch.arange(2, device=device), torch.tensor([length, length * 7 // 10], device=device)
    results = []
    for some in (read_paths, rule):
        output, trace = some(*leaves)
        forks = trace.state_after(path, count)
        grads = torch.autograd.grad(output.float().square().sum() + forks.square().sum(), leaves)
        results.append([x.detach().float() for x in (output, forks, *grads)])
    names = ("outputs", "states", *(f"gradients of {n}" for n in ("query", "key", "value", "decay", "beta", "state")))
    return {name: float((got - want).norm() / want.norm()) for name, want, got in zip(names, *results)}


def distrust(kernel: Kernel, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why `kernel` is not to be trusted on this device, or None: it is compared with our own rule once."""
    try:
        apart = rule_differences(KernelRule(kernel), device, dtype)
    except Exception as error:  # third-party kernels fail in many ways; the reason is returned, not lost
        if out_of_memory(error):
            raise  # the run is short of memory; the kernels are not at fault
        return f"it fails on {device}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    wrong = [f"its {name} are off by {off:.2g} on {device}" for name, off in apart.items() if not off < _TOLERANCE]
    return wrong[0] if wrong else None


@dataclass(frozen=True)
class RuleChoice:
    """The rule that runs, its name, and why it is this one."""

    rule: DeltaRule
    name: str
    reason: str
    mixer: Mixer | None = None
    """Kernels for what stands around the rule, where they are used."""

    def recurrence(self, layout: Layout, **options: Any) -> TreeRecurrence:
        """A pass over `layout` by this rule."""
        if self.mixer is None:
            return TreeRecurrence(layout, self.rule, **options)
        return KernelRecurrence(layout, self.rule, self.mixer, **options)


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
    return distrust(kernel, device, dtype)


@cache
def triton_trouble(heads: RecurrentHeads, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why Triton's kernels are not used for passes over such layers on this device, or None: they agree."""

    def compared() -> dict[str, float]:
        return triton_differences(heads, device, dtype)

    return kernel_trouble(compared, (heads.key_features, heads.value_features), device, dtype, most=128)


def triton_differences(
    heads: RecurrentHeads, device: torch.device, dtype: torch.dtype, thorough: bool = False
) -> dict[str, float]:
    """How far Triton's kernels of whole passes are from PyTorch, gradients included: those of a text and of thoughts,
    (`thorough`) of long thoughts, and all together on a tree."""
    from tfive.tree.fast.delta_chunk import TritonRule

    rule, mixer = TritonRule(dtype == torch.float32), TritonMixer()
    asked = (rule, device, dtype, (heads.key_features, heads.value_features))
    apart = mixer_differences(mixer, heads, device, dtype)
    paths = {"a text": (100, False), "thoughts": (14, True)} | ({"long thoughts": (100, True)} if thorough else {})
    for name, (length, stated) in paths.items():
        # With as many heads as the model, for which the kernels are compiled anyway.
        found = rule_differences(*asked, length, stated, narrow=True, heads=heads.values)
        apart |= {f"{what} of {name}": off for what, off in found.items()}
    return apart | recurrence_differences(lambda layout: KernelRecurrence(layout, rule, mixer), heads, device, dtype)


def choose_rule(
    setting: str, device: torch.device, dtype: torch.dtype, layers: Sequence[RecurrentParts] = ()
) -> RuleChoice:
    """The rule for option `delta_rule`: `torch`, `triton` (for `layers`, those it would run) or `fla`, refused where
    unsound, or `auto`: Triton's where it is sound, else flash-linear-attention's, else PyTorch's."""
    if setting == "torch":
        return RuleChoice(read_paths, "torch", "asked for")
    found = {}
    for name, choose in (("triton", _triton_rule), ("fla", _fla_rule)):
        if setting in (name, "auto"):
            choice = choose(device, dtype, layers)
            if isinstance(choice, RuleChoice):
                return choice
            found[name] = choice
    if setting != "auto":
        raise UserError(f"delta_rule = {setting}: of no use here: {found[setting]}; use torch or auto")
    reason = f"Triton's kernels are not used: {found['triton']}; flash-linear-attention is not used: {found['fla']}"
    return RuleChoice(read_paths, "torch", reason)


def _triton_rule(device: torch.device, dtype: torch.dtype, layers: Sequence[RecurrentParts]) -> RuleChoice | str:
    """Our kernels, or why not."""
    trouble = _layers_trouble(layers, device, dtype)
    if trouble is not None:
        return trouble
    from tfive.tree.fast.delta_chunk import TritonRule

    reason = "agrees with the PyTorch rule on this device"
    return RuleChoice(TritonRule(dtype == torch.float32), "triton", reason, TritonMixer())


def _fla_rule(device: torch.device, dtype: torch.dtype, _: Sequence[RecurrentParts]) -> RuleChoice | str:
    """flash-linear-attention's kernel, or why not."""
    trouble = _fla_trouble(device, dtype)
    if trouble is None and torch.are_deterministic_algorithms_enabled():
        trouble = "it does not promise deterministic gradients, which this run asks for"
    if trouble is not None:
        return trouble
    return RuleChoice(KernelRule(fla_kernel()), "fla", "agrees with the PyTorch rule on this device")


_refused: dict[tuple[RecurrentHeads, torch.device], str] = {}
"""Layers that Triton's kernels are not used for any more in this process, and why."""


def refuse_kernels(layers: Sequence[RecurrentParts], device: torch.device, why: str) -> None:
    """Let no pass that is begun later run such layers by Triton's kernels: a whole model went wrong with them."""
    _refused.update({(RecurrentHeads.of(parts), device): why for parts in layers})


def _layers_trouble(layers: Sequence[RecurrentParts], device: torch.device, dtype: torch.dtype) -> str | None:
    """Why Triton's kernels are not used for these layers, or None."""
    if not layers:
        return "these passes go token by token"
    each = {RecurrentHeads.of(parts) for parts in layers}
    found = (_refused.get((heads, device)) or triton_trouble(heads, device, dtype) for heads in each)
    trouble = next((why for why in found if why is not None), None)
    return trouble or finish_trouble(layers[0])

"""Weights in shards over processes, by FSDP2, and the one whole copy that computes without gradients.

`fully_shard` keeps every weight once over the processes of a mesh, in the precision it is trained in; a block is put
together in compute precision when a pass needs it and freed after, and gradients arrive summed, each process's own
rows of them. Sampling and scoring do without gathering: they read a whole copy, refreshed in place after every update,
so that whatever remembers where its weights lie (captured graphs, fused kernels) stays right. And since that copy is
there, passes with gradients gather their blocks out of it: weights travel between processes once an update, however
many passes it takes.

What was learned about `fully_shard`, and is held here: tied weights and everything else outside the blocks stay in the
root's group; the engine calls parts of a model without its forward, so passes run inside the forward of a root of ours;
parameters of another precision (learned delimiters, reading gates) are groups of their own, gathered by hand, since a
group has one precision; a sharded module cannot be copied, so the shards are made of the copy.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from tfive.distributed.pieces import Piece
from tfive.distributed.sharding import shard_width
from tfive.errors import UserError

Result = TypeVar("Result")
Waiting = Callable[[str], AbstractContextManager[object]]

# Their names before torch 2.13 are the second ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

REPLICATE, SHARD = "replicate", "shard"
"""Names of the mesh's dimensions: groups of processes that hold the same rows, and that hold all rows between them."""


def shard_mesh(device: str, ranks: range, shard: int = 0) -> DeviceMesh:
    """Of the processes `ranks`, `shard` (0: all) hold the weights between them; where there are more, that is repeated,
    the usual choice being one such group a node. Every process of the run must call it."""
    width = shard_width(len(ranks), shard)
    shape, names = ((len(ranks),), (SHARD,)) if width == len(ranks) else ((-1, width), (REPLICATE, SHARD))
    return DeviceMesh(device, torch.arange(ranks.start, ranks.stop).view(shape), mesh_dim_names=names)


class Shards:
    """The weights of a model, and of small modules beside it, in shards; and the whole copy beside them.

    Its methods are what `sharding.Sharding` asks for. `run` and those marked collective there must be called by every
    process equally often, or all wait for the one that did not.
    """

    def __init__(
        self,
        whole: nn.Module,
        blocks: Sequence[str],
        mesh: DeviceMesh,
        *,
        beside: Mapping[str, nn.Module] | None = None,
        name: str = "",
        trained_in: Callable[[torch.dtype], torch.dtype] = lambda dtype: dtype,
        waiting: Waiting = nullcontext,
    ) -> None:
        """`whole` and the modules `beside` it become the copy that computes without gradients; shards are made of a
        copy of them. `blocks` names the modules that are gathered one at a time; `trained_in` gives the precision in
        which weights are trained from that in which they compute. `name` stands before the names of `whole`'s
        weights, as those of the modules beside it before theirs. `waiting` is what every exchange happens in."""
        self._trained_in, self._waiting, others = trained_in, waiting, dict(beside or {})
        self._prefix = f"{name}." if name else ""
        # Copies are summed by a hook of ours: torch's own exchange would neither be watched nor name a lost process.
        copied = REPLICATE in (mesh.mesh_dim_names or ())
        self._copies: Any = mesh.get_group(REPLICATE) if copied else None
        self.mesh = mesh[SHARD] if copied else mesh
        self._group = mesh.get_group(SHARD)
        self._ways, self._rank = dist.get_world_size(self._group), dist.get_rank(self._group)
        self._whole = self._named(whole, others)
        if not all(parameter.requires_grad for parameter in self._whole.values()):
            raise UserError(
                "distributed.shard: some weights are frozen, and the rest is small; use distributed.shard = 1"
            )
        policy = _policy(_one_precision(whole), trained_in)
        self.model: Any = copy.deepcopy(whole)
        self.beside: dict[str, Any] = {name: copy.deepcopy(module) for name, module in others.items()}
        for parameter in self._whole.values():
            parameter.requires_grad_(False)
        # A block at a time is widened and sharded, so that master weights are never whole in memory.
        units = {f"{self._prefix}{block}.": self._unit(self.model.get_submodule(block), policy) for block in blocks}
        for other, module in self.beside.items():
            units[f"{other}."] = self._unit(module, _policy(_one_precision(module), trained_in))
        self._root = self._unit(_Root(self.model, self.beside), policy)
        self._units = self._by_unit({**units, "": self._root})
        self._parameters = self._named(self.model, self.beside)
        self._learn_order()
        self.take()
        self.refresh()

    def _named(self, model: nn.Module, beside: Mapping[str, nn.Module]) -> dict[str, nn.Parameter]:
        found = {self._prefix + own: parameter for own, parameter in model.named_parameters()}
        for other, module in beside.items():
            found |= {f"{other}.{own}": parameter for own, parameter in module.named_parameters()}
        return found

    def _unit(self, module: nn.Module, policy: MixedPrecisionPolicy) -> Any:
        for parameter in module.parameters():
            if not isinstance(parameter, DTensor):
                parameter.data = parameter.data.to(self._trained_in(parameter.dtype))
        unit: FSDPModule = fully_shard(module, mesh=self.mesh, mp_policy=policy)
        # Losses are divided by counts over all processes already: gradients are summed, not averaged.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        if self._copies is not None:
            unit.set_all_reduce_hook(self._sum_over_copies)
        return unit

    def _sum_over_copies(self, gradients: Tensor) -> None:
        """Add the gradients of the same rows over all groups that hold them, in place."""
        with self._waiting("gradients"):
            _exchanged(_all_reduce, gradients, gradients, self._copies)
        if gradients.is_cuda:
            # They belong to the stream of the exchange before this one, which may reuse the memory when it is done.
            gradients.record_stream(torch.cuda.current_stream())

    def _by_unit(self, units: dict[str, Any]) -> list[tuple[Any, list[tuple[Tensor, nn.Module, str]], _Gather]]:
        """Each unit with its weights (where the whole copy has them, which attribute of which module they are) and how
        they are put together."""
        longest = sorted(units, key=len, reverse=True)
        found: dict[str, list[tuple[Tensor, nn.Module, str]]] = {prefix: [] for prefix in units}
        for name, target in self._whole.items():
            prefix = next(one for one in longest if name.startswith(one))
            path, _, attribute = name.rpartition(".")
            other, _, inside = path.partition(".")
            module = self.beside[other].get_submodule(inside) if other in self.beside else self._inside(path)
            found[prefix].append((target, module, attribute))
        gathers = {
            prefix: _Gather([target for target, _, _ in weights], self._ways, self._waiting)
            for prefix, weights in found.items()
            if weights
        }
        for prefix, gather in gathers.items():
            units[prefix].set_custom_all_gather(gather)
            units[prefix].set_custom_reduce_scatter(_Sum(self._waiting))
        return [(units[prefix], found[prefix], gather) for prefix, gather in gathers.items()]

    def _inside(self, path: str) -> nn.Module:
        module: nn.Module = self.model.get_submodule(f"{path}.".removeprefix(self._prefix).removesuffix("."))
        return module

    @torch.no_grad()
    def _learn_order(self) -> None:
        """Gather a number for each weight, once, to see whether a unit's stand behind one another as they do here."""
        for unit, weights, gather in self._units:
            gather.marks = [torch.full_like(target, mark % 251) for mark, (target, _, _) in enumerate(weights)]
            for (_, module, attribute), mark in zip(weights, gather.marks):
                self.local(getattr(module, attribute)).fill_(float(mark.view(-1)[0]))
            unit.unshard()
            unit.reshard()
            gather.marks = None

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The sharded weights, named as those of the whole copy."""
        return list(self._parameters.items())

    def run(self, forward: Callable[[], Result]) -> Result:
        """What a pass through `model` gives, with gradients to the shards. The pass may call any part of the model.

        It ends with `backward` of its result, on every process; passes without gradients read the whole copy.
        """
        with warnings.catch_warnings():
            # Losses are computed of what a pass gives, never in place.
            warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
            result: Result = self._root(forward)
        return result

    def local(self, tensor: Tensor) -> Tensor:
        with torch.no_grad():
            own: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return own

    def piece(self, name: str, rows: Tensor) -> Piece:
        shape = tuple(self._whole[name].shape)
        first = min(self._rank * self._height(shape), shape[0])
        return Piece(rows, shape, (first, *[0] * (len(shape) - 1)))

    def computes_in(self, name: str) -> torch.dtype:
        return self._whole[name].dtype

    def norm(self, own: float) -> float:
        if self._ways == 1:
            return own
        square = torch.tensor([own * own], dtype=torch.float64, device=self._device)
        squares = torch.empty(self._ways, dtype=torch.float64, device=self._device)
        with self._waiting("the norm"):
            _exchanged(_all_gather, squares, square, self._group)
        return math.sqrt(math.fsum(squares.tolist())) if squares.isfinite().all() else math.nan

    def gathered(self, name: str, rows: Tensor) -> Tensor:
        if self._ways == 1:
            return rows
        shape = tuple(self._whole[name].shape)
        padded = rows.new_zeros(self._height(shape), *shape[1:])
        padded[: len(rows)] = rows
        whole = rows.new_empty(self._ways * len(padded), *shape[1:])
        with self._waiting("weights"):
            _exchanged(_all_gather, whole, padded, self._group)
        return whole[: shape[0]]

    @torch.no_grad()
    def refresh(self) -> None:
        for unit, weights, gather in self._units:
            gather.fresh = False
            unit.unshard()
            for target, module, attribute in weights:
                target.copy_(getattr(module, attribute))
            unit.reshard()
            gather.fresh = gather.order_known

    @torch.no_grad()
    def take(self) -> None:
        for name, parameter in self._parameters.items():
            own = self.local(parameter)
            own.copy_(self._whole[name][self.piece(name, own).box.slices])

    def _height(self, shape: tuple[int, ...]) -> int:
        """How many rows the first process has; the last ones may have fewer, or none."""
        return -(-shape[0] // self._ways)

    @property
    def _device(self) -> torch.device:
        return next(iter(self._whole.values())).device


def _all_reduce(out: Tensor, own: Tensor, **options: Any) -> Any:
    """The sum over a group's processes, in the form of the other collectives."""
    if out is not own:
        out.copy_(own)
    return dist.all_reduce(out, **options)


def _exchanged(collective: Callable[..., Any], out: Tensor, own: Tensor, group: Any, **options: Any) -> Any:
    """A collective from `own` to `out`. Gloo knows host memory alone: processes that share a GPU go by it."""
    if own.device.type == "cpu" or dist.get_backend(group) != "gloo":
        return collective(out, own, group=group, **options)
    host = torch.empty_like(out, device="cpu")
    collective(host, own.cpu(), group=group, **(options | {"async_op": False}))
    out.copy_(host)
    return None


class _Exchange:
    """A collective of `fully_shard`, as it asks for them."""

    def __init__(self, waiting: Waiting) -> None:
        self.waiting = waiting

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _Sum(_Exchange):
    """Gradients of all processes are added, and each gets its rows."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        with self.waiting("gradients"):
            return _exchanged(_reduce_scatter, output_tensor, input_tensor, group, op=op, async_op=async_op)


class _Gather(_Exchange):
    """How `fully_shard` puts a unit's weights together: out of the whole copy while that is `fresh`, else from every
    process."""

    def __init__(self, weights: Sequence[Tensor], ways: int, waiting: Waiting) -> None:
        super().__init__(waiting)
        self.weights, self.ways = weights, ways
        self.fresh = self.order_known = False
        """Whether the whole copy has the weights of now; whether they stand behind one another as here."""
        self.marks: list[Tensor] | None = None
        """What is gathered to find that out."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> dist.Work | None:
        if self.fresh:
            _copied(self.weights, output_tensor, self.ways)
            return None
        with self.waiting("weights"):
            work = _exchanged(_all_gather, output_tensor, input_tensor, group, async_op=async_op)
        if self.marks is not None:
            found = _copied(self.marks, torch.zeros_like(output_tensor), self.ways)
            self.order_known = torch.equal(found, output_tensor)
        return work


def _copied(weights: Sequence[Tensor], out: Tensor, ways: int) -> Tensor:
    """The weights as the processes would have sent them: all rows of the first process, then of the next; what is
    missing to equal shares is left as it is."""
    rank_rows, at = out.view(ways, -1), 0
    for weight in weights:
        height = -(-len(weight) // ways)
        for rank, part in enumerate(weight.split(height)):
            rank_rows[rank, at : at + part.numel()] = part.reshape(-1)
        at += height * math.prod(weight.shape[1:])
    return out


class _Root(nn.Module):
    """Its forward is any pass through the modules it holds."""

    def __init__(self, model: nn.Module, beside: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.model, self.beside = model, nn.ModuleDict(dict(beside))

    def forward(self, call: Callable[[], Result]) -> Result:
        for module in self.beside.values():
            # Nothing calls their forward, which would gather them; the end of the backward pass frees them.
            module.unshard()  # type: ignore[operator]
        return call()


def _one_precision(module: nn.Module) -> torch.dtype:
    found = {parameter.dtype for parameter in module.parameters()}
    if len(found) != 1:
        names = ", ".join(sorted(str(dtype) for dtype in found))
        raise UserError(
            f"distributed.shard: {type(module).__name__} has weights of several precisions ({names}), and shards have "
            "one; train it without shards"
        )
    return found.pop()


def _policy(compute: torch.dtype, trained_in: Callable[[torch.dtype], torch.dtype]) -> MixedPrecisionPolicy:
    """Weights are gathered in compute precision and gradients summed in float32 at least; a block's inputs are left
    as the model makes them."""
    half = compute in (torch.bfloat16, torch.float16)
    return MixedPrecisionPolicy(
        param_dtype=None if trained_in(compute) == compute else compute,
        reduce_dtype=torch.float32 if half else None,
        cast_forward_inputs=False,
    )

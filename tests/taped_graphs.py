"""CUDA graphs without a GPU, as strict as they are: operations are recorded with the tensors they ran on, and a replay
does them again there, without a line of Python. What would wait for the host cannot be captured."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pretended_graphs import Again, PretendedGraphs

WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "lift_fresh", "equal", "item", "is_nonzero")
"""Operations whose result the host must know, or that bring something of the host's."""
MEANINGLESS = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")


def _tensors(found: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _Recording(TorchDispatchMode):
    """Every operation with what it read and what it wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.before: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}
        """Tensors that were written to, and what they held before."""

    def __torch_dispatch__(self, func: Any, types: Iterable[Any], args: Any = (), kwargs: Any = None) -> Any:
        name, given = func._schema.name.split("::")[1], kwargs or {}
        chosen = [index for index in tree_leaves(args[1:]) if isinstance(index, Tensor)]
        by_mask = name.startswith(("index", "_index_put")) and any(index.dtype == torch.bool for index in chosen[:1])
        if name.startswith(WAITS) or by_mask:
            raise RuntimeError(f"{name}: operation not permitted when stream is capturing\nand more")
        self._note(func, args, given)
        found = func(*args, **given)
        written = any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)
        read = {_place(tensor) for tensor in _tensors((args, given))}
        views = not written and all(_place(tensor) in read for tensor in _tensors(found))
        if not views and name not in MEANINGLESS:
            self.done.append((func, args, given, [] if written else _tensors(found)))
        return found

    def _note(self, func: Any, args: Any, given: Any) -> None:
        named = [*zip(func._schema.arguments, args), *((a, given.get(a.name)) for a in func._schema.arguments)]
        for argument, value in named:
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in _tensors(value):
                    key = (_place(tensor), tensor.storage_offset(), tensor.shape)
                    self.before.setdefault(key, (tensor, tensor.detach().clone()))

    @torch.no_grad()
    def undo(self) -> None:
        """What was written to holds what it held before."""
        for tensor, before in self.before.values():
            tensor.detach().copy_(before)


class Tape(Again):
    """Captured operations, done again on the same tensors."""

    def __init__(self, done: list[tuple[Any, Any, Any, list[Tensor]]]) -> None:
        super().__init__(lambda: None)
        self.done = done

    @torch.no_grad()
    def replay(self) -> None:
        self.replays += 1
        for func, args, given, results in self.done:
            for result, again in zip(results, _tensors(func(*args, **given))):
                result.copy_(again)


class TapedGraphs(PretendedGraphs):
    """Stands in for the graphs of a device; capturing runs the work once, as nothing else would give its results a
    shape. With `undo` that run leaves nothing behind."""

    def __init__(self, undo: bool = False) -> None:
        super().__init__()
        self.undo = undo

    def capture(self, work: Callable[[], None], warm_up: int = 0) -> Again:
        for _ in range(warm_up):
            work()
        with _Recording() as recording:
            work()
        if self.undo:
            recording.undo()
        self.graphs.append(Tape(recording.done))
        return self.graphs[-1]

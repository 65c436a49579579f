"""A pass of the policy before it runs: its rows and the nodes that will be read, as tensors it can be run on again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from torch import Tensor

from tfive.tree.layout import Layout, layout_tensors
from tfive.tree.picks import Picks


class ToCapture(NamedTuple):
    """A `policy` pass that may be captured."""

    kind: Any
    """What it depends on beside its tensors."""
    tensors: list[Tensor]
    """All that it reads of texts and thoughts: their own, or those of the layout and the picks."""
    made: Callable[[Sequence[Tensor]], PolicyPass]
    """The pass of such tensors; making it does not wait for the device."""


@dataclass(frozen=True)
class PolicyPass:
    """What `TreeModel.policy_from` reads. It is made before the pass where picking waits for the device."""

    layout: Layout
    actions: Picks | None = None
    """The sampled actions, `[B, R, T]`."""
    text: Picks | None = None
    """The texts' own next tokens, `[B, S]`."""
    after: Picks | None = None
    """Continuation tokens after the whole thought, `[B, R, H]`."""
    without: Picks | None = None
    """The same tokens without the thought."""
    no_thought: bool = False
    """Whether the latter's log-probabilities are asked for, and not only computed."""
    nodes_x: Tensor | None = None
    """The flat nodes that go through the model, where padding is left out; none: all."""

    @property
    def _picks(self) -> dict[str, Picks]:
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in found.items() if isinstance(value, Picks)}

    @property
    def kinds(self) -> tuple[str, ...]:
        """What is read, by name."""
        return (*self._picks, *(("no_thought",) if self.no_thought else ()))

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors of the layout and of all picks; `on` takes others in their place."""
        picked = [tensor for picks in self._picks.values() for tensor in picks.tensors]
        return [*layout_tensors(self.layout).values(), *picked]

    def on(self, tensors: Sequence[Tensor]) -> PolicyPass:
        """The same pass over another layout and other picks of the same shapes."""
        rest = iter(tensors)
        rows: dict[str, Any] = {name: next(rest) for name in layout_tensors(self.layout)}
        changes: dict[str, Any] = {name: own.on([next(rest) for _ in own.tensors]) for name, own in self._picks.items()}
        return replace(self, layout=replace(self.layout, **rows), **changes)

    def padded(self) -> PolicyPass:
        """The same with picks of few sizes, for passes that are captured size by size. Those that leave padding out are
        not: thoughts of one size are texts of many."""
        changes: dict[str, Any] = {name: own.padded() for name, own in self._picks.items()}
        return self if self.nodes_x is not None else replace(self, **changes)

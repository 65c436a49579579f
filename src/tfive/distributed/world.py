"""The processes of a run, as the rest of the code sees them: which rows are one's own, and all rows back in order.

Every process runs the same program on the same state and takes the same decisions; what is split is the passes over
texts. A process computes its share of the rows, contiguous and in item order, and what comes out is gathered, so that
everything after it sees the whole set. Random numbers are functions of the item, so any number of processes draws the
same thoughts. `SINGLE` is a world of one, whose methods give back what they are given; several processes are a
`distributed.group.Group`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

from torch import Tensor

from tfive.distributed.pulse import Pulse

Rows = Sequence[Sequence[float]]
"""Numbers of every part (micro-batch) of a step: one row a part, one column a number."""

Part = TypeVar("Part")


class World:
    """One process. A world of several overrides everything that exchanges something."""

    rank: int = 0
    """The number of this process."""
    size: int = 1
    """How many there are."""

    def __init__(self) -> None:
        self.pulse = Pulse()
        """Where this process is, for the others."""
        self.dealt_to: range | None = None
        """The processes that have a share of the rows; all, if None."""

    @property
    def leads(self) -> bool:
        """Whether this process writes, prints and logs for all."""
        return self.rank == 0

    def share_of(self, rank: int, count: int) -> slice:
        """The rows of `count` that are `rank`'s: contiguous, in order, sizes that differ by one at most."""
        ranks = self.dealt_to or range(self.size)
        if rank not in ranks:
            return slice(count, count)
        each, more = divmod(count, len(ranks))
        number = rank - ranks.start
        start = number * each + min(number, more)
        return slice(start, start + each + (number < more))

    def share(self, count: int) -> slice:
        """The rows of `count` that are this process's own; none if there are fewer rows than processes."""
        return self.share_of(self.rank, count)

    def computed(self, count: int) -> slice:
        """The rows that this process computes: its share, or the last row where it has none, so that there is always a
        result whose shape is known; `gather` drops it."""
        own = self.share(count)
        return own if own.stop > own.start or not count else slice(count - 1, count)

    def beating(self, parts: Iterable[Part]) -> Iterator[Part]:
        """The same parts of long work, each begun with a sign of life: a process that works for long between two
        exchanges must not be taken for one that hangs."""
        for part in parts:
            self.pulse.beat()
            yield part

    def gather(self, own: Tensor, count: int, dim: int = 0) -> Tensor:
        """All `count` rows in order, from each process's result for `computed(count)`; `dim` is the rows' axis."""
        return self.gather_all([(own, dim)], count)[0]

    def gather_all(self, own: Sequence[tuple[Tensor, int]], count: int) -> list[Tensor]:
        """The same for several tensors with their axes, in one exchange."""
        return [tensor for tensor, _ in own]

    def gather_ragged(self, own: Sequence[Tensor]) -> list[Tensor]:
        """The rows of every process one after another, however many each has; all of `own` have the same number."""
        return list(own)

    def sum_in_order(self, parts: Rows, columns: int) -> list[float]:
        """Sums in float64 over the parts of all processes, added in the order of processes and parts."""
        return added(parts, columns)

    def reduce_gradients(
        self, gradients: Sequence[Tensor | None], zeros: Callable[[int], Tensor]
    ) -> list[Tensor | None]:
        """The sum of every gradient over the processes, the same bits on each; None where none has one. `zeros` makes
        the gradient of a number for a process that has none."""
        return list(gradients)

    def any_of(self, flag: bool) -> bool:
        """Whether any process says so."""
        return flag

    def broadcast_bytes(self, own: Tensor, source: int) -> Tensor:
        """The bytes (uint8) that process `source` gives, on the host of every process."""
        return own

    def part(self, ranks: Sequence[int]) -> World | None:
        """The world of some of the processes, for one of them; None for the others. All must call it."""
        return self if self.rank in ranks else None

    def dealt(self, ranks: range) -> World:
        """The same processes, of which those of `ranks` alone have a share of the rows; all get everything."""
        return self

    def gather_numbers(self, own: Mapping[str, float]) -> list[dict[str, float]]:
        """Every process's numbers, by rank; all give the same names."""
        return [dict(own)]

    def gather_texts(self, own: str) -> list[str]:
        """Every process's text, by rank."""
        return [own]

    def waiting(self, name: str) -> AbstractContextManager[None]:
        """Around every exchange: others see where this process waits, and that one is lost is an error of its own."""
        return nullcontext()

    def barrier(self, name: str) -> None:
        """Wait until every process is here; `name` says where that is."""

    def agree(self, name: str, value: str) -> None:
        """Require that every process has the same `value`; a difference is an error on all of them, not a hang."""


def added(parts: Rows, columns: int) -> list[float]:
    """The columns' sums, added row by row."""
    totals = [0.0] * columns
    for row in parts:
        for column, value in enumerate(row):
            totals[column] += value
    return totals


SINGLE = World()
"""A world of one."""

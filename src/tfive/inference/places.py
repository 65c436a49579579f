"""Where in a text thoughts stand: after given tokens, every so many, after a text or a pattern, where prediction is
uncertain, or where the gate opens."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from torch import Tensor

from tfive.errors import UserError

PATTERN_REACH = 64
"""Tokens before a place that a pattern is looked for in."""
Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Places:
    """One way to choose places; all None: after every H-th token."""

    positions: Sequence[int] | None = None
    """After these tokens, counted from 0."""
    every: int | None = None
    """After every token whose number is a multiple of this one."""
    after: str | Sequence[str] | None = None
    """After each occurrence of this text, or of these."""
    pattern: str | None = None
    """After each match of this regular expression."""
    entropy_above: float | None = None
    """Where the plain prediction is more uncertain than this, in nats, and no earlier thought still serves."""
    gate_above: float | None = None
    """Every H-th token is thought about, and the thoughts are kept that the gate trusts more than this on average."""

    def __post_init__(self) -> None:
        given = [field.name for field in fields(self) if getattr(self, field.name) is not None]
        if len(given) > 1:
            raise UserError(f"predict: {' and '.join(given)} given; choose places in one way")
        if self.every is not None and self.every < 1:
            raise UserError(f"every = {self.every}: at least 1 is needed")
        if self.gate_above is not None and not 0 <= self.gate_above < 1:
            raise UserError(f"gate_above = {self.gate_above}: give a trust from 0 to below 1")

    def chosen(self, ids: Sequence[int], horizon: int, decode: Decode) -> list[int]:
        """The places in a text, except those that only its predictions decide."""
        last = len(ids) - 1
        if self.positions is not None:
            return _checked(self.positions, len(ids))
        if self.after is None and self.pattern is None:
            every = horizon if self.every is None else self.every
            return list(range(every - 1, last, every))
        ending = self._ending()
        found = [
            at for at in range(last) if ending.search(decode(ids[max(0, at + 1 - PATTERN_REACH) : at + 1])) is not None
        ]
        if not found:
            what = f"after = {self.after!r}" if self.pattern is None else f"pattern = {self.pattern!r}"
            raise UserError(f"{what}: no token of this text ends there; correct it, or choose places in another way")
        return found

    def _ending(self) -> re.Pattern[str]:
        """What the text before a place ends with."""
        if self.pattern is None:
            wanted = [self.after] if isinstance(self.after, str) else list(self.after or ())
            return re.compile(rf"(?:{'|'.join(map(re.escape, wanted))})\Z")
        try:
            return re.compile(rf"(?:{self.pattern})\Z")
        except re.error as error:
            raise UserError(f"pattern = {self.pattern!r}: not a regular expression ({error}); correct it") from error


def _checked(positions: Sequence[int], tokens: int) -> list[int]:
    chosen = sorted(set(positions))
    if chosen and not 0 <= chosen[0] <= chosen[-1] < tokens - 1:
        raise UserError(
            f"positions {chosen[0]} … {chosen[-1]}: thoughts of this text stand after tokens 0 … {tokens - 2}"
        )
    return chosen


def uncertain_places(entropy: Tensor, above: float, horizon: int) -> list[int]:
    """Positions whose prediction is more uncertain than that, left to right, at least H apart."""
    chosen: list[int] = []
    for position in (entropy > above).nonzero().flatten().tolist():
        if not chosen or position - chosen[-1] >= horizon:
            chosen.append(position)
    return chosen

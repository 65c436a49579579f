"""What is asked of a model that writes with thoughts, and what becomes of it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tfive.tree.settings import SamplingSettings


@dataclass(frozen=True)
class When:
    """When a text that is being written is thought about."""

    every: int = 0
    """At its beginning and after so many new tokens; 0: never."""
    entropy_above: float | None = None
    """Instead: wherever the plain prediction is more uncertain than this, in nats, and no earlier thought serves."""

    @property
    def ever(self) -> bool:
        """Whether there are thoughts at all."""
        return self.every > 0 or self.entropy_above is not None


NEVER = When()


@dataclass(frozen=True)
class Order:
    """One text to write."""

    ids: tuple[int, ...]
    """The prompt."""
    max_new_tokens: int
    item: int = 0
    sample: int = 0
    """Which random numbers it gets."""

    @property
    def width(self) -> int:
        """The most tokens it will have."""
        return len(self.ids) + self.max_new_tokens


@dataclass(frozen=True)
class Written:
    """What became of an order."""

    ids: list[int]
    """New tokens, one that ends the text included."""
    log_probs: Tensor
    """`[tokens, 4]`: log-probability without a thought, with it (NaN where none serves), the gate, the mixture's."""
    thoughts: list[tuple[int, list[int], bool]]
    """Token it stands after, its tokens, whether it closed itself."""
    ended: str
    """`end` (the model ended the text), `stop` (`stopped` said so) or `length`."""


@dataclass(frozen=True)
class Manner:
    """How texts are written: by which laws, when they are thought about, what ends them."""

    law: SamplingSettings | None
    """Of text tokens; None takes the likeliest."""
    thought_law: SamplingSettings
    when: When
    ends: tuple[int, ...]
    seed: int = 0

"""Requests to a model that writes with thoughts, and their completions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from pydantic import ValidationError
from torch import Tensor

from tfive.errors import UserError
from tfive.tree.settings import SamplingSettings


@dataclass(frozen=True)
class When:
    """When a text that is being written is thought about."""

    every: int = 0
    """Think at its beginning and after each stride of this many new tokens; 0: never."""
    entropy_above: float | None = None
    """Instead: wherever the plain prediction is more uncertain than this, in nats, and no earlier thought serves."""
    at_answer: Literal["", "own", "other", "empty"] = ""
    """Instead: once, at its beginning, right before the answer; that thought serves all that is written. It is drawn
    (`own`), or a control that the requests bring: another request's, or nothing between the delimiters."""

    @property
    def ever(self) -> bool:
        """Whether there are thoughts at all."""
        return self.every > 0 or self.entropy_above is not None or bool(self.at_answer)


NEVER = When()


@dataclass(frozen=True)
class TokenRequest:
    """One text to write, in tokens."""

    ids: tuple[int, ...]
    """The prompt."""
    max_new_tokens: int
    """The most tokens to write after it."""
    item: int = 0
    sample: int = 0
    """Item and sample number select the random numbers it is written with."""
    thought: tuple[int, ...] | None = None
    """Its first thought, in place of one that is drawn; () is the empty one. A close at its end counts as sampled."""

    @property
    def width(self) -> int:
        """The most tokens it will have."""
        return len(self.ids) + self.max_new_tokens


@dataclass(frozen=True)
class Completion:
    """What was written for a request."""

    ids: list[int]
    """New tokens, one that ends the text included."""
    log_probs: Tensor
    """`[tokens, 4]`: log-probability without a thought, with it (NaN where none serves), the gate, the mixture's."""
    thoughts: list[tuple[int, list[int], bool]]
    """Token it stands after, its tokens, whether it closed itself."""
    finish_reason: str
    """Why the text ended: `end` (the model ended it), `stop` (a stop string) or `length`."""


@dataclass(frozen=True)
class WritingMode:
    """How texts are written: by which laws, when they are thought about, what ends them."""

    law: SamplingSettings | None
    """Sampling law of text tokens; None takes the most likely."""
    thought_law: SamplingSettings
    """Sampling law of thought tokens."""
    when: When
    ends: tuple[int, ...]
    """Tokens that end a text."""
    seed: int = 0


def text_law(temperature: float, top_k: int, top_p: float) -> SamplingSettings | None:
    """The law of text tokens; None is the greedy one."""
    if not 0 <= temperature < math.inf:
        raise UserError(f"temperature = {temperature}: give 0 (always the most likely token) or more")
    try:
        return SamplingSettings(temperature=temperature, top_k=top_k, top_p=top_p) if temperature else None
    except ValidationError as error:
        wrong = error.errors()[0]
        raise UserError(f"{wrong['loc'][0]} = {wrong['input']}: {wrong['msg'].lower()}") from error

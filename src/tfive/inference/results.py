"""What a `ThoughtModel` returns: thoughts, and the log-probabilities of tokens with and without them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tfive.inference.display import coloured, summary


@dataclass(frozen=True)
class Thought:
    """One hidden thought."""

    position: int
    """The token it stands after, counted from 0 in prompt and text together."""
    text: str
    """What it says, without its delimiters."""
    ids: tuple[int, ...]
    """The sampled tokens, a sampled close included."""
    closed: bool
    """Whether it ended itself by sampling the close."""


@dataclass(frozen=True)
class TokenScores:
    """Natural log-probabilities of tokens, and the gate; tensors `[n]` on the CPU, one entry per predicted token."""

    plain: Tensor
    """Without a thought."""
    thoughtful: Tensor
    """With the newest thought that serves the token; NaN where none does."""
    gate: Tensor
    """β_g, how far the thought is trusted; 0 where none serves."""
    mixed: Tensor
    """The model's prediction: log(β_g·p_thoughtful + (1−β_g)·p_plain)."""

    @property
    def gains(self) -> Tensor:
        """What the mixed prediction gains on the plain one, in nats; NaN where no thought serves."""
        return (self.mixed - self.plain).where(self.served, self.plain.new_tensor(float("nan")))

    @property
    def served(self) -> Tensor:
        """bool; which tokens a thought serves."""
        return ~self.thoughtful.isnan()


@dataclass(frozen=True)
class TextScores(TokenScores):
    """How well a text is predicted: entry i of every tensor is about token i + 1."""

    entropy: Tensor
    """Entropy of the plain prediction."""
    thoughts: tuple[Thought, ...]


@dataclass(frozen=True)
class Prediction(TextScores):
    """How well a text is predicted, with its tokens."""

    ids: tuple[int, ...]
    tokens: tuple[str, ...]
    """Each token's own text."""

    @property
    def mixed_gain(self) -> float:
        """Mean improvement over predicting without thoughts, in nats per token."""
        return float((self.mixed - self.plain).mean())

    def __repr__(self) -> str:
        return f"Prediction({len(self.ids)} tokens; {summary(self.gains, len(self.thoughts))})"

    def _repr_html_(self) -> str:
        """The text as a notebook shows it: tokens coloured by their gains, thoughts where they were had."""
        unpredicted = torch.full_like(self.gains[:1], torch.nan)
        thoughts = {thought.position: thought.text for thought in self.thoughts}
        note = summary(self.gains, len(self.thoughts))
        return coloured(self.tokens, torch.cat([unpredicted, self.gains]), thoughts, note)


@dataclass(frozen=True)
class Generation(TokenScores):
    """A written text: entry i of every tensor is about its token i."""

    text: str
    """What was written after the prompt; with `show`, thoughts stand in it between ⟨ and ⟩."""
    ids: tuple[int, ...]
    tokens: tuple[str, ...]
    """Each token's own text."""
    thoughts: tuple[Thought, ...]
    finish_reason: str
    """Why the text ended: `end` (the model ended it), `stop` (a stop string) or `length`."""
    prompt: int
    """Tokens of the prompt."""

    def __repr__(self) -> str:
        return f"Generation({self.text!r}, {len(self.thoughts)} thoughts, {self.finish_reason})"

    def _repr_html_(self) -> str:
        """The written text as a notebook shows it: tokens coloured by their gains, thoughts where they were had."""
        thoughts = {thought.position - self.prompt: thought.text for thought in self.thoughts}
        return coloured(self.tokens, self.gains, thoughts, summary(self.gains, len(self.thoughts)))

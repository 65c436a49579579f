"""Tokens that were written, as text: where a stop string ends them, and with their thoughts shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tfive.inference.requests import Completion
from tfive.inference.results import Thought

Decode = Callable[[Sequence[int]], str]


def stop_finder(decode: Decode, stops: tuple[str, ...]) -> Callable[[int, list[int], int], int | None]:
    """A function that says after how many tokens the first of `stops` has been written; it looks only at the end of a
    text."""
    reach = max((len(stop.encode()) for stop in stops), default=0)

    def found(ids: list[int]) -> bool:
        text = decode(ids)
        return any(stop in text for stop in stops)

    def stopped(_: int, ids: list[int], known: int) -> int | None:
        if not stops or not found(ids[max(0, known - reach) :]):
            return None
        return next((count for count in range(known + 1, len(ids) + 1) if found(ids[:count])), None)

    return stopped


def completed_text(decode: Decode, written: Completion, stops: tuple[str, ...]) -> str:
    """The written text, without what ended it."""
    text = decode(written.ids[:-1] if written.finish_reason == "end" else written.ids)
    if written.finish_reason != "stop":
        return text
    return text[: min(at for stop in stops if (at := text.find(stop)) >= 0)]


def with_thoughts(decode: Decode, text: str, ids: Sequence[int], thoughts: Sequence[Thought], prompt: int) -> str:
    """The text with every thought between ⟨ and ⟩ where it was had; `prompt` tokens stand before it."""
    parts, done = [], 0
    for thought in thoughts:
        upto = min(len(decode(ids[: thought.position - prompt + 1])), len(text))
        parts += [text[done:upto], f"⟨{thought.text}⟩"]
        done = upto
    return "".join([*parts, text[done:]])

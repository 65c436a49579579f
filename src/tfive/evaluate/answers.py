"""From an output to a verdict: what the answer is, its normal form, whether it is the gold one, and every step of that.

Exact match after fixed normalisation is the primary score, as in the paper; equivalence by math-verify stands beside it
when a verifier is given.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from tfive.evaluate.normalise import normalised
from tfive.evaluate.tasks import LETTERS, Item, Task

Verifier = Callable[[str, str], bool | None]
"""Whether a gold answer and an answer are equivalent; None when that could not be decided."""


@dataclass(frozen=True)
class Verdict:
    """The judgement of one output, with the steps that led to it."""

    correct: bool
    extracted: str | None
    normalised: str | None
    gold: str
    equivalent: bool | None
    steps: tuple[str, ...]


def judge(task: Task, item: Item, output: str, *, verifier: Verifier | None = None) -> Verdict:
    """The verdict on an output of the item. `equivalent` is None without a verifier, and for options."""
    if task.kind == "choice":
        return _judge_choice(item, output)
    numbers = re.findall(r"\\boxed\{([^{}]*)\}", output) or re.findall(r"-?\d[\d,]*\.?\d*", output)
    found = numbers[-1] if numbers else None
    if found is None:
        return Verdict(False, None, None, item.answer, None, ("no answer found",))
    normal, gold = normalised(found), normalised(item.answer)
    return Verdict(normal == gold, found, normal, item.answer, None, (f"{normal} against {gold}",))


def _judge_choice(item: Item, output: str) -> Verdict:
    letters = re.findall(rf"answer is \(?([{LETTERS[: len(item.choices)]}])\b", output)
    found = letters[-1] if letters else None
    return Verdict(found == item.answer, found, found, item.answer, None, (f"{found} against {item.answer}",))

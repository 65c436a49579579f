"""Benchmarks at the answer: their questions where the last problem of a sheet stands, and how what was written is read.

GSM8K and MATH-500 are asked behind the two examples of a sheet; CommonsenseQA has its options below the question and
behind two examples in that form, the first with a reason where a thought stands. Nothing of a working is in the text.
An answer is one line: a number at its beginning (GSM8K), a formula that is all of it and is compared in the normal form
that `tfive eval` compares (MATH-500), or a letter at its beginning (CommonsenseQA).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfive.errors import UserError
from tfive.evaluate.answers import extract
from tfive.evaluate.normalise import normalised
from tfive.evaluate.prompts import demonstrations, lettered
from tfive.evaluate.suite import BARE_TOKENS, judged
from tfive.evaluate.tasks import LETTERS, TASKS, load_items
from tfive.evaluate.tasks import Item as Asked
from tfive.text.sheets import ANSWER, CLOSE, END, HEADER, OPEN

GSM8K, MATH, CHOICE = "gsm8k", "math500", "csqa"
FRESH = "test-math_train"
"""No benchmark, but asked like one: MATH's problems that no run sees, on sheets (`render.py --sources`)."""
BENCHMARKS = (
    "a benchmark's questions (gsm8k.jsonl.gz, math500.jsonl.gz or csqa.jsonl.gz), or test-math_train.jsonl.gz of "
    "render.py; may be repeated"
)
"""What can be asked, in an option's help."""
NUMBER = re.compile(r"\s*\$?(-?\d[\d,]*(?:\.\d+)?)")
LETTER = re.compile(r"[\s(*]*([A-E])(?![\w'’])")


@dataclass(frozen=True)
class Item:
    """One answer that is asked for: what stands before it, and what should follow."""

    prompt: tuple[int, ...]
    problem: str
    missing: str
    working: tuple[int, ...]
    answer: str
    named: str = ""
    """What a thought that comes to the answer says, where that is not the answer itself."""
    options: int = 0
    """How many answers there are to choose from, 0 where that is open."""


@dataclass(frozen=True)
class Form:
    """What answers look like."""

    says: Callable[[str], str | None]
    """The answer that a text gives in its first line, alike for all ways to write it; None where it gives none."""
    longest: int
    """Most tokens of an answer and the end of its line."""
    begins: str = "begins_with_a_number"
    named: str = "right_number_in_thought"
    """What the shares of lines with an answer, and of thoughts that say the right one, are called in a result."""

    def right(self, written: str, answer: str) -> bool | None:
        """Whether the first line of what was written gives the answer; None where it gives none."""
        said = self.says(written)
        return None if said is None else said == self.says(answer)

    def in_thought(self, item: Item, thought: str) -> bool:
        """Whether a thought says the right answer."""
        wanted = item.named or item.answer
        if NUMBER.fullmatch(wanted):
            return re.search(rf"(?<![\d.]){re.escape(wanted)}(?!\d)", thought.replace(",", "")) is not None
        return re.search(rf"(?<!\w){re.escape(wanted)}(?!\w)", thought, re.IGNORECASE) is not None


def number(text: str) -> str | None:
    """The number that the first line begins with."""
    found = NUMBER.match(text.split("\n")[0])
    return None if found is None else str(float(found[1].replace(",", "")) + 0.0)  # no −0


def formula(text: str) -> str | None:
    """The first line in the normal form of a mathematical answer."""
    found = extract(judged(TASKS[MATH], text.split("\n")[0], bare=True))
    return None if found is None else normalised(found.text) or None


def letter(text: str) -> str | None:
    """The letter that the first line begins with."""
    found = LETTER.match(text.split("\n")[0])
    return None if found is None else found[1]


NUMBERS = Form(number, 8)
"""Answers of the sheets and of GSM8K: five digits, a sign and the end of the line."""
FORMS = {
    GSM8K: NUMBERS,
    FRESH: NUMBERS,
    MATH: Form(formula, BARE_TOKENS, "begins_with_a_formula", "right_formula_in_thought"),
    CHOICE: Form(letter, 4, "begins_with_a_letter", "right_option_in_thought"),
}


def benchmark_name(path: Path) -> str:
    """Which benchmark a file is of, by its name."""
    name = path.name.partition(".")[0]
    if name not in FORMS:
        known = ", ".join(f"{one}.jsonl.gz" for one in FORMS)
        raise UserError(f"--benchmark {path}: not one that can be asked here, by its name; give {known}")
    return name


def benchmark_rows(path: Path) -> tuple[Asked, ...]:
    """The questions of a benchmark's file, in their order; a few of them will do. Sheets are read elsewhere."""
    if benchmark_name(path) == FRESH:
        if not path.is_file():
            raise UserError(f"{path} is missing; render.py writes it with --sources gsm8k_train math_train")
        return ()
    task = TASKS[benchmark_name(path)].model_copy(update={"count": None, "file": path.name})
    if not path.is_file():
        raise UserError(f"{path} is missing; give the file of {task.title}'s questions")
    found = load_items(task, path.parent, frozen=False).items
    if not found:
        raise UserError(f"{path}: no question; give rows with question and answer")
    form = FORMS[task.name]
    for place, one in enumerate(found, 1):
        if form.says(one.answer) is None:
            raise UserError(f"{path}: answer {one.answer!r} of question {place} is none of {task.title}'s")
    return found


def different(paths: Sequence[Path]) -> dict[str, Path]:
    """The files by the benchmarks that they are of, no two of the same."""
    found = {benchmark_name(path): path for path in paths}
    if len(found) < len(paths):
        raise UserError(f"--benchmark: {len(paths)} files of {len(found)} benchmarks; give one of each")
    return found


def benchmark_items(path: Path, tokenizer: Any) -> list[Item]:
    """The questions of a benchmark, each as the only problem of a sheet."""
    name = benchmark_name(path)
    header = options_header() if name == CHOICE else HEADER
    found = []
    for one in benchmark_rows(path):
        question = asked(one)
        prompt = tuple(tokenizer.encode(f"{header}{question}{ANSWER}", add_special_tokens=False))
        right = one.choices[LETTERS.index(one.answer)] if one.choices else ""
        answer = one.answer.replace(",", "") if name == GSM8K else one.answer
        found.append(Item(prompt, question, "all", (), answer, right, len(one.choices)))
    return found


def asked(one: Asked) -> str:
    """A question in one line, its options below it."""
    lines = [f"Question: {' '.join(one.question.split())}", *([lettered(one)] if one.choices else [])]
    return "\n".join(lines)


def options_header() -> str:
    """Two questions of CommonsenseQA's training split at the top, the first with a reason where a thought stands."""
    worked, plain, *_ = demonstrations(CHOICE)
    reason = f"{OPEN} {worked.solution.rstrip('.')}{END}{CLOSE}"
    first = f"{asked(worked.item)}{ANSWER}{reason}{worked.item.answer}"
    return f"{first}\n\n{asked(plain.item)}{ANSWER}{plain.item.answer}\n\n"


def chance(items: Sequence[Item]) -> dict[str, float]:
    """The share that blind choice gets right, where there are options."""
    shares = [1 / item.options for item in items if item.options]
    return {"chance": round(sum(shares) / len(items), 4)} if shares else {}

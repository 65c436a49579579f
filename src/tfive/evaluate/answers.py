"""Grading an output: extract its answer, normalise it, compare it with the gold answer, and record every step.

Exact match after fixed normalisation is the primary score, as in the paper; equivalence by math-verify stands beside it
when a verifier is given. Extraction never looks at the gold answer. Its rules, the first that finds something:

- mathematics: the last \\boxed{…}; what follows the last `####`; what follows the last “answer is” or “answer:”; the
  last number or fraction.
- a few words: the same three places, the last of them to the end of its line; the first line.
- options: the same three places, read as a letter or the text of one option; a letter alone on the first or last line;
  the one option whose text the last line holds.

Only what comes after the last `</think>` counts when there is one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from tfive.evaluate.equivalence import Verifier
from tfive.evaluate.normalise import trace
from tfive.evaluate.tasks import LETTERS, Item, Task

LONGEST = 1000
"""Characters of the longest answer; what an output writes beyond them is not part of it."""

_ANSWER = re.compile(
    r"(?i)\banswers?(?:\s+(?:is|are|must be|should be|will be|would be)\b|\s*(?:\*\*)?\s*[:=])"
    r"(?:\s*(?:[:=]|\*\*|simply|just|thus|therefore|equal to|probably|most likely)(?=\W|\s|$))*"
)
_MATHEMATICS = re.compile(r"\$\$(.+?)\$\$|(?<!\\)\$(?=\S)(.+?)(?<=[^\s\\])\$(?!\d)|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.S)
"""Mathematics between its marks. As in Markdown, dollars of money ($5 + $3) do not make a pair."""
_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.S)
_SENTENCE_END = re.compile(r"(?<!\\)[.!?](?=\s|$)|[.](?=\*\*|\"|”)")
_LAST_NUMBER = re.compile(
    r"(?:(?<![\w)\]}.])-\s?)?(?:\\[dtc]?frac\s*\{[^{}]*\}\s*\{[^{}]*\}|\$?\d[\d,]*(?:\.\d+)?(?:/\d+(?![\d/]))?|\$?\.\d+)"
)


@dataclass(frozen=True)
class Verdict:
    """The grade of one output, with the steps that led to it."""

    correct: bool
    """Whether the answer is the gold one by exact match after normalisation."""
    extracted: str | None
    """The answer as the output wrote it, None when none was found."""
    normalised: str | None
    """What was compared."""
    gold: str
    """The gold answer as the benchmark writes it."""
    equivalent: bool | None
    """Whether math-verify calls it equal; None when it was not asked or could not decide."""
    steps: tuple[str, ...]
    """The steps of extraction and comparison, one line each."""


@dataclass(frozen=True)
class Extraction:
    """The answer found in an output and the rule that found it."""

    text: str
    rule: str


def grade(task: Task, item: Item, output: str, *, verifier: Verifier | None = None) -> Verdict:
    """The verdict on an output of the item. `equivalent` is None without a verifier, and for options."""
    if task.kind == "choice":
        return _grade_choice(item, output)
    if task.kind == "text":
        return _grade_words(item, output)
    extraction = extract(output)
    if extraction is None:
        return Verdict(False, None, None, item.answer, None, ("no answer found",))
    answer_trace, gold_trace = trace(extraction.text), trace(item.answer)
    normal, gold = answer_trace[-1][1], gold_trace[-1][1]
    steps = [f"{extraction.rule}: {extraction.text}"]
    steps += [f"answer, {name}: {text}" for name, text in answer_trace[1:]]
    steps += [f"gold, {name}: {text}" for name, text in gold_trace[1:]]
    correct = normal == gold and bool(normal)
    steps.append(f"exact match: {normal} {'=' if correct else '≠'} {gold}")
    equivalent: bool | None = None
    if verifier is not None and correct:
        equivalent = True
        steps.append("equivalence: the normal forms are the same text")
    elif verifier is not None:
        checked = verifier(gold, normal)
        equivalent = checked.equal
        steps.append(f"equivalence: {checked.reason}")
    return Verdict(correct, extraction.text, normal, item.answer, equivalent, tuple(steps))


def extract(output: str) -> Extraction | None:
    """The mathematical answer an output gives, None when it gives none."""
    said = output.rsplit("</think>", 1)[-1]
    for rule, search in _RULES:
        if (text := search(said)) is not None:
            return Extraction(text[:LONGEST], rule)
    numbers = _LAST_NUMBER.findall(said)
    return Extraction(numbers[-1].replace(" ", "").rstrip(",")[:LONGEST], "last number") if numbers else None


def boxed(text: str) -> str | None:
    """Content of the last \\boxed or \\fbox whose braces close; of boxes in one another the innermost."""
    opened: list[tuple[bool, int]] = []
    best: tuple[int, int] | None = None
    for token in _BRACES.finditer(text):
        if token[0] == "}":
            is_box, start = opened.pop() if opened else (False, 0)
            if is_box and (best is None or start > best[0]):
                best = start, token.start()
        elif token[0].endswith("{") and token[0] != r"\{":
            opened.append((token[0] != "{", token.end()))
    return (text[best[0] : best[1]].strip() or None) if best else None


def _after_marks(text: str) -> str | None:
    found = re.findall(r"####\s*(\S[^\n]*)", text)
    return found[-1].strip() if found else None


def _after_phrase(text: str) -> str | None:
    """What follows the last “answer is”, up to the end of its sentence; the mathematics in it when there is some."""
    for found in reversed(list(_ANSWER.finditer(text))):
        rest = text[found.end() :].strip().split("\n\n")[0]
        line = rest.split("\n")[0].strip()
        mathematics = _MATHEMATICS.search(rest if line in {"", "\\[", "$$"} else line)
        if mathematics and not re.search(r"\d", line[: mathematics.start()]):
            return next(part for part in mathematics.groups() if part is not None).strip()
        ended = _SENTENCE_END.search(line)
        said = (line[: ended.start()] if ended else line).strip(' *:"“”')
        if said:
            return said
    return None


def _line_after_phrase(text: str) -> str | None:
    """What follows the last “answer is” on its line: the text of an option may be several sentences."""
    lines = [text[found.end() :].strip().split("\n")[0].strip() for found in _ANSWER.finditer(text)]
    return next((line for line in reversed(lines) if line), None)


_RULES: tuple[tuple[str, Callable[[str], str | None]], ...] = (
    ("last \\boxed", boxed),
    ("after ####", _after_marks),
    ("after “answer is”", _after_phrase),
)
_CHOICE_RULES = (*_RULES[:2], ("after “answer is”", _line_after_phrase))


def _grade_words(item: Item, output: str) -> Verdict:
    """The words of the answer against those of the gold one, without case, punctuation and a leading article."""
    said = output.rsplit("</think>", 1)[-1]
    found = next(((text, rule) for rule, search in _CHOICE_RULES if (text := search(said))), None)
    first = next((line.strip() for line in said.splitlines() if line.strip()), None)
    if found is None and first is None:
        return Verdict(False, None, None, item.answer, None, ("no answer found",))
    text, rule = found or (str(first), "first line")
    text = text[:LONGEST]
    words, gold = _plain(text), _plain(item.answer)
    correct = bool(words) and words == gold
    steps = (f"{rule}: {text}", f"words: {words} {'=' if correct else '≠'} {gold}")
    return Verdict(correct, text, words, item.answer, None, steps)


def _grade_choice(item: Item, output: str) -> Verdict:
    found = extract_choice(output, item.choices)
    if found is None:
        return Verdict(False, None, None, item.answer, None, ("no option found",))
    text, letter, rule = found
    correct = letter == item.answer
    steps = (f"{rule}: {text}", f"option {letter} {'=' if correct else '≠'} {item.answer}")
    return Verdict(correct, text, letter, item.answer, None, steps)


def extract_choice(output: str, choices: tuple[str, ...]) -> tuple[str, str, str] | None:
    """What an output says, the letter of the option it chooses, and the rule; None when it chooses none."""
    said = output.rsplit("</think>", 1)[-1]
    for rule, search in _CHOICE_RULES:
        text = (search(said) or "")[:LONGEST]
        letter = _choice_of(text, choices) if text else None
        if letter is not None:
            return text, letter, rule
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    for rule, line in (("first line", lines[0]), ("last line", lines[-1])) if lines else ():
        found = re.fullmatch(rf"[(*\s]*([{LETTERS[: len(choices)]}])[)*.:,\s]*(?:\s(.*))?", line)
        if found and (not found[2] or _plain(found[2]) == _plain(choices[LETTERS.index(found[1])])):
            return line, found[1], rule
    held = [n for n, choice in enumerate(choices) if _holds(lines[-1], choice)] if lines else []
    return (lines[-1], LETTERS[held[0]], "option text in the last line") if len(held) == 1 else None


def _choice_of(text: str, choices: tuple[str, ...]) -> str | None:
    """The letter of the option that `text` names: a letter alone, an option's text, or a letter before more."""
    bare = re.sub(r"\\text(?:bf|rm|it)?\s*\{([^{}]*)\}", r"\1", text).strip()
    letters = LETTERS[: len(choices)]
    alone = re.fullmatch(rf"(?i)[(\[*\"“$]*([{letters}])[)\]*\"”$.]*", bare)
    if alone:
        return alone[1].upper()
    for form in (str, str.strip, lambda option: option.strip(" .").casefold(), _plain):
        same = [n for n, choice in enumerate(choices) if form(choice) == form(bare)]
        if same:
            return LETTERS[same[0]] if len(same) == 1 else None
    plain = _plain(bare)
    begun = [n for n, choice in enumerate(choices) if _plain(choice) and f"{plain} ".startswith(f"{_plain(choice)} ")]
    longest = max((len(_plain(choices[n])) for n in begun), default=0)
    if longest > 1:
        best = [n for n in begun if len(_plain(choices[n])) == longest]
        return LETTERS[best[0]] if len(best) == 1 else None
    found = re.match(rf"[\s(\[*\"“$]*(?:(?:option|choice|letter)\s+)?[\s(\[*\"“$]*([{letters}])(?![\w'’])", bare)
    found = found or re.match(rf"(?i)[\s*\"“]*[(\[]\s*([{letters}])\s*[)\]]", bare)
    return found[1].upper() if found else None


def _plain(text: str) -> str:
    """The words of an option without case, punctuation and a leading article."""
    words = _words(text)
    return " ".join(words[1:] if len(words) > 1 and words[0] in {"the", "a", "an"} else words)


def _words(text: str) -> list[str]:
    return re.sub(r"[^\w\s]", " ", text).casefold().split()


def _holds(line: str, choice: str) -> bool:
    wanted = _plain(choice)
    return bool(wanted) and f" {wanted} " in f" {' '.join(_words(line))} "

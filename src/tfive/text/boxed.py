r"""Solutions in LaTeX whose result stands in \boxed{…}, as those of MATH: their steps, and the answer.

The last box holds the answer. Steps are sentences, cut outside of formulas; they end with the one that holds the box,
because what comes behind it could tell the answer, and the box around the answer goes. A solution that shows a box with
something else in it is left out: which of them is the answer is not told.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

UNBOXED = r"have no result in \boxed{…} in their solution"
SEVERAL = r"have different results in several \boxed{…}"
DRAWN = "hold code of a drawing"
DRAWING = re.compile(r"\[asy\]|\\includegraphics|\\begin\{(?:tikz)?picture\}")
"""Code of a drawing, which no thought should write."""
BOX = re.compile(r"\\boxed\s*(?=\{)")
FRAMES = re.compile(r"\\(?:boxed|fbox|framebox)(?![A-Za-z])")
"""Whatever draws a box, closed or not."""
BRACES = re.compile(r"\\.|[{}]", re.DOTALL)
THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:(?:,|\{,\})(?:\\!)?\d{3})+(?:\.\d+)?")
"""Numbers with commas, also as LaTeX has them: 12,345 and 12{,}345 and 12,\\!345."""
MARKS = re.compile(r"\\begin\{[^{}]*\}|\\end\{[^{}]*\}|\\.|\$\$|[$.?!{}]", re.DOTALL)
"""What opens and closes formulas and groups, and what may end a sentence."""
DISPLAYS = {"\\[": 1, "\\(": 1, "\\]": -1, "\\)": -1, "{": 1, "}": -1}
AFTER = re.compile(r"(?:''|[\")\]])*\s+(?=[A-Z$\\(\"`])")
"""What stands between a stop and the next sentence."""
AHEAD = re.compile(r"\s*(?=[A-Z])")
"""The same behind a displayed formula, which may do without a stop."""
SHORTENED = re.compile(r"(?:\b(?:Mr|Mrs|Ms|Dr|vs|cf)|\bi\.e|\be\.g)\Z")
"""Words whose full stop ends no sentence."""
LOOKED_BACK = 64
"""Characters before a mark in which a shortened word or a full stop is looked for."""
STOP = re.compile(r"\.\s*(\\\]|\\\)|\$\$?|\\end\{[^{}]*\})?\Z")
"""The full stop of a sentence, which may stand in the formula that ends it."""


def boxes(text: str) -> Iterator[tuple[int, int, str]]:
    """Where each closed box begins and ends, and what it holds, in the order in which they begin."""
    begun = {found.end(): found.start() for found in BOX.finditer(text)}
    opened, found = list[int](), list[tuple[int, int, str]]()
    for mark in BRACES.finditer(text) if begun else ():
        if mark[0] == "{":
            opened.append(mark.start())
        elif mark[0] == "}" and opened and (at := opened.pop()) in begun:
            found.append((begun[at], mark.end(), text[at + 1 : mark.start()]))
    yield from sorted(found)


def answer_of(box: str) -> str:
    """What a box holds, without space around it, a full stop and the commas of its thousands."""
    answer = " ".join(box.split()).rstrip(".")
    return re.sub(r"\{,\}|,|\\!", "", answer) if THOUSANDS.fullmatch(answer) else answer


def sentences(text: str) -> list[str]:
    """The sentences of a text with formulas, each in one line and without its full stop."""
    text = " ".join(text.split())
    cuts, depth, inline = [0], 0, False
    for mark in MARKS.finditer(text):
        sign, ahead = mark[0], None
        if sign in ("$", "$$"):
            inline = not inline
        elif sign.startswith(("\\begin", "\\end")):
            depth += 1 if sign.startswith("\\b") else -1
        else:
            depth += DISPLAYS.get(sign, 0)
        if depth or inline:
            continue
        before = text[max(cuts[-1], mark.end() - LOOKED_BACK) : mark.end()]
        if sign in ".?!":
            ahead = None if SHORTENED.search(before[:-1]) else AFTER.match(text, mark.end())
        elif sign in ("\\]", "$$") or sign.startswith("\\end"):
            ahead = AHEAD.match(text, mark.end())
        elif sign in ("$", "\\)") and STOP.search(before):
            ahead = AFTER.match(text, mark.end())
        if ahead:
            cuts.append(ahead.end())
    found = (text[start:end].strip() for start, end in zip(cuts, [*cuts[1:], len(text)]))
    return [STOP.sub(r"\1", one).rstrip(".") for one in found if one.strip(".")]


def worked(question: str, solution: str) -> tuple[tuple[str, ...], str] | str:
    """The steps of a solution and its answer; or what rows like it have or hold, by which it is left out."""
    if DRAWING.search(question) or DRAWING.search(solution):
        return DRAWN
    answers = [answer_of(inside) for _, _, inside in boxes(solution)]
    if not answers or not answers[-1]:
        return UNBOXED
    if set(answers) != {answers[-1]} or len(FRAMES.findall(solution)) > len(answers):
        return SEVERAL
    steps = sentences(solution)
    last = next((number for number, step in enumerate(steps) if BOX.search(step)), len(steps) - 1)
    return tuple(_bare(step) for step in steps[: last + 1]), answers[-1]


def _bare(step: str) -> str:
    """A step with what its boxes hold in their place."""
    for start, end, inside in reversed(list(boxes(step))):
        step = f"{step[:start]}{inside.strip()}{step[end:]}"
    return step

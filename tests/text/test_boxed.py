r"""Solutions whose result stands in \boxed{…}: which box, what it holds, and the steps before it."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tfive.text import boxed
from tfive.text.boxed import DRAWN, SEVERAL, UNBOXED, answer_of, boxes, sentences, worked


@pytest.mark.parametrize(
    ("text", "held"),
    [
        (r"so \boxed{12}.", ["12"]),
        (r"\boxed{\frac{1}{\sqrt{2}}}", [r"\frac{1}{\sqrt{2}}"]),
        (r"\boxed {\{1, 2\}} and \boxed{3}", [r"\{1, 2\}", "3"]),
        (r"\boxed{a \\{b}}", [r"a \\{b}"]),
        (r"never closed: \boxed{\frac{1}{2}", []),
        (r"\boxed 5", []),
        (r"\boxed{\text{in } \boxed{5}}", [r"\text{in } \boxed{5}", "5"]),
    ],
)
def test_a_box_ends_with_its_own_brace(text: str, held: list[str]) -> None:
    found = list(boxes(text))
    assert [inside for _, _, inside in found] == held
    assert all(text[start:].startswith(r"\boxed") and text[end - 1] == "}" for start, end, _ in found)


@pytest.mark.parametrize(
    ("box", "answer"),
    [
        ("12", "12"), (" -7 ", "-7"), ("12,345", "12345"), (r"12{,}345", "12345"), (r"1,\!296,\!540", "1296540"),
        ("42.", "42"), ("1,234.50", "1234.50"), ("2,16", "2,16"), ("1,2", "1,2"), (r"\frac{3}{4}", r"\frac{3}{4}"),
        ("x^2 +\n1", "x^2 + 1"), (r"\$1,000", r"\$1,000"),
    ],
)  # fmt: skip
def test_commas_of_thousands_go_and_nothing_else(box: str, answer: str) -> None:
    assert answer_of(box) == answer


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("One is 1.5. Two is 2!\nSo three.", ["One is 1.5", "Two is 2!", "So three"]),
        (r"We have $x = 1.$ Then $y = 2$.", [r"We have $x = 1$", "Then $y = 2$"]),
        (r"So \[x + 2 = 3.\]Hence \[x = 1,\]since it is.", [r"So \[x + 2 = 3\]", r"Hence \[x = 1,\]since it is"]),
        ("We get\n\\begin{align*}\na &= 1. \\\\\nB &= 2.\n\\end{align*}\nThus $a. B$ it is.",
         [r"We get \begin{align*} a &= 1. \\ B &= 2\end{align*}", "Thus $a. B$ it is"]),
        (r"He pays $\$3$, i.e. $300$ cents, to Mr. Hill. $5$ are left.",
         [r"He pays $\$3$, i.e. $300$ cents, to Mr. Hill", "$5$ are left"]),
        (r"In \text{this. That} order. \(x\) is next.", [r"In \text{this. That} order", r"\(x\) is next"]),
        ("...", []),
    ],
)  # fmt: skip
def test_sentences_end_outside_of_formulas(text: str, steps: list[str]) -> None:
    assert sentences(text) == steps


def test_steps_end_with_the_box_and_show_nothing_of_it() -> None:
    found = worked("How many?", r"There are $2 \cdot 3$. So \[n = \boxed{6}.\]The answer 6 is even. Check: 6.")
    assert found == ((r"There are $2 \cdot 3$", r"So \[n = 6\]"), "6")
    # A second way to the same result comes behind the box, too.
    assert worked("q", r"One way gives $\boxed{1,024}$. Another: $2^{10} = \boxed{1024}$.") == (
        ("One way gives $1,024$",), "1024",
    )  # fmt: skip
    assert worked("q", r"A fraction: $\boxed{\frac{1}{2}}$") == ((r"A fraction: $\frac{1}{2}$",), r"\frac{1}{2}")


@pytest.mark.parametrize(
    ("solution", "why"),
    [
        ("It is 5.", UNBOXED),
        (r"It is $\boxed{}$.", UNBOXED),
        (r"It is $\boxed{5$.", UNBOXED),
        (r"Either $\boxed{4}$ or $\boxed{-4}$.", SEVERAL),
        (r"A $\boxed 3$. B $\boxed{4}$", SEVERAL),
        (r"It is $\fbox{3}$. Or $\boxed{4}$", SEVERAL),
        (r"First $\boxed{3$ no. Then $y = \boxed{4}$", SEVERAL),
        ("[asy] draw((0,0)--(1,1)); [/asy] It is $\\boxed{5}$.", DRAWN),
    ],
)
def test_what_tells_no_result_is_left_out_with_a_reason(solution: str, why: str) -> None:
    assert worked("How many?", solution) == why
    assert worked("[asy] dot((0,0)); [/asy] How many?", r"It is $\boxed{5}$.") == DRAWN


class Counted:
    """A pattern that tells how often it was found, and the longest text that it was looked for in."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self.pattern, self.found, self.longest = pattern, 0, 0

    def finditer(self, text: str, *ends: int) -> Iterator[re.Match[str]]:
        for match in self.pattern.finditer(text, *ends):
            self.found += 1
            yield match

    def search(self, text: str) -> re.Match[str] | None:
        self.longest = max(self.longest, len(text))
        return self.pattern.search(text)


def test_hostile_solutions_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # Where every mark looks through all of the text again, some kilobytes take minutes.
    braces, shortened = Counted(boxed.BRACES), Counted(boxed.SHORTENED)
    monkeypatch.setattr(boxed, "BRACES", braces)
    monkeypatch.setattr(boxed, "SHORTENED", shortened)
    assert list(boxes(r"\boxed{" * 300)) == []
    assert len(list(boxes(r"\boxed{" * 300 + "}" * 300))) == 300
    assert braces.found == 600 + 900, "every backslash and brace once"
    for text in ("1.5 " * 1_000, "a. " * 1_000):
        assert len(sentences(text)) == 1
    assert 0 < shortened.longest <= boxed.LOOKED_BACK

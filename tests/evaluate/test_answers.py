"""Extraction, normalisation and verdicts on answers written for the purpose."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from written_answers import CHOSEN, DIFFERENT, EQUAL, EXTRACTED, GENEROUS, OPTIONS, SAME

from tfive.evaluate.answers import LONGEST, boxed, extract, extract_choice, grade
from tfive.evaluate.normalise import STEPS, normalised, trace
from tfive.evaluate.tasks import TASKS, Item

PIECES = [
    r"\frac{", "}", r"\text{", r"\boxed{", r"\left(", r"\right)", r"\sqrt", r"^\circ", r"\%", "$", "####", "1/2", "3,",
    "-4", ".5", "x=", r"\{", r"\}", "[", ")", "\\\\", "e10", "(B)", "answer is ", " ", "\n",
]  # fmt: skip
MATHS, CHOICE = TASKS["math500"], TASKS["csqa"]


def pairs(table: dict[str, list[tuple[str, str]]]) -> list[tuple[str, str]]:
    return [pair for listed in table.values() for pair in listed]


def test_the_tables_hold_a_few_hundred_answers() -> None:
    assert len(pairs(SAME)) + len(pairs(EQUAL)) + len(pairs(DIFFERENT)) + len(EXTRACTED) + len(CHOSEN) > 300


@pytest.mark.parametrize(("gold", "written"), pairs(SAME))
def test_ways_of_writing_one_answer_match(gold: str, written: str) -> None:
    assert normalised(written) == normalised(gold)


@pytest.mark.parametrize(("gold", "written"), [*pairs(EQUAL), *pairs(DIFFERENT), *pairs(GENEROUS)])
def test_exact_match_does_no_arithmetic_and_keeps_different_answers_apart(gold: str, written: str) -> None:
    assert normalised(written) != normalised(gold)


@pytest.mark.parametrize(
    "text", sorted({text for table in (SAME, EQUAL, DIFFERENT) for pair in pairs(table) for text in pair})
)
def test_a_normal_form_is_its_own_normal_form(text: str) -> None:
    assert normalised(normalised(text)) == normalised(text)


@pytest.mark.parametrize(("output", "answer"), EXTRACTED)
def test_extraction_of_mathematical_answers(output: str, answer: str | None) -> None:
    found = extract(output)
    assert (found.text if found else None) == answer


@pytest.mark.parametrize(("output", "letter"), CHOSEN)
def test_extraction_of_options(output: str, letter: str | None) -> None:
    found = extract_choice(output, OPTIONS)
    assert (found[1] if found else None) == letter


def test_options_that_only_differ_in_signs_or_case_are_told_apart() -> None:
    assert extract_choice("The answer is +1.", ("-1", "+1", "0")) == ("+1.", "B", "after “answer is”")
    assert extract_choice("The answer is rr", ("RR", "Rr", "rr"))[1] == "C"  # type: ignore[index]
    assert extract_choice("The answer is the same", ("the same", "The same")) is not None
    assert extract_choice("The answer is mortal", ("mortal", "divine", "mortal")) is None


def test_a_letter_that_is_also_an_option_means_the_letter() -> None:
    assert extract_choice("The answer is C.", ("C", "D", "A"))[1] == "C"  # type: ignore[index]


def test_a_verdict_tells_every_step() -> None:
    verdict = grade(MATHS, Item("q", "?", r"15\mbox{ cm}^2"), r"The area is \boxed{15\text{ cm}^2}.")
    assert verdict.correct
    assert verdict.extracted == r"15\text{ cm}^2"
    assert verdict.normalised == "15"
    assert verdict.equivalent is None
    assert verdict.steps[0] == r"last \boxed: 15\text{ cm}^2"
    assert "answer, no units in upright text: 15" in verdict.steps
    assert verdict.steps[-1] == "exact match: 15 = 15"


def test_a_wrong_and_a_missing_answer() -> None:
    item = Item("q", "?", "7")
    wrong = grade(MATHS, item, "The answer is 8.")
    assert (wrong.correct, wrong.extracted, wrong.steps[-1]) == (False, "8", "exact match: 8 ≠ 7")
    missing = grade(MATHS, item, "No idea.")
    assert (missing.correct, missing.extracted, missing.steps) == (False, None, ("no answer found",))


def test_extraction_does_not_look_at_the_gold_answer() -> None:
    output = "Maybe 7. The answer is 8."
    assert {grade(MATHS, Item("q", "?", gold), output).extracted for gold in ("7", "8", "x")} == {"8"}


def test_an_answer_that_normalises_to_nothing_is_not_correct() -> None:
    assert not grade(MATHS, Item("q", "?", "$"), r"\boxed{$}").correct


def test_a_choice_verdict() -> None:
    item = Item("q", "?", "B", OPTIONS)
    assert grade(CHOICE, item, "The answer is the library.").correct
    verdict = grade(CHOICE, item, "The answer is C.")
    assert (verdict.correct, verdict.normalised, verdict.equivalent) == (False, "C", None)
    assert verdict.steps == ("after “answer is”: C.", "option C ≠ B")
    assert grade(CHOICE, item, "Hm.").extracted is None


def test_trace_names_steps_of_the_chain_only() -> None:
    names = [name for name, _ in trace(r"x = \dfrac{1}{2}\%")]
    assert names[0] == "as written"
    assert set(names[1:]) <= {name for name, _ in STEPS}


@pytest.mark.parametrize(
    "piece", [r"\boxed{", "{", "}", "answer is ", "answer is $", r"\frac", "1/", "(((", "1,", r"\\", "-"]
)
def test_endless_outputs_are_read_in_one_pass(piece: str) -> None:
    # Backtracking or nested scans would take minutes here.
    verdict = grade(MATHS, Item("q", "?", "1"), piece * 20_000)
    assert verdict.extracted is None or len(verdict.extracted) <= LONGEST


def test_boxes_inside_sets_and_escaped_braces() -> None:
    assert boxed(r"\boxed{\{\frac{1}{2}\}} and \} more") == r"\{\frac{1}{2}\}"
    assert boxed(r"} \boxed{4} }") == "4"
    assert boxed(r"\boxed{4") is None


@given(st.text(max_size=80) | st.lists(st.sampled_from(PIECES), max_size=30).map("".join))
def test_any_output_gets_a_verdict(output: str) -> None:
    grade(MATHS, Item("q", "?", "1"), output)
    grade(CHOICE, Item("q", "?", "B", OPTIONS), output)
    assert all(isinstance(text, str) for _, text in trace(output))

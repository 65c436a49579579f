"""Extraction, normalisation and verdicts on answers written for the purpose."""

from __future__ import annotations

from collections.abc import Iterable

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


def listed(cases: Iterable[object]) -> str:
    """One case a line, for the message of a property that fails."""
    return "\n".join(repr(case) for case in cases)


def test_ways_of_writing_one_answer_match() -> None:
    apart = [(gold, written) for gold, written in pairs(SAME) if normalised(written) != normalised(gold)]
    assert not apart, f"one answer, two normal forms:\n{listed(apart)}"


def test_exact_match_does_no_arithmetic_and_keeps_different_answers_apart() -> None:
    different = [*pairs(EQUAL), *pairs(DIFFERENT), *pairs(GENEROUS)]
    matched = [(gold, written) for gold, written in different if normalised(written) == normalised(gold)]
    assert not matched, f"exact match takes these for one answer:\n{listed(matched)}"


def test_a_normal_form_is_its_own_normal_form() -> None:
    texts = {text for table in (SAME, EQUAL, DIFFERENT) for pair in pairs(table) for text in pair}
    moved = sorted(text for text in texts if normalised(normalised(text)) != normalised(text))
    assert not moved, f"normalising twice changes:\n{listed(moved)}"


def test_extraction_of_mathematical_answers() -> None:
    found = {output: None if (answer := extract(output)) is None else answer.text for output, _ in EXTRACTED}
    assert found == dict(EXTRACTED)


def test_extraction_of_options() -> None:
    found = {output: None if (chosen := extract_choice(output, OPTIONS)) is None else chosen[1] for output, _ in CHOSEN}
    assert found == dict(CHOSEN)


def letter(text: str, options: tuple[str, ...]) -> str:
    found = extract_choice(text, options)
    assert found is not None
    return found[1]


def test_options_that_only_differ_in_signs_or_case_are_told_apart() -> None:
    assert extract_choice("The answer is +1.", ("-1", "+1", "0")) == ("+1.", "B", "after “answer is”")
    assert letter("The answer is rr", ("RR", "Rr", "rr")) == "C"
    assert extract_choice("The answer is the same", ("the same", "The same")) is not None
    assert extract_choice("The answer is mortal", ("mortal", "divine", "mortal")) is None


def test_a_letter_that_is_also_an_option_means_the_letter() -> None:
    assert letter("The answer is C.", ("C", "D", "A")) == "C"


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


def test_endless_outputs_are_read_in_one_pass() -> None:
    # Backtracking or nested scans would take minutes here.
    for piece in (r"\boxed{", "{", "}", "answer is ", "answer is $", r"\frac", "1/", "(((", "1,", r"\\", "-"):
        verdict = grade(MATHS, Item("q", "?", "1"), piece * 20_000)
        assert verdict.extracted is None or len(verdict.extracted) <= LONGEST, piece


def test_boxes_inside_sets_and_escaped_braces() -> None:
    assert boxed(r"\boxed{\{\frac{1}{2}\}} and \} more") == r"\{\frac{1}{2}\}"
    assert boxed(r"} \boxed{4} }") == "4"
    assert boxed(r"\boxed{4") is None


@given(st.text(max_size=80) | st.lists(st.sampled_from(PIECES), max_size=30).map("".join))
def test_any_output_gets_a_verdict(output: str) -> None:
    grade(MATHS, Item("q", "?", "1"), output)
    grade(CHOICE, Item("q", "?", "B", OPTIONS), output)
    assert all(isinstance(text, str) for _, text in trace(output))

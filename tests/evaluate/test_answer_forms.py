"""Ways of writing an answer that follow a rule, as properties: every spelling of one value has one normal form, and
different values have different ones."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from written_answers import OPTIONS

from tfive.evaluate.answers import extract, extract_choice
from tfive.evaluate.normalise import normalised

COUNTS = st.integers(1, 10**9)
SIGNED = st.integers(-(10**9), 10**9)
DIGITS = st.integers(1, 9)


def alike(gold: str, *spellings: str) -> None:
    """Fails with the spellings whose normal form is not that of `gold`."""
    form = normalised(gold)
    others = {text: normalised(text) for text in spellings if normalised(text) != form}
    assert not others, f"{gold!r} has the normal form {form!r}, but {others}"
    assert normalised(form) == form


@given(COUNTS, st.integers(2, 10**6))
@example(270, 7)
def test_spellings_of_a_fraction(top: int, bottom: int) -> None:
    gold = rf"\frac{{{top}}}{{{bottom}}}"
    alike(
        gold,
        rf"\dfrac{{{top}}}{{{bottom}}}",
        rf"\tfrac{{{top}}}{{{bottom}}}",
        rf"\frac{{ {top} }}{{ {bottom} }}",
        f"{top}/{bottom}",
        f"{top} / {bottom}",
        f"${gold}$.",
    )
    alike(
        f"-{gold}", rf"\frac{{-{top}}}{{{bottom}}}", rf"\frac{{{top}}}{{-{bottom}}}", f"-{top}/{bottom}",
        f"−{top}/{bottom}",
    )  # fmt: skip


@given(DIGITS, st.integers(2, 9), st.integers(10, 999))
def test_fractions_without_braces(top: int, bottom: int, long: int) -> None:
    gold = rf"\frac{{{top}}}{{{bottom}}}"
    alike(gold, rf"\tfrac{top}{bottom}", rf"\frac {top}{bottom}", rf"\frac {top} {bottom}")
    alike(rf"\frac{{{top}}}{{{long}}}", rf"\frac{top}{{{long}}}")
    alike(rf"\frac{{{long}}}{{{bottom}}}", rf"\frac{{{long}}}{bottom}")


@given(st.tuples(COUNTS, COUNTS), st.tuples(COUNTS, COUNTS))
@example((1, 12), (11, 2))
@example((1, 2), (2, 1))
def test_fractions_match_in_both_numbers_alone(first: tuple[int, int], second: tuple[int, int]) -> None:
    same = normalised("{}/{}".format(*first)) == normalised(r"\frac{{{}}}{{{}}}".format(*second))
    assert same == (first == second)
    assert normalised("-{}/{}".format(*first)) != normalised("{}/{}".format(*first))


@given(SIGNED, st.integers(1, 999_999), st.integers(1, 3))
def test_zeros_and_points_that_say_nothing(whole: int, behind: int, zeros: int) -> None:
    point = f"{whole}.{behind:06d}1"
    alike(point, point + "0" * zeros)
    alike(str(whole), f"{whole}.", f"{whole}." + "0" * zeros)
    alike(f"0.{behind}", f".{behind}", f"0.{behind}0")
    alike(f"-0.{behind}", f"-.{behind}")
    alike(str(abs(whole)), f"+{abs(whole)}", f"0{abs(whole)}")
    alike(f"-{abs(whole) + 1}", f"−{abs(whole) + 1}", f"- {abs(whole) + 1}")


@given(st.integers(1000, 10**12))
def test_separators_of_thousands_and_money(count: int) -> None:
    commas = f"{count:,}"
    alike(
        str(count), commas, commas.replace(",", r",\!"), commas.replace(",", "{,}"), rf"\${commas}",
        f"{commas} dollars", rf"\${count}", f"${count}.00", f"£{count}", f"{count} dollars", f"{count} euros",
    )  # fmt: skip
    alike(f"-{count}", f"-{commas}")
    assert normalised(f"({count // 1000 % 900 + 1},{100 + count % 900})") != normalised(
        f"{count // 1000 % 900 + 1}{100 + count % 900}"
    ), "a pair is no number with separators"


@given(COUNTS)
def test_units_percentages_and_degrees_are_left_out(count: int) -> None:
    units = ("cm", "apples", "hours", "mph", "sec", "square inches", "percent", "degrees")
    alike(
        str(count),
        *(f"{count} {unit}" for unit in units),
        *(rf"{count} \text{{ {unit}}}" for unit in units),
        f"{count}cm", rf"{count}\,\mathrm{{km}}", rf"{count}~\mathrm{{m}}", rf"{count}\mbox{{ cm}}^2",
        rf"{count}\%", f"{count}%", f"{count} %",
        rf"{count}^\circ", rf"{count}^{{\circ}}", f"{count}°", rf"{count}\degree",
    )  # fmt: skip


@given(st.integers(1, 99), st.integers(2, 40))
def test_powers_of_ten(digits: int, power: int) -> None:
    mantissa = f"{digits / 10 + 1:.1f}"
    alike(
        f"{mantissa}e{power}", rf"{mantissa} \times 10^{{{power}}}", rf"{mantissa} \cdot 10^{{{power}}}",
        f"{mantissa}E{power}", f"{mantissa}e+{power}",
    )  # fmt: skip
    alike(f"{mantissa}e-{power}", rf"{mantissa}\times10^{{-{power}}}")
    assert normalised(f"{mantissa}e{power}") != normalised(f"{mantissa}e{power + 1}")


@given(st.lists(st.integers(-99, 99), min_size=2, max_size=4, unique=True), st.randoms(use_true_random=False))
def test_the_order_of_a_list_or_set_says_nothing_and_that_of_a_tuple_does(numbers: list[int], rng: Random) -> None:
    shuffled = list(numbers)
    rng.shuffle(shuffled)
    words, others = [str(n) for n in numbers], [str(n) for n in shuffled]
    gold = ", ".join(words)
    alike(gold, ",".join(others), ", ".join(others), ", ".join(others[:-1]) + f" and {others[-1]}")
    alike(gold, ", ".join(others[:-1]) + f" or {others[-1]}")
    if len(numbers) > 2:
        alike(gold, ", ".join(others[:-1]) + f", and {others[-1]}")
    braces = rf"\{{{gold}\}}"
    alike(braces, r"\{" + ",".join(others) + r"\}", r"\left\{" + ", ".join(others) + r"\right\}")
    alike(braces, r"\lbrace " + ", ".join(others) + r" \rbrace")
    assert (normalised(f"({gold})") == normalised(f"({', '.join(others)})")) == (words == others)


@given(st.sampled_from([r"p - q", r"\frac{1}{2}", r"11\sqrt{2}", "x^2+1", "7", "(3, 4)"]))
def test_marks_around_an_answer_are_no_part_of_it(gold: str) -> None:
    alike(gold, f"${gold}$", rf"\({gold}\)", rf"\[ {gold} \]", f"**{gold}**", f"`{gold}`")


@given(SIGNED)
def test_a_variable_that_is_named_is_no_part_of_it(number: int) -> None:
    alike(str(number), f"x={number}", f"x = {number}", f"$n = {number}$")


@given(SIGNED, SIGNED)
def test_numbers_match_when_they_are_equal(first: int, second: int) -> None:
    assert (normalised(str(first)) == normalised(str(second))) == (first == second)
    assert normalised(f"{first}.5") != normalised(str(first))


@given(st.sampled_from(["42", "-3", "1,234", "3.5", r"\frac{1}{2}", r"\{1, 2\}", "x = 5"]), st.integers(0, 99))
def test_the_last_answer_that_is_marked_counts(answer: str, other: int) -> None:
    outputs = (
        rf"So the answer is $\boxed{{{answer}}}$.",
        rf"First \boxed{{{other}}}, but really \boxed{{{answer}}}.",
        rf"The answer is {other}. Checking: \boxed{{{answer}}}",
        rf"<think>\boxed{{{other}}}</think> \boxed{{{answer}}}",
        rf"\boxed{{{answer}}} and nothing more, {other} of them",
        rf"\fbox{{{answer}}}",
        rf"\boxed {{{answer}}}",
    )
    found = {output: None if (given_ := extract(output)) is None else given_.text for output in outputs}
    assert found == dict.fromkeys(outputs, answer)


@given(SIGNED, st.integers(0, 99))
def test_phrases_and_marks_before_a_number(number: int, other: int) -> None:
    outputs = (
        f"The answer is {number}.", f"The answer is: {number}", f"The final answer is {number}",
        f"the answer is therefore {number}.", f"Answer: {number}", f"**Answer:** {number}", f"Answer = {number}",
        f"**Final answer: {number}**", f"The answer is **{number}**.", f"#### {number}",
        f"My answer is {other}. Wait. The answer is {number}.", f"#### {other}\nNo.\n#### {number}",
    )  # fmt: skip
    found = {output: None if (given_ := extract(output)) is None else given_.text for output in outputs}
    assert found == dict.fromkeys(outputs, str(number))


@pytest.mark.parametrize("letter", "ABCDE")
def test_every_way_of_naming_an_option(letter: str) -> None:
    named = OPTIONS["ABCDE".index(letter)]
    other = "ABCDE"["ABCDE".index(letter) - 1]
    outputs = (
        f"The answer is {letter}.", f"The answer is ({letter}).", f"The answer is ({letter.lower()}).",
        f"The answer is {letter}) {named}.", f"The answer is {letter}. {named}", f"The answer is: {letter}",
        f"The correct answer is option {letter}.", f"Answer: {letter}", f"**Answer:** ({letter})",
        f"The answer is **{letter}**.", f"The answer is the {named}.", f"The answer is {named}.",
        rf"\boxed{{{letter}}}", rf"\boxed{{\text{{{letter}}}}}", rf"\boxed{{\text{{({letter})}}}}",
        rf"\boxed{{\text{{{named}}}}}", rf"The answer is $\boxed{{{letter}}}$.", f"#### {letter}",
        letter, f" {letter}.", f"({letter})", f"{letter}. {named}", f"{letter}) {named}\nBecause it has doors.",
        f"At first {other}. No.\nThe answer is {letter}.", f"The answer is {other}. Wait, the answer is {letter}.",
        f"<think>The answer is {other}.</think>\nThe answer is {letter}.",
    )  # fmt: skip
    found = {output: None if (chosen := extract_choice(output, OPTIONS)) is None else chosen[1] for output in outputs}
    assert found == dict.fromkeys(outputs, letter)

"""math-verify behind a wall: it finds what is equal, and nothing a model writes can hang or crash the caller."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
from written_answers import DIFFERENT, EQUAL, GENEROUS

from tfive.errors import UserError
from tfive.evaluate.answers import grade
from tfive.evaluate.equivalence import LONGEST, Verifier
from tfive.evaluate.normalise import normalised
from tfive.evaluate.tasks import TASKS, Item

PATIENT = 120.0


@pytest.fixture(scope="module")
def verifier() -> Iterator[Verifier]:
    with Verifier(seconds=PATIENT) as one:
        yield one


@pytest.mark.parametrize(
    ("table", "equal"), [(EQUAL, True), (DIFFERENT, False), (GENEROUS, True)], ids=["equal", "different", "generous"]
)
def test_written_answers(verifier: Verifier, table: dict[str, list[tuple[str, str]]], equal: bool) -> None:
    found = {
        (gold, written): verifier(normalised(gold), normalised(written)).equal
        for listed in table.values()
        for gold, written in listed
    }
    assert found == dict.fromkeys(found, equal)


def test_endless_work_is_undecided_and_the_next_question_gets_a_fresh_worker() -> None:
    with Verifier(seconds=0.5) as verifier:
        endless = verifier("1", "9^{9^{9^9}}")
        assert endless.equal is None
        assert "no result within 0.5 seconds" in endless.reason
        verifier.seconds = PATIENT
        assert verifier(r"\frac{1}{2}", "0.5").equal is True


@pytest.mark.parametrize("answer", ["(" * 40, "{" * 40, r"\frac{" * 50, "\\", "\0", "", "1/0", "\ud800"])
def test_broken_latex_is_not_equal_and_harms_nothing(verifier: Verifier, answer: str) -> None:
    assert verifier("1", answer).equal is not True
    assert verifier("1", "1").equal is True


def test_long_answers_are_not_looked_at(verifier: Verifier) -> None:
    found = verifier("1", "1" * (LONGEST + 1))
    assert found.equal is None
    assert str(LONGEST) in found.reason


def test_a_worker_that_was_killed_is_replaced() -> None:
    with Verifier(seconds=PATIENT) as verifier:
        assert verifier("2", "4/2").equal is True
        assert verifier._worker is not None
        verifier._worker.kill()
        verifier._worker.wait()
        assert verifier("2", "4/2").equal is None
        assert verifier("2", "4/2").equal is True
    assert verifier._worker is None


def test_a_verdict_holds_both_scores(verifier: Verifier) -> None:
    item, task = Item("q", "?", r"\frac{1}{2}"), TASKS["math500"]
    half = grade(task, item, "The answer is 0.5.", verifier=verifier)
    assert (half.correct, half.equivalent) == (False, True)
    same = grade(task, item, "The answer is 1/2.", verifier=verifier)
    assert (same.correct, same.equivalent) == (True, True)
    other = grade(task, item, "The answer is 2.", verifier=verifier)
    assert (other.correct, other.equivalent, other.steps[-1]) == (
        False,
        False,
        "equivalence: math-verify calls them different",
    )


def test_without_math_verify_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="math-verify>="):
        Verifier()

"""Prompts as a base model sees them, as a chat model sees them, and the strings compared by log-likelihood."""

from __future__ import annotations

from typing import Any

import pytest

from tfive.errors import UserError
from tfive.evaluate.answers import grade
from tfive.evaluate.prompts import STYLES, demonstrations, options, prompt
from tfive.evaluate.tasks import TASKS, Item, Task

SUM = Item("s", " How many are {these}? ", "7")
DOOR = Item("d", "Where is a revolving door?", "A", ("bank", "library", "store", "mall", "york"))
SOAP = Item("p", "dresser", "B", ("replace drawer with pin ", "finish  with pin"), {"subject": "high_school_physics"})


class ChatTokenizer:
    """Puts messages between marks."""

    chat_template = "there is one"

    def apply_chat_template(self, messages: list[dict[str, str]], **named: Any) -> str:
        assert named == {"tokenize": False, "add_generation_prompt": True}
        return "".join(f"<{one['role']}>{one['content']}" for one in messages) + "<assistant>"


@pytest.mark.parametrize("task", TASKS.values(), ids=list(TASKS))
def test_every_shipped_task_can_be_asked(task: Task) -> None:
    item = DOOR if task.kind == "choice" else SUM
    asked = prompt(task, item)
    shown = demonstrations(task.demonstrations or "")
    assert asked.version == task.prompt in STYLES
    assert asked.stop == task.stop
    assert asked.demonstrations == tuple(one.item.id for one in shown)
    assert 4 <= len(shown) <= 5
    assert asked.text.count("\n\n") >= len(shown)
    assert asked.text.endswith(("Answer:", "Solution:"))
    assert asked.text == asked.text.strip()
    assert "train" in asked.demonstrations[0] or task.kind == "choice"


@pytest.mark.parametrize("task", TASKS.values(), ids=list(TASKS))
def test_every_demonstration_is_answered_the_way_it_is_judged(task: Task) -> None:
    for one in demonstrations(task.demonstrations or ""):
        worked = STYLES[task.prompt].solution.format(solution=one.solution, answer=one.item.answer)
        verdict = grade(task, one.item, worked)
        assert verdict.correct, verdict.steps
        assert not any(stop in worked for stop in task.stop)


@pytest.mark.parametrize("task", TASKS.values(), ids=list(TASKS))
def test_generation_stops_where_a_next_example_would_begin(task: Task) -> None:
    text = prompt(task, DOOR if task.kind == "choice" else SUM).text
    assert text.count(task.stop[0]) == len(demonstrations(task.demonstrations or ""))


def test_options_of_demonstrations_use_every_letter() -> None:
    assert {one.item.answer for one in demonstrations("csqa")} == set("ABCDE")
    assert {one.item.answer for one in demonstrations("arc_challenge")} == set("ABCD")
    assert {one.item.answer for one in demonstrations("piqa")} == set("AB")


def test_a_task_without_demonstrations_asks_the_question_alone() -> None:
    task = Task(name="bare", kind="math", count=1, file="bare.jsonl", prompt="words-v1")
    asked = prompt(task, SUM)
    assert asked.text == "Question: How many are {these}?\nAnswer:"
    assert asked.demonstrations == ()


def test_unknown_prompts_and_pools_are_named() -> None:
    asked = {"name": "bare", "kind": "math", "count": 1, "file": "bare.jsonl"}
    with pytest.raises(UserError, match="prompt 'words-v9' is not known"):
        prompt(Task(**asked, prompt="words-v9"), SUM)
    with pytest.raises(UserError, match="no such pool"):
        prompt(Task(**asked, prompt="words-v1", demonstrations="horses"), SUM)


def test_chat_mode_goes_through_the_tokenizers_template() -> None:
    asked = prompt(TASKS["csqa"], DOOR, ChatTokenizer(), chat=True)
    assert asked.text.startswith("<user>Think step by step.")
    assert asked.text.endswith("E. york<assistant>")
    assert "Answer:" not in asked.text
    assert (asked.stop, asked.version, asked.demonstrations) == ((), "options-v1-chat", ())
    maths = prompt(TASKS["math500"], SUM, ChatTokenizer(), chat=True)
    assert maths.text.endswith("Problem: How many are {these}?<assistant>")
    with pytest.raises(UserError, match="no chat template"):
        prompt(TASKS["csqa"], DOOR, object(), chat=True)


def test_log_likelihood_strings_are_those_of_lm_evaluation_harness() -> None:
    assert options(TASKS["piqa"], SOAP) == [
        ("Question: dresser\nAnswer:", " replace drawer with pin "),
        ("Question: dresser\nAnswer:", " finish  with pin"),
    ]
    assert options(TASKS["arc_challenge"], DOOR)[2] == ("Question: Where is a revolving door?\nAnswer:", " store")
    csqa = "Question: Where is a revolving door?\nA. bank\nB. library\nC. store\nD. mall\nE. york\nAnswer:"
    assert options(TASKS["csqa"], DOOR) == [(csqa, f" {letter}") for letter in "ABCDE"]
    mmlu = "The following are multiple choice questions (with answers) about high school physics.\n\ndresser\nA. "
    assert options(TASKS["mmlu"], SOAP)[0][0].startswith(mmlu)
    with pytest.raises(UserError, match="has no options"):
        options(TASKS["gsm8k"], SUM)

"""Declarations, items and the manifests they are held to."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from made_up import write_rows
from pydantic import ValidationError

from tfive.errors import UserError
from tfive.evaluate import tasks as room
from tfive.evaluate.answers import grade
from tfive.evaluate.prompts import prompt
from tfive.evaluate.tasks import (
    PRIMARY,
    SUITES,
    TASKS,
    Fields,
    HubSource,
    Item,
    Task,
    declared,
    digest_of,
    find_tasks,
    load_items,
)

ROWS: list[dict[str, Any]] = [
    {"id": "one", "question": "What is 1 + 1?", "answer": "2"},
    {"id": "two", "question": "What is  2 + 2?", "answer": 4, "subject": "sums"},
]
OPTIONS = [{"id": "q", "question": "Which?", "choices": ["red", "green", "blue"], "answer": 2}]


def sums(**more: Any) -> Task:
    return Task(**{"name": "sums", "kind": "math", "count": 2, "file": "sums.jsonl", "prompt": "words-v1", **more})


def colours(**more: Any) -> Task:
    asked = {"name": "colours", "kind": "choice", "count": 1, "file": "colours.jsonl", "prompt": "options-v1"}
    return Task(**{**asked, "context": "{question}", **more})


def test_the_primary_suite_is_the_papers_table() -> None:
    counts = {name: TASKS[name].count for name in SUITES["primary"]}
    assert counts == {
        "aime2025": 30,
        "aime2026": 30,
        "gsm8k": 1319,
        "math500": 500,
        "csqa": 1221,
        "piqa": 1838,
        "arc_challenge": 1172,
    }
    assert all(TASKS[name].state == "frozen" for name in PRIMARY)
    assert all("@" in TASKS[name].source for name in PRIMARY)


def test_supplementary_tasks_are_there_and_say_when_they_are_not_frozen() -> None:
    assert {"mmlu", "mmlu_pro", "gpqa_diamond", "amc23", "minerva_math", "gsm8k", "math500"} == set(SUITES["earlier"])
    supplementary = {"hmmt_feb_2025": 30, "simpleqa_verified": 1000, "livebench_reasoning": None, "hle": None}
    assert {name: TASKS[name].count for name in SUITES["supplementary"]} == supplementary
    unfrozen = {name for name in TASKS if TASKS[name].state == "unfrozen"}
    assert unfrozen == {"mmlu_pro", "gpqa_diamond", *supplementary}
    assert TASKS["gsm8k_greedy"].sha256 == TASKS["gsm8k"].sha256


def test_the_papers_mathematics_takes_four_samples_and_options_one() -> None:
    assert {name: TASKS[name].samples for name in PRIMARY if TASKS[name].samples > 1} == dict.fromkeys(PRIMARY[:4], 4)


@pytest.mark.parametrize("name", SUITES["supplementary"])
def test_supplementary_tasks_say_what_they_need(name: str, tmp_path: Path) -> None:
    """tab:supplementary-evaluation: declared, items brought by the user."""
    task = TASKS[name]
    for folder in (None, tmp_path):
        with pytest.raises(UserError, match="as JSON lines with id, question") as error:
            load_items(task, folder)
        assert task.file in str(error.value)
        assert "\n" not in str(error.value)
    rows = [{"id": str(n), "question": f"What is {n}?", "answer": f"The {n}"} for n in range(task.count or 3)]
    write_rows(tmp_path / task.file, rows)
    found = load_items(task, tmp_path)
    assert (len(found), found.state) == (task.count or 3, "unfrozen")
    assert "What is 2?" in prompt(task, found[2]).text
    assert grade(task, found[2], "I think.\nThe answer is 2.").correct == (task.kind == "text")
    if task.kind == "text":
        assert grade(task, found[2], "the 2").steps[0] == "first line: the 2"
        assert not grade(task, found[2], "The answer is 2 or 3").correct
        assert grade(task, found[2], " ").extracted is None


def test_a_task_of_unknown_size_cannot_be_frozen() -> None:
    with pytest.raises(ValidationError, match="count is missing"):
        sums(count=None, kind="text", sha256="0" * 64)
    assert sums(count=None, kind="text").count is None


def test_local_items_plain_and_compressed(tmp_path: Path) -> None:
    write_rows(tmp_path / "sums.jsonl", ROWS)
    plain = load_items(sums(), tmp_path)
    assert [item.answer for item in plain] == ["2", "4"]
    assert plain[1] == Item("two", "What is  2 + 2?", "4", (), {"subject": "sums"})
    assert plain.state == "unfrozen"
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / "sums.jsonl.gz").write_bytes(gzip.compress((tmp_path / "sums.jsonl").read_bytes()))
    assert load_items(sums(), tmp_path / "packed").items == plain.items


def test_frozen_items_must_have_the_count_and_the_digest(tmp_path: Path) -> None:
    write_rows(tmp_path / "sums.jsonl", ROWS)
    digest = load_items(sums(), tmp_path).sha256
    assert load_items(sums(sha256=digest), tmp_path).state == "frozen"
    with pytest.raises(UserError, match="2 items, sums has 3"):
        load_items(sums(count=3, sha256=digest), tmp_path)
    write_rows(tmp_path / "sums.jsonl", [ROWS[0], {**ROWS[1], "answer": "5"}])
    changed = load_items(sums(sha256=digest), tmp_path, frozen=False)
    assert changed.state == "unfrozen"
    with pytest.raises(UserError, match=f"sha256 {changed.sha256}.* says {digest}"):
        load_items(sums(sha256=digest), tmp_path)


def test_items_of_one_name_are_refused(tmp_path: Path) -> None:
    write_rows(tmp_path / "sums.jsonl", [ROWS[0], {**ROWS[1], "id": "one"}])
    with pytest.raises(UserError, match=r"two items have the id 'one'.*fields\.id \(task sums\)"):
        load_items(sums(), tmp_path)
    assert [item.id for item in load_items(sums(fields={"id": "none"}), tmp_path)] == ["sums-0", "sums-1"]


def test_the_digest_is_of_the_content_alone() -> None:
    items = [Item("1", "A  question\n?", "x", ("a", "b")), Item("2", "Caf\u00e9", "y")]
    same = [Item("9", "Cafe\u0301 ", "y"), Item("8", "A question ?", "x", ("a ", "b"))]
    assert digest_of(items) == digest_of(same)
    assert digest_of(items) != digest_of([items[0], Item("2", "Caf\u00e9", "z")])
    assert digest_of(items) != digest_of([items[0]])
    swapped = Item("1", "A question ?", "x", ("b", "a"))
    assert digest_of(items) != digest_of([swapped, items[1]])


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        (2, "C"),
        ("2", "C"),
        ("C", "C"),
        ("c", "C"),
        (3, None),
        (-1, None),
        ("D", None),
        ("x y", None),
        ("²", None),
        (None, None),
        ([0], None),
        (float("inf"), None),
    ],
)
def test_the_right_option(tmp_path: Path, answer: Any, letter: str | None) -> None:
    write_rows(tmp_path / "colours.jsonl", [{**OPTIONS[0], "answer": answer}])
    if letter is None:
        with pytest.raises(UserError, match=r"row 1 has answer .* and 3 options"):
            load_items(colours(), tmp_path)
    else:
        assert load_items(colours(), tmp_path)[0].answer == letter


def test_options_of_other_layouts(tmp_path: Path) -> None:
    nested = {"question": "Which?", "choices": {"text": ["red", "green"], "label": ["1", "2"]}, "answerKey": "2"}
    fields = Fields(choices="choices.text", labels="choices.label", answer="answerKey")
    write_rows(tmp_path / "colours.jsonl", [nested])
    item = load_items(colours(fields=fields), tmp_path)[0]
    assert (item.id, item.choices, item.answer) == ("colours-0", ("red", "green"), "B")
    write_rows(tmp_path / "colours.jsonl", [{"goal": "Which?", "sol1": "red", "sol2": "green", "label": 0}])
    fields = Fields(question="goal", choices=("sol1", "sol2"), answer="label")
    assert load_items(colours(fields=fields), tmp_path)[0].answer == "A"


def test_shuffled_options_keep_the_right_one_and_do_not_depend_on_the_rest(tmp_path: Path) -> None:
    fields = Fields(choices=("right", "wrong1", "wrong2"), answer=0, shuffle=True)
    listed = [
        {"question": f"Question {n}?", "right": f"yes {n}", "wrong1": f"no {n}", "wrong2": f"never {n}"}
        for n in range(30)
    ]
    write_rows(tmp_path / "colours.jsonl", listed)
    items = load_items(colours(count=30, fields=fields), tmp_path)
    assert all(item.choices["ABC".index(item.answer)] == f"yes {n}" for n, item in enumerate(items))
    assert {item.answer for item in items} == {"A", "B", "C"}
    write_rows(tmp_path / "colours.jsonl", listed[7:8])
    assert load_items(colours(fields=fields), tmp_path)[0].choices == items[7].choices


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([{"id": "a", "answer": "1"}], "row 1 has no field 'question'"),
        ([ROWS[0], {"question": " ", "answer": "1"}], "row 2 has no text in field 'question'"),
        ([{"question": "?"}], "row 1 has no field 'answer'"),
    ],
)
def test_rows_that_are_no_items_are_named(tmp_path: Path, rows: list[dict[str, Any]], reason: str) -> None:
    write_rows(tmp_path / "sums.jsonl", rows)
    with pytest.raises(UserError, match=reason):
        load_items(sums(), tmp_path)


def test_broken_and_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"sums\.jsonl: no such file"):
        load_items(sums(), tmp_path)
    (tmp_path / "sums.jsonl").write_text("[1]\n", encoding="utf-8")
    with pytest.raises(UserError, match="row 1 is not a JSON object"):
        load_items(sums(), tmp_path)
    (tmp_path / "sums.jsonl").write_text("{\n", encoding="utf-8")
    with pytest.raises(UserError, match="row 1 is not JSON"):
        load_items(sums(), tmp_path)
    with pytest.raises(UserError, match="is not on the hub"):
        load_items(sums(), None)
    (tmp_path / "mine.task.toml").write_bytes(b"name = '\xff'")
    with pytest.raises(UserError, match=r"mine\.task\.toml: not a UTF-8 text file"):
        find_tasks(["mine"], tmp_path)


@pytest.mark.parametrize("choices", [None, 7, "red", {"red": 1}])
def test_options_that_are_no_list_are_one_line(tmp_path: Path, choices: Any) -> None:
    write_rows(tmp_path / "colours.jsonl", [{**OPTIONS[0], "choices": choices}])
    with pytest.raises(UserError, match="row 1 has no list of options"):
        load_items(colours(), tmp_path)


def test_a_new_task_is_one_declaration_and_a_file(tmp_path: Path) -> None:
    (tmp_path / "sums.task.toml").write_text(
        'name = "sums"\nkind = "math"\ncount = 2\nfile = "sums.jsonl"\nprompt = "words-v1"\n', encoding="utf-8"
    )
    write_rows(tmp_path / "sums.jsonl", ROWS)
    found = find_tasks(["primary", "sums", "gsm8k"], tmp_path)
    assert [task.name for task in found] == [*PRIMARY, "sums"]
    assert len(load_items(found[-1], tmp_path)) == 2
    with pytest.raises(UserError, match="task 'differences': not known"):
        find_tasks(["differences"], tmp_path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("name = ", "not TOML"),
        ('name = "a"\nkind = "math"\ncount = 1\nfile = "f"\nprompt = "p"\nsampels = 1', "sampels"),
        ('name = "a"\nkind = "math"\nfile = "f"\nprompt = "p"', "count"),
        ('name = "a"\nkind = "choice"\ncount = 1\nfile = "f"\nprompt = "p"', "context"),
        (
            'name = "a"\nkind = "choice"\ncount = 1\nfile = "f"\nprompt = "p"\ncontext = "{question.__class__}"',
            "context",
        ),
        (
            'name = "a"\nkind = "choice"\ncount = 1\nfile = "f"\nprompt = "p"\ncontext = "{question:>999999999}"',
            "context",
        ),
        ('name = "a"\nkind = "choice"\ncount = 1\nfile = "f"\nprompt = "p"\ncontext = "{0}"', "context"),
        ("count = " + "9" * 5000, "not TOML"),
        ("count = " + "[" * 5000 + "]" * 5000, "not TOML"),
    ],
)
def test_bad_declarations_name_the_key(text: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        declared(text, "a.task.toml")


def hub_task(**more: Any) -> Task:
    return sums(hub=HubSource(path="some/sums", revision="abc", fields=Fields(answer_after="####")), **more)


def test_items_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(*arguments: Any, **named: Any) -> list[dict[str, Any]]:
        asked.append((arguments, named))
        return [{"question": "A?", "answer": "so\n#### 1,200"}, {"question": "B?", "answer": "#### 2"}]

    fake = SimpleNamespace(load_dataset=load_dataset, exceptions=SimpleNamespace(DatasetsError=RuntimeError))
    monkeypatch.setitem(sys.modules, "datasets", fake)
    items = load_items(hub_task(), None)
    assert [item.answer for item in items] == ["1200", "2"]
    assert [item.id for item in items] == ["sums-0", "sums-1"]
    assert items.source == "some/sums@abc"
    assert asked == [(("some/sums", None), {"split": "test", "revision": "abc"})]


def test_a_hub_that_cannot_be_read_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*arguments: Any, **named: Any) -> None:
        raise OSError("no\nroute")

    fake = SimpleNamespace(load_dataset=load_dataset, exceptions=SimpleNamespace(DatasetsError=RuntimeError))
    monkeypatch.setitem(sys.modules, "datasets", fake)
    with pytest.raises(UserError, match=r"some/sums cannot be read from the hub \(no route\)"):
        load_items(hub_task(), None)
    with pytest.raises(UserError, match="accept its terms"):
        load_items(TASKS["gpqa_diamond"], None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match="datasets>="):
        load_items(hub_task(), None)


def test_declarations_are_small_and_hold_no_items() -> None:
    folder = Path(room.__file__).parents[1] / "data" / "evaluate" / "tasks"
    assert all(path.stat().st_size < 2000 for path in folder.iterdir())
    assert json.loads((folder.parent / "demonstrations.json").read_text("utf-8"))["pools"]

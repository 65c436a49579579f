"""A suite from questions to scores: answers on disk, going on, comparing two runs, explaining an item."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tfive.errors import UserError
from tfive.evaluate import suite
from tfive.evaluate.answers import grade
from tfive.evaluate.compare import compare_runs, comparison_table, explained, find_item
from tfive.evaluate.metrics import mcnemar
from tfive.evaluate.prompts import options
from tfive.evaluate.records import Answers, open_folder, read_answers, read_run
from tfive.evaluate.suite import by_item, flips, generated_values, mean_of_tasks, plan_task, run_task, task_scores
from tfive.evaluate.tasks import LETTERS, Items
from tfive.inference.requests import When
from tfive.inference.thought_model import ThoughtModel

pytestmark = pytest.mark.model


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_generated_answers_are_judged_and_kept_once(thinker: ThoughtModel, sums: Items, tmp_path: Path) -> None:
    asked = plan_task(sums, samples=4, temperature=1.0, max_new_tokens=5, limit=3)
    run_task(thinker, asked, tmp_path)
    path = tmp_path / "sums.generated.jsonl"
    whole = lines(path)
    assert sorted((r["id"], r["sample"]) for r in whole) == [(f"sum-{n}", s) for n in range(3) for s in range(4)]
    for record in whole:
        item = next(item for item in sums if item.id == record["id"])
        verdict = grade(sums.task, item, record["output"])
        assert (record["correct"], record["extracted"], record["gold"]) == (
            verdict.correct,
            verdict.extracted,
            item.answer,
        )
        assert record["tokens"] <= 5
        assert record["question"] == item.question
    run_task(thinker, asked, tmp_path)
    assert lines(path) == whole
    # What was cut off in the middle of a line is asked again, and comes out the same.
    text = path.read_text("utf-8").splitlines(keepends=True)
    path.write_text("".join(text[:7]) + text[7][:40], "utf-8")
    run_task(thinker, asked, tmp_path)
    again = lines(path)
    assert again[:7] == whole[:7]
    assert sorted(map(json.dumps, again)) == sorted(map(json.dumps, whole))


def test_options_are_compared_both_ways_and_recorded(thinker: ThoughtModel, riddles: Items, tmp_path: Path) -> None:
    asked = plan_task(riddles, ways=("likelihood",), when=When(2))
    run_task(thinker, asked, tmp_path)
    assert not (tmp_path / "riddles.generated.jsonl").exists()
    found = {record["id"]: record for record in lines(tmp_path / "riddles.options.jsonl")}
    assert set(found) == {item.id for item in riddles}
    for item in riddles:
        record = found[item.id]
        assert record["characters"] == [len(choice) for choice in item.choices]
        best = max(range(len(item.choices)), key=record["log_likelihood"].__getitem__)
        assert record["taken"]["raw"] == LETTERS[best]
        assert record["raw"] == (LETTERS[best] == item.answer)
        assert record["thought_tokens"] > 0
        assert len(options(riddles.task, item)) == len(record["log_likelihood"])
    scores = task_scores("choice", [], list(found.values()))
    assert scores["log-likelihood raw"].mean == pytest.approx(sum(r["raw"] for r in found.values()) / 5)
    assert scores["log-likelihood raw"].low <= scores["log-likelihood raw"].mean <= scores["log-likelihood raw"].high


def record(name: str, sample: int, correct: bool, **more: Any) -> dict[str, Any]:
    base: dict[str, Any] = {"id": name, "sample": sample, "correct": correct, "extracted": "1", "equivalent": None}
    base |= {"tokens": 10, "ended": "stop", "thought_tokens": 0, "thoughts": 0, "gold": "1", "question": "?"}
    return base | {"choices": [], "output": "1", "steps": ["number 1"]} | more


def test_measures_are_those_of_hand() -> None:
    records = [record("a", s, s == 0) for s in range(4)]
    records += [record("b", s, False, extracted=None if s else "2", tokens=20, ended="length") for s in range(4)]
    records[1]["equivalent"] = True
    values = generated_values(records)
    assert values["pass@1"] == {"a": 0.25, "b": 0.0}
    assert values["pass@4"] == {"a": 1.0, "b": 0.0}
    assert values["coverage"] == {"a": 1.0, "b": 0.25}
    assert values["tokens"] == {"a": 10.0, "b": 20.0}
    assert values["cut off"] == {"a": 0.0, "b": 1.0}
    # An item without any answer is wrong by equivalence too: every measure is over the same items.
    assert values["equivalent pass@1"] == {"a": 0.5, "b": 0.0}
    assert "equivalent pass@1" not in generated_values(records[2:])
    assert [r["sample"] for r in by_item(records[::-1])["a"]] == [0, 1, 2, 3]
    scores = task_scores("math", records, [])
    assert next(iter(scores)) == "pass@1"
    assert scores["pass@1"].mean == 0.125
    assert scores["equivalent pass@1"].items == scores["pass@1"].items == 2
    assert (scores["thought tokens"].low, scores["thought tokens"].high) == (0.0, 0.0)
    assert "accuracy" in task_scores("choice", records, [])
    both = mean_of_tasks({"one": {"a": 1.0, "b": 0.0}, "two": {"c": 1.0}})
    assert both.mean == 0.75


def test_flips_are_measured_on_the_first_items(
    thinker: ThoughtModel, sums: Items, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = plan_task(sums, max_new_tokens=4)
    found = flips(thinker, asked, 2)
    assert (found.outputs, found.flipped) == (2, 0)
    original = suite.generate

    def unsteady(model: Any, requests: Any, stops: Any, decoding: Any, **more: Any) -> Any:
        for request, sample, output in original(model, requests, stops, decoding, **more):
            spoilt = replace(output, ids=(*output.ids[:-1], 0)) if not decoding.parity else output
            yield request, sample, spoilt

    monkeypatch.setattr(suite, "generate", unsteady)
    assert flips(thinker, asked, 2).flipped == 2


def made_run(folder: Path, right: dict[str, bool], **asked: Any) -> Path:
    task = {"items": len(right), "of": len(right), "sha256": "x", "manifest": "frozen", "kind": "math"}
    open_folder(folder, {"model": {"name": folder.name}, "seed": 0, **asked, "tasks": {"sums": task}})
    with Answers(folder / "sums.generated.jsonl") as answers:
        for name, correct in right.items():
            answers.add(record(name, 0, correct, output=f"so {name}"))
    return folder


def test_two_runs_are_compared_item_by_item(tmp_path: Path) -> None:
    first = {f"i{n}": n % 3 != 0 for n in range(30)}
    second = {f"i{n}": n % 2 == 0 for n in range(30)}
    a, b = made_run(tmp_path / "a", first, chat=False), made_run(tmp_path / "b", second, chat=True)
    found = compare_runs(a, b)
    one = found["tasks"]["sums"]["pass@1"]
    assert one["items"] == 30
    assert one["difference"] == pytest.approx(20 / 30 - 15 / 30)
    test = mcnemar(list(first.values()), list(second.values()))
    assert (one["only_a"], one["only_b"], one["p_value"]) == (test.only_a, test.only_b, test.p_value)
    assert one["low"] < one["difference"] < one["high"]
    assert found["differ_in"] == ["chat"]
    assert "| sums | pass@1 | 30 |" in comparison_table(found)
    other = tmp_path / "c"
    open_folder(other, {"model": {}, "tasks": {"else": {}}})
    with pytest.raises(UserError, match="no task in common"):
        compare_runs(a, other)
    with pytest.raises(UserError, match=r"run\.json is missing"):
        compare_runs(a, tmp_path)


def test_an_item_is_explained(tmp_path: Path) -> None:
    run = made_run(tmp_path / "a", {"i1": True, "i2": False})
    text = explained(find_item(run, "i2"))
    assert "so i2" in text
    assert "number 1" in text
    assert "wrong" in text
    assert find_item(run, "sums/i1")["generated"][0]["correct"]
    with pytest.raises(UserError, match="no answer to item 'i9'"):
        find_item(run, "i9")


def test_a_folder_belongs_to_one_way_of_asking(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    asked = {"model": {"weights": "abc"}, "tasks": {"sums": {"limit": 3}}}
    open_folder(folder, asked)
    open_folder(folder, asked)
    assert read_run(folder) == asked
    with pytest.raises(UserError, match=r"model\.weights = 'abc', now it is 'xyz'"):
        open_folder(folder, {"model": {"weights": "xyz"}, "tasks": {"sums": {"limit": 3}}})
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine.txt").write_text("keep", "utf-8")
    with pytest.raises(UserError, match="holds no evaluation"):
        open_folder(full, asked)
    assert [path.name for path in full.iterdir()] == ["mine.txt"]


def test_a_line_cut_inside_a_letter_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "sums.generated.jsonl"
    whole = '{"id": "a", "output": "½"}\n'.encode()
    path.write_bytes(whole + whole[: whole.index("½".encode()) + 1])
    with Answers(path) as answers:
        answers.add({"id": "b"})
    assert [one["id"] for one in read_answers(path)] == ["a", "b"]
    path.write_bytes(whole[: whole.index("½".encode()) + 1] + b"\n" + whole)
    with pytest.raises(UserError, match="line 1 is not JSON"):
        list(read_answers(path))


@pytest.mark.parametrize("text", ['{"id": 1}\nnot json\n{"id": 2}\n', "[1]\n", '{"name": 1}\n'])
def test_a_damaged_file_of_answers_is_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "sums.generated.jsonl"
    path.write_text(text, "utf-8")
    with pytest.raises(UserError, match="line"):
        list(read_answers(path))

"""Benchmarks at the answer in the study of thoughts before answers: how questions stand in the text, how answers are
read, what a tiny random model's results look like, and the tables of several benchmarks."""

from __future__ import annotations

import copy
import gzip
import json
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import questions
from made_up_cells import clocked, lines_of
from transformers import PreTrainedTokenizerFast

import scripts
from tfive.errors import UserError
from tfive.text.sheets import ANSWER, HEADER

ROOT = Path(__file__).resolve().parents[2]
CONDITIONS = {"none", "own", "sampled", "other", "empty", "random"}
MATH = [
    {"id": "m0", "question": "What is\n half of three?", "answer": "\\frac{3}{2}", "subject": "Algebra", "level": 1},
    {"id": "m1", "question": "Which point?", "answer": "\\left( 3, \\frac{\\pi}{2} \\right)"},
    {"id": "m2", "question": "In terms of $p$ and $q$?", "answer": "p - q"},
]
CHOICE = [
    {"id": f"c{n}", "question": f"Where is number {n}?", "choices": ["bank", "mall", "sea", "sky", "hat"], "answer": n}
    for n in range(3)
]
NUMBERS = [{"question": f"{n} plus 2?", "answer": f"1,00{n}"} for n in range(3)]
ROWS: dict[str, list[Any]] = {"gsm8k": NUMBERS, "math500": MATH, "csqa": CHOICE}


def written(folder: Path, name: str, rows: list[Any]) -> Path:
    path = folder / f"{name}.jsonl.gz"
    with gzip.open(path, "wt", encoding="utf-8") as out:
        out.writelines(json.dumps(row) + "\n" for row in rows)
    return path


def tokenizer(place: Path) -> Any:
    return PreTrainedTokenizerFast(tokenizer_file=str(place / "model" / "tokenizer.json"))


def test_formulas_count_in_any_spelling_and_no_other() -> None:
    form = questions.FORMS["math500"]
    point = "\\left( 3, \\frac{\\pi}{2} \\right)"
    for said, answer in (
        ("\\dfrac32", "\\frac{3}{2}"),
        ("$3/2$.", "\\frac{3}{2}"),
        ("\\boxed{\\frac{3}{2}}\nand more", "\\frac{3}{2}"),
        ("(3, \\dfrac{\\pi}{2})", point),
        ("p-q", "p - q"),
        ("1,200", "1200"),
        ("\\text{Evelyn}", "Evelyn"),
    ):
        assert form.right(said, answer) is True, said
    # The last of several numbers is not the answer, half of it is not, and neither is what comes in a later line.
    for said, answer in (
        ("\\frac{2}{3}", "\\frac{3}{2}"),
        ("\\frac{\\pi}{2}", point),
        ("(\\frac{\\pi}{2}, 3)", point),
        ("q - p", "p - q"),
        ("5\n\\frac{3}{2}", "\\frac{3}{2}"),
        ("3", "\\frac{3}{2}"),
    ):
        assert form.right(said, answer) is False, said
    assert form.right("  ", "5") is None
    accuracy = scripts.script("studies/answers/accuracy.py")
    assert accuracy.vote(["\\frac12", "7", "1/2"], "\\frac{1}{2}", form)
    assert not accuracy.vote(["\\frac12", "7", "7"], "\\frac{1}{2}", form)
    item = questions.Item((), "q", "all", (), "\\frac{3}{2}")
    assert form.in_thought(item, "so half of 3 is \\frac{3}{2} of it")
    assert not form.in_thought(item, "so half of 3 is 1.5")


def test_letters_are_judged_by_the_first_one_written() -> None:
    form = questions.FORMS["csqa"]
    for said in ("B", " B", "(B) mall", "B. mall", "**B**", "B because of A"):
        assert form.right(said, "B") is True, said
    for said in ("A", "A or B", "C\nB"):
        assert form.right(said, "B") is False, said
    for said in ("", "mall", "Because of A", "Both", "b", "F", "\nB"):
        assert form.right(said, "B") is None, said
    item = questions.Item((), "q", "all", (), "B", "mall", 5)
    assert form.in_thought(item, "one buys it at the Mall, so")
    assert not form.in_thought(item, "a small B thing")


def test_numbers_are_judged_as_ever() -> None:
    form = questions.FORMS["gsm8k"]
    assert form.right("$1,200.\n", "1200")
    assert form.right("1200.0 pens", "1200")
    assert form.right("12", "1200") is False
    assert form.right("Working: 5", "5") is None
    item = questions.Item((), "q", "all", (), "12")
    assert [form.in_thought(item, one) for one in ("is 12", "is 1,2", "is 112", "is 3.12")] == [
        True,
        True,
        False,
        False,
    ]


def test_questions_stand_where_the_last_problem_of_a_sheet_does(place: Path, tmp_path: Path) -> None:
    made = tokenizer(place)
    items = {name: questions.benchmark_items(written(tmp_path, name, rows), made) for name, rows in ROWS.items()}
    assert made.decode(items["math500"][0].prompt) == f"{HEADER}Question: What is half of three?{ANSWER}"
    assert [one.answer for one in items["gsm8k"]] == ["1000", "1001", "1002"]
    text = made.decode(items["csqa"][1].prompt)
    assert text.endswith("Question: Where is number 1?\nA. bank\nB. mall\nC. sea\nD. sky\nE. hat\nAnswer:\n")
    worked, plain, _ = text.split("\n\n")
    # One example thinks as the trained models do, between their delimiters, the other answers at once.
    assert worked.count("\nAnswer:\nWorking: ") == 1
    assert worked.endswith("\n####B")
    assert plain.endswith("\nAnswer:\nD")
    assert (items["csqa"][1].answer, items["csqa"][1].named) == ("B", "mall")
    assert questions.chance(items["csqa"]) == {"chance": 0.2}
    assert questions.chance(items["math500"]) == questions.chance(items["gsm8k"]) == {}
    assert questions.benchmark_items(tmp_path / "csqa.jsonl.gz", made) == items["csqa"]


def test_a_bad_benchmark_gets_one_line(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, rows, message in (
        ("piqa", CHOICE, r"piqa\.jsonl\.gz: not one that can be asked here, by its name; give gsm8k\.jsonl\.gz, "),
        ("csqa", MATH, "row 1 has no field 'choices'"),
        ("math500", [{"id": "a", "question": "Why?"}], "row 1 has no field 'answer'"),
        ("gsm8k", [{"question": "Why?", "answer": "because"}], "answer 'because' of question 1 is none of GSM8K's"),
        ("csqa", [{**CHOICE[0], "answer": 5}], "row 1 has answer 5 and 5 options"),
        ("math500", [], "no question"),
        ("math500", ["not an object"], "row 1 is not a JSON object"),
    ):
        with pytest.raises(UserError, match=message):
            questions.benchmark_rows(written(tmp_path, name, rows))
    with pytest.raises(UserError, match="missing"):
        questions.benchmark_rows(tmp_path / "none" / "csqa.jsonl.gz")
    (tmp_path / "more").mkdir()
    twice = [written(folder, "csqa", CHOICE) for folder in (tmp_path, tmp_path / "more")]
    with pytest.raises(UserError, match="2 files of 1 benchmarks"):
        questions.different(twice)
    run = scripts.script("studies/answers/run.py")
    with pytest.raises(UserError, match="give --problems"):
        run.main(["cell", "t5", "--benchmark", str(twice[0])])
    # As it is run, but for a process that would load torch again.
    script = ROOT / "studies" / "answers" / "accuracy.py"
    asked = [str(script), str(place / "model"), str(place / "sheets"), "--benchmark", str(tmp_path / "x.jsonl.gz")]
    monkeypatch.setattr(sys, "argv", asked)
    monkeypatch.syspath_prepend(script.parent)
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    said = capsys.readouterr()
    assert (ended.value.code, said.out, said.err.count("\n")) == (2, "", 1)


@pytest.mark.model
def test_a_model_is_asked_several_benchmarks(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    accuracy = scripts.script("studies/answers/accuracy.py")
    collect = scripts.script("studies/answers/collect.py")
    paths = [written(tmp_path, name, rows) for name, rows in ROWS.items()]
    asked = [str(place / "model"), str(place / "sheets"), "--samples", "2", "--device", "cpu", "--limit", "2"]
    asked += ["--set", "thought.length=8", "--set", "thought.checkpoints=[8]"]
    files = [word for path in paths for word in ("--benchmark", str(path))]
    assert accuracy.main([*asked, *files, "--out", str(tmp_path / "benchmark-warm.json")]) == 0
    found = json.loads(capsys.readouterr().out)["benchmarks"]
    assert list(found) == list(ROWS)
    for name, one in found.items():
        every = one["results"]["every"]
        assert (one["problems"], every["items"]) == (name, 2)
        assert set(every["accuracy"]) == CONDITIONS | {"vote"}
        assert set(every["difference"]) >= {"own - none", "own - other", "own - empty", "own - random"}
        assert one["longest_prompt"] > 50
    assert [one.get("chance") for one in found.values()] == [None, None, 0.2]
    assert found["csqa"]["begins_with_a_letter"].keys() == CONDITIONS
    # One file alone gives the same, under no name; the same seed the same thoughts.
    assert accuracy.main([*asked, *files[-2:], "--out", str(tmp_path / "benchmark-again-csqa.json")]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert {key: alone[key] for key in found["csqa"] if key != "seconds"} == {
        key: value for key, value in found["csqa"].items() if key != "seconds"
    }
    kept = collect.benchmarks(tmp_path)
    assert {name: sorted(models) for name, models in kept.items()} == {
        "csqa": ["again", "warm"], "gsm8k": ["warm"], "math500": ["warm"],
    }  # fmt: skip
    assert kept["math500"]["warm"]["model"] == "model"
    # Questions that the model has no positions for are not cut.
    loaded = accuracy.load(str(place / "model"), accuracy.Config.load(str(accuracy.PRESET)), "cpu")
    loaded.model.config.max_position_embeddings = 200
    with pytest.raises(UserError, match="has 200 positions"):
        accuracy.measure_benchmark(loaded, paths[-1], 0, 1, 0)


@pytest.mark.model
def test_sheets_of_another_source_are_asked_like_a_benchmark(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    accuracy = scripts.script("studies/answers/accuracy.py")
    for name, other in (("test.jsonl.gz", f"{questions.FRESH}.jsonl.gz"), ("workings.json.gz", "workings.json.gz")):
        shutil.copy(place / "sheets" / name, tmp_path / other)
    asked = [str(place / "model"), str(place / "sheets"), "--samples", "1", "--device", "cpu", "--limit", "6"]
    asked += ["--set", "thought.length=8", "--set", "thought.checkpoints=[8]"]
    path = tmp_path / f"{questions.FRESH}.jsonl.gz"
    found = []
    for more in ([], ["--benchmark", str(path)]):
        assert accuracy.main([*asked, *more]) == 0
        found.append(json.loads(capsys.readouterr().out))
    usual, apart = found
    assert (usual["problems"], apart["problems"]) == ("test", "test-math_train")
    assert all(usual[key] == apart[key] for key in ("results", "verdicts", "clusters", "examples"))
    assert "true" in apart["verdicts"]
    path.unlink()
    with pytest.raises(UserError, match="is missing; render"):
        accuracy.main([*asked, "--benchmark", str(path)])


def answers(own: str, **more: Any) -> dict[str, Any]:
    shares = {name: [own.count("1") / len(own)] for name in CONDITIONS}
    every = {"items": len(own), "accuracy": shares, "difference": {"own - none": [0.25, 0.2, 0.3]}}
    return {"results": {"every": every}, "verdicts": {"own": own, "sampled": own, "none": own}, **more}


def test_tables_of_several_benchmarks() -> None:
    tables = scripts.script("studies/answers/long_tables.py")
    cells = [clocked(method, 380.0, 0.8) for method in ("t5", "rlp", "quiet-star-grpo")]
    unnamed = copy.deepcopy(cells)
    bare = {"cells": unnamed, "benchmark": {"careful-groups": answers("100")}}
    others = tables.of_kind(tables.long_benchmarks, "groups")
    assert others({"cells": cells}) == ""
    unnamed[0]["accuracy"]["benchmark"] = answers("110")
    # One unnamed benchmark is GSM8K and none of the others; named it gives the same table.
    shown = tables.CLOCKED_TABLES["groups_benchmark"](bare)
    assert [row[:4] for row in lines_of(shown)] == [["the start", "–", "3", "33.3"], ["T⁵, 8 × 1", "1", "3", "66.7"]]
    assert others(bare) == ""
    cells[0]["accuracy"]["benchmarks"] = {"gsm8k": answers("110"), "csqa": answers("0101", chance=0.2)}
    cells[1]["accuracy"]["benchmarks"] = {"math500": answers("01"), "csqa": answers("0001", chance=0.2)}
    starts = {"gsm8k": {"careful-groups": answers("100")}, "csqa": {"careful-groups": answers("0000", chance=0.2)}}
    found = {"cells": cells, "benchmarks": starts}
    assert tables.CLOCKED_TABLES["groups_benchmark"](found) == shown
    math, start, first, second = lines_of(others(found))
    assert math[:5] == ["MATH-500", "RLP, 8 × 1", "1", "2", "50.0"]
    assert start[:5] == ["CommonsenseQA (blind choice 20.0)", "the start", "–", "4", "0.0"]
    assert (first[1], first[11].split()[0]) == ("T⁵, 8 × 1", "+50.0")
    assert (second[1], second[11].split()[0], second[13].split()[0]) == ("RLP, 8 × 1", "+25.0", "+25.0")
    assert tables.of_kind(tables.long_benchmarks, "long")(found) == ""


def test_later_benchmarks_stand_beside_earlier_ones() -> None:
    collect = scripts.script("studies/answers/collect.py")
    now: dict[str, Any] = {"cells": [], "headroom": {}, "accuracy": {}, "clusters": {}, "machine": {}, "benchmarks": {}}
    before = {**now, "benchmark": {"warm": 1}}
    assert collect.merged(before, now)["benchmark"] == {"warm": 1}
    once = collect.merged(before, {**now, "benchmarks": {"csqa": {"warm": 2}}})
    twice = collect.merged(once, {**now, "benchmarks": {"csqa": {"base": 3}, "math500": {"warm": 4}}})
    assert twice["benchmarks"] == {"csqa": {"warm": 2, "base": 3}, "math500": {"warm": 4}}
    assert twice["benchmark"] == {"warm": 1}

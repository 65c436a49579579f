"""Exercise sheets of worked problems: three forms of rows, full rows of tokens, no problem in two files, and the
command that writes them for the preset."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from tfive.cli.app import app
from tfive.cli.data_sheets import items_for, sheets
from tfive.config.config import Config
from tfive.errors import UserError
from tfive.text.sheets import HEADER, Problem, read_problems, sheet_files
from tfive.text.workings import worked_texts
from tfive.training.inputs import needed

LENGTH = 192


def asked(number: int) -> dict[str, Any]:
    """A problem in the form of GSM8K's own file."""
    a, b, c = 2 + number % 37, 3 + number % 11, 1 + number
    lines = (f"Ann has {a} + {b} = <<{a}+{b}={a + b}>>{a + b} pens.", f"{c:,} come on top.", f"So {a + b + c}.")
    answer = "\n".join(lines) + f"\n#### {a + b + c:,}"
    return {"question": f"Ann buys {a} pens,  then {b}\nand then {c} more. How many has she?", "answer": answer}


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer and the problems it was made of."""
    where = tmp_path_factory.mktemp("sheets")
    rows = [asked(number) for number in range(300)]
    write(where / "problems.jsonl", rows)
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    options: dict[str, Any] = {"special_tokens": ["<e>"], "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    trainer = trainers.BpeTrainer(vocab_size=600, show_progress=False, **options)
    backend.train_from_iterator([row["question"] + row["answer"] for row in rows] + [HEADER] * 50, trainer)
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<e>").save_pretrained(where / "model")
    return where


def test_three_forms_of_rows_are_the_same_problem(tmp_path: Path) -> None:
    lines = "Half of 2,468 is 1,234.\nSo 1,234."
    given = [
        {"id": "a", "question": "What is half of 2,468?", "working": lines, "answer": "1,234"},
        {"id": "a", "question": "What is half of 2,468?", "answer": f"{lines}\n#### 1,234"},
        {"id": "a", "text": f"What is half of 2,468?\n\n{lines}\nThe answer is 1,234."},
    ]
    spare = {"id": "s", "question": "And?", "working": "w", "answer": 7, "fewshot": True}
    for row in given:
        found = read_problems(write(tmp_path / "one.jsonl", [row, spare]))
        assert found.kept == [Problem("a", "What is half of 2,468?", ("Half of 2,468 is 1,234", "So 1,234"), "1234")]
        assert [one.answer for one in found.spare] == ["7"]
    noted = read_problems(write(tmp_path / "one.jsonl", [asked(1), spare]))
    assert noted.kept[0].lines == ("Ann has 3 + 4 = 7 pens", "2 come on top", "So 9")
    assert noted.kept[0].question == "Ann buys 3 pens, then 4 and then 2 more. How many has she?"
    # Nothing to leave out, several words, or none: no problem.
    pairs = ((" ", "1"), ("w", "a b"), ("w", ""), ("w", "x" * 13))
    bad = [{"question": "q", "working": working, "answer": answer} for working, answer in pairs]
    assert read_problems(write(tmp_path / "one.jsonl", [*bad, *given])).passed_over == 4


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"answer": "1"}, "row 1: has answer; give question, working and answer"),
        ({"question": "q", "working": ["a"], "answer": "1"}, "row 1: working is a list; give it as text"),
        ([1], "row 1: list, not an object"),
        ({"question": "q", "answer": "7"}, "problems with a working and an answer of one word, 1 rows without"),
    ],
)
def test_rows_that_are_no_problems_are_refused_in_one_line(tmp_path: Path, row: Any, told: str) -> None:
    with pytest.raises(UserError, match=re.escape(told)):
        read_problems(write(tmp_path / "one.jsonl", [row]))


def test_sheets_fill_rows_share_no_problem_and_bring_what_they_leave_out(folder: Path, tmp_path: Path) -> None:
    backend = Tokenizer.from_file(str(folder / "model" / "tokenizer.json"))
    problems = read_problems(folder / "problems.jsonl")
    assert (len(problems.kept), len(problems.spare)) == (297, 3)
    files, workings = sheet_files(problems, backend, LENGTH)
    seen = {name: {one for row in rows for one in row["problems"]} for name, rows in files.items()}
    assert sum(map(len, seen.values())) == len(set().union(*seen.values()))
    assert all(seen.values())
    pattern = Config.load("worked-answers").text.positions.pattern
    for row in (row for rows in files.values() for row in rows):
        assert len(backend.encode(row["text"], add_special_tokens=False).ids) == LENGTH - 1
        assert len(re.findall(pattern, row["text"])) == len(row["problems"]) == len(row["workings"])
    # Each problem comes once with its last line left out, once with two, once with all.
    left_out = [known["missing"] for before, known in workings.items() if "Ann buys 3 pens, then 4 and" in before]
    assert set(left_out) == {"1", "2", "all"}
    with pytest.raises(UserError, match="no sheet is full"):
        sheet_files(problems, backend, 120)
    # The warm start finds a working at every position.
    path = tmp_path / "warm.jsonl.gz"
    with gzip.open(path, "wt", encoding="utf-8") as out:
        out.writelines(json.dumps(row) + "\n" for row in files["warm"])
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "model")
    texts = list(worked_texts(path, tokenizer, re.compile(pattern), length=LENGTH, per_text=4))
    assert len(texts) == len(files["warm"])
    assert all(working for text in texts for working in text.workings)


def test_the_command_writes_sheets_says_what_comes_next_and_overwrites_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = Config.load("worked-answers", overrides=[f"model.name={folder / 'model'}"])
    missing = [one for one in needed(config) if not one.there and one.what != "model"]
    assert [one.what for one in missing] == ["text sheets", "text of the warm start"]
    assert {one.remedy for one in missing} == {"tfive data sheets MODEL PROBLEMS makes it"}
    model, problems = str(folder / "model"), str(folder / "problems.jsonl")
    done = CliRunner().invoke(app, ["data", "sheets", model, problems, "--length", str(LENGTH), "--quiet"])
    assert done.exit_code == 0, done.output
    assert f"next: tfive train worked-answers --set model.name={model} --set text.sequence_length=192" in done.output
    assert "--set window.items=64" in done.output
    assert all(one.there for one in needed(config) if one.what != "model")
    with pytest.raises(UserError, match="already exists; give another folder"):
        sheets(model, Path(problems), Path("sheets"), LENGTH)
    with pytest.raises(UserError, match="no such file"):
        sheets(model, tmp_path / "none.jsonl", Path("other"), LENGTH)
    assert not Path("other").exists()
    assert "the preset reads sheets/: give other that name" in sheets(model, Path(problems), Path("other"), LENGTH)


def test_few_sheets_ask_for_smaller_windows() -> None:
    assert [items_for(count) for count in (4757, 4000, 3999, 700, 10)] == [2048, 2048, 960, 128, 64]

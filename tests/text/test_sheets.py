"""Exercise sheets of worked problems: four forms of rows, full rows of tokens, no problem in two files, and the
command that writes them for the preset."""

from __future__ import annotations

import gzip
import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from tfive.cli.app import app
from tfive.cli.data_sheets import FEW, FOLDER, ITEMS, PAID, THOUGHT, _left_out, alone, sheets, thought_for, window_for
from tfive.cli.data_sheets import LENGTH as ROW
from tfive.config.config import Config
from tfive.config.rules import problems as problems_of
from tfive.errors import UserError
from tfive.rl.roles import role_shares
from tfive.text.boxed import UNBOXED
from tfive.text.sheets import HEADER, PATTERN, Files, Problem, read_problems, sheet_files
from tfive.text.workings import enough_for, worked_texts
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


def test_forms_of_rows_are_the_same_problem(tmp_path: Path) -> None:
    lines = "Half of 2,468 is 1,234.\nSo 1,234."
    given = [
        {"id": "a", "question": "What is half of 2,468?", "working": lines, "answer": "1,234"},
        {"id": "a", "question": "What is half of 2,468?", "answer": f"{lines}\n#### 1,234"},
        {"id": "a", "text": f"What is half of 2,468?\n\n{lines}\nThe answer is 1,234."},
        {"id": "a", "problem": "What is half of\n2,468?", "solution": "Half of 2,468 is 1,234.\nSo \\boxed{1,234}."},
    ]
    spare = {"id": "s", "question": "And?", "working": "w", "answer": 7, "fewshot": True}
    for row in given:
        found = read_problems(write(tmp_path / "one.jsonl", [row, spare]))
        lines_of = ("Half of 2,468 is 1,234", "So 1,234")
        assert found.kept == [Problem("row 1", "What is half of 2,468?", lines_of, "1234")]
        assert [one.answer for one in found.spare] == ["7"]
    noted = read_problems(write(tmp_path / "one.jsonl", [asked(1), spare]))
    assert noted.kept[0].lines == ("Ann has 3 + 4 = 7 pens", "2 come on top", "So 9")
    assert noted.kept[0].question == "Ann buys 3 pens, then 4 and then 2 more. How many has she?"
    # Nothing to leave out, several words, or none: no problem.
    pairs = ((" ", "1"), ("w", "a b"), ("w", ""), ("w", "x" * 13), ("w", None))
    bad = [{"question": "q", "working": working, "answer": answer} for working, answer in pairs]
    found = read_problems(write(tmp_path / "one.jsonl", [*bad, *given, asked(1), spare]))
    assert (found.unfit, found.again, len(found.kept)) == ((1, 2, 3, 4, 5), (7, 8, 9), 2)


def test_boxed_results_follow_the_rule_of_answers(tmp_path: Path) -> None:
    spare = {"question": "And?", "working": "w", "answer": 7, "fewshot": True}
    results = {
        r"\boxed{42}": "42", r"\boxed{-12{,}345}": "-12345", r"\boxed{\frac{3}{4}}": r"\frac{3}{4}",
        r"\boxed{x^2 + 1}": None, r"\boxed{\frac{\sqrt{3}}{2}}": None, "42": None, r"\boxed{4": None,
    }  # fmt: skip
    rows: list[dict[str, Any]] = [
        {"problem": f"q{n}", "solution": f"Some. So ${one}$."} for n, one in enumerate(results)
    ]
    found = read_problems(write(tmp_path / "one.jsonl", [*rows, spare]))
    assert {one.question: one.answer for one in found.kept} == {"q0": "42", "q1": "-12345", "q2": r"\frac{3}{4}"}
    # Several words, and more than 12 characters, as of other rows; and no box.
    assert found.unfit == (4, 5)
    assert found.unsolved == {UNBOXED: [6, 7]}
    assert {one.question: one.lines for one in found.kept}["q2"] == ("Some", r"So $\frac{3}{4}$")
    # Other forms come first, whatever else a row has; a field without a value leaves its row out.
    extra: dict[str, Any] = {"solution": r"\boxed{1}", "problem": 5}
    own: dict[str, Any] = {"question": "a", "working": "w", "answer": "2"}
    rows = [own | extra, {"question": "b", "answer": "w\n#### 3"} | extra, {"text": "c\n\nw\nThe answer is 4."} | extra]
    rows += [{"question": "d", "working": None, "answer": "9", "solution": r"So it is $\boxed{5}$."}]
    found = read_problems(write(tmp_path / "one.jsonl", [*rows, {"problem": "e", "solution": None}, spare]))
    assert sorted((one.question, one.answer) for one in found.kept) == [("a", "2"), ("b", "3"), ("c", "4"), ("d", "5")]
    assert found.unfit == (5,)


@pytest.mark.parametrize(
    ("answer", "kept"),
    [("1,234.50", "1234.50"), ("3,5", "3,5"), ("-7", "-7"), ("42.", "42"), (2.5, "2.5"), ("$1,000", "$1,000")],
)
def test_answers_stay_what_they_are(tmp_path: Path, answer: Any, kept: str) -> None:
    rows = [{"question": "q", "working": "Think.\r\nSo.\n#### 9", "answer": answer}, {**asked(1), "fewshot": True}]
    (problem,) = read_problems(write(tmp_path / "one.jsonl", rows)).kept
    assert (problem.lines, problem.answer) == (("Think", "So"), kept)


def test_parquet_is_read_too(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [asked(number) for number in range(5)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "one.parquet")
    write(tmp_path / "one.jsonl", rows)
    assert read_problems(tmp_path / "one.parquet") == read_problems(tmp_path / "one.jsonl")


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"answer": "1"}, "row 1: has answer; give question, working and answer"),
        ({"question": "q", "working": ["a"], "answer": "1"}, "row 1: working is a list; give it as text"),
        ([1], "row 1: list, not an object"),
        ({"question": "q", "answer": "7"}, "rows that can be used: 1; give some hundred rows with question and answer"),
        (
            {"question": "q", "working": "w", "answer": "far too many letters"},
            "of 1 rows 1 have no question that can be",
        ),
        ({"text": "q\n\nmore of it\n\nw\nThe answer is 1."}, "of 1 rows 1 have no question that can be told, or"),
        (
            {"problem": "q", "solution": "So 5."},
            r"of 1 rows 1 have no result in \boxed{…} in their solution (row 1 first)",
        ),
        (
            {"problem": "q", "solution": r"\boxed{1} or \boxed{2}"},
            r"1 have different results in several \boxed{…} (row 1",
        ),
        ({"problem": "q", "solution": [r"\boxed{1}"]}, "row 1: solution is a list; give it as text"),
        ({"problem": 1, "solution": r"\boxed{1}"}, "row 1: problem is a int; give it as text"),
        ({"problem": "q"}, r"row 1: has problem; give question, working and answer"),
        ({"question": "half \ud800", "working": "w", "answer": "1"}, "row 1: no JSON in UTF-8"),
    ],
)
def test_rows_that_are_no_problems_are_refused_in_one_line(tmp_path: Path, row: Any, told: str) -> None:
    with pytest.raises(UserError, match=re.escape(told)):
        read_problems(write(tmp_path / "one.jsonl", [row]))
    (tmp_path / "none.jsonl").write_text("", "utf-8")
    with pytest.raises(UserError, match="is empty"):
        read_problems(tmp_path / "none.jsonl")


def test_sheets_fill_rows_share_no_problem_and_bring_what_they_leave_out(folder: Path, tmp_path: Path) -> None:
    backend = Tokenizer.from_file(str(folder / "model" / "tokenizer.json"))
    problems = read_problems(folder / "problems.jsonl")
    assert (len(problems.kept), len(problems.spare)) == (297, 3)
    made = sheet_files(problems, backend, LENGTH)
    files, workings = made.rows, made.workings
    seen = {name: {one for row in rows for one in row["problems"]} for name, rows in files.items()}
    assert sum(map(len, seen.values())) == len(set().union(*seen.values()))
    assert all(seen.values())
    pattern = Config.load("worked-answers").text.positions.pattern
    assert pattern == PATTERN
    assert re.findall(pattern, HEADER) == []
    assert re.findall(pattern, "Ann gives some away. How many apples are left?\nAnswer:\n3") == ["\nAnswer:\n"]
    for row in (row for rows in files.values() for row in rows):
        assert len(backend.encode(row["text"], add_special_tokens=False).ids) == LENGTH - 1
        assert len(re.findall(pattern, row["text"])) == len(row["problems"]) == len(row["workings"])
    # Each problem comes once with its last line left out, once with two, once with all.
    left_out = [known["missing"] for before, known in workings.items() if "Ann buys 3 pens, then 4 and" in before]
    assert set(left_out) == {"1", "2", "all"}
    with pytest.raises(UserError, match=r"--length 90: the two examples of a sheet alone take \d+ tokens"):
        sheet_files(problems, backend, 90)
    with pytest.raises(UserError, match=r"too long for a sheet, and none is left for test") as refused:
        sheet_files(problems, backend, len(backend.encode(HEADER).ids) + 12)
    proposed = re.search(r"give --length (\d+), which holds nine of ten", str(refused.value))
    assert proposed is not None
    assert sheet_files(problems, backend, int(proposed[1])).too_long <= 30  # of 297
    with pytest.raises(UserError, match=r"^of 9 problems none is left for test.jsonl.gz; give some hundred problems"):
        sheet_files(replace(problems, kept=problems.kept[:9]), backend, LENGTH)
    # Every problem is on a sheet, too long or told of.
    assert sum(map(len, seen.values())) + made.too_long + made.unused == len(problems.kept)
    long = replace(problems.kept[0], question="How long? " * 60)
    assert sheet_files(replace(problems, kept=[long, *problems.kept]), backend, LENGTH).too_long == 1
    # The warm start finds a working at every position.
    path = tmp_path / "warm.jsonl.gz"
    with gzip.open(path, "wt", encoding="utf-8") as out:
        out.writelines(json.dumps(row) + "\n" for row in files["warm"])
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "model")
    texts = list(worked_texts(path, tokenizer, re.compile(pattern), length=LENGTH, per_text=4))
    assert len(texts) == len(files["warm"])
    assert not any(text.cut or text.foreign for text in texts)
    assert all(working for text in texts for working in text.workings)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]


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
    assert "--set window.items=32" in done.output
    made = json.loads(gzip.decompress(Path("sheets/workings.json.gz").read_bytes()))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "model")
    sizes = sorted(len(tokenizer.encode(f" {one['working']}\n", add_special_tokens=False)) + 1 for one in made.values())
    assert sizes[-1] <= 32  # so that all are held by the least that is proposed
    assert "--set thought.length=32 --set 'thought.checkpoints=[4,8,12,16,24,32]'" in done.output
    assert "thoughts of 32 hold 100 %" in done.output
    assert "stand the questions of 3 further problems" in done.output
    used = {one for path in Path("sheets").glob("*.jsonl.gz") for row in rows_of(path) for one in row["problems"]}
    assert f"left out: {297 - len(used)} problems that were left over" in done.output
    assert "few:" not in done.output
    assert sorted(path.name for path in Path("sheets").iterdir()) == [
        "runs.jsonl.gz", "test.jsonl.gz", "warm.jsonl.gz", "workings.json.gz",
    ]  # fmt: skip
    with pytest.raises(UserError, match=r"nano: ####, which closes a thought on these sheets, is 4 tokens"):
        sheets("nano", Path(problems), Path("small"), LENGTH)
    with pytest.raises(UserError, match="is a folder; give a file of rows"):
        sheets(model, folder, Path("small"), LENGTH)
    assert not Path("small").exists()
    Path("taken").write_text("", "utf-8")
    with pytest.raises(UserError, match="taken: is a file; give a folder"):
        sheets(model, Path(problems), Path("taken"), LENGTH)
    assert all(one.there for one in needed(config) if one.what != "model")
    with pytest.raises(UserError, match="already exists; give another folder"):
        sheets(model, Path(problems), Path("sheets"), LENGTH)
    with pytest.raises(UserError, match="no such file"):
        sheets(model, tmp_path / "none.jsonl", Path("other"), LENGTH)
    assert not Path("other").exists()
    monkeypatch.setattr("tfive.cli.data_sheets.ENOUGH", 10_000)
    told = sheets(model, Path(problems), Path("other"), LENGTH)
    assert "the preset reads sheets/: give other that name" in told
    assert "few: chance may leave a part of a run none of" in told
    assert "problems like these are enough. The last line of what comes next says whether these are" in told
    assert told.splitlines()[-1].startswith("next: tfive doctor worked-answers --set model.name=")
    assert told.count("--set model.name=") == 1


def test_the_command_takes_boxed_results_and_says_what_has_none(folder: Path, tmp_path: Path) -> None:
    def boxed(number: int) -> dict[str, Any]:
        steps = f"We add $2 + {number}$.\n\nSo there are $\\boxed{{{2 + number}}}$. Done."
        return {"problem": f"Ann has 2 pens and then {number} more. How many?", "solution": steps, "level": "1"}

    rows = [boxed(number) for number in range(300)]
    rows[7]["solution"] = "So 9."
    model, problems = str(folder / "model"), write(tmp_path / "math.jsonl", rows)
    given = ["data", "sheets", model, str(problems), str(tmp_path / "out"), "--length", str(LENGTH), "--quiet"]
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 0, done.output
    assert "left out: 1 rows that have no result in \\boxed{…} in their solution (row 8 first)\n" in done.output
    made = json.loads(gzip.decompress((tmp_path / "out" / "workings.json.gz").read_bytes()))
    assert {one["working"][-12:] for one in made.values() if one["answer"] == "102"} == {"re are $102$"}
    write(tmp_path / "math.jsonl", [{**row, "solution": "So 9."} for row in rows])
    with pytest.raises(
        UserError, match=r"math.jsonl: of 300 rows 300 have no result in \\boxed.*row 1 first\); give some"
    ):
        sheets(model, problems, tmp_path / "other", LENGTH)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(("uncut", "ending"), [(0, "filled"), (2, "filled, or on such sheets alone")])
def test_what_is_left_out_is_told_once(folder: Path, uncut: int, ending: str) -> None:
    made = Files({}, {}, [], too_long=0, uncut=uncut, most=4, unused=3)
    lines = _left_out(read_problems(folder / "problems.jsonl"), made, LENGTH)
    assert f"left out: 3 problems that were left over when sheets were {ending}" in lines
    assert any("could not be cut" in line for line in lines) == bool(uncut)


def test_problems_without_workings_are_taken_where_no_row_has_one(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then a run begins with its own thoughts: nothing is there to be shown."""
    rows = [
        {"question": f"Ann has 2 pens and then {number} more. How many?", "answer": str(2 + number)}
        for number in range(300)
    ]
    rows[5]["answer"], rows[9]["question"] = "as many as there are", rows[8]["question"]
    model, problems = str(folder / "model"), write(tmp_path / "bare.jsonl", rows)
    given = ["data", "sheets", model, str(problems), str(tmp_path / "out"), "--length", str(LENGTH), "--quiet"]
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 0, done.output
    assert "workings: no row has one" in done.output
    assert "left out: 1 rows whose answer is no word of 1 to 12 characters" in done.output
    assert "left out: 1 rows whose question came before (row 10 first)" in done.output
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "runs.jsonl.gz", "test.jsonl.gz", "workings.json.gz",
    ]  # fmt: skip
    assert json.loads(gzip.decompress((tmp_path / "out" / "workings.json.gz").read_bytes())) == {}
    made = [row for name in ("runs", "test") for row in rows_of(tmp_path / "out" / f"{name}.jsonl.gz")]
    assert all("workings" not in row for row in made)
    names = [one for row in made for one in row["problems"]]
    assert len(names) == len(set(names)) > 200, "each comes once: there is nothing to show less of"
    assert all("So far:" not in row["text"] for row in made)
    command = next(line for line in done.output.splitlines() if line.startswith("next: "))
    sets = [word for word in shlex.split(command) if "=" in word]
    config = Config.load("worked-answers", overrides=sets)
    assert problems_of(config) == []
    assert (config.warmstart.source, config.warmstart.path) == ("hindsight", None)
    answers = max(len(row["problems"]) for row in made)
    assert config.text.positions.per_text == min(max(answers, 4), 8)
    assert 64 <= config.warmstart.items < 2048
    # Bare sheets hold more answers than those that windows are sized by.
    runs = rows_of(tmp_path / "out" / "runs.jsonl.gz")
    held = sum(min(len(row["problems"]), 8) for row in runs)
    monkeypatch.setattr("tfive.cli.data_sheets.SHEETS", held // 3)
    assert "window.items" not in sheets(model, problems, tmp_path / "enough", LENGTH)
    monkeypatch.setattr("tfive.cli.data_sheets.SHEETS", held // 3 + 1)
    assert held // 3 + 1 > len(runs)
    assert "--set window.items=" in sheets(model, problems, tmp_path / "few", LENGTH)
    # No more of a sheet's answers than there may be places, and never fewer than one a sheet.
    assert max(len(row["problems"]) for row in runs) > 2
    monkeypatch.setattr("tfive.cli.data_sheets.CROWDED", 2)
    for answers, enough, name in ((1, 2 * len(runs), "crowded"), (100, len(runs), "each")):
        monkeypatch.setattr("tfive.cli.data_sheets.HELD", answers)
        for more in (0, 1):
            monkeypatch.setattr("tfive.cli.data_sheets.SHEETS", enough + more)
            told = sheets(model, problems, tmp_path / f"{name}{more}", LENGTH)
            assert ("--set window.items=" in told) == bool(more)
    monkeypatch.undo()
    # Those that are marked only fill the ends of sheets.
    marked = write(tmp_path / "marked.jsonl", [{**row, "fewshot": number < 3} for number, row in enumerate(rows)])
    taken = read_problems(marked)
    assert [one.name for one in taken.spare] == ["row 1", "row 2", "row 3"]
    assert not {"row 1", "row 2", "row 3"} & {one.name for one in taken.kept}
    # Where some rows have a working, the others are left out as ever.
    worked = [{**rows[0], "question": f"Last {number}?", "working": "2 + 0 = 2"} for number in range(3)]
    write(tmp_path / "bare.jsonl", [*rows, *worked])
    assert len(read_problems(problems).unfit) == 300


def test_hindsight_is_sized_to_the_sheets() -> None:
    assert alone(4757, 3) == {"warmstart.source": "hindsight", "warmstart.path": "none", "warmstart.rounds": 3,
                              "warmstart.items": 2048, "warmstart.steps": 50}  # fmt: skip
    few = alone(292, 11)
    assert (few["text.positions.per_text"], few["warmstart.items"], few["warmstart.steps"]) == (8, 1168, 28)
    assert alone(5, 3)["warmstart.steps"] == 4


def test_few_sheets_ask_for_smaller_windows() -> None:
    preset = Config.load("worked-answers")
    assert (preset.text.sequence_length, preset.window.items) == (ROW, ITEMS)
    assert {Path(preset.text.sources[0].path or "").parent, Path(preset.warmstart.path or "").parent} == {Path(FOLDER)}
    assert [window_for(count) for count in (4757, 2000)] == [{}, {}]
    assert [window_for(count)["window.items"] for count in (1999, 1000, 700, 10)] == [224, 128, 64, 32]
    shares = {key: value for key, value in window_for(700).items() if key in FEW}
    assert all(share > getattr(preset.window, key.removeprefix("window.")) for key, share in shares.items())
    assert shares == FEW


def test_thoughts_are_as_long_as_nine_of_ten_workings_need() -> None:
    assert [enough_for(sizes) for sizes in ([], [7], [*range(1, 11)], [*range(1, 12)])] == [0, 7, 9, 10]
    preset = Config.load("worked-answers")
    assert (preset.thought.length, preset.thought.checkpoints) == (THOUGHT, (16, 32, 48, 64, 96, 128))
    assert preset.thought.checkpoints == tuple(THOUGHT * eighths // 8 for eighths in PAID)
    assert thought_for([20] * 85 + [102] * 10 + [400] * 5) == {}  # nine of ten need 102, 128 hold them
    proposed = {80: (96, "[12,24,36,48,72,96]"), 33: (64, "[8,16,24,32,48,64]"),
                129: (160, "[20,40,60,80,120,160]"), 700: (256, "[32,64,96,128,192,256]")}  # fmt: skip
    for size, (length, checkpoints) in proposed.items():
        sets = thought_for([5] * 89 + [size] * 11)
        assert sets == {"thought.length": length, "thought.checkpoints": checkpoints}
        config = Config.load("worked-answers", overrides=[f"{key}={value}" for key, value in sets.items()])
        assert problems_of(config) == []


@pytest.mark.parametrize("count", [10, 500, 1000, 1999, 2000])
def test_what_is_proposed_is_a_configuration_that_can_be_run(count: int) -> None:
    config = Config.load("worked-answers", overrides=[f"{key}={value}" for key, value in window_for(count).items()])
    assert problems_of(config) == []
    window = config.window
    held = role_shares(window, config.text.positions.per_text)["train"]
    # Of so many sheets, which hold three positions or so each, four fifths are trained on.
    for role in ("pilot", "head_train", "head_validate", "scale"):
        expected = 3 * 0.8 * max(count, 330) * held[role] / sum(held.values())
        assert expected > 2 * window.count(role), role

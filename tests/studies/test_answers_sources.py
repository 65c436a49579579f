"""The study's sheets of MATH beside those of GSM8K: what is taken, what is left out and told, and that the sheets of
GSM8K stay what they are without MATH."""

from __future__ import annotations

import gzip
import json
import random
import re
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import pytest
from answer_sheets import LENGTH

from tfive.errors import UserError
from tfive.models.load import load_tokenizer
from tfive.text.sheets import sheet_files


def boxed(number: int) -> dict[str, Any]:
    draw = random.Random(number)
    a, b = draw.randrange(2, 40), draw.randrange(2, 40)
    question = f"Find the sum of ${a}$ and ${b}$, then add ${number}$."
    solution = (
        f"The sum is \\[{a} + {b} = {a + b}.\\]With ${number}$ it is $\\boxed{{{a + b + number}}}$. It is no square."
    )
    return {"id": f"m{number}", "source": "math_train", "text": f"{question}\n\n{solution}", "fewshot": number < 5}


def lines_of(path: Path) -> list[str]:
    with gzip.open(path, "rt", encoding="utf-8") as rows:
        return rows.readlines()


def test_math_comes_on_sheets_of_its_own(
    place: Path, tmp_path: Path, render: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [json.loads(line) for line in lines_of(place / "problems.jsonl.gz") if json.loads(line)["id"] != "m1"]
    math = [boxed(number) for number in range(300)]
    math[9]["text"] = "Find one.\n\nSo it is $\\boxed{\\frac{1}{2}}$."
    math[10]["text"] = "Find one.\n\nYes, two.\n\nSo it is it. It is $\\boxed{2}$."
    math[11]["text"] = "Find one.\n\nSo it is $\\boxed{7}$."
    math[12]["text"] = math[13]["text"]
    with gzip.open(tmp_path / "problems.jsonl.gz", "wt", encoding="utf-8") as out:
        out.writelines(json.dumps(row) + "\n" for row in (*math, *rows))
    given = [str(place / "model"), str(tmp_path / "problems.jsonl.gz"), str(tmp_path / "sheets")]
    named = ["--sources", "gsm8k_train", "math_train"]
    assert render.main([*given, "--length", str(LENGTH), *named]) == 0
    told = capsys.readouterr().out
    assert "math_train: 291 problems, 5 more fill the ends of sheets\n" in told
    for why in (render.NUMBER, render.BORDER, render.SHORT, render.AGAIN):
        assert f"left out: 1 that {why}\n" in told
    assert "together:\n" in told

    # What there is without MATH is there with it, byte for byte; MATH stands behind it, its test apart.
    alone, both = place / "sheets", tmp_path / "sheets"
    assert lines_of(both / "test.jsonl.gz") == lines_of(alone / "test.jsonl.gz")
    more = {"test": [json.loads(line) for line in lines_of(both / "test-math_train.jsonl.gz")]}
    for name in ("warm", "runs"):
        before, after = lines_of(alone / f"{name}.jsonl.gz"), lines_of(both / f"{name}.jsonl.gz")
        assert after[: len(before)] == before
        more[name] = [json.loads(line) for line in after[len(before) :]]
    assert all({row["source"] for row in rows} == {"math_train"} for rows in more.values())
    assert all(name.startswith("m") for rows in more.values() for row in rows for name in row["problems"])
    seen = [{name for row in rows for name in row["problems"]} for rows in more.values()]
    assert sum(map(len, seen)) == len(set().union(*seen))
    first = json.loads("".join(lines_of(alone / "workings.json.gz")))
    known = json.loads("".join(lines_of(both / "workings.json.gz")))
    assert first.items() <= known.items()
    mine = [(before, one) for before, one in known.items() if before not in first]
    assert mine
    for before, one in mine:
        assert "boxed" not in before + one["working"]
        assert "no square" not in before + one["working"]
        assert one["working"].endswith(f"it is ${one['answer']}$")


def test_bare_runs_show_no_working_and_leave_the_test_as_it_is(
    place: Path, tmp_path: Path, render: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    shown, bare = place / "sheets", tmp_path / "bare"
    given = [str(place / "model"), str(place / "problems.jsonl.gz"), str(bare)]
    assert render.main([*given, "--length", str(LENGTH), "--bare"]) == 0
    assert sorted(path.name for path in bare.iterdir()) == ["runs.jsonl.gz", "test.jsonl.gz", "workings.json.gz"]
    assert lines_of(bare / "test.jsonl.gz") == lines_of(shown / "test.jsonl.gz")
    rows = [json.loads(line) for line in lines_of(bare / "runs.jsonl.gz")]
    assert rows
    assert not any("workings" in row or "So far" in row["text"] for row in rows)
    names = [name for row in rows for name in row["problems"]]
    assert len(set(names)) == len(names)  # each once
    tested = {name for line in lines_of(bare / "test.jsonl.gz") for name in json.loads(line)["problems"]}
    assert not tested & set(names)
    every = json.loads("".join(lines_of(shown / "workings.json.gz")))
    kept = json.loads("".join(lines_of(bare / "workings.json.gz")))
    assert 0 < len(kept) < len(every)
    assert kept.items() <= every.items()
    told = capsys.readouterr().out
    assert f"of {len(tested)} problems" in told
    # What is told to be left out is what stands on no sheet of these files.
    problems, _ = render.read_problems(place / "problems.jsonl.gz")
    left = sum(int(re.sub(",", "", one)) for one in re.findall(r"left out: ([\d,]+) (?:that are too|left over)", told))
    assert len(problems.kept) - len(tested) - len(names) == left > 0
    # Workings are measured where some are known: in the test.
    backend = load_tokenizer(str(place / "model")).backend_tokenizer
    rows = [json.loads(line) for line in lines_of(bare / "test.jsonl.gz")]
    sizes = [len(backend.encode(one, add_special_tokens=False).ids) + 1 for row in rows for one in row["workings"]]
    assert f"workings and their close: median {median(sizes):g} tokens" in told
    made = sheet_files(problems, backend, LENGTH)
    assert len(render.bared(made, problems, backend, LENGTH).sizes) == len(sizes) < len(made.sizes)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"q" + "\n\n" + r"Some. So $\boxed{-12{,}345}$", "-12345"),
        (r"q" + "\n\n" + r"Some. So $\boxed{\text{at } 5}$", "NUMBER"),
        (r"q" + "\n\n" + r"Some. So $\boxed{123456}$", "NUMBER"),
        (r"q" + "\n\n" + r"Some. So $\boxed 5$", "UNBOXED"),
        ("q\n\n[asy]\ndot((0,0));\n\n[/asy] Some. So $\\boxed{5}$", "DRAWN"),
        (r"q" + "\n\n" + r"Either $\boxed{4}$. Or $\boxed{5}$", "SEVERAL"),
    ],
)
def test_results_are_whole_numbers_of_five_digits(render: ModuleType, text: str, found: str) -> None:
    problem = render.of_math({"id": "m", "text": text})
    assert problem == getattr(render, found) if found.isupper() else problem.answer == found


def test_a_source_is_named_once(tmp_path: Path, render: ModuleType) -> None:
    with pytest.raises(UserError, match="--sources math_train math_train: one is named twice; name each once"):
        render.main(["model", "problems", str(tmp_path / "out"), "--sources", "math_train", "math_train"])
    assert not (tmp_path / "out").exists()

"""`studies/real_model/evaluation.py`: differences are found, and the harness gets the fields it reads."""

from __future__ import annotations

import json
from types import ModuleType
from typing import Any

import pytest

import scripts
from tfive.errors import UserError
from tfive.evaluate.tasks import Item


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    return scripts.script("studies/real_model/evaluation.py")


def ours(name: str, values: list[float], right: bool, normed: bool) -> dict[str, Any]:
    return {"id": name, "log_likelihood": values, "raw": right, "per_character": normed}


def theirs(name: str, values: list[float], right: float, normed: float | None) -> dict[str, Any]:
    return {"id": name, "ll": values, "acc": right, "acc_norm": normed}


def test_every_difference_is_told(benchmark: ModuleType) -> None:
    mine = [
        ours("a", [-1.0, -2.0], True, True),
        ours("b", [-3.0, -3.5], False, True),
        ours("c", [0.0, 0.0], True, True),
    ]
    other = [theirs("a", [-1.0, -2.25], 1.0, 1.0), theirs("b", [-3.5, -3.5], 1.0, 1.0)]
    found = benchmark.agreement("t", mine, other)
    assert (found["items"], found["options"]) == (2, 4)
    assert found["largest_difference"] == 0.5
    assert found["mean_difference"] == pytest.approx(0.75 / 4)
    assert [one["id"] for one in found["acc"]["verdicts_that_differ"]] == ["b"]
    assert (found["acc"]["ours"], found["acc"]["theirs"]) == (0.5, 1.0)
    assert found["acc_norm"]["verdicts_that_differ"] == []
    letters = benchmark.agreement("t", mine, [theirs("a", [-1.0, -2.0], 1.0, None)])
    assert "acc_norm" not in letters
    with pytest.raises(UserError, match="none of these items"):
        benchmark.agreement("t", mine, [theirs("z", [1.0], 1.0, None)])


def test_items_get_the_fields_of_the_harness_and_lines_what_is_compared(benchmark: ModuleType) -> None:
    item = Item("i", "Where?", "B", ("here", "there", "nowhere"))
    assert benchmark.harness_row("piqa", Item("p", "How?", "A", ("so", "thus"))) == {
        "id": "p", "goal": "How?", "sol1": "so", "sol2": "thus", "label": 0,
    }  # fmt: skip
    row = benchmark.harness_row("csqa", item)
    assert row["choices"] == {"text": ["here", "there", "nowhere"], "label": ["A", "B", "C"]}
    assert row["answerKey"] == "B"
    sample = {"doc": row, "arguments": [("Where?", " here"), ("Where?", " there")], "acc": 1.0}
    line = json.loads(benchmark.harness_line({**sample, "resps": [[(-1.5, False)], [(-2.5, True)]]}))
    assert (line["id"], line["ll"], line["acc"], line["acc_norm"]) == ("i", [-1.5, -2.5], 1.0, None)
    assert (line["context"], line["options"]) == ("Where?", [" here", " there"])


def test_the_tables_show_both_sides(benchmark: ModuleType) -> None:
    found = benchmark.agreement("t", [ours("a", [-1.0, -2.0], True, True)], [theirs("a", [-1.0, -2.25], 0.0, 1.0)])
    scores = {"pass@1": {"mean": 0.25, "low": 0.1, "high": 0.4}, "coverage": {"mean": 0.5}, "tokens": {"mean": 80.4}}
    own = {"primary": "pass@1", "scores": scores, "items": 9, "tokens_per_second": 1234.5}
    flips = {"gsm8k": {"flipped": 1, "outputs": 16}}
    kinds = {"float32 chat": {"tasks": {"gsm8k": own}, "flips": flips}}
    text = benchmark.tables({"lm_eval": {"piqa": found}, "generated": kinds})
    assert "| piqa | 1 | acc | 100.00 | 0.00 | 1 | 2.5e-01 |" in text
    assert "| piqa | 1 | acc_norm | 100.00 | 100.00 | 0 | 2.5e-01 |" in text
    assert "| gsm8k, float32 chat | 9 | 25.00 (10.00 … 40.00) | 50.00 | 80 | 1,234 | 1 of 16 |" in text

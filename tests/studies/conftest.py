"""The modules of the studies can be imported by their names, as when a script beside them is run; and what tests of
thoughts before answers begin with."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from answer_sheets import LENGTH, problem, save_model

import scripts

for study in ("answers", "smollm2"):
    sys.path.append(str(Path(__file__).resolve().parents[2] / "studies" / study))


@pytest.fixture(scope="session")
def render() -> ModuleType:
    return scripts.script("studies/answers/render.py")


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory, render: ModuleType) -> Path:
    """A model, problems and the sheets made of them."""
    folder = tmp_path_factory.mktemp("answers")
    rows = [problem(number) for number in range(400)]
    other = {"id": "m1", "source": "math_train", "text": "x\n\ny\nThe answer is 1.", "fewshot": False}
    with gzip.open(folder / "problems.jsonl.gz", "wt", encoding="utf-8") as out:
        out.writelines(json.dumps(row) + "\n" for row in (*rows, other))
    save_model(folder / "model", [row["text"] for row in rows] + [render.HEADER] * 50)
    given = [str(folder / name) for name in ("model", "problems.jsonl.gz", "sheets")]
    assert render.main([*given, "--length", str(LENGTH)]) == 0
    return folder

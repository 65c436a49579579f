"""A whole run by two processes: the files and numbers of one, written once, with what each process took."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from processes import run_world
from whole import evaluated, trained

from tfive.config.config import Config
from tfive.errors import UserError
from tfive.training.processes import course_so_far, require_possible, weights_so_far
from tiny import OVERRIDES, configure

pytestmark = pytest.mark.model

COLOURS = """name = "colours"
kind = "choice"
count = 5
file = "colours.jsonl"
prompt = "options-v1"
context = "{question}"
continuation = "text"
"""
SUMS = """name = "sums"
kind = "math"
count = 1
file = "sums.jsonl"
prompt = "words-v1"
max_new_tokens = 3
"""


def asked(home: Path) -> list[str]:
    """A run of one window with critics, a gate, and benchmarks of both kinds, of one of which there is one item."""
    configure(home)
    rows = [{"id": str(n), "question": f"{n} boat", "choices": ["river", "mill"], "answer": n % 2} for n in range(5)]
    (home / "colours.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (home / "colours.task.toml").write_text(COLOURS)
    (home / "sums.jsonl").write_text(json.dumps({"id": "0", "question": "1 1?", "answer": "2"}) + "\n")
    (home / "sums.task.toml").write_text(SUMS)
    names = 'benchmarks.gains=["colours", "sums"]', 'benchmarks.scores=["colours", "sums"]'
    benchmarks = ("benchmarks.every=2", *names, f"benchmarks.data={home}")
    return ["method=quiet-star-ppo", "window.windows=1", "window.actor_steps=2", "window.items=8", *benchmarks]


def written(folder: Path) -> set[str]:
    """The files of a run; how a checkpoint is cut into files depends on who writes it."""
    paths = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    return {path for path in paths if not path.startswith("checkpoints/") and not Path(path).name.startswith(".")}


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]


def test_a_run_by_two_processes_is_written_once_and_like_one(tmp_path: Path) -> None:
    overrides = asked(tmp_path)
    alone = trained(str(tmp_path), str(tmp_path / "one"), overrides)
    sharded = [*overrides, "distributed.shard=0"]
    found = run_world(2, "whole:trained", str(tmp_path), str(tmp_path / "two"), sharded, joins=False)
    assert found[0] == found[1]
    assert found[0]["account"] == alone["account"]
    assert found[0]["gains"] == pytest.approx(alone["gains"], abs=1e-4)
    assert alone["processes"] is None
    assert [one["seconds"] > 0 and one["peak_bytes"] > 1e6 for one in found[0]["processes"]] == [True, True]
    assert found[0]["place"] == alone["place"] | {"processes": 2, "threads": found[0]["place"]["threads"]}
    assert written(tmp_path / "two") == written(tmp_path / "one")
    one, two = lines(tmp_path / "one"), lines(tmp_path / "two")
    assert [entry.keys() for entry in one] == [entry.keys() for entry in two]
    for name in ("colours.options", "sums.generated"):
        answers = [
            (tmp_path / run / "benchmarks" / "step-000002" / f"{name}.jsonl").read_text("utf-8")
            for run in ("one", "two")
        ]
        ids = [[json.loads(line)["id"] for line in text.splitlines()] for text in answers]
        assert ids[0] == ids[1], name


def answers(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Every answer of an evaluation, by file, in the order of items."""
    kept = {path.name: path.read_text("utf-8").splitlines() for path in folder.glob("*.jsonl")}
    return {
        name: sorted(map(json.loads, found), key=lambda one: (one["id"], one.get("sample", 0)))
        for name, found in kept.items()
    }


def test_an_evaluation_by_two_processes_has_the_answers_of_one(tmp_path: Path) -> None:
    asked(tmp_path)
    alone = evaluated(str(tmp_path), str(tmp_path / "one"))
    # A stopped evaluation goes on with what it lacks.
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "run.json").write_bytes((tmp_path / "one" / "run.json").read_bytes())
    begun = (tmp_path / "one" / "colours.options.jsonl").read_text("utf-8").splitlines(keepends=True)[:2]
    (tmp_path / "two" / "colours.options.jsonl").write_text("".join(begun), "utf-8")
    found = run_world(2, "whole:evaluated", str(tmp_path), str(tmp_path / "two"), joins=False)
    assert found == [alone, alone]
    assert answers(tmp_path / "two") == answers(tmp_path / "one")


@pytest.mark.parametrize(
    ("size", "overrides", "said"),
    [
        (2, ("distributed.profile=compact",), "distributed.profile = compact: 2 critics with 1 process each need 3"),
        (1, ("distributed.profile=cluster",), "this run has 1; start more, or use distributed.profile = single"),
        (4, ("distributed.profile=compact", "method=ntp"), "method ntp has no critics to give processes to"),
        (4, ("distributed.shard=3",), "distributed.shard = 3: 4 processes cannot be divided into groups of 3"),
        (8, ("distributed.shard=4", "distributed.profile=compact"), "6 processes cannot be divided into groups of 4"),
    ],
)
def test_what_cannot_go_together_is_refused_in_one_line(size: int, overrides: tuple[str, ...], said: str) -> None:
    config = Config.load("nano", overrides=(*OVERRIDES[5:], *overrides))
    with pytest.raises(UserError, match=said) as refused:
        require_possible(config, size)
    assert "\n" not in str(refused.value)


def test_processes_compare_decisions_and_weights_and_not_measured_numbers() -> None:
    model = torch.nn.Linear(2, 1)
    actor: Any = SimpleNamespace(engine=SimpleNamespace(model=model))
    report = {"window": 1, "mixture": "learned", "r2": [0.25, 0.5], "actor_updates": {"qualified": 4}}
    method: Any = SimpleNamespace(window=1, phase="open", report=report)
    before, weights = course_so_far(method), weights_so_far(actor)
    report["r2"] = [0.25, 0.5000001]
    assert course_so_far(method) == before
    report["mixture"] = "average"
    assert course_so_far(method) != before
    report["mixture"] = "learned"
    with torch.no_grad():
        model.weight[0, 0] += 1e-6
    assert course_so_far(method) == before
    assert weights_so_far(actor) != weights

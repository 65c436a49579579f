"""`tfive eval` as it is typed: a suite on a model, going on, comparing, explaining, gains, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tiny
from tfive.cli import app as cli
from tfive.inference.thought_model import ThoughtModel
from tfive.models.load import save_model
from tfive.tree.settings import SamplingSettings, ThoughtSettings

pytestmark = pytest.mark.model

SUMS = """
name = "sums"
kind = "math"
count = 4
file = "sums.jsonl"
prompt = "words-v1"
stop = ["\\nQuestion:"]
max_new_tokens = 6
"""
RIDDLES = """
name = "riddles"
kind = "choice"
count = 4
file = "riddles.jsonl"
prompt = "options-v1"
max_new_tokens = 6
context = "Question: {question}\\nAnswer:"
continuation = "text"
"""


def call(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main([str(word) for word in words])
    printed = capsys.readouterr()
    return int(ended.value.code or 0), printed.out, printed.err


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with thoughts, a plain one, two small tasks and a corpus."""
    home = tmp_path_factory.mktemp("place")
    model = tiny.model()
    model.config.max_position_embeddings = 256
    thought = ThoughtSettings(length=3, checkpoints=(3,), horizon=4)
    ThoughtModel(model, tiny.tokenizer(), thought, SamplingSettings()).save_pretrained(home / "thinker")
    save_model(model, tiny.tokenizer(), home / "plain")
    data = home / "data"
    data.mkdir()
    rows: list[dict[str, Any]] = [{"id": f"s{n}", "question": f"What is {n}?", "answer": str(n)} for n in range(4)]
    (data / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    rows = [{"id": f"r{n}", "question": f"Mill {n}?", "choices": ["river", "salt"], "answer": n % 2} for n in range(4)]
    (data / "riddles.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    (data / "sums.task.toml").write_text(SUMS, "utf-8")
    (data / "riddles.task.toml").write_text(RIDDLES, "utf-8")
    (home / "corpus.jsonl").write_text(
        "".join(json.dumps({"text": tiny.document(n)}) + "\n" for n in range(9)), "utf-8"
    )
    return home


def asked(place: Path, model: str, out: Path, *more: object) -> list[object]:
    data = ("--data", place / "data", "--device", "cpu", "--out", out)
    return ["eval", place / model, "--tasks", "sums,riddles", *data, *more]


def test_a_model_is_asked_compared_and_explained(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, thinking = tmp_path / "plain", tmp_path / "thinking"
    status, out, err = call(capsys, *asked(place, "plain", plain, "--flips", 2, "--json"))
    assert (status, err) == (0, "")
    scores = json.loads(out)
    assert json.loads((plain / "scores.json").read_text("utf-8")) == scores
    assert scores["tasks"]["sums"]["primary"] == "pass@1"
    assert scores["tasks"]["riddles"]["primary"] == "accuracy"
    assert set(scores["tasks"]["riddles"]["scores"]) >= {"accuracy", "coverage", "tokens", "log-likelihood raw"}
    first = [task["scores"][task["primary"]]["mean"] for task in scores["tasks"].values()]
    assert scores["mean"]["mean"] == pytest.approx(sum(first) / 2)
    assert scores["flips"]["sums"]["outputs"] == 2
    run = json.loads((plain / "run.json").read_text("utf-8"))
    assert run["tasks"]["sums"]["prompt"]["version"] == "words-v1"
    assert run["tasks"]["sums"]["decoding"]["max_new_tokens"] == 6
    assert run["tasks"]["riddles"]["manifest"] == "unfrozen"
    assert run["model"]["precision"] == "float32"
    before = (plain / "sums.generated.jsonl").read_text("utf-8")
    status, out, _ = call(capsys, *asked(place, "plain", plain))
    assert status == 0
    assert "| riddles | 4 |" in out
    assert (plain / "sums.generated.jsonl").read_text("utf-8") == before

    status, out, _ = call(capsys, *asked(place, "thinker", thinking, "--thoughts", "every=2", "--json"))
    assert status == 0
    thought = json.loads(out)
    assert thought["tasks"]["sums"]["thought_tokens"] > 0
    assert thought["tasks"]["riddles"]["thought_tokens"] > 0
    assert json.loads((thinking / "run.json").read_text("utf-8"))["model"]["thought"]["length"] == 3

    status, out, _ = call(capsys, "eval", "compare", plain, thinking, "--json")
    assert status == 0
    assert set(json.loads(out)["tasks"]["riddles"]) == {"pass@1", "log-likelihood raw", "log-likelihood per_character"}
    assert "| sums | pass@1 | 4 |" in call(capsys, "eval", "compare", plain, thinking)[1]
    status, out, _ = call(capsys, "eval", "explain", plain, "r1")
    assert status == 0
    assert "Mill 1?" in out
    assert "gold: B" in out
    assert json.loads(call(capsys, "eval", "explain", plain, "sums/s2", "--json")[1])["task"] == "sums"


def test_one_item_alone_is_as_it_was_among_others(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--parity", "--samples", 2, "--temperature", "1.0", "--ways", "generated", "--json")
    assert call(capsys, *asked(place, "plain", tmp_path / "all", *words))[0] == 0
    assert call(capsys, *asked(place, "plain", tmp_path / "one", *words, "--limit", 1))[0] == 0
    for task in ("sums", "riddles"):
        whole, single = (
            [json.loads(line) for line in (tmp_path / name / f"{task}.generated.jsonl").open(encoding="utf-8")]
            for name in ("all", "one")
        )
        assert len(single) == 2
        assert all(record in whole for record in single)


def test_tasks_are_listed_with_the_state_of_their_files(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = call(capsys, "eval", "tasks", "--json")
    assert status == 0
    rows = {row["task"]: row for row in json.loads(out)}
    assert rows["gsm8k"]["items"] == 1319
    assert rows["gsm8k"]["suite"] == "primary"
    assert rows["gsm8k"]["manifest"] == "frozen"
    (tmp_path / "piqa.jsonl").write_text(
        json.dumps({"id": "1", "question": "?", "choices": ["a", "b"], "answer": 0}) + "\n", "utf-8"
    )
    status, out, _ = call(capsys, "eval", "tasks", "--data", tmp_path)
    assert status == 0
    assert "wrong:" in next(line for line in out.splitlines() if line.startswith("piqa"))
    assert "no file" in next(line for line in out.splitlines() if line.startswith("gsm8k "))


def test_gains_of_a_model_on_a_corpus(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--corpus", place / "corpus.jsonl", "--texts", 6, "--tokens", 40, "--positions", 2, "--device", "cpu")
    status, out, err = call(capsys, "eval", "gains", place / "thinker", *words, "--base", place / "plain", "--json")
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert {"thought_gain", "content_gain", "gain_vs_base", "continuation_loss"} <= set(found["all"])
    assert found["thought"]["length"] == 3
    assert found["all"]["no_thought_drift"]["mean"] == pytest.approx(0, abs=1e-5)
    assert set(found["by_kind"]) == {"entropy", "uniform"}
    status, out, _ = call(capsys, "eval", "gains", place / "thinker", *words, "--pattern", "river", "--json")
    assert status == 0
    assert "match" in json.loads(out)["by_kind"]
    status, out, _ = call(capsys, "eval", "gains", place / "thinker", *words)
    assert status == 0
    assert "| content_gain |" in out
    assert "gain_vs_base" not in out


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--tasks", "nothing"], "nothing"),
        (["--limit", "0"], "--limit 0"),
        (["--temperature", "-1"], "temperature = -1.0: give 0"),
        (["--thoughts", "often"], "--thoughts 'often'"),
        (["--thoughts", "every=2"], "has no thoughts/thought.json"),
        (["--samples", "4"], "temperature 0"),
        (["--ways", "guess"], "guess"),
        (["--data", "absent"], "absent"),
        (["--chat"], "chat"),
        (["--device", "abacus"], "abacus"),
        (["--bogus"], "--bogus"),
    ],
)
def test_bad_wishes_are_one_line_and_nothing_is_written(
    place: Path, tmp_path: Path, words: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    status, printed, err = call(capsys, *asked(place, "plain", out), *words)
    assert (status, printed) == (2, "")
    assert err.startswith("tfive: error: ")
    assert err.count("\n") == 1
    assert part in err
    assert not out.exists()


def test_wrong_models_and_runs_are_one_line(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commands: list[tuple[list[object], str]] = [
        (["eval", tmp_path / "absent", "--tasks", "sums", "--data", place / "data"], "no such folder"),
        (["eval", "explain", tmp_path, "x"], "run.json is missing"),
        (["eval", "compare", tmp_path, tmp_path], "run.json is missing"),
        (["eval", "gains", place / "plain", "--corpus", tmp_path / "none.txt"], "none.txt"),
        (["eval", "gains", place / "plain", "--corpus", place / "corpus.jsonl", "--tokens", "400"], "--tokens 400"),
        (["eval", "gains", place / "plain"], "corpus"),
        (["eval", "gains", place / "plain", "--corpus", place / "corpus.jsonl", "--pattern", "("], "--pattern '('"),
        (["eval", "gains", place / "plain", "--corpus", place / "corpus.jsonl", "--entropy", "2"], "--entropy 2"),
    ]
    for words, part in commands:
        status, printed, err = call(capsys, *words)
        assert (status, printed) == (2, "")
        assert err.count("\n") == 1
        assert part in err

"""`tfive data overlap`, and a corpus prepared without the documents that hold benchmark items."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tfive.cli import app as cli
from tfive.config.config import Config
from tfive.text.settings import TextSettings
from tfive.training.corpus import corpus_of, exclusion_of, stats

QUESTION = "A farmer drives seven brown cows over a narrow bridge and counts how many hooves he has seen in all."
DECLARATION = """
name = "cows"
kind = "math"
count = 2
file = "cows.jsonl"
prompt = "words-v1"
"""


def rows(path: Path, listed: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in listed), encoding="utf-8")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A benchmark of two items and a corpus in which three documents of 300 hold the first."""
    folder = tmp_path_factory.mktemp("overlap")
    (folder / "cows.task.toml").write_text(DECLARATION, encoding="utf-8")
    rows(folder / "cows.jsonl", [{"question": QUESTION, "answer": "28"}, {"question": "And now?", "answer": "1"}])
    plain = [
        f"Note {n}. The river carries grain and salt to the town, boat {n * 7} goes first." * 3 for n in range(297)
    ]
    dirty = [f"Heard in class {n}: {QUESTION.lower()} Nobody knew." for n in range(3)]
    rows(folder / "corpus.jsonl", [{"text": text} for text in (*plain, *dirty)])
    (folder / "run.toml").write_text(
        f"""
        [text]
        sequence_length = 48
        cache = "{folder / "cache"}"
        sequences = {{train = 32, calibration = 4, development = 4, test = 2}}
        positions = {{per_text = 3}}
        sources = [{{name = "notes", path = "{folder / "corpus.jsonl"}"}}]
        [thought]
        length = 2
        checkpoints = [2]
        horizon = 4
        [window]
        items = 24
        [run]
        develop_items = 6
        """,
        encoding="utf-8",
    )
    return folder


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    printed = capsys.readouterr()
    return int(ended.value.code or 0), printed.out, printed.err


@pytest.mark.parametrize("corpus", ["corpus.jsonl", "run.toml"])
def test_a_file_and_a_configuration_give_the_same_figures(
    home: Path, capsys: pytest.CaptureFixture[str], corpus: str
) -> None:
    named = [str(home / corpus)] if corpus == "corpus.jsonl" else ["nano", str(home / corpus)]
    status, out, _ = run(capsys, "data", "overlap", *named, "--tasks", "cows", "--data", str(home), "--json")
    report = json.loads(out)
    assert status == 0
    assert list(report["documents"].values()) == [300]
    assert list(report["overlapping"].values()) == [3]
    assert report["tasks"] == {"cows": {"items": 2, "unchecked": 1, "found": 1, "documents": 3}}
    assert [match["row"] for match in report["matches"]] == [297, 298, 299]


def test_the_report_for_people(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "data", "overlap", str(home / "corpus.jsonl"), "--tasks", "cows", "--data", str(home))
    assert "corpus: 3 of 300 documents overlap" in out
    assert "corpus row 297: cows cows-0, 8 of 8 runs" in out


def test_another_field_and_a_missing_one(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    items = str(home / "cows.jsonl")
    asked = ("--tasks", "cows", "--data", str(home), "--json")
    status, out, _ = run(capsys, "data", "overlap", items, "--field", "question", *asked)
    assert (status, json.loads(out)["tasks"]["cows"]["found"]) == (0, 1)
    status, _, err = run(capsys, "data", "overlap", items, *asked)
    assert (status, "no field 'text'" in err) == (2, True)


def test_unknown_tasks_and_missing_files_are_named(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "data", "overlap", "nano", "--tasks", "horses", "--data", str(home))
    assert (status, "task 'horses'" in err) == (2, True)
    status, _, err = run(capsys, "data", "overlap", "nano", "--tasks", "gsm8k", "--data", str(home))
    assert (status, "gsm8k.jsonl.gz: no such file" in err) == (2, True)


def test_a_prepared_corpus_leaves_overlapping_documents_out_and_counts_them(home: Path) -> None:
    overrides = ['text.decontaminate.tasks=["cows"]', f"text.decontaminate.data={home}"]
    sources = ("nano", str(home / "run.toml"))
    clean = corpus_of(Config.load(*sources, overrides=overrides))
    plain = corpus_of(Config.load(*sources))
    assert clean.folder != plain.folder
    assert clean.manifest["read"]["notes"]["overlapping"] == 3
    assert clean.manifest["read"]["notes"]["documents"] == 297
    assert clean.manifest["exclusion"]["tasks"] == ["cows"]
    assert plain.manifest["read"]["notes"]["overlapping"] == 0
    assert "exclusion" not in plain.manifest
    assert clean.documents["record"].max() < 297
    assert "3 overlapping" in stats(sources, overrides, quiet=True)


def test_nothing_is_left_out_unless_asked() -> None:
    assert exclusion_of(TextSettings()) is None


def test_a_missing_file_is_not_taken_for_a_preset(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("absent.jsonl.gz", "some/folder"):
        assert cli._call(["data", "overlap", name, "--tasks", "sums"]) == 2
        assert f"{name}: no such file or folder" in capsys.readouterr().err

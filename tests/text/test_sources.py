"""Rows to documents: what a row's text is, which rows are kept, and how bad ones are named."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from material import write_jsonl
from pydantic import ValidationError

from tfive.errors import UserError
from tfive.text.settings import TextSource, Where
from tfive.text.sources import BadRow, Reader, SourceFile, local_files, text_of


def row_file(**options: Any) -> SourceFile:
    return SourceFile("s", Path("a.jsonl"), "a.jsonl", **options)


def line(value: object) -> bytes:
    return json.dumps(value).encode()


def test_fields_are_joined_by_a_blank_line() -> None:
    file = row_file(fields=("title", "abstract"))
    assert text_of(line({"title": " A\r\nB ", "abstract": "C\rD\n", "x": 1}), file) == "A\nB\n\nC\nD"
    assert text_of(line({"title": "A", "abstract": "  "}), file) == "A"


def test_only_white_space_is_an_empty_document() -> None:
    assert text_of(line({"text": " \n\t "}), row_file()) == ""


@pytest.mark.parametrize(
    ("value", "where", "kept"),
    [
        ("2024-12-31", Where(field="date", at_least="2025-01-01", below="2027"), False),
        ("2025-01-01", Where(field="date", at_least="2025-01-01", below="2027"), True),
        ("2026-12-31", Where(field="date", at_least="2025-01-01", below="2027"), True),
        ("2027-01-01", Where(field="date", at_least="2025-01-01", below="2027"), False),
        ("hep-th/9901001", Where(field="date", at_least="25", below="27"), False),
        ("2507.17675", Where(field="date", at_least="25", below="27"), True),
        (3, Where(field="date", below=3.5), True),
        (4.0, Where(field="date", below=3.5), False),
    ],
)
def test_rows_are_kept_by_a_range(value: object, where: Where, kept: bool) -> None:
    text = text_of(line({"text": "x", "date": value}), row_file(where=where))
    assert text == ("x" if kept else None)


def test_dates_of_parquet_rows_compare_in_iso_form() -> None:
    where = Where(field="date", at_least="2025", below="2027")
    file = row_file(where=where)
    assert text_of({"text": "x", "date": datetime.date(2025, 5, 1)}, file) == "x"
    assert text_of({"text": "x", "date": datetime.datetime(2024, 5, 1, 12)}, file) is None


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"{", "is not JSON"),
        (b"[" * 200_000, "is not JSON"),
        (b'{"text": ' + b"1" * 5000 + b"}", "is not JSON"),
        (b"[1]", "is a JSON list"),
        (b'{"body": "x"}', "has no field 'text'"),
        (b'{"text": null}', "has a NoneType instead of text"),
        (b'{"text": ["x"]}', "has a list instead of text"),
        (b'{"text": "\xff"}', "is not UTF-8"),
        (b'{"text": "\\ud800"}', "surrogate"),
        (b'{"text": "a\\u0000b"}', "NUL"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, raw: bytes, reason: str) -> None:
    with pytest.raises(BadRow, match=reason):
        text_of(raw, row_file())
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "fine"}\n' + raw + b'\n{"text": "also fine"}\n')
    file = SourceFile("s", path, "a.jsonl")
    with pytest.raises(UserError, match="row 2") as error:
        list(Reader().documents(file))
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)
    reader = Reader(skip_bad=True)
    assert list(reader.documents(file)) == [(0, "fine"), (2, "also fine")]
    assert reader.tallies["s"].bad == 1


def test_a_field_to_filter_by_must_be_there() -> None:
    with pytest.raises(BadRow, match="no text in field 'date'"):
        text_of(line({"text": "x", "date": 3}), row_file(where=Where(field="date", below="2027")))
    with pytest.raises(BadRow, match="no number in field 'date'"):
        text_of(line({"text": "x"}), row_file(where=Where(field="date", below=3)))


@given(st.sampled_from(["a.jsonl", "a.txt"]), st.binary(max_size=300), st.booleans())
def test_any_bytes_give_documents_or_one_clear_line(
    tmp_path_factory: pytest.TempPathFactory, name: str, content: bytes, skip: bool
) -> None:
    path = tmp_path_factory.mktemp("bytes") / name
    path.write_bytes(content)
    message = ""
    found: list[tuple[int, str]] = []
    try:
        found = list(Reader(skip_bad=skip).documents(SourceFile("s", path, name)))
    except UserError as error:
        message = str(error)
    assert not (skip and message)
    assert "\n" not in message
    assert all(text == text.strip() and text and "\r" not in text for _, text in found)


@given(st.sets(st.integers(0, 30), min_size=1))
def test_wanted_rows_alone_are_read(tmp_path_factory: pytest.TempPathFactory, wanted: set[int]) -> None:
    path = write_jsonl(tmp_path_factory.mktemp("rows") / "a.jsonl", [f"text {n}" for n in range(31)])
    numbers = np.array(sorted(wanted))
    found = list(Reader().documents(SourceFile("s", path, "a.jsonl"), numbers))
    assert found == [(n, f"text {n}") for n in sorted(wanted)]


def test_reading_ends_with_the_last_wanted_row(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"text": "b"}\nnot JSON\n')
    assert list(Reader().documents(SourceFile("s", path, "a.jsonl"), np.array([1]))) == [(1, "b")]


def test_a_folder_stands_for_its_files_in_a_fixed_order(tmp_path: Path) -> None:
    for name in ("b.jsonl", "sub/a.txt", "a.parquet", "note.md", ".hidden/c.txt", "z.jsonl.gz"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    files = local_files(TextSource(name="s", path=str(tmp_path)))
    assert [file.name for file in files] == ["a.parquet", "b.jsonl", "sub/a.txt", "z.jsonl.gz"]


def test_missing_and_unknown_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x")
    (tmp_path / "empty").mkdir()
    for name, reason in [("gone.jsonl", "no such file"), ("a.csv", "not a .jsonl"), ("empty", "no .jsonl")]:
        with pytest.raises(UserError, match=reason) as error:
            local_files(TextSource(name="s", path=str(tmp_path / name)))
        assert name in str(error.value)


def test_a_file_of_the_package() -> None:
    with pytest.raises(UserError, match="no such file"):
        local_files(TextSource(name="s", path="tfive:data/absent.jsonl"))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"path": "a", "hub": "b"},
        {"path": "a", "limit": 3},
        {"path": "a", "share": 0},
        {"path": "a", "share": -1},
        {"path": "a", "share": float("inf")},
        {"hub": "a", "limit": -1},
        {"path": "a", "fields": ()},
        {"path": "a", "separator": ""},
        {"path": "a", "unknown": 1},
        {"path": 7},
        {"path": "a", "sha256": "not hexadecimal"},
        {"hub": "a", "sha256": "0" * 64},
    ],
)
def test_a_source_must_make_sense(options: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        TextSource.model_validate({"name": "s", **options})

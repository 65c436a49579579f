"""Files as streams of rows: every format gives the same rows, and no damaged file goes unnoticed."""

from __future__ import annotations

import gzip
import io
import json
import tempfile
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from tfive.errors import UserError
from tfive.text import formats
from tfive.text.formats import format_of, raw_rows

ROWS = [{"text": f"row {n} äöü", "n": n} for n in range(40)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def parquet_bytes(rows: list[dict[str, object]]) -> bytes:
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), buffer, row_group_size=16)
    return buffer.getvalue()


def read(path: Path, separator: str = "none") -> list[tuple[int, formats.RawRow]]:
    return list(raw_rows(path, ["text", "n"], separator))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", LINES),
        ("a.jsonl.gz", gzip.compress(LINES)),
        ("two.jsonl.gz", gzip.compress(LINES[:100]) + gzip.compress(LINES[100:])),
        ("a.jsonl.zst", zstandard.compress(LINES)),
        ("two.JSONL.ZST", zstandard.compress(LINES[:100]) + zstandard.compress(LINES[100:])),
        ("a.parquet", parquet_bytes(ROWS)),
    ],
)
def test_every_format_gives_the_same_rows(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    found = [(n, json.loads(raw) if isinstance(raw, bytes) else raw) for n, raw in read(path)]
    assert found == list(enumerate(ROWS))


def test_blank_lines_keep_their_number(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n\n  \n{"text": "b"}')
    assert [n for n, _ in read(path)] == [0, 3]


@given(st.lists(st.sampled_from(["ab", "\n", "\r", "\r\n", "===", "="]), max_size=30), st.integers(1, 5))
def test_separated_documents_do_not_depend_on_chunks(
    tmp_path_factory: pytest.TempPathFactory, parts: list[str], size: int
) -> None:
    content = "".join(parts)
    path = tmp_path_factory.mktemp("txt") / "a.txt"
    path.write_bytes(content.encode())
    whole = content.replace("\r\n", "\n").replace("\r", "\n")
    expected = whole.split("===")
    expected = expected if expected[-1] else expected[:-1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(formats, "CHUNK", size)
        found = [raw.decode() for _, raw in read(path, "===") if isinstance(raw, bytes)]
    assert found == expected


def test_a_text_file_may_be_one_document(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\n\ntwo\n")
    assert read(path) == [(0, b"one\n\ntwo\n")]


@given(st.sampled_from(["a.jsonl.gz", "a.jsonl.zst", "a.parquet"]), st.floats(0.001, 0.999))
def test_truncated_files_are_refused(tmp_path_factory: pytest.TempPathFactory, name: str, part: float) -> None:
    content = {
        "a.jsonl.gz": gzip.compress(LINES),
        "a.jsonl.zst": zstandard.compress(LINES),
        "a.parquet": parquet_bytes(ROWS),
    }[name]
    path = tmp_path_factory.mktemp("cut") / name
    path.write_bytes(content[: max(1, int(len(content) * part))])
    with pytest.raises(UserError, match=r"truncated|damaged") as error:
        read(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


@given(st.sampled_from(["a.jsonl.gz", "a.jsonl.zst", "a.parquet"]), st.binary(min_size=1, max_size=200))
def test_junk_under_a_compressed_name_is_refused(
    tmp_path_factory: pytest.TempPathFactory, name: str, junk: bytes
) -> None:
    path = tmp_path_factory.mktemp("junk") / name
    path.write_bytes(junk)
    with pytest.raises(UserError) as error:
        read(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(parquet_bytes([{"body": "x", "n": 1}]))
    with pytest.raises(UserError, match="no column 'text'; it has body, n"):
        read(path)


def test_an_endless_line_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "LONGEST_ROW", 1000)
    monkeypatch.setattr(formats, "CHUNK", 100)
    for name in ("a.jsonl", "a.txt"):
        path = tmp_path / name
        path.write_bytes(b"x" * 5000)
        with pytest.raises(UserError, match="more than"):
            read(path)


def test_formats_by_name() -> None:
    names = ["a.jsonl", "a.txt.zst", "a.parquet", "a.parquet.gz", "a.csv", "jsonl", "a.gz"]
    assert [format_of(Path(name)) for name in names] == ["jsonl", "txt", "parquet", None, None, None, None]


@given(
    st.lists(st.sampled_from([b"", b" ", b"\t", b"\r", b'{"text": "a"}', b"x y"]), max_size=12),
    st.booleans(),
    st.integers(1, 9),
)
def test_blank_lines_are_counted_and_left_out(pieces: list[bytes], ended: bool, chunk: int) -> None:
    """The same rows and numbers as cutting at every line feed, however the file is cut into chunks."""
    content = b"\n".join(pieces) + (b"\n" if ended else b"")
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        path = Path(folder) / "a.jsonl"
        path.write_bytes(content)
        patch.setattr(formats, "CHUNK", chunk)
        found = list(raw_rows(path, ("text",)))
    assert found == [(number, line) for number, line in enumerate(content.split(b"\n")) if line.strip()]


def test_blank_lines_are_never_handed_out_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\n" * 1_000_000)
    monkeypatch.setattr(formats, "_pieces", lambda *_: pytest.fail("every line feed is a step of a loop"))
    assert list(raw_rows(tmp_path / "a.jsonl", ("text",))) == []

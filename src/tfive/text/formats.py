"""File formats as streams of raw rows: JSON lines, Parquet and plain text, the first and last also gzip'd or zstd'd.

Nothing is held beyond one chunk and one row. A file that cannot be read to its end raises `UserError` with its name.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tfive.errors import UserError
from tfive.extras import install_hint
from tfive.text.cutting import documents_of
from tfive.text.settings import AUTO, WHOLE

CHUNK = 1 << 20
LONGEST_ROW = 64 << 20
"""Bytes of the longest line or document accepted; a longer one is a mistake more often than a text."""

RawRow = bytes | dict[str, Any]
"""A JSON line or a plain document as bytes, or a Parquet row."""

_FILLED = re.compile(rb"[^\n]+")
_COMPRESSED = (".gz", ".zst")
_KINDS = {".jsonl": "jsonl", ".txt": "txt", ".parquet": "parquet"}


def format_of(path: Path) -> str | None:
    """`jsonl`, `txt` or `parquet` by the file's name, None for anything else."""
    name = path.name.lower()
    for suffix in _COMPRESSED:
        if name.endswith(suffix):
            inner = _KINDS.get(Path(name.removesuffix(suffix)).suffix)
            return None if inner == "parquet" else inner
    return _KINDS.get(Path(name).suffix)


def raw_rows(path: Path, columns: Sequence[str], separator: str = AUTO) -> Iterator[tuple[int, RawRow]]:
    """Rows of one file with their number; blank JSON lines keep their number but are left out. Of a Parquet file the
    `columns` are read and must be there, or all of them where none is named.

    `separator` is that of a source: `auto` cuts plain text by `tfive.text.cutting`, `none` takes a file whole.
    """
    kind = format_of(path)
    if kind is None:
        raise UserError(f"{path}: not a .jsonl, .parquet or .txt file; convert it or point at another file")
    try:
        if kind == "parquet":
            yield from enumerate(_parquet(path, columns))
        elif kind == "jsonl":
            yield from _lines(path, _bytes(path))
        elif separator == WHOLE:
            yield 0, _whole(path)
        elif separator == AUTO:
            yield from enumerate(documents_of(_pieces(path, _unix_newlines(_bytes(path)), b"\n")))
        else:
            yield from enumerate(_pieces(path, _unix_newlines(_bytes(path)), separator.encode()))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from error


def _bytes(path: Path) -> Iterator[bytes]:
    """The file's content, decompressed, in chunks."""
    name = path.name.lower()
    if name.endswith(".gz"):
        yield from _gunzip(path)
    elif name.endswith(".zst"):
        yield from _unzstd(path)
    else:
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                yield chunk


def _gunzip(path: Path) -> Iterator[bytes]:
    try:
        with gzip.open(path, "rb") as file:
            while chunk := file.read(CHUNK):
                yield chunk
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path}: truncated or damaged gzip file ({error}); fetch it again") from error


def _unzstd(path: Path) -> Iterator[bytes]:
    """Chunks of all frames. The decompressor says when a frame is complete, so a truncated file is noticed."""
    try:
        import zstandard
    except ImportError as error:
        raise UserError(f"{path}: reading .zst files needs a package: {install_hint('zstd')}") from error
    frame = None
    try:
        with path.open("rb") as file:
            # Small reads: one compressed chunk may expand a thousandfold.
            while data := file.read(CHUNK // 16):
                while data:
                    frame = frame or zstandard.ZstdDecompressor().decompressobj()
                    yield frame.decompress(data)
                    data = frame.unused_data if frame.eof else b""
                    frame = None if frame.eof else frame
    except zstandard.ZstdError as error:
        raise UserError(f"{path}: damaged zstd file ({error}); fetch it again") from error
    if frame is not None:
        raise UserError(f"{path}: truncated zstd file; fetch it again")


def _unix_newlines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """The same bytes with every line ending written as a line feed, also one that straddles two chunks."""
    held = b""
    for chunk in chunks:
        chunk = held + chunk
        held = b"\r" if chunk.endswith(b"\r") else b""
        yield chunk.removesuffix(b"\r").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    if held:
        yield b"\n"


def _pieces(path: Path, chunks: Iterator[bytes], end: bytes) -> Iterator[bytes]:
    """The stream cut at `end`; what follows the last one is a piece unless it is empty."""
    rest = b""
    for chunk in chunks:
        pieces = (rest + chunk).split(end)
        rest = pieces.pop()
        _check_length(path, len(rest))
        yield from pieces
    if rest:
        yield rest


def _lines(path: Path, chunks: Iterator[bytes]) -> Iterator[tuple[int, bytes]]:
    """Lines that hold more than white space, with their number; blank ones cost no more than being counted."""
    rest, number = b"", 0
    for chunk in chunks:
        block, end, rest = (rest + chunk).rpartition(b"\n")
        _check_length(path, len(rest))
        done = 0
        for line in _FILLED.finditer(block):
            number += block.count(b"\n", done, line.start())
            done = line.start()
            if not line[0].isspace():
                yield number, line[0]
        number += block.count(b"\n", done) + len(end)
    if rest.strip():
        yield number, rest


def _whole(path: Path) -> bytes:
    parts: list[bytes] = []
    size = 0
    for chunk in _bytes(path):
        parts.append(chunk)
        size += len(chunk)
        _check_length(path, size)
    return b"".join(parts)


def _check_length(path: Path, size: int) -> None:
    if size > LONGEST_ROW:
        raise UserError(
            f"{path}: a line or document of more than {LONGEST_ROW >> 20} MB; "
            "set the source's separator for .txt, or cut the row into documents"
        )


def _parquet(path: Path, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(f"{path}: reading .parquet needs a package: {install_hint('parquet')}") from error
    try:
        # Pre-buffering would hold whole row groups; a stream buffer and small batches keep memory to a few pages.
        with pyarrow.parquet.ParquetFile(path, pre_buffer=False, buffer_size=CHUNK) as file:
            missing = sorted(set(columns) - set(file.schema_arrow.names))
            if missing:
                raise UserError(f"{path}: no column {missing[0]!r}; it has {', '.join(file.schema_arrow.names)}")
            for batch in file.iter_batches(batch_size=256, columns=list(dict.fromkeys(columns)) or None):
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: truncated or damaged Parquet file ({reason}); fetch it again") from error

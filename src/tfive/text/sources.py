"""Sources as streams of documents: which files a source stands for, and the text each of their rows holds.

A document's text is kept as it is, except that line endings become line feeds and white space around it is dropped.
Unicode is not normalised: the tokenizer of the model decides about that.
"""

from __future__ import annotations

import datetime
import importlib.resources
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tfive.errors import UserError
from tfive.text.files import sha256
from tfive.text.formats import RawRow, format_of, raw_rows
from tfive.text.settings import AUTO, TextSource, Where

PACKAGE = "tfive:"
"""Prefix of a path inside the installed package."""


class BadRow(Exception):
    """A row that holds no usable text; the message says why."""


@dataclass(frozen=True)
class SourceFile:
    """One file of a source, with what is needed to read its documents."""

    source: str
    path: Path
    name: str
    """The path below the source's folder, with forward slashes: the same on every machine."""
    fields: tuple[str, ...] = ("text",)
    where: Where | None = None
    separator: str = AUTO

    @cached_property
    def is_plain(self) -> bool:
        """Whether rows are documents as they stand, without fields."""
        return format_of(self.path) == "txt"

    def digest(self) -> str:
        """sha256 of the file's bytes."""
        try:
            return sha256(self.path)
        except OSError as error:
            raise UserError(f"{self.path}: cannot be read ({error.strerror or error})") from error


@dataclass
class Tally:
    """How many rows and documents of each kind were read from a source."""

    rows: int = 0
    empty: int = 0
    filtered: int = 0
    bad: int = 0
    overlapping: int = 0
    """Documents left out because they hold benchmark items."""
    documents: int = 0
    bytes: int = 0
    """Bytes of the documents' text in UTF-8."""


@dataclass(frozen=True)
class Exclusion:
    """A rule by which documents are left out, and a fingerprint that changes whenever the rule does."""

    fingerprint: str
    excludes: Callable[[str], bool]


@dataclass
class Reader:
    """Reads documents of files; `skip_bad` leaves unusable rows out and counts them instead of stopping."""

    skip_bad: bool = False
    exclusion: Exclusion | None = None
    tallies: dict[str, Tally] = field(default_factory=dict)

    def documents(self, file: SourceFile, wanted: npt.NDArray[np.int64] | None = None) -> Iterator[tuple[int, str]]:
        """Row numbers and texts of one file; with `wanted` (ascending), only of those rows, stopping after the last."""
        tally = self.tallies.setdefault(file.source, Tally()) if wanted is None else Tally()
        # Rows that are asked for by number were chosen among those that are not excluded.
        exclusion = self.exclusion if wanted is None else None
        columns = [*file.fields, *([file.where.field] if file.where else [])]
        numbers = iter(()) if wanted is None else iter(wanted.tolist())
        next_wanted = next(numbers, None)
        if wanted is not None and next_wanted is None:
            return
        for number, raw in raw_rows(file.path, columns, file.separator):
            if wanted is not None and number != next_wanted:
                continue
            text = self._text(file, number, raw, tally)
            if text is not None and exclusion is not None and exclusion.excludes(text):
                tally.overlapping += 1
            elif text is not None:
                tally.documents += 1
                tally.bytes += len(text.encode())
                yield number, text
            if wanted is not None:
                next_wanted = next(numbers, None)
                if next_wanted is None:
                    return

    def _text(self, file: SourceFile, number: int, raw: RawRow, tally: Tally) -> str | None:
        tally.rows += 1
        try:
            text = text_of(raw, file)
        except BadRow as error:
            if not self.skip_bad:
                raise UserError(
                    f"{file.path}: row {number + 1} {error}; mend it, or leave such rows out with "
                    'text.bad_rows = "skip"'
                ) from error
            tally.bad += 1
            return None
        if text is None:
            tally.filtered += 1
        elif not text:
            tally.empty += 1
        return text or None


def text_of(raw: RawRow, file: SourceFile) -> str | None:
    """The document of a raw row: None when the filter leaves it out, empty when it holds only white space."""
    if file.is_plain and isinstance(raw, bytes):
        text = _decoded(raw)
    else:
        row = raw if isinstance(raw, dict) else _json_object(raw)
        if file.where is not None and not _kept(row, file.where):
            return None
        text = "\n\n".join(filter(None, (_field(row, name).strip() for name in file.fields)))
    if "\0" in text:
        raise BadRow("contains a NUL character and looks like binary data")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRow("contains half of a surrogate pair, which is no character") from error
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    return text.strip()


def _decoded(raw: bytes) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadRow(f"is not UTF-8 (byte {error.start})") from error


def _json_object(raw: bytes) -> dict[str, Any]:
    text = _decoded(raw)
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRow("is not JSON") from error
    if not isinstance(row, dict):
        raise BadRow(f"is a JSON {type(row).__name__}, not an object")
    return row


def _field(row: dict[str, Any], name: str) -> str:
    if name not in row:
        raise BadRow(f"has no field {name!r} (it has {', '.join(map(str, list(row)[:8])) or 'none'})")
    if not isinstance(row[name], str):
        raise BadRow(f"has a {type(row[name]).__name__} instead of text in field {name!r}")
    return row[name]


def _kept(row: dict[str, Any], where: Where) -> bool:
    value = row.get(where.field)
    if isinstance(value, datetime.date | datetime.datetime):
        value = value.isoformat()
    textual = isinstance(where.at_least if where.at_least is not None else where.below, str)
    if isinstance(value, bool) or not isinstance(value, str if textual else int | float):
        raise BadRow(f"has no {'text' if textual else 'number'} in field {where.field!r}, by which rows are kept")
    above: bool = where.at_least is None or value >= where.at_least  # type: ignore[operator]
    return above and (where.below is None or value < where.below)  # type: ignore[operator]


def source_root(source: TextSource) -> Path:
    """The file or folder that a local source names, there or not."""
    path = source.path or ""
    if path.startswith(PACKAGE):
        return Path(str(importlib.resources.files("tfive"))) / path.removeprefix(PACKAGE)
    return Path(path).expanduser()


def local_files(source: TextSource) -> list[SourceFile]:
    """The files of a local source in a fixed order."""
    root = source_root(source)
    if root.is_dir():
        found = sorted(
            (found for found in root.rglob("*") if found.is_file() and format_of(found) and not _hidden(found, root)),
            key=lambda found: found.relative_to(root).as_posix(),
        )
        if not found:
            raise UserError(f"{root}: no .jsonl, .parquet or .txt file in this folder (source {source.name})")
        names = [found.relative_to(root).as_posix() for found in found]
    elif root.is_file():
        if format_of(root) is None:
            raise UserError(f"{root}: not a .jsonl, .parquet or .txt file (source {source.name}); convert it")
        found, names = [root], [root.name]
    else:
        raise UserError(f"{root}: no such file or folder (source {source.name}); check text.sources")
    return [
        SourceFile(source.name, path, name, source.fields, source.where, source.separator)
        for path, name in zip(found, names)
    ]


def _hidden(path: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(root).parts)


def shares_of(sources: Sequence[TextSource]) -> dict[str, float]:
    """Share of each source by name; they add up to 1."""
    total = sum(source.share for source in sources)
    return {source.name: source.share / total for source in sources}

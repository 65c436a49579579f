"""Plain text cut into documents where it falls apart by itself: at form feeds, at blank lines, at a size limit.

Splits and roles go to whole documents, so that a book in one file must become many. Paragraphs stay whole and are
joined until a document is long enough to think in; a paragraph without an end is cut at a line's end or at white space.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

VERSION = 1
"""Part of a prepared corpus's key: raise it whenever the rule below changes."""

ENOUGH = 2_000
"""Bytes after which the next blank line ends a document: about 500 tokens of English, the length of a sequence."""

SECTION = 500
"""Bytes after which two blank lines in a row, as before a chapter or between pages, end it already."""

MOST = 8_000
"""Bytes at which a paragraph is cut although it goes on."""

RULE = f"at form feeds and blank lines into documents of about {ENOUGH:,} bytes, {MOST:,} at most"
"""What is told of it."""

_SPACE = re.compile(rb"\s")


def documents_of(lines: Iterable[bytes]) -> Iterator[bytes]:
    """The documents of a text given line by line; those of white space alone are left out."""
    held: list[bytes] = []
    size = blank = 0
    for line in _single_page(lines):
        page_ends = line == b"\f"
        if page_ends or not line.strip():
            blank += 1
            if page_ends or size >= (SECTION if blank > 1 else ENOUGH):
                yield from _joined(held)
                held, size = [], 0
            continue
        if blank and held:
            held.append(b"")
        blank = 0
        for part in _cut(line):
            if size and size + len(part) > MOST:
                yield from _joined(held)
                held, size = [], 0
            held.append(part)
            size += len(part) + 1
    yield from _joined(held)


def _single_page(lines: Iterable[bytes]) -> Iterator[bytes]:
    """The same lines, with every form feed as a line of its own."""
    for line in lines:
        first, *others = line.split(b"\f")
        yield first
        for other in others:
            yield b"\f"
            yield other


def _cut(line: bytes) -> Iterator[bytes]:
    """A line in parts of at most `MOST` bytes, cut behind the last white space, or else between two characters."""
    while len(line) > MOST:
        spaces = [found.end() for found in _SPACE.finditer(line, MOST // 2, MOST)]
        end = spaces[-1] if spaces else MOST
        while line[end] & 0xC0 == 0x80:  # the middle of a UTF-8 character
            end -= 1
        yield line[:end]
        line = line[end:]
    yield line


def _joined(lines: list[bytes]) -> Iterator[bytes]:
    document = b"\n".join(lines)
    if document.strip():
        yield document

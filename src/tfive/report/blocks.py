"""Blocks of a report (headings, text, tables, pictures) and their rendering as Markdown."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tfive.printable import printable

MARKDOWN, PAGE = "report.md", "report.html"
"""The files of a report."""


@dataclass(frozen=True)
class Block:
    """A heading, a paragraph, a table, a picture or a command."""

    kind: str
    text: str = ""
    head: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()


def heading(text: str) -> Block:
    """A section's title."""
    return Block("heading", text)


def paragraph(*lines: str) -> Block:
    """Running text."""
    return Block("text", " ".join(lines))


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> Block:
    """Cells that are already text."""
    return Block("table", head=tuple(head), rows=tuple(tuple(row) for row in rows))


def picture(name: str, caption: str) -> Block:
    """An image file beside the page."""
    return Block("picture", caption, head=(name,))


def command(text: str, tags: str = "sh long") -> Block:
    """A shell command; `tags` tell the documentation check whether to run it."""
    return Block("command", text, head=(tags,))


def plain(text: str) -> str:
    """Text that Markdown shows as it is: no HTML element, no control character, no line of its own.

    Thoughts and corpora are others' text; a viewer of the page must not run or load anything that stands in them.
    """
    shown = printable(text.replace("\r\n", "\n")).replace("&", "&amp;").replace("<", "&lt;").replace("\n", "↵")
    return shown.replace("[", "\\[").replace("`", "\\`")


def markdown(title: str, blocks: Iterable[Block], level: int = 1) -> str:
    """The blocks as a Markdown page; cells and titles are shown as they are, headings and paragraphs are ours."""
    parts = [f"{'#' * level} {plain(title)}"]
    for block in blocks:
        if block.kind == "heading":
            parts.append(f"{'#' * (level + 1)} {plain(block.text)}")
        elif block.kind == "text":
            parts.append(printable(block.text).replace("<", "&lt;"))
        elif block.kind == "command":
            parts.append(f"```{block.head[0]}\n{printable(block.text)}\n```")
        elif block.kind == "picture":
            parts.append(f"![{plain(block.text)}]({block.head[0]})")
        else:
            lines = ["| " + " | ".join(block.head) + " |", "|---" * len(block.head) + "|"]
            lines += ["| " + " | ".join(plain(cell).replace("|", "\\|") for cell in row) + " |" for row in block.rows]
            parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def write_pages(folder: Path, title: str, blocks: Sequence[Block], page: str) -> list[Path]:
    """`report.md` of the blocks and `report.html` in `folder`, each whole or not at all; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in ((MARKDOWN, markdown(title, blocks)), (PAGE, page)):
        beside = folder / f".{name}"
        beside.write_text(text, "utf-8", errors="replace")
        os.replace(beside, folder / name)
    return [folder / MARKDOWN, folder / PAGE]

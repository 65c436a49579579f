"""Blocks of a page (headings, text, tables, pictures) and their rendering as Markdown and as one HTML file."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tfive.printable import printable


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


def webpage(title: str, blocks: Iterable[Block]) -> str:
    """The blocks as one HTML file; pictures lie beside it."""
    parts = [f"<h1>{html.escape(title)}</h1>"]
    for block in blocks:
        if block.kind == "heading":
            parts.append(f"<h2>{html.escape(block.text)}</h2>")
        elif block.kind == "text":
            parts.append(f"<p>{html.escape(block.text)}</p>")
        elif block.kind == "command":
            parts.append(f"<pre>{html.escape(block.text)}</pre>")
        elif block.kind == "picture":
            source, caption = html.escape(block.head[0]), html.escape(block.text)
            parts.append(f'<figure><img src="{source}" alt="{caption}"><figcaption>{caption}</figcaption></figure>')
        else:
            head = "".join(f"<th>{html.escape(cell)}</th>" for cell in block.head)
            body = "".join(
                "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in block.rows
            )
            parts.append(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")
    style = (
        "body{font:15px/1.5 sans-serif;max-width:70em;margin:2em auto;padding:0 1em}"
        "table{border-collapse:collapse;margin:1em 0}td,th{border:1px solid #ccc;padding:.2em .6em;text-align:left}"
        "img{max-width:100%}"
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{style}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def write_pages(folder: Path, title: str, blocks: Sequence[Block]) -> list[Path]:
    """`report.md` and `report.html` in `folder`; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    pages = {"report.md": markdown(title, blocks), "report.html": webpage(title, blocks)}
    for name, text in pages.items():
        (folder / name).write_text(text, "utf-8")
    return [folder / name for name in pages]

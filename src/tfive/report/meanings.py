"""What every number means, for a page to show beside it: the tables of docs/howto/diagnostics.md as plain data.

`meanings.json` is written from that page by `docs/tools/reference.py`, so that an installed package has it too.
"""

from __future__ import annotations

import json
import re
from functools import cache
from importlib.resources import files
from typing import Any

from tfive.report.sections import TITLES

FILE = "meanings.json"


def read_tables(page: str) -> dict[str, dict[str, str]]:
    """Number → what it is, what healthy looks like, what to do if not: every row of the page's four-column tables."""
    found: dict[str, dict[str, str]] = {}
    for line in page.splitlines():
        cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) != 4 or not cells[0].startswith("`"):
            continue
        for name in re.findall(r"`([A-Za-z_0-9]+)`", cells[0]):
            # The first row that names a number is the one about the run itself; later tables are of special cases.
            found.setdefault(name, dict(zip(("what", "healthy", "otherwise"), map(_plain, cells[1:]))))
    return found


def _plain(cell: str) -> str:
    """Text without links and emphasis; a dash stands for nothing to say."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", cell)
    text = re.sub(r"(?<![\w*])\*([^*]+)\*(?![\w*])", r"\1", text)
    return "" if text == "–" else text


@cache
def _known() -> dict[str, dict[str, str]]:
    content: dict[str, dict[str, str]] = json.loads((files("tfive.report") / FILE).read_text("utf-8"))
    return content


def meanings(names: set[str]) -> dict[str, dict[str, Any]]:
    """The meaning of each number by its bare name (`r2` for `r2.1`); one that is not explained has its title alone."""
    found: dict[str, dict[str, Any]] = {}
    for name in sorted({name.partition(".")[0] for name in names}):
        kind = re.sub(r"_(match|entropy|every|uniform)$", "_KIND", name)
        known = _known().get(name) or _known().get(kind) or {}
        title = TITLES.get(name, name.replace("_", " "))
        empty = dict.fromkeys(("what", "healthy", "otherwise"), "")
        unit = "nats per token" if "gain" in name or name.startswith("no_thought") else ""
        found[name] = {"title": title, **empty, **known, "unit": unit}
    return found

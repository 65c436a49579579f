"""Tables of the studies' pages: how one is drawn, and the marked places of a page that are filled from results."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

PLACE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
"""Where a table stands; what stands around it is written by hand."""


def drawn(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of these rows."""
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def filled(page: str, tables: Mapping[str, Callable[[dict[str, Any]], str]], found: dict[str, Any]) -> str:
    """The page with every marked place filled from the results for which there is a table here; several scripts may
    fill one page."""
    return PLACE.sub(
        lambda place: place[1] + tables[place[2]](found) + place[3] if place[2] in tables else place[0], page
    )

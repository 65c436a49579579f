"""Small made-up benchmarks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tfive.evaluate.tasks import Item, Items, Task, digest_of

LONG = "A farmer drives seven brown cows over a narrow bridge and then counts how many hooves he has seen in all."
SHORT = "How many legs have three spiders and two beetles?"
TINY = "Why is it dark?"


def task(name: str = "made_up", count: int = 1, **more: Any) -> Task:
    """A declaration as small as it can be."""
    return Task(name=name, kind="math", count=count, file=f"{name}.jsonl", prompt="words-v1", **more)


def benchmark(*items: Item, name: str = "made_up") -> Items:
    """Items as they come from a file."""
    return Items(task(name, len(items)), items, digest_of(items), "nowhere", "unfrozen")


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """A file of JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path

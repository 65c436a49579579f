"""The summary of a finished run: written whole or not at all, and read back only if it is one."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from tfive.errors import UserError

SUMMARY = "summary.json"

NEEDED: dict[str, type | tuple[type, ...]] = {
    "method": str,
    "model": str,
    "seed": int,
    "windows": int,
    "actor_steps": int,
    "seconds": (int, float),
    "generated_tokens": int,
    "identity": dict,
    "account": dict,
    "history": list,
    "laps": list,
}
"""What every summary holds; pages, tables and comparisons are made of these."""


def summary_text(summary: dict[str, Any], indent: int | None = None) -> str:
    """The summary as JSON that any parser takes: a number that is not finite (an interval of one text) is null."""
    return json.dumps(_finite(summary), indent=indent, ensure_ascii=False, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def save_summary(summary: dict[str, Any], folder: Path) -> None:
    """Write the summary whole or not at all: where there is one, the run is finished."""
    beside = folder / f".{SUMMARY}"
    beside.write_text(summary_text(summary, indent=1) + "\n", "utf-8")
    os.replace(beside, folder / SUMMARY)


def read_summary(folder: Path) -> dict[str, Any]:
    """The summary in a run's folder; one that was cut off or is something else is refused in one line."""
    path = folder / SUMMARY
    try:
        found: Any = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read ({error!r:.80}); {_remedy(folder)}") from error
    if not isinstance(found, dict):
        raise UserError(f"{path}: holds no JSON object; {_remedy(folder)}")
    wrong = next((name for name, kind in NEEDED.items() if not isinstance(found.get(name, ...), kind)), None)
    if wrong is not None:
        raise UserError(f"{path}: {wrong} is missing or no value that tfive writes; {_remedy(folder)}")
    if not found["history"] or not all(isinstance(entry, dict) for entry in (*found["history"], *found["laps"])):
        raise UserError(f"{path}: history holds no measurement; {_remedy(folder)}")
    return found


def _remedy(folder: Path) -> str:
    return f"remove it, and tfive resume {folder} writes it again from the last checkpoint"

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


def headline(split: str, first: dict[str, Any], last: dict[str, Any]) -> dict[str, Any]:
    """What a summary says of one split, each figure named by it: `test_content_gain_end`, `dev_content_gain_end`."""
    ends = ("thought_gain", "content_gain", "no_thought_loss")
    found = {f"{name}_start": first[name] for name in ends} | {f"{name}_end": last[name] for name in ends}
    found |= {f"{name}_end": last.get(name) for name in ("gain_vs_base", "empty_gain", "random_gain", "mixed_gain")}
    intervals = ("thought_gain", "content_gain", "gain_vs_base", "mixed_gain")
    found |= {f"{name}_interval": last.get(f"{name}_interval") for name in intervals}
    shares = ("mixed_gain_constant", "mixed_gain_other", "useful_fraction", "worst_1_percent")
    found |= {name: last.get(name) for name in (*shares, "mean_thought_length", "mean_gate", "gate_deviation")}
    return {f"{split}_{name}": value for name, value in found.items()}

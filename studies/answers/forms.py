"""How the study's tables are written: names of methods, signs, intervals, shares, and paired differences."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

CAREFUL = "careful"
"""The model that has learned to read its own thoughts (`careful.py`); cells that begin with it say so."""
SIZE = "-1.5b"
"""How the folders of the larger model end; those of the 0.5B model say no size."""
LARGER = f"{CAREFUL}{SIZE}"
"""The same of the larger model."""
PILOT = "ff2211d"
"""The commit of the first cells from careful reading, one seed each."""
NAMES = {
    "t5": "T⁵",
    "quiet-star-grpo": "GRPO",
    "rlp": "RLP",
    "quiet-star-ppo": "PPO, one critic",
    "anchor-only": "anchors alone",
}


def signed(value: float) -> str:
    """A gain with its sign and three decimals."""
    return f"{value:+.3f}".replace("-", "−")


def drawn(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of these rows."""
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def larger(cell: dict[str, Any]) -> bool:
    """Whether a cell is of the larger model."""
    return str(cell.get("start", "")).endswith(SIZE)


def anchor_rate(cell: dict[str, Any]) -> float:
    """The rate of a cell's anchors, 0 where they have none of their own."""
    known = cell["settings"].get("anchor.lr", "none")
    return 0.0 if known == "none" else float(known)


def title(cell: dict[str, Any]) -> str:
    """Method, positions a window and thoughts at each, and the rate of anchors that have one of their own."""
    settings, rate = cell["settings"], anchor_rate(cell)
    own = f", anchors at {rate:g}" if rate else ""
    return f"{NAMES[cell['method']]}, {settings['window.items']:,} × {settings['group']}{own}"


def seed_of(cell: dict[str, Any]) -> str:
    """The seed of a cell."""
    return str(cell["settings"]["run.seed"])


def with_interval(value: Sequence[float]) -> str:
    """A gain and its interval."""
    return f"{signed(value[0])} ({signed(value[1])} … {signed(value[2])})"


def percent(value: float) -> str:
    """A share in per cent."""
    return f"{100 * value:.1f}"


def points(value: Sequence[float]) -> str:
    """A difference of shares in percentage points, with its interval."""
    shown = [f"{100 * one:+.1f}".replace("-", "−") for one in value]
    return f"{shown[0]} ({shown[1]} … {shown[2]})"


def paired(first: str, second: str) -> list[float]:
    """The mean difference of two strings of verdicts and its 95 % interval, each answer a unit of its own."""
    apart = [int(a) - int(b) for a, b in zip(first, second, strict=True)]
    error = statistics.stdev(apart) / len(apart) ** 0.5
    mean = statistics.fmean(apart)
    return [mean, mean - 1.96 * error, mean + 1.96 * error]

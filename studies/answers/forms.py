"""How the study's tables are written: names of methods, signs, intervals, shares, and paired differences."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from tfive_lab.estimates import Estimate, over_seeds

CAREFUL = "careful"
"""The model that has learned to read its own thoughts (`careful.py`); cells that begin with it say so."""
SIZE = "-1.5b"
"""How the folders of the larger model end; those of the 0.5B model say no size."""
LARGER = f"{CAREFUL}{SIZE}"
"""The same of the larger model."""
LENGTH = "-128"
"""How the folders of models end that may think for 128 tokens; others have 64."""
LONGER = f"{CAREFUL}{LENGTH}"
"""The model that has learned to read its own thoughts of that length."""
LARGER_LONGER = f"{CAREFUL}{LENGTH}{SIZE}"
"""The same of the larger model."""
SOURCES = "-both"
"""How the folders of models end that learned from sheets of GSM8K and MATH; others from GSM8K's alone."""
LONGER_BOTH = f"{LONGER}{SOURCES}"
"""The longer thoughts' model of both."""
PILOT = "ff2211d"
"""The commit of the first cells from careful reading, one seed each."""
NAMES = {
    "t5": "T⁵",
    "quiet-star-grpo": "GRPO",
    "rlp": "RLP",
    "quiet-star-ppo": "PPO, one critic",
    "anchor-only": "anchors alone",
}
HISTORY = "critics fitted to the actor's last thoughts"
"""What tables call `window.history`."""
PARTS: dict[str, dict[object, str]] = {
    "critic.pair": {"bracket": "twins of two expectiles", "disjoint": "twins of half the thoughts each"},
    "calibration.mode": {
        "average": "average of the two",
        "single": "first critic alone",
        "minimum": "smaller of the two",
    },
    "gae.unit": {"position": "in units of the position"},
    "window.history": {True: HISTORY},
    "window.crossed": {True: "its halves crossed"},
    "gae.alpha": {1000: "all tokens credited alike"},
}
"""By their key the parts of T⁵ that a cell may have in place of the usual one, and what tables call them."""
OTHERS: dict[str, dict[str, dict[object, str]]] = {
    "quiet-star-grpo": {"grpo.normalisation": {"leave_one_out": "not divided by the group's deviation"}},
    "quiet-star-ppo": {key: PARTS[key] for key in ("gae.unit", "window.history")},
}
"""The same of other methods."""


def signed(value: float) -> str:
    """A gain with its sign and three decimals."""
    return f"{value:+.3f}".replace("-", "−")


def plain(value: float) -> str:
    """A loss with three decimals."""
    return f"{value:.3f}"


def ending(start: str) -> str:
    """How the folder of a start ends, of which cells stand in tables of their own; nothing for all others."""
    return next((end for end in (LENGTH + SOURCES, LENGTH + SIZE, SIZE, LENGTH) if start.endswith(end)), "")


def usual(cell: dict[str, Any]) -> bool:
    """Whether a cell is of the 0.5B model with thoughts of 64 tokens, on sheets of GSM8K alone."""
    return not ending(str(cell.get("start", "")))


def anchor_rate(cell: dict[str, Any]) -> float:
    """The rate of a cell's anchors, 0 where they have none of their own."""
    known = cell["settings"].get("anchor.lr", "none")
    return 0.0 if known == "none" else float(known)


def parts(cell: dict[str, Any]) -> tuple[str, ...]:
    """What a cell has in place of its method's usual parts; cells of earlier code have those."""
    replaced: dict[str, dict[object, str]] = {"t5": PARTS, **OTHERS}.get(cell["method"], {})
    known = ((name, cell["settings"].get(key)) for key, name in replaced.items())
    return tuple(name[value] for name, value in known if value in name)


def title(cell: dict[str, Any]) -> str:
    """Method, positions a window and thoughts at each, parts that were replaced, and the rate of anchors that have one
    of their own."""
    settings, rate = cell["settings"], anchor_rate(cell)
    own = (*parts(cell), *([f"anchors at {rate:g}"] if rate else []))
    return ", ".join([NAMES[cell["method"]], f"{settings['window.items']:,} × {settings['group']}", *own])


def seed_of(cell: dict[str, Any]) -> str:
    """The seed of a cell."""
    return str(cell["settings"]["run.seed"])


def with_interval(value: Sequence[float]) -> str:
    """A gain and its interval."""
    return f"{signed(value[0])} ({signed(value[1])} … {signed(value[2])})"


def percent(value: float) -> str:
    """A share in per cent."""
    return f"{100 * value:.1f}"


def points_of(value: float) -> str:
    """A difference of shares in percentage points."""
    return f"{100 * value:+.1f}".replace("-", "−")


def interval(found: Estimate, form: Callable[[float], str] = signed) -> str:
    """Both ends of an interval, or a dash where there is none."""
    mean, half = found
    return "–" if half is None else f"{form(mean - half)} … {form(mean + half)}"


def estimate(found: Estimate, form: Callable[[float], str] = signed) -> str:
    """A mean, and its interval where there is one."""
    return form(found[0]) if found[1] is None else f"{form(found[0])} ({interval(found, form)})"


def told(values: Sequence[float], form: Callable[[float], str] = signed) -> str:
    """Mean and interval over seeds of some differences, or a dash where there are none."""
    return estimate(over_seeds(values), form) if values else "–"


def over_both(found: Estimate | None, values: Sequence[float], form: Callable[[float], str] = signed) -> str:
    """A mean over seeds with its interval over texts or problems, and with that over seeds where there are several
    `values`, one a seed."""
    if found is None:
        return "–"
    if len(values) < 2:
        return estimate(found, form)
    return f"{form(found[0])} ({interval(found, form)}; over seeds {interval(over_seeds(values), form)})"


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

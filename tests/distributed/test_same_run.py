"""The same run by any number of processes, in float64: thoughts token for token, gradients to 1e-12, every decision."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from courses import course
from processes import run_world

from tfive.distributed.world import SINGLE

pytestmark = pytest.mark.model

T5 = ("method=t5",)
CASES: dict[str, tuple[str, ...]] = {
    "t5": ("method=t5",),
}


def close(left: float, right: float, within: float) -> bool:
    return (math.isnan(left) and math.isnan(right)) or abs(left - right) <= within * max(1.0, abs(left))


def compare(alone: dict[str, Any], shared: dict[str, Any]) -> None:
    for name in ("phases", "events", "thoughts"):
        assert shared[name] == alone[name], name
    assert len(shared["gradients"]) == len(alone["gradients"])
    for one, other in zip(alone["gradients"], shared["gradients"]):
        assert all(close(a, b, 1e-12) for a, b in zip(one, other, strict=True))


def test_first(tmp_path: Path) -> None:
    alone = course(SINGLE, str(tmp_path), list(CASES["t5"]))
    found = run_world(2, "courses:course", str(tmp_path), list(CASES["t5"]))
    compare(alone, found[0])

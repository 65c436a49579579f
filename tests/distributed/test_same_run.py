"""The same run by any number of processes, in float64: thoughts token for token, gradients to 1e-12, every decision."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from courses import courses
from processes import run_world

from tfive.distributed.world import SINGLE

pytestmark = pytest.mark.model

QUICK = (
    "window.actor_steps=2", "run.develop_items=4", "text.sequences.development=5", "run.seed=2", "window.qualify=0.5",
    "critic.lr=1e-3", "critic.head_lr=1e-2",
)  # fmt: skip
"""Short windows, sets that no number of processes divides, and critics that fail a few times and then pass."""

CASES: dict[str, tuple[str, ...]] = {
    "t5": ("method=t5", "calibration.cross_fit=true"),
    "t5 that pauses": (
        "method=t5",
        "qualify.rule=sustained",
        "qualify.patience=1",
        "critic.pair=disjoint",
        "calibration.mode=average",
    ),
    "t5 without critics": ("method=t5", "qualify.eta=0.9", "qualify.attempts=2", "qualify.on_failure=baseline"),
    "t5 on foreign thoughts": (
        "method=t5",
        "reward.reference=foreign",
        "calibration.mode=repeated",
        "qualify.rule=fixed",
    ),
    "ntp": ("method=ntp",),
    "anchor-only": ("method=anchor-only",),
    "quiet-star-ppo": ("method=quiet-star-ppo", "anchor.lr=1e-4"),
    "quiet-star-grpo": ("method=quiet-star-grpo", "sampling.parity=true", "window.probe=0"),
    "rlp": ("method=rlp",),
    "gated": ("method=t5", "thought.reading=gated", "window.reading=1", "anchor.conditioned=1", "qualify.rule=fixed"),
    "warm start": (
        "method=anchor-only",
        "warmstart.source=hindsight",
        "warmstart.rounds=2",
        "warmstart.steps=2",
        "warmstart.items=8",
        "warmstart.samples=2",
    ),
}


def close(left: float, right: float, within: float = 1e-12) -> bool:
    return (math.isnan(left) and math.isnan(right)) or abs(left - right) <= within * max(1.0, abs(left))


def compare(name: str, alone: dict[str, Any], shared: dict[str, Any]) -> None:
    for what in ("phases", "events", "thoughts"):
        assert shared[what] == alone[what], (name, what)
    assert len(shared["gradients"]) == len(alone["gradients"])
    for one, other in zip(alone["gradients"], shared["gradients"]):
        assert all(close(a, b) for a, b in zip(one, other, strict=True)), (name, one, other)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("courses")


@pytest.fixture(scope="module")
def alone(home: Path) -> dict[str, Any]:
    return courses(SINGLE, str(home), cases())


def cases() -> dict[str, list[str]]:
    return {name: [*QUICK, *overrides] for name, overrides in CASES.items()}


@pytest.mark.parametrize("size", [2, 4])
def test_any_number_of_processes_makes_the_same_run(home: Path, alone: dict[str, Any], size: int) -> None:
    found = run_world(size, "courses:courses", str(home), cases())
    for name, one in alone.items():
        compare(name, one, found[0][name])
        assert all(other[name] == found[0][name] for other in found), name

"""Growth curves: exponents of made-up times, and which of them are told as worse than linear."""

from __future__ import annotations

from typing import Any

import torch

import scripts
from tfive.tree.settings import EngineOptions
from tfive_lab.bench.phases import PHASES
from tfive_lab.bench.selfcheck import MODELS
from tfive_lab.bench.work import Work, random_model

growth = scripts.script("benchmarks/growth.py")


def test_exponents_come_from_the_larger_half() -> None:
    points = [growth.Point(n, dict.fromkeys(PHASES, 5.0 if n < 4 else n**1.5), {}) for n in (1, 2, 4, 8, 16)]
    found = growth.exponents(points, "seconds")["actor"]
    assert abs(found["larger half"] - 1.5) < 1e-9
    assert abs(found["last doubling"] - 1.5) < 1e-9
    assert growth.slope([1.0], [1.0]) is None
    assert growth.slope([1.0, 2.0], [0.0, 1.0]) is None


def test_only_curves_that_bend_upwards_are_told() -> None:
    def curves(time: float, memory: float | None) -> dict[str, dict[str, dict[str, float | None]]]:
        return {
            "time exponents": {"actor": {"larger half": time}},
            "memory exponents": {"actor": {"larger half": memory}},
        }

    told = growth.worse({"tokens": curves(1.4, None), "group": curves(1.05, 1.2)})
    assert told == ["actor: time against tokens, exponent 1.40", "actor: memory against group, exponent 1.20"]


def test_one_number_changes_at_a_time() -> None:
    work = growth.sized(Work(), "length", 24)
    assert (work.length, work.checkpoints, work.positions) == (24, (8, 16, 24), 16)
    assert growth.sized(Work(), "group", 4).group == 4


def test_what_is_cut_short_leaves_what_it_measured() -> None:
    model = random_model(MODELS["attention"], torch.device("cpu"), torch.float32)
    kept = list[dict[str, Any]]()
    axes = {"positions": (1, 2), "group": (1, 2)}
    work = Work(texts=1, tokens=24, positions=2, length=2, checkpoints=(2,), horizon=2)
    report = growth.growth(model, work, axes, EngineOptions(), 1, 60.0, kept.append)
    counts = [[len(one["axes"][axis]["points"]) for axis in axes] for one in kept]
    assert counts == [[1, 0], [1, 1], [2, 1], [2, 2]]
    assert {axis: one["points"] for axis, one in report["axes"].items()} == {
        axis: one["points"] for axis, one in kept[-1]["axes"].items()
    }

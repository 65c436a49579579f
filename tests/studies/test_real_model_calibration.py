"""The calibration study alone: contexts side by side, a lazy weight that is blind, how an attempt is chosen."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import scripts
from tfive.rl.calibration.heads import WeightHead
from tfive.rl.calibration.mixture import WeightInputs
from tfive.rl.trajectory import Trajectories
from tfive.tree.layout import TextBatch, Thoughts


@pytest.fixture(scope="module")
def study() -> ModuleType:
    return scripts.script("studies/real_model/calibration.py")


def test_contexts_stand_side_by_side_and_missing_ones_are_left_out(study: ModuleType) -> None:
    rows, contexts, many, steps = 2, 3, 2, 4
    branches = contexts * many
    exists = torch.tensor([[True, False, True], [True, True, False]])
    valid_BR = exists.repeat_interleave(many, 1)
    step_BR = torch.tensor([[0, 2, 3], [1, 1, 2]]).repeat_interleave(many, 1)
    zero = torch.zeros(rows, branches, dtype=torch.int64)
    texts = TextBatch(torch.zeros(rows, 5, dtype=torch.int64), torch.zeros(rows, 5, dtype=torch.int64), zero, zero)
    none = torch.zeros(rows, branches, steps)
    thoughts = Thoughts(none.long(), zero + steps, valid_BR, ~valid_BR, none)
    probe = Trajectories("probe", 1, texts, thoughts, probe_step_BR=step_BR)
    value_BRT = torch.arange(rows * branches * steps, dtype=torch.float32).view(rows, branches, steps)
    expected = [
        [float(value_BRT[b, c * many + m, step_BR[b, c * many]]) for m in range(many)]
        for b in range(rows)
        for c in range(contexts)
        if exists[b, c]
    ]
    assert study.contexts(probe, value_BRT, many).tolist() == expected


def test_the_lazy_weight_sees_the_step_and_nothing_else(study: ModuleType) -> None:
    draw = torch.Generator().manual_seed(3)
    shape, mask = (5, 4), torch.ones(5, 4, dtype=torch.bool)

    def some() -> WeightInputs:
        return WeightInputs(
            torch.randn(*shape, 6, generator=draw),
            torch.randn(*shape, 2, generator=draw),
            torch.arange(4.0).expand(shape) / 4,
            torch.randn(*shape, 3, generator=draw),
            torch.randn(shape, generator=draw),
        )

    head = WeightHead(6, 3, width=8, action_width=2, seed=1)
    with torch.no_grad():
        head.joined.last.weight.mul_(300)
    lazy, inputs = study.TimeOnly(head), some()
    lazy.standardize(inputs, mask)
    seen = lazy(inputs)
    assert torch.equal(seen, lazy(some()))
    assert float((seen - lazy(replace(inputs, time_NT=inputs.time_NT + 0.5))).detach().abs().max()) > 1e-3


def attempt(route: str, unbiased: float, visible: float, retention: float = 0.05, **more: Any) -> dict[str, Any]:
    cross = {"change_visible": visible, "change_visible_error": 1.0}
    found = {"unbiased_change": {"z": unbiased}, "cross_fitted": cross, "retention": retention}
    return {"route": route, "mixture": "learned", "kappa": 0.1, "development": found} | more


def test_the_choice_goes_by_the_weaker_of_both_reductions(study: ModuleType) -> None:
    even, lopsided = attempt("even", -4.0, -3.0), attempt("lopsided", -20.0, -1.0)
    lazy, loose = attempt("time-only", -50.0, -50.0), attempt("loose", -9.0, -9.0, retention=0.2)
    average = attempt("none", -9.0, -9.0, mixture="average")
    assert study.clearest([lopsided, even, lazy, loose, average]) is even
    assert study.clearest([lazy, loose, average]) is None


def test_bad_input_is_one_line(
    study: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["nano", "--set", "critic.pairs=same", "--out", str(tmp_path / "out.json")]
    monkeypatch.setattr(sys, "argv", [str(study.__file__), *words])
    with pytest.raises(SystemExit) as ended:
        study.script(study.main)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("calibration.py: error: ")
    assert "critic.pair" in said
    assert len(said.strip().splitlines()) == 1
    assert not (tmp_path / "out.json").exists()

"""The self-check of small heads, by graphs that are recorded operation by operation: it passes where a replay is the
launched step, and fails where it is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from taped_graphs import TapedGraphs
from tfive.tree.fast.cuda_graph import CudaGraphs
from tfive_lab.bench import head_checks as checked
from tfive_lab.bench.head_checks import BOUND, FITS, head_checks

CPU = torch.device("cpu")
NAMES = [name for name in FITS if name != "replayed steps side by side"]
"""Calibration's heads drop units by numbers that a recorded operation draws anew; tests/tree/test_cuda_graph.py has
them."""


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[TapedGraphs]:
    """The graphs that checks make, as if processors had some."""
    made: list[TapedGraphs] = []

    def on(*given: Any, **named: Any) -> TapedGraphs:
        made.append(TapedGraphs(undo=True))
        return made[-1]

    monkeypatch.setattr(CudaGraphs, "on", on)
    monkeypatch.setattr(checked, "FITS", {name: FITS[name] for name in NAMES})
    return made


def test_replayed_fits_are_the_launched_ones(graphs: list[TapedGraphs]) -> None:
    checks = list(head_checks(CPU))
    assert [check.name for check in checks] == NAMES
    for check, own in zip(checks, graphs, strict=True):
        assert check.max_abs_diff is not None
        assert check.max_abs_diff <= BOUND / 10
        assert (check.ok, check.note, own.trouble) == (True, "", "")


@pytest.mark.parametrize("name", NAMES)
def test_a_replay_that_does_nothing_shows(
    name: str, graphs: list[TapedGraphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("taped_graphs.Tape.replay", lambda self: None)
    wrong = next(check for check in head_checks(CPU) if check.name == name)
    assert not wrong.ok


def test_a_capture_that_is_refused_is_told(graphs: list[TapedGraphs], monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: TapedGraphs, work: Any, warm_up: int = 0) -> Tensor:
        raise RuntimeError("not permitted")

    monkeypatch.setattr(TapedGraphs, "capture", refused)
    assert {(check.ok, check.note) for check in head_checks(CPU)} == {(True, "launched: not permitted")}

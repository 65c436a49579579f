"""Idle stretches of a device, and stages of the host's work around them."""

from __future__ import annotations

import pytest
import torch

from tfive_lab.bench.timeline import _idle, timeline


class Work:
    def outer(self) -> torch.Tensor:
        return self.inner() + 1

    @staticmethod
    def inner() -> torch.Tensor:
        return torch.ones(4) * 2


def test_idle_is_what_no_kernel_covers() -> None:
    assert _idle([(2, 3), (1, 2.5), (6, 7)], 0, 10) == [(0, 1), (3, 6), (7, 10)]
    assert _idle([], 1, 4) == [(1, 4)]
    assert _idle([(0, 9)], 1, 4) == []


def test_stages_are_watched_and_left_as_they_were() -> None:
    before = dict(Work.__dict__)
    found = timeline(lambda: Work().outer(), torch.device("cpu"), ((Work, "outer"), (Work, "inner")))
    assert [stage["name"] for stage in found["stages"]] == ["Work.outer", "Work.inner"]
    assert found["idle_ms"] == pytest.approx(found["whole_ms"])
    assert dict(Work.__dict__) == before

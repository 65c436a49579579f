"""What a score reads is known before its passes: the same picks as counting gives, and nothing is asked of a device on
the way."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import Case, cases, random_case
from families import tiny
from hypothesis import given, settings
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from taped_graphs import WAITS
from tfive.tree.delimiters import Delimiters
from tfive.tree.forward import TreeModel
from tfive.tree.outputs import Scores
from tfive.tree.picks import Picks, standing
from tfive.tree.scoring import Scoring
from tfive.tree.settings import EngineOptions

pytestmark = pytest.mark.model
OF: Callable[..., Picks] = Picks.of
MODEL = tiny("qwen3", torch.float32)


def scores(case: Case, options: EngineOptions | None = None, **asked: Any) -> Scores:
    delimiters = Delimiters.from_model(MODEL, case.plan) if case.plan.learned else None
    return TreeModel(MODEL, case.plan, options, delimiters).score(case.texts, case.thoughts, **asked)


@settings(max_examples=25, deadline=None)
@given(cases())
def test_counted_beforehand_picks_are_the_same(case: Case) -> None:
    made: list[int] = []

    def of(node: Tensor, target: Tensor, keep: Tensor, node_count: int, count: int | None = None) -> Picks:
        assert count is not None
        found, wanted = OF(node, target, keep, node_count, count), OF(node, target, keep, node_count)
        assert all(torch.equal(*both) for both in zip(found.tensors, wanted.tensors, strict=True))
        made.append(count)
        return found

    first_B = torch.arange(len(case.texts.tokens_BS)) == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Picks, "of", staticmethod(of))
        for most in (0, 1):  # in one pass, and branch by branch
            for whole in (False, True):
                made.clear()
                scores(case, EngineOptions(max_nodes=most), whole=whole, features=True, actions_B=first_B)
                parts = case.thoughts.length_BR.shape[1] if most else (len(made) - 1) // 3
                assert len(made) == 1 + 3 * parts


def test_standing_entries_are_those_that_nonzero_finds() -> None:
    draw = torch.Generator().manual_seed(0)
    for share in (0.0, 0.3, 1.0):
        keep = torch.rand(50, generator=draw) < share
        found = keep.nonzero()[:, 0]
        assert torch.equal(standing(keep, len(found)), found)


class Watched(TorchDispatchMode):
    """What would wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Iterable[Any], args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        if name.startswith(WAITS) and name != "lift_fresh":  # constants of the host's: none of them is asked for
            self.waits.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("whole", [False, True])
def test_the_host_asks_for_one_count_alone(whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    case = random_case(4, "text", variable=True, group=2)
    tree = TreeModel(MODEL, case.plan, EngineOptions(fused_blocks="on"))
    reading, all_B = tree.read(case.texts), torch.ones(2, dtype=torch.bool)
    assert tree.training.reason  # chosen before the host is watched
    asked: list[int] = []

    def listed(self: Tensor) -> Any:
        asked.append(self.numel())
        return self.numpy().tolist()  # which no mode sees

    monkeypatch.setattr(Tensor, "tolist", listed)
    with Watched() as watched:
        tree.score(case.texts, case.thoughts, reading, features=True, whole=whole, actions_B=all_B)
    assert watched.waits == []
    assert asked == [1 + 3 * case.thoughts.length_BR.shape[1]]


def test_a_device_has_work_before_the_branches_are_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    for name in ("plain", "branches"):
        own = getattr(Scoring, name)

        def noted(self: Scoring, *given: Any, own: Any = own, name: str = name) -> Any:
            order.append(name)
            return own(self, *given)

        monkeypatch.setattr(Scoring, name, noted)
    scores(random_case(4, "text"), EngineOptions(max_nodes=1))
    assert order == ["plain", "branches", "branches", "branches"]


def test_thoughts_that_do_not_exist_are_not_counted() -> None:
    case, all_B = random_case(6, "text"), torch.ones(2, dtype=torch.bool)
    valid_BR = case.thoughts.valid_BR.clone()
    assert valid_BR[0, 0]
    assert not valid_BR[1, 2]  # its position does not exist
    valid_BR[0, 0] = False
    found = []
    # A length may be told of a thought that is none.
    for length_BR in (case.plan.length * valid_BR, torch.full_like(case.thoughts.length_BR, case.plan.length)):
        told = replace(case, thoughts=replace(case.thoughts, valid_BR=valid_BR, length_BR=length_BR))
        found.append(scores(told, actions_B=all_B))
    for name in ("losses_BRK", "log_prob_BRT"):
        assert torch.equal(*(one.need(name) for one in found))
        assert not found[0].need(name)[0, 0].any()

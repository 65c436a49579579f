"""Rows with many branches: attention in parts gives the same numbers, and the pairs it asks for grow linearly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import Case, lifted, random_case
from exact import apart
from families import tiny
from test_decode import numbers
from torch import Tensor

from tfive.tree import attention
from tfive.tree.forward import TreeModel
from tfive.tree.settings import EngineOptions, SamplingSettings

pytestmark = pytest.mark.model


def many(group: int, kind: str = "text2") -> Case:
    return random_case(5, kind, variable=True, width=10, count=2, group=group, length=4)


def in_parts(monkeypatch: pytest.MonkeyPatch, parts: bool) -> None:
    for name in ("tfive.tree.attention.SHORT", "tfive.tree.step_pass.SHORT"):
        monkeypatch.setattr(name, 1 if parts else 10**9)


@pytest.mark.parametrize(("family", "kernel"), [("qwen3", "folded"), ("qwen3", "sdpa"), ("gemma2", "folded")])
@pytest.mark.parametrize("first", [False, True])
def test_parts_give_the_same_log_probabilities_and_gradients(
    monkeypatch: pytest.MonkeyPatch, family: str, kernel: Any, first: bool
) -> None:
    case = many(6)
    found: list[tuple[Tensor, ...]] = []
    for parts in (False, True):
        in_parts(monkeypatch, parts)
        tree = TreeModel(tiny(family), case.plan, EngineOptions(attention=kernel))
        with lifted():
            read = tree.policy(case.texts, case.thoughts, continuations=True, of_first=first)
            told = (read.need("log_prob_BRT"), read.need("continuation_log_prob_BRH"))
            (told[0].sum() + told[1].sum()).backward()
        slopes = torch.cat([p.grad.flatten() for p in tree.model.parameters() if p.grad is not None])
        found.append((*(one.detach() for one in told), slopes))
    assert all(apart(a, b) < 1e-10 for a, b in zip(*found))


@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma2"])
def test_parts_draw_the_same_thoughts(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    case = many(6)
    drawn = []
    for parts in (False, True):
        in_parts(monkeypatch, parts)
        tree = TreeModel(tiny(family), case.plan)
        with lifted():
            drawn.append(tree.sample(case.texts, numbers(case.texts, 6, 4), SamplingSettings()))
    assert drawn[0].tokens_BRT.equal(drawn[1].tokens_BRT)
    assert apart(drawn[0].log_q_BRT, drawn[1].log_q_BRT) < 1e-6


def test_pairs_grow_with_the_number_of_branches(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    right, softmax = attention.additive, torch.Tensor.softmax

    def counted(seen_B1nm: Tensor, dtype: torch.dtype, fold: int = 1) -> Tensor:
        asked.append(seen_B1nm.numel())
        return right(seen_B1nm, dtype, fold)

    def noted(scores: Tensor, *given: Any, **named: Any) -> Tensor:
        asked.append(scores.numel())
        return softmax(scores, *given, **named)

    monkeypatch.setattr(attention, "additive", counted)
    monkeypatch.setattr(torch.Tensor, "softmax", noted)
    rows, steps = list[int](), list[int]()
    for group in (168, 336):
        case = many(group)
        tree = TreeModel(tiny("qwen3"), case.plan)
        with torch.no_grad():
            tree.policy(case.texts, case.thoughts)
        rows.append(sum(asked))
        asked.clear()
        tree.sample(case.texts, numbers(case.texts, group, 4), SamplingSettings())
        steps.append(sum(asked))
        asked.clear()
    assert rows[1] <= 2.1 * rows[0]
    assert steps[1] <= 2.1 * steps[0]

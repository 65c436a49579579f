"""Passes without padding: the same numbers from fewer rows, in scoring, sampling and below the critics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from cases import Case, lifted, random_case
from exact import apart
from families import tiny
from test_decode import numbers

from tfive.tree import packed
from tfive.tree.attention import Attending
from tfive.tree.forward import TreeModel
from tfive.tree.settings import SamplingSettings

pytestmark = pytest.mark.model


def scene() -> tuple[TreeModel, Case]:
    case = random_case(3, "text", variable=True, count=4, group=3, length=5)
    return TreeModel(tiny("qwen3"), case.plan), case


@contextmanager
def rows_read(tree: TreeModel) -> Iterator[list[int]]:
    """How many rows each pass sends through the first block."""
    seen: list[int] = []
    hook = tree.backbone.blocks[0].register_forward_pre_hook(lambda _, given: seen.append(given[0][..., 0].numel()))
    try:
        yield seen
    finally:
        hook.remove()


def whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes with their padding, in every file that asks."""
    for name in ("tfive.tree.packed.packs", "tfive.tree.decode.packs"):
        monkeypatch.setattr(name, lambda tree, device: False)


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "ROWS", 1)


def test_scores_and_lower_activations_need_no_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    tree, case = scene()
    with lifted():
        with rows_read(tree) as few:
            scores, lower = tree.score(case.texts, case.thoughts), tree.lower(case.texts, case.thoughts, 1)
        whole(monkeypatch)
        with rows_read(tree) as all_rows:
            expected, full = tree.score(case.texts, case.thoughts), tree.lower(case.texts, case.thoughts, 1)
    assert apart(scores.losses_BRK, expected.losses_BRK) < 1e-12
    assert apart(scores.token_BRH, expected.token_BRH) < 1e-12
    read = tree.features(case.texts, case.thoughts, lower)
    assert apart(read.detach(), tree.features(case.texts, case.thoughts, full).detach()) < 1e-12
    # The text is read whole; its branches and the row below the critics are not.
    assert few[0] == all_rows[0]
    assert all(a < 0.9 * b for a, b in zip(few[1:], all_rows[1:], strict=True))


def test_sampling_stops_reading_thoughts_that_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    tree, case = scene()
    # Sharpened, so that many close soon.
    given = (case.texts, numbers(case.texts, 3, 5), SamplingSettings(temperature=0.05))
    with lifted():
        with rows_read(tree) as few:
            drawn = tree.sample(*given)
        whole(monkeypatch)
        tree._samplers.clear()
        with rows_read(tree) as all_rows:
            expected = tree.sample(*given)
    assert drawn.tokens_BRT.equal(expected.tokens_BRT)
    assert drawn.length_BR.equal(expected.length_BR)
    assert apart(drawn.log_q_BRT, expected.log_q_BRT) < 1e-6
    assert expected.closed_BR.any()
    assert sum(few) < sum(all_rows)


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_the_last_block_is_computed_where_it_is_read(family: str) -> None:
    _, case = scene()
    tree = TreeModel(tiny(family), case.plan)
    entered: list[int] = []
    last: Any = tree.backbone.blocks[-1].mlp
    hook = last.register_forward_hook(lambda module, given, _: entered.append(given[0][..., 0].numel()))
    inner = getattr(last, "down_proj", None)
    if inner is not None:
        inner.register_forward_pre_hook(lambda _, given: entered.append(given[0][..., 0].numel()))
    with lifted():
        expected = tree.features(case.texts, case.thoughts).detach()
        whole_rows = entered[-1]
        entered.clear()
        with torch.no_grad():
            found = tree.features(case.texts, case.thoughts)
    hook.remove()
    assert apart(found, expected) < 1e-12
    # A family whose parts go by other names is computed whole.
    assert min(entered) == (int(case.thoughts.mask_BRT.sum()) if inner is not None else whole_rows)


def test_which_rows_are_kept() -> None:
    exists = torch.tensor([[True, False, False], [False, True, False]])
    found = packed.packing(exists)
    assert found is not None
    assert found.tolist() == [0, 4]
    assert packed.packing(torch.ones(2, 3, dtype=torch.bool)) is None


def test_few_rows_are_filled_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "ROWS", 4)
    exists = torch.zeros(3, 4, dtype=torch.bool)
    exists[2, 1] = True
    found = packed.packing(exists)
    assert found is not None
    assert found.tolist() == [0, 1, 2, 9]


def test_only_without_gradients_on_processors() -> None:
    tree = Attending("folded")
    assert not packed.packs(tree, torch.device("cpu"))
    with torch.no_grad():
        assert packed.packs(tree, torch.device("cpu"))
        assert not packed.packs(tree, torch.device("cuda"))

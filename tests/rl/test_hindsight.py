"""Hindsight: which thought of a position is worth learning, and that each is drawn without what follows in sight."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tiny
from tfive.rl.gains import foreign
from tfive.rl.hindsight import Learnable, chosen, learnable, texts_of_round
from tfive.rl.sampling import sample
from tfive.tree.forward import TreeModel
from tfive.tree.layout import TextBatch, ThoughtPlan, Thoughts
from tfive.tree.settings import SamplingSettings


def test_a_position_keeps_its_best_thought_if_it_beats_others_and_none() -> None:
    own = torch.tensor([[3.0, 1.0, 2.0, 2.5, 1.5, 9.0]])
    other = torch.tensor([[2.0, 2.0, 2.0, 2.0, 1.0, 1.0]])
    none, every = torch.full_like(own, 2.0), torch.ones_like(own).bool()
    branch, gain, useful = chosen(own, other, none, every, 2)
    assert branch.tolist() == [[1, 2, 4]]
    assert gain.tolist() == [[1.0, 0.0, -0.5]]
    assert useful.tolist() == [[True, False, False]]
    # A branch that does not exist is nobody's best.
    branch, _, useful = chosen(own, other, none, torch.tensor([[True, False, True, False, True, True]]), 2)
    assert branch.tolist() == [[0, 2, 4]]
    assert not useful.any()
    # Better than another's is not enough where nothing would be better still.
    *_, useful = chosen(own, other, torch.full_like(own, 0.9), every, 2)
    assert not useful.any()


def test_the_best_has_the_best_of_as_many_others_beside_it() -> None:
    own = torch.tensor([[3.0, 1.0]])
    lucky = torch.tensor([[0.9, 3.1]])
    _, gain, useful = chosen(own, lucky, torch.full_like(own, 9.0), torch.ones_like(own).bool(), 2)
    assert gain.tolist() == [[1.0]]  # more than their mean, and yet by chance
    assert not useful.any()


def test_of_what_helps_the_better_half_is_learned() -> None:
    own = torch.tensor([[1.0, 0.0, -1.0, 2.0]])  # margins 1, 2, 3 and 0
    *_, useful = chosen(own, torch.full_like(own, 2.0), torch.full_like(own, 3.0), torch.ones_like(own).bool(), 1)
    assert useful.tolist() == [[False, True, True, False]]


def test_luck_alone_teaches_a_quarter_at_most() -> None:
    """Thoughts that are no better than others' and than none: half of them would be the best of both by chance."""
    g = torch.Generator().manual_seed(0)
    own, other = (torch.randn(1, 8 * 4000, generator=g) for _ in range(2))
    *_, useful = chosen(own, other, torch.full_like(own, 9.0), torch.ones_like(own).bool(), 8)
    assert float(useful.float().mean()) == pytest.approx(0.25, abs=0.02)


@pytest.mark.model
def test_one_text_has_the_thoughts_of_its_other_positions_beside_its_own() -> None:
    """Never its own: the best would be held against itself."""
    plan = ThoughtPlan(length=3, checkpoints=(3,), horizon=3, open_ids=(5,), close_ids=(6,), group=4)
    engine, texts = TreeModel(tiny.model(), plan), _texts().rows(0, 1)
    drawn = sample(engine, texts, SamplingSettings(), seed=0, role="w", window=0, rows=1, record_old=False).thoughts
    others = foreign(drawn, near=True, group=4)
    assert torch.equal(others.tokens_BRT[0, :4], drawn.tokens_BRT[0, 4:])
    assert torch.equal(others.tokens_BRT[0, 4:], drawn.tokens_BRT[0, :4])
    assert learnable(engine, texts, SamplingSettings(), seed=0, stream="w", rows=1).kept > 0


def _texts(seed: int = 1) -> TextBatch:
    tokens = torch.randint(10, 200, (4, 16), generator=torch.Generator().manual_seed(seed))
    return TextBatch(tokens, torch.zeros_like(tokens), torch.tensor([[4, 9]] * 4), torch.arange(8).view(4, 2))


@pytest.mark.model
def test_what_is_learned_is_the_best_of_what_was_drawn() -> None:
    plan = ThoughtPlan(length=3, checkpoints=(3,), horizon=3, open_ids=(5,), close_ids=(6,), group=4)
    engine, texts = TreeModel(tiny.model(), plan), _texts()
    found = learnable(engine, texts, SamplingSettings(), seed=0, stream="w", rows=2)
    drawn = sample(engine, texts, SamplingSettings(), seed=0, role="w", window=0, rows=4, record_old=False).thoughts
    assert (found.drawn, found.tokens) == (32, 96)
    assert 0 < found.kept <= 8
    assert found.content_gain > 0
    own, others, none = (_final(engine, texts, one) for one in (drawn, foreign(drawn, near=True), None))
    margins = {}
    for row in range(4):
        for slot in range(2):
            group = slice(4 * slot, 4 * slot + 4)
            best = 4 * slot + int(own[row, group].argmin())
            margins[row, slot] = float(min(others[row, group].min(), none[row, 4 * slot]) - own[row, best])
            assert torch.equal(found.thoughts.tokens_BRT[row, slot], drawn.tokens_BRT[row, best])
    helps = sorted(margin for margin in margins.values() if margin > 0)
    assert len(helps) > found.kept, "some that help are left out, so that the better half shows"
    least = helps[(len(helps) - 1) // 2]
    kept = {(row, slot) for row, slot in found.thoughts.valid_BR.nonzero().tolist()}
    assert kept == {place for place, margin in margins.items() if margin >= least}


def _final(engine: TreeModel, texts: TextBatch, thoughts: Thoughts | None) -> torch.Tensor:
    with torch.no_grad():
        if thoughts is None:
            return engine.no_thought(texts)
        return engine.score(texts, thoughts, whole=True).losses_BRK[..., -1]


@pytest.mark.model
def test_thoughts_know_nothing_of_what_follows_them() -> None:
    """Another continuation gives the same thoughts: hindsight chooses, it does not tell."""
    plan = ThoughtPlan(length=3, checkpoints=(3,), horizon=3, open_ids=(5,), close_ids=(6,), group=4)
    engine, texts = TreeModel(tiny.model(), plan), _texts()
    other = texts.tokens_BS.clone()
    other[:, 10:] = 200 - other[:, 10:]
    changed = TextBatch(other, texts.document_BS, texts.positions_BP, texts.items_BP)

    def last_slot(one: TextBatch) -> set[tuple[int, ...]]:
        found: Learnable = learnable(engine, one, SamplingSettings(), seed=0, stream="w", rows=4)
        return {tuple(ids) for ids in found.thoughts.tokens_BRT[:, 1].tolist()}

    every = sample(engine, texts, SamplingSettings(), seed=0, role="w", window=0, rows=4, record_old=False).thoughts
    before_change = {tuple(ids) for ids in every.tokens_BRT[:, 4:].flatten(0, 1).tolist()}
    assert last_slot(texts) <= before_change
    assert last_slot(changed) <= before_change


@pytest.mark.parametrize(
    ("number", "wanted", "places", "again"),
    [
        (0, 4, [0, 1], 0),
        (1, 4, [2, 3], 0),
        (2, 4, [4, 0], 1),
        (0, 100, [0, 1, 2, 3, 4], 0),
        (1, 100, [0, 1, 2, 3, 4], 5),
        (3, 4, [1, 2], 2),
    ],
)
def test_rounds_go_through_the_pool_and_count_what_comes_again(
    number: int, wanted: int, places: list[int], again: int
) -> None:
    found, repeated = texts_of_round(np.array([2, 2, 2, 2, 2]), number, wanted)
    assert (found.tolist(), repeated) == (places, again)

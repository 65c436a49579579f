"""Hindsight thoughts: what counts as a copy, which thought of a position is kept, and where notes stand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tiny
from tfive.rl import hindsight
from tfive.rl.gains import foreign
from tfive.rl.hindsight import chosen, leaks, learnable, noted
from tfive.tree.forward import TreeModel
from tfive.tree.layout import TextBatch, ThoughtPlan, Thoughts
from tfive.tree.settings import SamplingSettings


@pytest.mark.parametrize(
    ("thought", "continuation", "copied"),
    [
        (" 7 + 11 = 18\n", "18\n\nQuestion", False),
        (" 18\n", "18\n\nQuestion", True),
        (" The mill stood by the river bank all day", "and the mill stood by the river", True),
        (" a river has a bank", "and the mill stood by the river", False),
        (" see [next: 18]", "18", True),
        ("", "18", False),
        ("so it is red green blue", "red green blue", True),
    ],
)
def test_copies_are_told_from_workings(thought: str, continuation: str, copied: bool) -> None:
    assert leaks(thought, continuation) is copied


def test_a_position_keeps_its_best_allowed_thought_if_it_beats_others() -> None:
    own = torch.tensor([[3.0, 1.0, 2.0, 2.5, 1.5, 9.0]])
    other = torch.tensor([[2.0, 2.0, 2.0, 2.0, 1.0, 1.0]])
    none = torch.full_like(own, 2.0)
    allowed = torch.tensor([[True, False, True, False, True, True]])
    branch, gain, useful = chosen(own, other, none, allowed, 2)
    assert branch.tolist() == [[0, 2, 4]]
    assert gain.tolist() == [[-1.0, 0.0, -0.5]]
    assert useful.tolist() == [[False, False, False]]
    branch, gain, useful = chosen(own, other, none, torch.ones_like(allowed), 2)
    assert branch.tolist() == [[1, 2, 4]]
    assert useful.tolist() == [[True, False, False]]
    assert gain[0, 0] == 1.0
    # Better than another's is not enough where nothing would be better still.
    *_, useful = chosen(own, other, torch.full_like(own, 0.9), torch.ones_like(allowed), 2)
    assert not useful.any()


def test_a_note_stands_between_a_document_and_its_thought() -> None:
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]])
    document = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2]])
    texts = TextBatch(tokens, document, torch.tensor([[4, -1]]), torch.tensor([[9, -1]]))
    rows, places, continuations = noted(texts, 3, ([90], [91]))
    assert rows.tokens_BS.tolist() == [[4, 5, 90, 6, 7, 91]]
    assert (rows.positions_BP.tolist(), rows.items_BP.tolist()) == ([[5]], [[9]])
    assert (places, continuations) == ([(0, 0)], [[6, 7]])


@pytest.mark.model
def test_leaking_thoughts_are_never_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = ThoughtPlan(length=3, checkpoints=(3,), horizon=3, open_ids=(5,), close_ids=(6,), group=4)
    engine = TreeModel(tiny.model(), plan)
    tokens = torch.randint(10, 200, (4, 16), generator=torch.Generator().manual_seed(1))
    positions = torch.tensor([[4, 9]] * 4)
    texts = TextBatch(tokens, torch.zeros_like(tokens), positions, torch.arange(8).view(4, 2))

    def found() -> hindsight.Learnable:
        return learnable(engine, texts, SamplingSettings(), note=([7], [8]), decode=str, seed=0, stream="w", rows=2)

    every = found()
    assert every.drawn == 32
    assert 0 < every.kept <= 8
    after = engine.score(texts, Thoughts(*(getattr(every.thoughts, name).repeat_interleave(4, 1) for name in
                                           Thoughts.__dataclass_fields__)), whole=True).losses_BRK[..., -1]  # fmt: skip
    none = engine.no_thought(texts)
    useful = every.thoughts.valid_BR.repeat_interleave(4, 1)
    assert bool((after < none)[useful].all()), "each helps more than none"
    assert every.content_gain > 0
    scores = engine.score(texts, Thoughts(*(getattr(every.thoughts, name).repeat_interleave(4, 1) for name in
                                            Thoughts.__dataclass_fields__)), whole=True)  # fmt: skip
    assert scores.losses_BRK.isfinite().all()
    first = {tuple(ids) for ids in every.thoughts.tokens_BRT[every.thoughts.valid_BR].tolist()}
    monkeypatch.setattr(hindsight, "leaks", lambda thought, _: tuple(eval(thought)) in first)
    without = found()
    assert without.leaked >= len(first)
    assert not first & {tuple(ids) for ids in without.thoughts.tokens_BRT[without.thoughts.valid_BR].tolist()}
    monkeypatch.setattr(hindsight, "leaks", lambda *_: True)
    assert found().kept == 0


@pytest.mark.model
def test_half_of_the_thoughts_are_drawn_without_the_note(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = torch.randint(10, 200, (4, 16), generator=torch.Generator().manual_seed(1))
    texts = TextBatch(tokens, torch.zeros_like(tokens), torch.tensor([[4, 9]] * 4), torch.arange(8).view(4, 2))
    real, asked, scored = hindsight.sample, list[tuple[int, int, int]](), list[Thoughts]()

    def noting(engine: TreeModel, some: TextBatch, *given: Any, **named: Any) -> Any:
        drawn = real(engine, some, *given, **named)
        asked.append((engine.plan.group, *some.positions_BP.shape))
        alone.append(drawn.thoughts)
        return drawn

    def seen(thoughts: Thoughts, **near: bool) -> Thoughts:
        scored.append(thoughts)
        return foreign(thoughts, **near)

    monkeypatch.setattr(hindsight, "sample", noting)
    monkeypatch.setattr(hindsight, "foreign", seen)
    for group, expected in ((1, [(1, 8, 1)]), (5, [(3, 8, 1), (2, 4, 2)])):
        plan = ThoughtPlan(length=3, checkpoints=(3,), horizon=3, open_ids=(5,), close_ids=(6,), group=group)
        engine, alone = TreeModel(tiny.model(), plan), list[Thoughts]()
        asked.clear()
        learnable(engine, texts, SamplingSettings(), note=([7], [8]), decode=str, seed=0, stream="w", rows=2)
        assert asked == expected
        together = scored[-1].tokens_BRT.unflatten(1, (2, group))
        assert torch.equal(together[1, 1, : expected[0][0]], alone[0].tokens_BRT[3])
        for one in alone[1:]:
            assert torch.equal(together[:, :, 3:], one.tokens_BRT.unflatten(1, (2, 2)))

"""Hindsight thoughts: what counts as a copy, which thought of a position is kept, and where notes stand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tiny
from tfive.rl import hindsight
from tfive.rl.gains import foreign
from tfive.rl.hindsight import chosen, first_line, leaks, learnable, noted
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
    # The best of one's own has the best of as many others beside it, not their mean.
    lucky = other.clone()
    lucky[0, :2] = torch.tensor([0.9, 3.1])
    _, gain, useful = chosen(own, lucky, none, torch.ones_like(allowed), 2)
    assert gain[0, 0] == 1.0
    assert not useful.any()
    # Of those that help, the half that helps most: margins 1, 2, 3 and 0.
    own = torch.tensor([[1.0, 0.0, -1.0, 2.0]])
    *_, useful = chosen(own, torch.full_like(own, 2.0), torch.full_like(own, 3.0), torch.ones_like(own).bool(), 1)
    assert useful.tolist() == [[False, True, True, False]]
    # Better than another's is not enough where nothing would be better still.
    own = torch.tensor([[3.0, 1.0, 2.0, 2.5, 1.5, 9.0]])
    *_, useful = chosen(own, other, torch.full_like(own, 0.9), torch.ones_like(allowed), 2)
    assert not useful.any()


def test_a_note_stands_between_a_document_and_its_thought() -> None:
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]])
    document = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2]])
    texts = TextBatch(tokens, document, torch.tensor([[4, -1]]), torch.tensor([[9, -1]]))
    rows, places, continuations = noted(texts, 3, ([90], [91]), str)
    assert rows.tokens_BS.tolist() == [[4, 5, 90, 6, 7, 91]]
    assert (rows.positions_BP.tolist(), rows.items_BP.tolist()) == ([[5]], [[9]])
    assert (places, continuations) == ([(0, 0)], [[6, 7]])
    # A note ends where the line does.
    rows, _, continuations = noted(
        texts, 3, ([90], [91]), lambda ids: "".join("\n" if one == 7 else "a" for one in ids)
    )
    assert rows.tokens_BS.tolist() == [[4, 5, 90, 6, 91]]
    assert continuations == [[6, 7]]


@pytest.mark.parametrize(
    ("continuation", "line"),
    [("18\n\nQ", "18"), ("\n18\nQ", "\n18"), ("18", "18"), ("\n\n", "\n\n"), ("1\n", "1"), ("\n", "\n"), ("", "")],
)
def test_a_note_holds_the_first_line_that_says_something(continuation: str, line: str) -> None:
    assert first_line([ord(one) for one in continuation], lambda ids: "".join(map(chr, ids))) == [ord(x) for x in line]


@pytest.mark.model
def test_leaking_thoughts_are_never_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = ThoughtPlan(length=3, checkpoints=(3,), horizon=3, open_ids=(5,), close_ids=(6,), group=4)
    engine = TreeModel(tiny.model(), plan)
    tokens = torch.randint(10, 200, (4, 16), generator=torch.Generator().manual_seed(1))
    positions = torch.tensor([[4, 9]] * 4)
    texts = TextBatch(tokens, torch.zeros_like(tokens), positions, torch.arange(8).view(4, 2))

    def found() -> hindsight.Learnable:
        asked: dict[str, Any] = {"note": ([7], [8]), "decode": str, "seed": 0, "stream": "w", "rows": 2}
        return learnable(engine, texts, SamplingSettings(), informed=2, **asked)

    every = found()
    assert every.drawn == 32
    assert 0 < every.kept <= 8
    after = engine.score(texts, Thoughts(*(getattr(every.thoughts, name).repeat_interleave(4, 1) for name in
                                           Thoughts.__dataclass_fields__)), whole=True).losses_BRK[..., -1]  # fmt: skip
    none = engine.no_thought(texts)
    useful = every.thoughts.valid_BR.repeat_interleave(4, 1)
    assert bool((after < none)[useful].all()), "each helps more than none"
    assert 0 <= every.informed <= 1
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
def test_thoughts_are_drawn_with_the_note_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
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
        ways: dict[str, Any] = {"note": ([7], [8]), "decode": str, "seed": 0, "stream": "w", "rows": 2}
        learnable(engine, texts, SamplingSettings(), informed=expected[0][0], **ways)
        assert asked == expected
        together = scored[-1].tokens_BRT.unflatten(1, (2, group))
        assert torch.equal(together[1, 1, : expected[0][0]], alone[0].tokens_BRT[3])
        for one in alone[1:]:
            assert torch.equal(together[:, :, 3:], one.tokens_BRT.unflatten(1, (2, 2)))

"""Gains and their controls: who lends a thought to whom, and every loss again from plain rows."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stage import CLOSE, LAW, PLAN, PlainModel, V, gpt2, items_of, texts, thoughts_for
from tfive.rl.gains import Gains, KeptReadings, emptied, foreign, measure, no_thought_losses, randomised
from tfive.tree.forward import TreeModel
from tfive.tree.layout import TextBatch, Thoughts
from tfive.tree.outputs import Reading

pytestmark = pytest.mark.model
LEGAL_V = torch.tensor([token for token in range(V) if token not in PLAN.forbidden_ids])


def numbered(valid_BR: Tensor) -> Thoughts:
    """Thoughts whose tokens, length, close and log q all say which text and branch they were written in."""
    rows, branches = valid_BR.shape
    number_BR = torch.arange(rows * branches).view(rows, branches)
    steps_T = torch.arange(4)
    tokens_BRT = number_BR[..., None] * 10 + steps_T
    return Thoughts(tokens_BRT, number_BR % 4 + 1, valid_BR, number_BR % 2 == 0, -tokens_BRT / 8)


@given(st.lists(st.integers(0, 4), min_size=2, max_size=7))
def test_every_thought_comes_from_another_text(counts: list[int]) -> None:
    most = max(counts)
    valid_BR = torch.arange(4) < torch.tensor(counts)[:, None]
    thoughts = numbered(valid_BR)
    if sum(counts) < 2 * most:
        with pytest.raises(ValueError, match="too few texts"):
            foreign(thoughts)
        return
    if not most:
        return
    lent = foreign(thoughts)
    origin_BR = lent.tokens_BRT[..., 0] // 10
    assert lent.valid_BR.equal(valid_BR)
    home_BR = torch.arange(len(counts))[:, None].expand_as(valid_BR)
    assert not (origin_BR // 4 == home_BR)[valid_BR].any()
    assert sorted(origin_BR[valid_BR].tolist()) == valid_BR.flatten().nonzero().flatten().tolist()
    for name in ("length_BR", "closed_BR", "log_q_BRT", "tokens_BRT"):
        whole = getattr(thoughts, name).flatten(0, 1)
        assert getattr(lent, name)[valid_BR].equal(whole[origin_BR[valid_BR]]), name
    assert lent.tokens_BRT[~valid_BR].equal(thoughts.tokens_BRT[~valid_BR])


def test_the_empty_thought_is_the_delimiters_alone() -> None:
    engine, batch = TreeModel(gpt2(), PLAN), texts()
    nothing = emptied(thoughts_for(batch))
    assert not nothing.length_BR.any()
    assert not nothing.closed_BR.any()
    found, plain = engine.score(batch, nothing), PlainModel(engine.model)
    for item in items_of(batch, nothing):
        assert item.thought == []
        expected = -plain.after(item).mean()
        torch.testing.assert_close(found.losses_BRK[item.row, item.branch, 0], expected.detach())


def test_random_thoughts_keep_lengths_and_closes() -> None:
    batch = texts(rows=30, seed=8)
    own = thoughts_for(batch, seed=9)
    found = randomised(own, batch, LEGAL_V, group=1, seed=1, window=2)
    assert found.length_BR.equal(own.length_BR)
    assert found.closed_BR.equal(own.closed_BR)
    inside_BRT = own.mask_BRT.clone()
    for row, branch in own.closed_BR.nonzero().tolist():
        last = int(own.length_BR[row, branch]) - 1
        assert found.tokens_BRT[row, branch, last] == CLOSE
        inside_BRT[row, branch, last] = False
    kinds = Counter(found.tokens_BRT[inside_BRT].tolist())
    assert set(kinds) <= set(LEGAL_V.tolist())
    assert len(kinds) > len(LEGAL_V) // 2
    assert (found.tokens_BRT == own.tokens_BRT)[inside_BRT].double().mean() < 0.2
    assert randomised(own, batch, LEGAL_V, group=1, seed=1, window=2).tokens_BRT.equal(found.tokens_BRT)
    assert not randomised(own, batch, LEGAL_V, group=1, seed=1, window=3).tokens_BRT.equal(found.tokens_BRT)
    part = randomised(own.rows(4, 9), batch.rows(4, 9), LEGAL_V, group=1, seed=1, window=2)
    assert part.tokens_BRT.equal(found.tokens_BRT[4:9])


def test_every_loss_is_that_of_plain_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, base, batch = TreeModel(gpt2(), PLAN), TreeModel(gpt2(seed=7), PLAN), texts(rows=5, count=3, width=24)
    seen: dict[str, Any] = {}

    def watched(thoughts: Thoughts, texts: TextBatch, allowed_V: Tensor, **options: int) -> Thoughts:
        seen["allowed"] = allowed_V
        seen["random"] = randomised(thoughts, texts, allowed_V, **options)
        return seen["random"]

    monkeypatch.setattr("tfive.rl.gains.randomised", watched)
    l_0 = no_thought_losses(base, batch, rows=2)
    kinds_BP = torch.arange(15).view(5, 3)
    gains, own = measure(engine, batch, LAW, base_no_thought_BR=l_0, kind_BP=kinds_BP, seed=5, rows=2)
    # A close inside a thought would have ended it: random tokens are never one.
    assert seen["allowed"].tolist() == [token for token in LEGAL_V.tolist() if token != CLOSE]
    plain, plain_base = PlainModel(engine.model), PlainModel(base.model)
    versions = {"own": own, "other": foreign(own), "empty": emptied(own), "random": seen["random"]}
    for name, thoughts in versions.items():
        expected = torch.stack([-plain.after(item).mean() for item in items_of(batch, thoughts)])
        torch.testing.assert_close(getattr(gains, f"{name}_I"), expected.detach().float(), rtol=1e-5, atol=1e-5)
    items = list(items_of(batch, own))
    for name, model in (("no_thought", plain), ("base_no_thought", plain_base)):
        expected = torch.stack([-model.without(item).mean() for item in items])
        torch.testing.assert_close(getattr(gains, f"{name}_I"), expected.detach().float(), rtol=1e-5, atol=1e-5)
    assert gains.length_I.tolist() == [len(item.thought) for item in items]
    assert gains.text_I.tolist() == [item.row for item in items]
    assert gains.kind_I.tolist() == [int(kinds_BP[item.row, item.branch]) for item in items]


def test_measuring_does_not_depend_on_batching_or_change_the_model() -> None:
    engine, batch = TreeModel(gpt2(), PLAN), texts(rows=5)
    before = {name: tensor.clone() for name, tensor in engine.model.state_dict().items()}
    l_0 = no_thought_losses(engine, batch, rows=5)
    torch.testing.assert_close(no_thought_losses(engine, batch, rows=2), l_0)
    one, _ = measure(engine, batch, LAW, base_no_thought_BR=l_0, seed=5, rows=1)
    many, _ = measure(engine, batch, LAW, base_no_thought_BR=l_0, seed=5, rows=4)
    for name in Gains.__dataclass_fields__:
        torch.testing.assert_close(getattr(one, name), getattr(many, name))
    assert many.no_thought_I.equal(many.base_no_thought_I)
    assert all(tensor.equal(before[name]) for name, tensor in engine.model.state_dict().items())


def test_texts_are_read_once_for_sampling_and_scoring(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, batch, reads = TreeModel(gpt2(), PLAN), texts(rows=5), list[int]()
    l_0, read = no_thought_losses(engine, batch, rows=5), engine.read

    def counted(some: TextBatch, below: int | None = None) -> Reading:
        reads.append(len(some.tokens_BS))
        return read(some, below)

    monkeypatch.setattr(engine, "read", counted)
    once, _ = measure(engine, batch, LAW, base_no_thought_BR=l_0, seed=5, rows=2)
    assert reads == [2, 2, 1]
    # Without room for what is kept, every part is read again.
    reads.clear()
    monkeypatch.setattr(KeptReadings.__init__, "__defaults__", (0,))
    twice, _ = measure(engine, batch, LAW, base_no_thought_BR=l_0, seed=5, rows=2)
    assert reads == [2, 2, 1, 2, 2, 1]
    assert once.own_I.equal(twice.own_I)
    assert once.other_I.equal(twice.other_I)


def test_the_summary_by_hand() -> None:
    draw = np.random.default_rng(0)
    text = np.repeat(np.arange(60), 4)
    losses = ("own", "other", "empty", "random", "no_thought", "base_no_thought")
    columns = {f"{name}_I": draw.normal(2.0, 0.5, 240) + text / 100 for name in losses}
    length = draw.integers(1, 5, 240)
    tensors: dict[str, Any] = {name: torch.from_numpy(values) for name, values in columns.items()}
    gains = Gains(
        **tensors, length_I=torch.from_numpy(length), text_I=torch.from_numpy(text), kind_I=torch.from_numpy(text % 2)
    )
    found = gains.summary()
    named = {
        "thought_gain": ("no_thought_I", "own_I"),
        "content_gain": ("other_I", "own_I"),
        "gain_vs_base": ("base_no_thought_I", "own_I"),
        "other_gain": ("no_thought_I", "other_I"),
        "empty_gain": ("no_thought_I", "empty_I"),
        "random_gain": ("no_thought_I", "random_I"),
        "no_thought_drift": ("no_thought_I", "base_no_thought_I"),
    }
    for name, (left, right) in named.items():
        each = columns[left] - columns[right]
        by_text = each.reshape(60, 4).mean(1)
        error = by_text.std(ddof=1) / math.sqrt(60)
        assert found[name] == pytest.approx(each.mean(), rel=1e-9)
        assert found[f"{name}_interval"] == pytest.approx(
            [each.mean() - 1.959964 * error, each.mean() + 1.959964 * error], rel=1e-5
        )
    gain = columns["no_thought_I"] - columns["own_I"]
    assert found["no_thought_loss"] == pytest.approx(columns["no_thought_I"].mean())
    assert found["useful_fraction"] == pytest.approx((gain > 0).mean())
    assert found["worst_1_percent"] == pytest.approx(np.sort(gain)[:2].mean())
    assert found["mean_thought_length"] == pytest.approx(length.mean())
    assert (found["items"], found["texts"]) == (240, 60)
    odd = gains.estimates(gains.kind_I == 1)["thought_gain"]
    assert odd.mean == pytest.approx(gain[text % 2 == 1].mean())
    assert odd.units == 30


def test_more_of_a_better_loss_is_more_gain() -> None:
    one = torch.ones(4)
    gains = Gains(one, one, one, one, one, one, torch.ones(4), torch.tensor([0, 0, 1, 1]), torch.zeros(4))
    better = replace(gains, own_I=one - 0.25)
    for name in ("thought_gain", "content_gain", "gain_vs_base"):
        assert better.estimates()[name].mean - gains.estimates()[name].mean == pytest.approx(0.25)
    assert better.estimates()["other_gain"] == gains.estimates()["other_gain"]

"""Sampling a role's thoughts: the random numbers by a loop, both laws by plain rows, and nothing by batching."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from stage import LAW, PLAN, PlainModel, gpt2, items_of, texts
from tfive import rng
from tfive.rl.sampling import branch_uniforms, micro_batches, sample, score
from tfive.rl.trajectory import Trajectories
from tfive.tree.forward import TreeModel
from tfive.tree.settings import SamplingSettings

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def engine() -> TreeModel:
    return TreeModel(gpt2(), PLAN)


def drawn(engine: TreeModel, rows: int = 3, law: SamplingSettings = LAW, **changes: Any) -> Trajectories:
    options: dict[str, Any] = {"seed": 5, "role": "actor", "window": 2, "scored": True} | changes
    return sample(engine, texts(rows=6), law, rows=rows, **options)


def test_numbers_are_functions_of_item_member_and_step() -> None:
    batch = texts()
    numbers = branch_uniforms(batch, group=2, steps=3, seed=4, role="pilot", window=6)
    assert numbers.dtype == torch.float64
    for row in range(4):
        for branch in range(4):
            item = int(batch.items_BP[row, branch // 2])
            for step in range(3):
                expected = 0.5 if item < 0 else float(rng.uniforms(4, "pilot", 6, item, branch % 2, step))
                assert numbers[row, branch, step] == expected
    order = torch.tensor([2, 0])
    part = replace(batch, **{name: getattr(batch, name)[order] for name in batch.__dataclass_fields__})
    assert branch_uniforms(part, group=2, steps=3, seed=4, role="pilot", window=6).equal(numbers[order])


@pytest.mark.parametrize(("count", "size"), [(0, 3), (3, 3), (7, 3), (2, 5)])
def test_micro_batches_cover_every_row_once(count: int, size: int) -> None:
    parts = list(micro_batches(count, size))
    assert [i for part in parts for i in range(count)[part]] == list(range(count))
    assert all(0 < part.stop - part.start <= size for part in parts)


def test_both_laws_and_all_losses_are_those_of_plain_rows(engine: TreeModel) -> None:
    found, plain = drawn(engine), PlainModel(engine.model)
    assert found.thoughts.closed_BR.any()
    assert (found.thoughts.length_BR == PLAN.length).any()
    for item in items_of(found.texts, found.thoughts):
        at, length = (item.row, item.branch), len(item.thought)
        log_p = plain.actions(item).detach()
        torch.testing.assert_close(found.need("log_old_BRT")[at][:length], log_p.float())
        torch.testing.assert_close(found.thoughts.log_q_BRT[at][:length], log_p.float())
        torch.testing.assert_close(found.need("no_thought_BR")[at], -plain.without(item).mean().detach())
        mask = found.need("checkpoint_mask_BRK")[at]
        losses = zip(found.need("checkpoint_BRK")[at][mask].tolist(), found.need("losses_BRK")[at][mask].tolist())
        assert dict(losses) == pytest.approx(plain.checkpoints(item))
        assert not set(item.thought) & set(PLAN.forbidden_ids)


def test_scoring_while_sampling_equals_scoring_afterwards(engine: TreeModel) -> None:
    found = drawn(engine)
    again = score(engine, drawn(engine, scored=False), rows=2, snapshots={"scorer": "scorer-1"})
    assert again.snapshots == {"scorer": "scorer-1"}
    for name in ("no_thought_BR", "losses_BRK"):
        torch.testing.assert_close(again.need(name), found.need(name))
    assert again.need("checkpoint_BRK").equal(found.need("checkpoint_BRK"))


def test_thoughts_follow_seed_role_and_window_alone(engine: TreeModel) -> None:
    first = drawn(engine).thoughts.tokens_BRT
    assert drawn(engine).thoughts.tokens_BRT.equal(first)
    for change in ({"seed": 6}, {"role": "pilot"}, {"window": 3}):
        assert not drawn(engine, **change).thoughts.tokens_BRT.equal(first)


def test_in_parity_batching_changes_no_bit_and_both_laws_are_one(engine: TreeModel) -> None:
    law = SamplingSettings(parity=True)
    one, all_at_once = drawn(engine, 1, law), drawn(engine, 6, law)
    assert one.thoughts.tokens_BRT.equal(all_at_once.thoughts.tokens_BRT)
    assert one.thoughts.log_q_BRT.equal(all_at_once.thoughts.log_q_BRT)
    assert one.need("log_old_BRT").equal(one.thoughts.log_q_BRT)


def test_the_old_policy_is_recorded_only_when_asked_for(engine: TreeModel) -> None:
    assert drawn(engine, record_old=False).log_old_BRT is None
    tempered = drawn(engine, law=SamplingSettings(temperature=0.5))
    mask = tempered.mask_BRT
    assert not torch.allclose(tempered.need("log_old_BRT")[mask], tempered.thoughts.log_q_BRT[mask], atol=1e-2)

"""The record of a window: what is missing is named, rows are rows of everything, and a file gives back every bit."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from torch import Tensor

from stage import texts, thoughts_for
from tfive.rl.trajectory import Trajectories, last_loss
from tfive.tree.layout import TextBatch, Thoughts


def whole() -> Trajectories:
    """Every field filled; each tensor tells texts, branches and steps apart."""
    batch = texts()
    thoughts = thoughts_for(batch)
    rows, branches, steps = thoughts.tokens_BRT.shape
    draw = torch.Generator().manual_seed(3)

    def filled(*shape: int) -> Tensor:
        return torch.rand(shape, generator=draw)

    mask_BRK = torch.tensor([[[True, False]] * branches, *[[[True, True]] * branches] * (rows - 1)])
    per_step = dict.fromkeys(
        ("log_old_BRT", "potentials_BRT", "rewards_BRT", "returns_BRT", "weight_BRT", "advantage_BRT"), (rows, branches)
    )
    return Trajectories(
        "actor",
        3,
        batch,
        thoughts,
        no_thought_BR=filled(rows, branches),
        losses_BRK=filled(rows, branches, 2),
        checkpoint_BRK=torch.tensor([2, 4]).expand(rows, branches, 2).clone(),
        checkpoint_mask_BRK=mask_BRK,
        values_2BRT=filled(2, rows, branches, steps),
        gae_2BRT=filled(2, rows, branches, steps),
        probe_step_BR=torch.arange(rows * branches).view(rows, branches) % steps,
        snapshots={"policy": "policy-2"},
        **{name: filled(*shape, steps) for name, shape in per_step.items()},
    )


def tensors(record: Trajectories) -> dict[str, Tensor]:
    own = {f.name: getattr(record, f.name) for f in fields(record) if isinstance(getattr(record, f.name), Tensor)}
    parts: dict[str, TextBatch | Thoughts] = {"texts": record.texts, "thoughts": record.thoughts}
    return own | {f"{p}.{f.name}": getattr(part, f.name) for p, part in parts.items() for f in fields(part)}


def same(left: Trajectories, right: Trajectories) -> None:
    a, b = tensors(left), tensors(right)
    assert a.keys() == b.keys()
    assert all(a[name].equal(b[name]) and a[name].dtype == b[name].dtype for name in a)
    assert (left.role, left.window, left.snapshots) == (right.role, right.window, right.snapshots)


def test_what_is_missing_is_named() -> None:
    fresh = Trajectories("pilot", 7, texts(), thoughts_for(texts()))
    with pytest.raises(ValueError, match="gae_2BRT of the pilot trajectories of window 7"):
        fresh.need("gae_2BRT")


def test_having_adds_and_leaves_the_original_alone() -> None:
    fresh = Trajectories("pilot", 1, texts(), thoughts_for(texts()), snapshots={"policy": "policy-1"})
    later = fresh.having(no_thought_BR=torch.ones(4, 2), snapshots={"scale": "scale-1"})
    assert fresh.no_thought_BR is None
    assert fresh.snapshots == {"policy": "policy-1"}
    assert later.need("no_thought_BR").sum() == 8
    assert later.snapshots == {"policy": "policy-1", "scale": "scale-1"}
    assert later.thoughts is fresh.thoughts


@pytest.mark.parametrize("index", [slice(1, 3), torch.tensor([3, 0]), slice(0, 0)], ids=["slice", "index", "none"])
def test_rows_are_rows_of_everything(index: slice | Tensor) -> None:
    record = whole()
    chosen = list(range(4))[index] if isinstance(index, slice) else index.tolist()
    found = tensors(record.rows(index))
    for name, tensor in tensors(record).items():
        by_text = tensor.movedim(1, 0) if name.endswith("_2BRT") else tensor
        expected = by_text.new_zeros((len(chosen), *by_text.shape[1:]))
        for place, row in enumerate(chosen):
            expected[place] = by_text[row]
        expected = expected.movedim(0, 1) if name.endswith("_2BRT") else expected
        assert found[name].equal(expected), name


def test_gain_is_read_at_each_thoughts_last_checkpoint() -> None:
    record = whole()
    for row in range(4):
        for branch in range(2):
            last = int(record.need("checkpoint_mask_BRK")[row, branch].sum()) - 1
            loss = record.need("losses_BRK")[row, branch, last]
            valid = bool(record.thoughts.valid_BR[row, branch])
            assert record.final_loss_BR[row, branch] == (loss if valid else 0)
            assert record.gain_BR[row, branch] == (record.need("no_thought_BR")[row, branch] - loss if valid else 0)
    assert record.count == 7
    assert last_loss(torch.ones(1, 2), torch.zeros(1, 2, dtype=torch.bool)).tolist() == [1.0]


def test_a_state_gives_back_every_bit() -> None:
    record = whole()
    same(Trajectories.from_state(record.state_dict()), record)

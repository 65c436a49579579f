"""The record of a window: what is missing is named, rows are rows of everything, and a file gives back every bit."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from stage import texts, thoughts_for
from tfive.errors import UserError
from tfive.rl.trajectory import Trajectories, last_loss


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
    parts = {"texts": record.texts, "thoughts": record.thoughts}
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


def test_a_file_gives_back_every_bit(tmp_path: Path) -> None:
    record = whole()
    record.save(tmp_path / "set.safetensors")
    same(Trajectories.load(tmp_path / "set.safetensors"), record)
    fresh = Trajectories("pilot", 1, texts(), thoughts_for(texts()))
    fresh.save(tmp_path / "fresh.safetensors")
    same(Trajectories.load(tmp_path / "fresh.safetensors"), fresh)


def test_files_that_are_no_trajectories_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "set.safetensors"
    with pytest.raises(UserError, match=r"set\.safetensors: not a trajectory file"):
        Trajectories.load(path)
    save_file({"a": torch.zeros(2)}, path)
    with pytest.raises(UserError, match="not a trajectory file"):
        Trajectories.load(path)
    whole().save(path)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(UserError, match="damaged trajectory file"):
        Trajectories.load(path)


@pytest.mark.parametrize("name", ["texts.items_BP", "thoughts.tokens_BRT"])
def test_a_file_without_one_of_its_tensors_names_it(tmp_path: Path, name: str) -> None:
    path, record = tmp_path / "set.safetensors", whole()
    state = record.state_dict()
    held = {key: tensor.contiguous() for key, tensor in state.pop("tensors").items()}
    lost = held.pop(name)
    save_file(held, path, metadata={"trajectories": json.dumps(state)})
    with pytest.raises(UserError, match=rf"set\.safetensors: incomplete .*the tensor {name} is missing"):
        Trajectories.load(path)
    save_file({**held, name: lost, "stray": torch.zeros(1)}, path, metadata={"trajectories": json.dumps(state)})
    with pytest.raises(UserError, match="stray"):
        Trajectories.load(path)
    del state["role"]
    save_file({**held, name: lost}, path, metadata={"trajectories": json.dumps(state)})
    with pytest.raises(UserError, match="lacks role"):
        Trajectories.load(path)

"""Checkpoints of several ranks: every element written once, read by any number of ranks, whole or refused by name."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tfive.distributed.pieces import Box, Piece
from tfive.errors import RunFailed, UserError
from tfive.training import checkpoint, placement
from tfive.training.checkpoint import CheckpointStore
from tfive.training.checkpoint_write import Attempt
from tfive.training.placement import Wanted
from training.test_checkpoint import same
from training.thread_ranks import ThreadRank, together

SHARDED = {"rows": 0, "columns": 1, "few": 0, "half": 0}
"""Tensors of which every rank holds a block, and the axis that is cut."""


def whole_state(number: int = 1) -> dict[Any, Any]:
    generator = torch.Generator().manual_seed(number)
    return {
        "rows": torch.randn(11, 3, generator=generator),
        "columns": torch.randn(4, 6, generator=generator, dtype=torch.float64),
        "few": torch.randn(2, 5, generator=generator),
        "half": torch.randn(9, generator=generator).bfloat16(),
        "same": {"weight": torch.randn(40, 3, generator=generator), "count": torch.tensor(number)},
        "empty": torch.empty(0, 3),
        3: [torch.arange(7 * number), None, 0.5],
    }


SHAPES = {name: tuple(whole_state()[name].shape) for name in SHARDED}


def block(tensor: Tensor, rank: int, size: int, axis: int) -> Box:
    """The block of a rank as `torch.chunk` cuts it: the last ones are shorter, or empty."""
    length = -(-tensor.shape[axis] // size)
    start = min(rank * length, tensor.shape[axis])
    offset, shape = [0] * tensor.ndim, list(tensor.shape)
    offset[axis], shape[axis] = start, min(length, tensor.shape[axis] - start)
    return Box(tuple(offset), tuple(shape))


def held(tree: dict[Any, Any], ranks: ThreadRank) -> dict[Any, Any]:
    """What one rank holds of the tree; a number of its own beside it, of which the first rank's counts."""
    own = dict(tree)
    for name, axis in SHARDED.items():
        box = block(tree[name], ranks.rank, ranks.size, axis)
        own[name] = Piece(tree[name][box.slices].clone(), tuple(tree[name].shape), box.offset)
    return {**own, "tied": own["rows"], "rank": ranks.rank}


def whole(tree: dict[Any, Any]) -> dict[Any, Any]:
    return {**tree, "tied": tree["rows"], "rank": 0}


def wanted_by(ranks: ThreadRank) -> Wanted:
    """Its own blocks of the sharded tensors, everything else whole."""

    def wanted(path: tuple[str | int, ...], shape: tuple[int, ...]) -> Box | None:
        axis = SHARDED.get(str(path[-1]))
        return None if axis is None else block(torch.empty(shape), ranks.rank, ranks.size, axis)

    return wanted


def saved(root: Path, size: int, tree: dict[Any, Any], **options: Any) -> list[Path | Exception]:
    def save(ranks: ThreadRank) -> Path:
        return CheckpointStore(root, world=ranks, **options).save(held(tree, ranks))

    return together(size, save)


def loaded(root: Path, size: int) -> list[Any]:
    """The tree on every rank, put together from the blocks of all to compare."""

    def load(ranks: ThreadRank) -> dict[Any, Any]:
        found = CheckpointStore(root, world=ranks).newest(wanted=wanted_by(ranks)).checkpoint
        assert found is not None
        return dict(found.tree)

    trees: list[Any] = together(size, load)
    for tree in trees:
        assert isinstance(tree, dict), tree
        for name in SHARDED:
            piece = tree[name]
            # What one process alone wants is the whole, which comes as a tensor.
            assert isinstance(piece, Tensor) if size == 1 else piece.shape == SHAPES[name]
    joined = {
        name: torch.cat([tree[name] if size == 1 else tree[name].local for tree in trees], axis)
        for name, axis in SHARDED.items()
    }
    return [{**tree, **joined, "tied": joined["rows"]} for tree in trees]


def test_four_two_one_four(tmp_path: Path) -> None:
    tree = whole_state()
    for writers, readers in ((4, 2), (2, 1), (1, 4), (4, 4), (3, 2)):
        root = tmp_path / f"{writers}-{readers}"
        paths = saved(root, writers, tree)
        assert paths == [root / "checkpoint-00000001"] * writers
        for found in loaded(root, readers):
            assert same(found, whole(tree))
        alone = CheckpointStore(root).newest().checkpoint
        assert alone is not None
        assert same(alone.tree, whole(tree))


def test_each_element_is_written_once_and_the_work_is_dealt(tmp_path: Path) -> None:
    tree = {**whole_state(), "many": [torch.full((50,), float(n)) for n in range(40)]}
    saved(tmp_path, 4, tree)
    folder = tmp_path / "checkpoint-00000001"
    manifest = json.loads((folder / "manifest.json").read_bytes())
    files = {path.name: load_file(path) for path in folder.glob("*.safetensors")}
    assert {path.suffix for path in folder.iterdir()} == {".safetensors", ".json"}
    assert set(files) | {"tree.json"} == set(manifest["files"])
    assert manifest["ranks"] == 4
    volume = sum(tensor.numel() for content in files.values() for tensor in content.values())
    tensors = [*tree.values(), *tree["many"], *tree["same"].values(), tree[3][0]]
    assert volume == sum(one.numel() for one in tensors if isinstance(one, Tensor))
    shares = [
        sum(one.nbytes for name, content in files.items() if f"-{rank:05d}-" in name for one in content.values())
        for rank in range(4)
    ]
    assert max(shares) - min(shares) <= 40 * 3 * 4, shares
    for number, entry in enumerate(manifest["tensors"]):
        if entry["path"] != ["rows"]:
            continue
        for part in entry["parts"]:
            start, length = part["offset"][0], part["shape"][0]
            assert files[part["file"]][str(number)].equal(tree["rows"][start : start + length])
            assert part["file"].startswith("parts-")


def test_copies_of_a_block_are_dealt_to_their_holders(tmp_path: Path) -> None:
    """Two groups of two ranks hold the same blocks: sharded inside a group, replicated across."""
    weights = [torch.full((4, 2), float(number)) for number in range(4)]

    def save(ranks: ThreadRank) -> Path:
        first = ranks.rank % 2 == 0
        pieces = [Piece(one[:2] if first else one[2:], (4, 2), (0 if first else 2, 0)) for one in weights]
        return CheckpointStore(tmp_path, world=ranks).save({"weights": pieces})

    together(4, save)
    path = tmp_path / "checkpoint-00000001"
    assert sorted(len(load_file(file)) for file in path.glob("*.safetensors")) == [2, 2, 2, 2]
    assert same(CheckpointStore(tmp_path).load(path), {"weights": weights})


def flipped(path: Path) -> str:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    return f"{path.name}: checksum mismatch"


def cut_short(path: Path) -> str:
    path.write_bytes(path.read_bytes()[:-1])
    return f"{path.name}: checksum mismatch"


def removed(path: Path) -> str:
    path.unlink()
    return f"{path.name} is missing"


@pytest.mark.parametrize("harm", [flipped, cut_short, removed])
@pytest.mark.parametrize("kind", ["parts-00002", "tensors"])
def test_a_damaged_shard_is_refused_by_name_on_every_rank(
    tmp_path: Path, kind: str, harm: Callable[[Path], str]
) -> None:
    root = tmp_path / "run" / "checkpoints"
    for number in (1, 2):
        saved(root, 4, whole_state(number))
    reason = harm(sorted((root / "checkpoint-00000002").glob(f"{kind}-*"))[-1])

    def use(ranks: ThreadRank, skip: bool) -> Any:
        return CheckpointStore(root, world=ranks).usable(skip_damaged=skip, wanted=wanted_by(ranks))

    for found in (*together(4, lambda ranks: use(ranks, False)), *together(1, lambda ranks: use(ranks, False))):
        assert isinstance(found, UserError)
        assert f"{tmp_path / 'run'}: no usable checkpoint (checkpoint-00000002: {reason})" in str(found)
        assert "an older one with --skip-damaged" in str(found)
        assert "\n" not in str(found)
    for taken in together(4, lambda ranks: use(ranks, True)):
        assert isinstance(taken, tuple), taken
        assert taken[0].path.name == "checkpoint-00000001"
        assert taken[1] == [f"checkpoint-00000002 cannot be used ({reason}); skipped"]
    shutil.rmtree(root / "checkpoint-00000001")
    (last,) = together(1, lambda ranks: use(ranks, True))
    assert "start again with tfive train" in str(last)


def full_disk(point: str) -> None:
    if point == "mid-write":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("silent", [False, True], ids=["reported", "unreported"])
def test_a_rank_that_cannot_write_fails_all_and_leaves_the_older_one(
    tmp_path: Path, at: int, silent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, 4, whole_state(1))
    with monkeypatch.context() as patch:
        if silent:
            # Not even a report finds room: the others hear of it from the rank itself, long before patience ends.
            patch.setattr(Attempt, "_report", lambda self, content: full_disk("mid-write"))

        def save(ranks: ThreadRank) -> Path:
            faults = full_disk if ranks.rank == at else None
            store = CheckpointStore(tmp_path, world=ranks, faults=faults, patience=20.0)
            return store.save(held(whole_state(2), ranks))

        found = together(4, save)
    assert all(isinstance(error, RunFailed) for error in found), found
    (said,) = {str(error) for error in found}
    assert "No space left on device; free space and resume" in said
    assert at == 0 or silent or "rank 2: " in said
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-00000001"]
    saved(tmp_path, 4, whole_state(3))
    assert same(loaded(tmp_path, 2)[1], whole(whole_state(3)))


def test_a_rank_without_memory_for_a_copy_fails_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = checkpoint._host_copy

    def scarce(tensor: Tensor) -> Tensor:
        if tensor.shape == (3, 3) and tensor[0, 0] == whole_state()["rows"][3, 0]:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 36 bytes")
        return copied(tensor)

    monkeypatch.setattr(checkpoint, "_host_copy", scarce)
    said = {str(error) for error in saved(tmp_path, 4, whole_state())}
    assert said == {
        f"no checkpoint could be written in {tmp_path}: rank 1: not enough host memory for a copy of the state; free "
        "some and resume"
    }
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_vanishes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Attempt, "_report", lambda self, content: None)
    found = saved(tmp_path, 2, whole_state(), patience=0.1)
    assert {str(error) for error in found} == {
        f"no checkpoint could be written in {tmp_path}: rank 1 did not write its part; see whether it runs and sees "
        "the same folder, and resume"
    }
    assert list(tmp_path.iterdir()) == []


def _another_shape(tree: dict[Any, Any]) -> None:
    tree["same"] = {"weight": torch.zeros(3), "count": torch.tensor(1)}


def _less(tree: dict[Any, Any]) -> None:
    del tree["same"]


def _the_same_block(tree: dict[Any, Any]) -> None:
    tree["rows"] = tree["tied"] = Piece(torch.zeros(3, 3), (11, 3), (1, 0))


def _cannot_be_stored(tree: dict[Any, Any]) -> None:
    tree["same"] = object()


@pytest.mark.parametrize(
    ("change", "said"),
    [(_another_shape, "rank 1 has tensors of other shapes"), (_less, "rank 1: ValueError: state.same.weight is not"),
     (_the_same_block, "state.rows of shape"), (_cannot_be_stored, "rank 1: TypeError: state.same: a object")],
)  # fmt: skip
def test_ranks_that_hold_different_states_are_refused(
    tmp_path: Path, change: Callable[[dict[Any, Any]], None], said: str
) -> None:
    def save(ranks: ThreadRank) -> Path:
        tree = held(whole_state(), ranks)
        if ranks.rank == 1:
            change(tree)
        return CheckpointStore(tmp_path, world=ranks).save(tree)

    for error in together(3, save):
        assert said in str(error) or isinstance(error, TypeError)
    assert not CheckpointStore(tmp_path).paths()


def test_writing_goes_on_beside_training(tmp_path: Path) -> None:
    """What is saved is the state when it was asked for; the next save waits; nothing is lost at the end."""
    weight, let, asked = torch.zeros(1000), threading.Event(), threading.Event()

    def held_up(point: str) -> None:
        if point == "before-rename":
            asked.set()
            assert let.wait(20)

    store = CheckpointStore(tmp_path, faults=held_up)
    store.begin({"weight": weight})
    assert asked.wait(20)
    weight += 1
    assert not store.paths()
    second = threading.Thread(target=lambda: store.begin({"weight": weight}))
    second.start()
    second.join(0.05)
    assert second.is_alive()
    let.set()
    second.join(20)
    weight += 1
    assert store.wait() == tmp_path / "checkpoint-00000002"
    assert [store.load(path)["weight"][0].item() for path in store.paths()] == [0, 1]
    assert store.wait() is None


def test_a_write_that_fails_in_the_background_is_told_once(tmp_path: Path) -> None:
    def crash(point: str) -> None:
        if point == "before-rename":
            raise ZeroDivisionError("a mistake\nof ours")

    store = CheckpointStore(tmp_path, faults=crash)
    for tell in (store.wait, lambda: store.begin({}), store.settle):
        store.begin({"weight": torch.zeros(3)})
        while not store.failed:
            pass
        if tell == store.settle:
            assert "ZeroDivisionError: a mistake of ours" in str(tell())
            continue
        with pytest.raises(RunFailed, match=r"^no checkpoint could be written in .*: ZeroDivisionError: a mistake of"):
            tell()
        assert not store.failed
        assert store.wait() is None
    assert not store.paths()


def test_a_manifest_that_asks_for_more_than_its_files_hold_is_damaged(tmp_path: Path) -> None:
    from tfive.training.manifest import signed

    store = CheckpointStore(tmp_path)
    path = store.save({"weight": torch.zeros(4, 2)})
    fields = json.loads((path / "manifest.json").read_bytes())
    (entry,) = fields["tensors"]
    (part,) = entry["parts"]
    for shape, parts in (
        ([10**9, 10**9], [part]),
        ([4, 2], [part, part]),
        ([4, 2], []),
        ([4, 2], [{**part, "offset": [1, 0]}]),
        ([4, 2], [{**part, "offset": [-1, 0]}]),
        ([4, 2], [{**part, "shape": [8]}]),
        ([2, 4], [{**part, "shape": [2, 4]}]),
        ([4, 2], [{**part, "file": "../../elsewhere"}]),
    ):
        fields["tensors"] = [{**entry, "shape": shape, "parts": parts}]
        (path / "manifest.json").write_bytes(signed(fields))
        found = store.newest()
        assert found.checkpoint is None
        assert len(found.damaged) == 1


def test_files_are_cut_and_put_together_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "FILE_BYTES", 64)
    saved(tmp_path, 3, whole_state())
    assert (tmp_path / "checkpoint-00000001" / "parts-00001-00001.safetensors").is_file()
    assert same(loaded(tmp_path, 2)[0], whole(whole_state()))


@pytest.mark.parametrize("length", [float("inf"), 3.5, "3", None, True])
@pytest.mark.parametrize("place", ["shape", "offset", "length"])
def test_a_length_that_is_no_whole_number_is_malformed(place: str, length: Any) -> None:
    part = {"file": "tensors", "offset": [0], "shape": [3]}
    entry = {"path": ["rows"], "dtype": "F32", "shape": [3], "parts": [part]}
    assert placement.StoredTensor.of(entry).shape == (3,)
    if place == "shape":
        entry["shape"] = [length]
    else:
        part["offset" if place == "offset" else "shape"] = [length]
    with pytest.raises(ValueError, match="where a whole number belongs"):
        placement.StoredTensor.of(entry)

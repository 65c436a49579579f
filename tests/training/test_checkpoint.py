"""A checkpoint comes back bit for bit or is refused; a crash at any moment loses at most the one being written."""

import errno
import math
import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import tfive.training.checkpoint as checkpoint
import tfive.training.placement as placement
from tfive.errors import RunFailed
from tfive.training.checkpoint import POINTS, CheckpointStore, DamagedCheckpointError
from tfive.training.state_tree import decode, encode

DTYPES = [
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool,
]  # fmt: skip


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same(a: Any, b: Any) -> bool:
    """Equality of trees to the bit: types, NaN payloads and signed zeros included."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and [type(k) for k in a] == [type(k) for k in b] and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b))
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    return a == b


def newest_tree(store: CheckpointStore) -> Any:
    found = store.newest().checkpoint
    assert found is not None
    return found.tree


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape: list[int] = draw(st.lists(st.integers(0, 3), max_size=3))
    count = math.prod(shape)
    width = torch.empty(0, dtype=dtype).element_size()
    raw = draw(st.binary(min_size=count * width, max_size=count * width))
    if not count:
        return torch.empty(shape, dtype=dtype)
    if dtype == torch.bool:
        raw = bytes(byte & 1 for byte in raw)
    tensor = torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape)
    return tensor.transpose(0, -1) if bool(shape) and draw(st.booleans()) else tensor


arrays = st.builds(
    lambda values, dtype: np.array(values).astype(dtype),
    st.one_of(st.integers(0, 100), st.lists(st.integers(0, 100), max_size=4)),
    st.sampled_from(["float64", "float32", "int64", "int8", "uint32", "bool", ">f4"]),
)
leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(st.characters(codec=None), max_size=5),
    tensors(), arrays,
)  # fmt: skip
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=5), st.integers()), inner, max_size=3),
    ),
    max_leaves=8,
)


def native(tree: Any) -> Any:
    """Arrays come back in the machine's byte order."""
    if isinstance(tree, np.ndarray):
        return tree.astype(tree.dtype.newbyteorder("="))
    if isinstance(tree, dict):
        return {key: native(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(native(part) for part in tree)
    return tree


@settings(max_examples=150, deadline=None)
@given(trees)
def test_any_tree_survives_the_encoding(tree: Any) -> None:
    found = encode(tree)
    assert same(decode(found.document, [piece.local for piece in found.pieces]), native(tree))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tree=trees)
def test_any_tree_survives_the_disk(tree: Any, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    path = store.save(tree)
    found = store.newest()
    assert found.damaged == ()
    assert found.checkpoint is not None
    assert found.checkpoint.path == path
    assert same(found.checkpoint.tree, native(tree))


def state(number: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(number)
    return {
        "window": number,
        "actor": {
            "weight": torch.randn(6, 5, generator=generator),
            "half": torch.randn(7, generator=generator).bfloat16(),
        },
        "ledger": {3: "pilot", 8: "actor"},
        "scale": [0.1 * number, None, float("inf")],
        "order": np.arange(number + 3),
        "note": "windows – ∞",
    }


@pytest.mark.parametrize(
    "bad", [{1.5: 0}, {"a": {True: 0}}, [object()], {"m": nn.Linear(1, 1)}, {"s": {1, 2}}, np.array(["text"]), b"bytes",
            torch.zeros(2, dtype=torch.complex64), torch.zeros(2).to_sparse(), np.int64(3)],
)  # fmt: skip
def test_what_cannot_be_stored_is_refused_by_path(bad: Any, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save({"good": 1})
    with pytest.raises(TypeError, match=r"^state\.part"):
        store.save({"part": bad})
    assert len(store.paths()) == 1


def test_tied_tensors_are_stored_once_and_views_apart(tmp_path: Path) -> None:
    weight = torch.randn(100, 10)
    found = encode({"embed": weight, "head": weight, "slice": weight[:10], "turned": weight.T})
    assert found.paths == [("embed",), ("slice",), ("turned",)]
    store = CheckpointStore(tmp_path)
    store.save({"embed": weight, "head": nn.Parameter(weight), "slice": weight[:10], "turned": weight.T})
    tree = newest_tree(store)
    assert all(tree[name].equal(weight) for name in ("embed", "head"))
    assert tree["slice"].equal(weight[:10])
    assert tree["turned"].equal(weight.T)
    assert not tree["head"].requires_grad


def test_large_states_are_cut_into_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "FILE_BYTES", 100)
    store = CheckpointStore(tmp_path)
    path = store.save({"parts": [torch.full((10,), float(n)) for n in range(9)]})
    assert len(list(path.glob("*.safetensors"))) == 3
    assert [part[0].item() for part in store.load(path)["parts"]] == list(range(9))


def test_newest_is_used_and_a_bounded_number_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    assert store.newest() == checkpoint.Found(None)
    for number in range(5):
        store.save(state(number))
    assert [path.name for path in store.paths()] == ["checkpoint-00000004", "checkpoint-00000005"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [path.name for path in store.paths()]
    assert newest_tree(store)["window"] == 4
    with pytest.raises(ValueError, match="at least one"):
        CheckpointStore(tmp_path, keep=0)


def _truncate(path: Path, where: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(where * len(content))])


def _flip(path: Path, where: float) -> None:
    content = bytearray(path.read_bytes())
    place = min(int(where * len(content)), len(content) - 1)
    content[place] ^= 1 << (place % 8)
    path.write_bytes(bytes(content))


def _delete(path: Path, where: float) -> None:
    path.unlink()


def _empty(path: Path, where: float) -> None:
    path.write_bytes(b"")


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("run")
    store = CheckpointStore(root)
    store.save(state(1))
    store.save(state(2))
    return root


NAMES = ["manifest.json", "tree.json", "tensors-00000-00000.safetensors"]


@pytest.mark.parametrize("damage", [_truncate, _flip, _delete, _empty], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(where=st.floats(0, 1, exclude_max=True))
def test_any_damage_to_any_file_is_noticed(
    two_checkpoints: Path, name: str, damage: Callable[[Path, float], None], where: float
) -> None:
    store = CheckpointStore(two_checkpoints)
    newest = store.paths()[-1]
    assert sorted(path.name for path in newest.iterdir()) == sorted(NAMES)
    kept = (newest / name).read_bytes()
    try:
        damage(newest / name, where)
        with pytest.raises(DamagedCheckpointError):
            store.load(newest)
        assert store.newest().checkpoint is None
        found = store.newest(skip_damaged=True)
        assert [path for path, _ in found.damaged] == [newest]
        assert found.checkpoint is not None
        assert same(found.checkpoint.tree, state(1))
    finally:
        (newest / name).write_bytes(kept)
    assert same(newest_tree(store), state(2))


def test_a_flipped_bit_in_any_byte_of_the_manifest_is_noticed(two_checkpoints: Path) -> None:
    store = CheckpointStore(two_checkpoints)
    manifest = store.paths()[-1] / "manifest.json"
    kept = manifest.read_bytes()
    try:
        for place in range(len(kept)):
            changed = bytearray(kept)
            changed[place] ^= 1 << (place % 8)
            manifest.write_bytes(bytes(changed))
            with pytest.raises(DamagedCheckpointError):
                store.load(manifest.parent)
    finally:
        manifest.write_bytes(kept)


def test_a_newer_save_outranks_a_damaged_one(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    for number in (1, 2):
        store.save(state(number))
    _flip(store.paths()[-1] / "tree.json", 0.5)
    skipping = store.newest(skip_damaged=True).checkpoint
    assert skipping is not None
    assert skipping.tree["window"] == 1
    store.save(state(7))
    found = store.newest()
    assert found.damaged == ()
    assert found.checkpoint is not None
    assert found.checkpoint.tree["window"] == 7
    for path in store.paths():
        shutil.rmtree(path)
        path.mkdir()
    found = store.newest(skip_damaged=True)
    assert found.checkpoint is None
    assert len(found.damaged) == 3
    assert all("manifest.json" in reason for _, reason in found.damaged)


def test_a_renamed_or_foreign_folder_is_not_taken(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    path = store.save(state(1))
    (tmp_path / "notes").mkdir()
    os.rename(path, tmp_path / "checkpoint-00000009")
    found = store.newest()
    assert found.checkpoint is None
    assert [reason for _, reason in found.damaged] == ["manifest.json is not as it was written"]


def test_full_disk_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    CheckpointStore(tmp_path).save(state(1))

    def full(point: str) -> None:
        if point == "mid-write":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(RunFailed, match="No space left") as error:
        CheckpointStore(tmp_path, faults=full).save(state(2))
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-00000001"]
    assert same(newest_tree(CheckpointStore(tmp_path)), state(1))


def killed_while_saving(root: Path, tree: Any, point: str, occurrence: int) -> bool:
    """A child process saves and kills itself (SIGKILL) at the n-th call of the fault point; True if it died there."""
    child = os.fork()
    if child == 0:
        left = [occurrence]

        def crash(reached: str) -> None:
            if reached == point:
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left[0] -= 1

        try:
            CheckpointStore(root, keep=2, faults=crash).save(tree)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_kill_nine_anywhere_leaves_the_old_or_the_new_state(tmp_path: Path) -> None:
    """A chain of kills in one folder: after each, exactly the last completed save is found and nothing is reported."""
    kills: Counter[str] = Counter()
    store = CheckpointStore(tmp_path, keep=2)
    store.save(state(0))
    store.save(state(1))
    expected, number = 1, 1
    for _ in range(3):
        for point, occurrences in {point: 3 if point == "mid-write" else 1 for point in POINTS}.items():
            for occurrence in range(occurrences):
                number += 1
                assert killed_while_saving(tmp_path, state(number), point, occurrence), (point, occurrence)
                kills[point] += 1
                if point in ("after-rename", "mid-prune"):
                    expected = number
                found = store.newest()
                assert found.damaged == ()
                assert found.checkpoint is not None
                assert same(found.checkpoint.tree, state(expected)), (point, occurrence)
    assert kills == {point: 9 if point == "mid-write" else 3 for point in POINTS}
    store.save(state(99))
    assert len(list(tmp_path.iterdir())) == 2

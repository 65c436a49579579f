"""Checkpoints whose checksums hold and whose content says anything are damaged; errors of this code are shown."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tfive.distributed.pieces import Box
from tfive.training import checkpoint
from tfive.training.checkpoint import CheckpointStore
from tfive.training.manifest import DamagedCheckpointError, signed


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return CheckpointStore(tmp_path).save({"began": {"rate": 0.5}, "weight": torch.zeros(4, 2)})


def forged(path: Path, *, manifest: Callable[[dict[str, Any]], Any] | None = None, **files: bytes) -> None:
    """Other content with checksums that hold."""
    fields = json.loads((path / "manifest.json").read_bytes())
    for name, content in files.items():
        file = next(one for one in path.iterdir() if one.name.startswith(name))
        file.write_bytes(content)
        fields["files"][file.name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    if manifest is not None:
        manifest(fields)
    (path / "manifest.json").write_bytes(signed(fields))


def damage(path: Path) -> str:
    """What is said of the newest checkpoint; reading one entry of it must not fail either."""
    store = CheckpointStore(path.parent)
    ((found, why),) = store.newest().damaged
    assert found == path
    assert "\n" not in why
    store.entry("began")
    return why


@pytest.mark.parametrize(
    "document",
    [
        None, 3, "text", [], {}, {"dict": 3}, {"dict": {"a": 1}}, {"dict": [["a"]]}, {"dict": [3]},
        {"dict": [["a", 1, 2]]}, {"dict": [[["a"], 1]]}, {"dict": [[None, 1]]}, {"dict": [["began", {"dict": None}]]},
        {"dict": [], "tuple": []}, {"dict": [["a", {"tuple": 7}]]}, {"dict": [["a", {"float": "text"}]]},
        {"dict": [["a", {"float": []}]]}, {"dict": [["a", {"tensor": 9}]]}, {"dict": [["a", {"tensor": -1}]]},
        {"dict": [["a", {"tensor": "0"}]]}, {"dict": [["a", {"tensor": True}]]}, {"dict": [["a", {"array": {}}]]},
        {"dict": [["a", {"other": 1}]]},
    ],
)  # fmt: skip
def test_a_tree_of_another_shape_is_damaged(path: Path, document: Any) -> None:
    plain = not isinstance(document, dict) and not isinstance(document, list)
    forged(path, tree=json.dumps(document).encode())
    if plain or document == []:  # a tree of its own, of which nobody asks for an entry
        assert CheckpointStore(path.parent).load(path) == document
        assert CheckpointStore(path.parent).entry("began") is None
    else:
        assert damage(path)


def test_an_array_that_numpy_has_not_is_damaged(tmp_path: Path) -> None:
    path = CheckpointStore(tmp_path).save({"weight": torch.zeros(4).bfloat16()})
    forged(path, tree=b'{"dict": [["weight", {"array": 0}]]}')
    assert "a 'array' of 0 is nothing that is stored" in damage(path)


@pytest.mark.parametrize("place", ["path", "dtype", "shape", "parts"])
@pytest.mark.parametrize("value", [None, 3, "text", [None], [[]], {"a": 1}, [{"file": 3, "offset": [0], "shape": [4]}]])
def test_an_entry_of_another_shape_is_damaged(path: Path, place: str, value: Any) -> None:
    forged(path, manifest=lambda fields: fields["tensors"][0].update({place: value}))
    assert damage(path).startswith("unreadable: ")


@pytest.mark.parametrize("place", ["ranks", "files", "tensors"])
@pytest.mark.parametrize("value", [None, "text", 0.5, [3]])
def test_a_manifest_of_another_shape_is_damaged(path: Path, place: str, value: Any) -> None:
    forged(path, manifest=lambda fields: fields.update({place: value}))
    assert damage(path)
    for content in (b"[]", b"3", b"{}", b'{"format": []}', b"\xff"):
        (path / "manifest.json").write_bytes(content)
        assert "manifest.json" in damage(path) or content == b"\xff"


def test_files_that_hold_other_tensors_or_none_are_damaged(path: Path) -> None:
    for tensors in ({}, {"1": torch.zeros(4, 2)}, {"0": torch.zeros(2, 4)}, {"0": torch.zeros(4, 2).long()}):
        forged(path, tensors=safetensors.torch.save(tensors))
        assert "holds another part of state.weight" in damage(path)
    header = b'{"0":{"dtype":"F4","shape":[4,2],"data_offsets":[0,4]}}'
    for content in (b"", b"text", len(header).to_bytes(8, "little") + header + bytes(4)):
        forged(path, tensors=content)
        assert "no file of tensors" in damage(path)


@pytest.mark.parametrize("shape", [[0, 1 << 70], [0, 1 << 40, 1 << 40], [1 << 40, 0, 1 << 24]])
def test_a_length_beyond_all_memory_beside_none_is_damaged(path: Path, shape: list[int]) -> None:
    forged(path, manifest=lambda fields: fields["tensors"][0].update(shape=shape, parts=[]))
    assert "state.weight has shape" in damage(path)


def _asked_for(box: Box, where: tuple[str | int, ...], shape: tuple[int, ...]) -> Box:
    return box


def test_a_tensor_without_the_part_that_is_wanted_is_damaged(path: Path) -> None:
    store = CheckpointStore(path.parent)
    for box in (Box((0,), (4,)), Box((2, 0), (4, 2))):
        with pytest.raises(DamagedCheckpointError, match=r"state.weight of shape \(4, 2\) has no part at"):
            store.load(path, partial(_asked_for, box))


@pytest.mark.parametrize("error", [AttributeError, TypeError, KeyError, IndexError, RuntimeError])
def test_an_error_of_this_code_is_not_told_as_damage(
    path: Path, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def decode(*given: Any) -> Any:
        raise error("a mistake")

    monkeypatch.setattr(checkpoint, "decode", decode)
    store = CheckpointStore(path.parent)
    for read in (lambda: store.load(path), store.newest, store.usable, lambda: store.entry("began")):
        with pytest.raises(error, match="a mistake"):
            read()

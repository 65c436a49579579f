"""Checkpoints that are whole or absent: any tree of state, checksummed, written beside the old ones and then renamed.

A checkpoint is a folder `checkpoint-00000017` with safetensors shards, the tree as JSON and a manifest that holds the
sha256 of every other file. It is written under another name, synced to disk, and renamed; so a crash at any moment
leaves either the previous checkpoints or those and a complete new one. Loading verifies every byte before use.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from tfive.errors import RunFailed
from tfive.training.state_tree import decode, encode

FORMAT = 3
"""Of the files and of the state in them; raised whenever either is laid out differently. No older one is read."""

SHARD_BYTES = 1 << 29
POINTS = ("before-write", "mid-write", "before-rename", "after-rename", "mid-prune")
"""Where `save` calls its fault hook; `mid-write` comes once for every file, half of it written."""

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_MALFORMED = (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError)
"""What reading JSON of another shape raises."""

_NAME = re.compile(r"checkpoint-(\d{8,})")
_WRITING, _PRUNED = ".writing-", ".pruned-"
_MANIFEST, _TREE = "manifest.json", "tree.json"


class DamagedCheckpointError(Exception):
    """A checkpoint that is not byte for byte what this version writes; says what is wrong with it."""


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint and the state it holds (tensors on the CPU)."""

    path: Path
    tree: Any


@dataclass(frozen=True)
class Found:
    """The newest valid checkpoint, if there is one, and the newer ones that had to be skipped, with the reason."""

    checkpoint: Checkpoint | None
    damaged: tuple[tuple[Path, str], ...] = ()


class CheckpointStore:
    """The checkpoints of one run. One process writes; the newest `keep` are kept."""

    def __init__(
        self, root: str | os.PathLike[str], *, keep: int = 2, faults: Callable[[str], None] | None = None
    ) -> None:
        """`faults` is called with each of `POINTS` during a save, for tests that crash there."""
        if keep < 1:
            raise ValueError(f"at least one checkpoint must be kept, not {keep}")
        self.root, self.keep = Path(root), keep
        self._fault = faults or (lambda point: None)

    def paths(self) -> list[Path]:
        """Folders of complete checkpoints, oldest first (not verified)."""
        if not self.root.is_dir():
            return []
        return sorted((path for path in self.root.iterdir() if _NAME.fullmatch(path.name)), key=_serial)

    def save(self, tree: Any) -> Path:
        """Store `tree` as the newest checkpoint; returns its folder. A failure leaves the older ones as they were."""
        document, tensors = encode(tree)
        self._fault("before-write")
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self._clear_leftovers()
            paths = self.paths()
            serial = _serial(paths[-1]) + 1 if paths else 1
            unfinished, final = self.root / f"{_WRITING}{serial:08d}", self.root / f"checkpoint-{serial:08d}"
            unfinished.mkdir()
            self._write_all(unfinished, serial, document, tensors)
            self._fault("before-rename")
            os.rename(unfinished, final)
            _sync(self.root)
            self._fault("after-rename")
            self._prune()
        except OSError as error:
            self._clear_leftovers()
            reason = error.strerror or str(error)
            remedy = "free space" if error.errno in FULL else "see that it can be written to"
            raise RunFailed(f"no checkpoint could be written in {self.root}: {reason}; {remedy} and resume") from error
        return final

    def load(self, path: Path) -> Any:
        """The verified tree of one checkpoint; `DamagedCheckpointError` when any byte of it is not as written."""
        try:
            return self._verified(path)
        except DamagedCheckpointError:
            raise
        except (OSError, MemoryError, SafetensorError, *_MALFORMED) as error:
            raise DamagedCheckpointError(f"unreadable: {' '.join(str(error).split())[:200]}") from error

    def entry(self, key: str) -> Any:
        """One entry without tensors of the newest tree whose checksum holds, None where there is none: a small read."""
        for path in reversed(self.paths()):
            try:
                document = self._document(path, _read_manifest(path))
                return next(decode(value, []) for name, value in document["dict"] if name == key)
            except (DamagedCheckpointError, StopIteration, OSError, *_MALFORMED):
                continue
        return None

    def newest(self) -> Found:
        """The newest checkpoint that verifies; damaged newer ones are named, never used."""
        damaged: list[tuple[Path, str]] = []
        for path in reversed(self.paths()):
            try:
                return Found(Checkpoint(path, self.load(path)), tuple(damaged))
            except DamagedCheckpointError as error:
                damaged.append((path, str(error)))
        return Found(None, tuple(damaged))

    def _write_all(self, folder: Path, serial: int, document: Any, tensors: list[Tensor]) -> None:
        files = {}
        for number, shard in enumerate(_shards(tensors)):
            name = f"tensors-{number:05d}.safetensors"
            files[name] = self._write(folder / name, safetensors.torch.save(shard))
        files[_TREE] = self._write(folder / _TREE, json.dumps(document, separators=(",", ":")).encode())
        self._write(folder / _MANIFEST, _manifest(serial, files))
        _sync(folder)

    def _write(self, path: Path, content: bytes) -> dict[str, Any]:
        with path.open("xb") as file:
            file.write(content[: len(content) // 2])
            file.flush()
            self._fault("mid-write")
            file.write(content[len(content) // 2 :])
            file.flush()
            os.fsync(file.fileno())
        return _fingerprint(content)

    def _prune(self) -> None:
        for path in self.paths()[: -self.keep]:
            doomed = self.root / f"{_PRUNED}{path.name}"
            os.rename(path, doomed)
            self._fault("mid-prune")
            shutil.rmtree(doomed)

    def _clear_leftovers(self) -> None:
        """Remove what a crash left half-written or half-removed; such folders were never checkpoints."""
        for path in self.root.glob(".*") if self.root.is_dir() else ():
            if path.name.startswith((_WRITING, _PRUNED)):
                shutil.rmtree(path, ignore_errors=True)

    def _verified(self, path: Path) -> Any:
        manifest = _read_manifest(path)
        tensors: dict[str, Tensor] = {}
        for name in manifest["files"]:
            if name != _TREE:
                tensors |= safetensors.torch.load(_content(path, name, manifest))
        return decode(self._document(path, manifest), [tensors[str(number)] for number in range(len(tensors))])

    @staticmethod
    def _document(path: Path, manifest: dict[str, Any]) -> Any:
        return json.loads(_content(path, _TREE, manifest))


def _read_manifest(path: Path) -> dict[str, Any]:
    written = (path / _MANIFEST).read_bytes()
    manifest: dict[str, Any] = json.loads(written)
    if manifest["format"] != FORMAT:
        own = f"format {manifest['format']}, this one reads {FORMAT}"
        raise DamagedCheckpointError(f"{_MANIFEST}: written by another version of tfive ({own})")
    if written != _manifest(_serial(path), manifest["files"]):
        raise DamagedCheckpointError(f"{_MANIFEST} is not as it was written")
    if any(Path(name).name != name for name in manifest["files"]):
        raise DamagedCheckpointError(f"{_MANIFEST} names a file outside of the checkpoint")
    return manifest


def _content(path: Path, name: str, manifest: dict[str, Any]) -> bytes:
    """A file of a checkpoint, byte for byte as it was written."""
    content = (path / name).read_bytes()
    if _fingerprint(content) != manifest["files"][name]:
        raise DamagedCheckpointError(f"{name}: checksum mismatch")
    return content


def _serial(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise DamagedCheckpointError(f"{path.name} is not the name of a checkpoint")
    return int(match[1])


def _manifest(serial: int, files: dict[str, Any]) -> bytes:
    return json.dumps({"format": FORMAT, "serial": serial, "files": files}, sort_keys=True, indent=1).encode()


def _fingerprint(content: bytes) -> dict[str, Any]:
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _shards(tensors: list[Tensor]) -> Iterator[dict[str, Tensor]]:
    """Fresh host copies in pieces of about `SHARD_BYTES`, so that a save needs little more memory than one piece."""
    shard: dict[str, Tensor] = {}
    held = 0
    for number, tensor in enumerate(tensors):
        shard[str(number)] = tensor.to("cpu", copy=True).contiguous()
        held += tensor.numel() * tensor.element_size()
        if held >= SHARD_BYTES:
            yield shard
            shard, held = {}, 0
    if shard:
        yield shard


def _sync(folder: Path) -> None:
    """Make the folder's entries themselves durable (a rename is not before its folder is synced)."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

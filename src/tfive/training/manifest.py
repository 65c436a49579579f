"""The manifest of a checkpoint: its files with their sha256, and where every part of every tensor stands.

It also holds the sha256 of itself, so that a changed byte anywhere in a checkpoint is noticed before anything is used.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfive.training.placement import StoredTensor
from tfive.training.tensor_files import Fingerprint, fingerprint

FORMAT = 4
"""Of the files and of the state in them; raised whenever either is laid out differently. No older one is read."""

MANIFEST, TREE = "manifest.json", "tree.json"
_NAME = re.compile(r"checkpoint-(\d{8,})")


class DamagedCheckpointError(Exception):
    """A checkpoint that is not byte for byte what this version writes; says what is wrong with it."""


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint is made of."""

    serial: int
    ranks: int
    """How many processes wrote it."""
    files: Mapping[str, Fingerprint]
    tensors: tuple[StoredTensor, ...]
    """By number."""

    def written(self) -> bytes:
        """The manifest as a file."""
        return signed(
            {
                "format": FORMAT,
                "serial": self.serial,
                "ranks": self.ranks,
                "files": dict(self.files),
                "tensors": [one.entry() for one in self.tensors],
            }
        )


def signed(fields: Mapping[str, Any]) -> bytes:
    """The fields of a manifest as a file, with the sha256 of all others in `sha256`."""
    others = {name: value for name, value in fields.items() if name != "sha256"}
    digest = hashlib.sha256(_canonical(others)).hexdigest()
    return _canonical({**others, "sha256": digest})


def _canonical(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint in folder `path`; `DamagedCheckpointError` unless it is as it was written."""
    content = (path / MANIFEST).read_bytes()
    fields = json.loads(content)
    if not isinstance(fields, dict) or "format" not in fields:
        raise DamagedCheckpointError(f"{MANIFEST} is not as it was written")
    if fields["format"] != FORMAT:
        own = f"format {fields['format']}, this one reads {FORMAT}"
        raise DamagedCheckpointError(f"{MANIFEST}: written by another version of tfive ({own})")
    if content != signed(fields) or fields.get("serial") != serial_of(path):
        raise DamagedCheckpointError(f"{MANIFEST} is not as it was written")
    kinds = {"ranks": int, "files": dict, "tensors": list}
    wrong = [name for name, kind in kinds.items() if type(fields.get(name)) is not kind]
    if wrong or TREE not in fields["files"]:
        raise DamagedCheckpointError(f"{MANIFEST} lacks {wrong[0] if wrong else TREE}")
    if any(Path(name).name != name for name in fields["files"]):
        raise DamagedCheckpointError(f"{MANIFEST} names a file outside of the checkpoint")
    tensors = tuple(map(StoredTensor.of, fields["tensors"]))
    missing = {file for one in tensors for file, _ in one.parts} - fields["files"].keys()
    if missing:
        raise DamagedCheckpointError(f"{MANIFEST} lacks {min(missing)}")
    return Manifest(serial_of(path), fields["ranks"], fields["files"], tensors)


def checked(path: Path, name: str, manifest: Manifest) -> bytes:
    """A file of the checkpoint in folder `path`, byte for byte as it was written."""
    try:
        content = (path / name).read_bytes()
    except FileNotFoundError as error:
        raise DamagedCheckpointError(f"{name} is missing") from error
    if fingerprint(content) != manifest.files[name]:
        raise DamagedCheckpointError(f"{name}: checksum mismatch")
    return content


def is_checkpoint(path: Path) -> bool:
    """Whether a folder has the name of a complete checkpoint."""
    return _NAME.fullmatch(path.name) is not None


def serial_of(path: Path) -> int:
    """The number in a checkpoint's name."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise DamagedCheckpointError(f"{path.name} is not the name of a checkpoint")
    return int(match[1])

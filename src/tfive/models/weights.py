"""Which files a model is made of, byte for byte: a run goes on only with those it began with."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from transformers.utils.hub import cached_file

from tfive.errors import UserError
from tfive.models.folder import CONFIG, folder_of, weight_files

IN_MEMORY = "in memory"
"""Stands for the files of a model that the caller made."""


def model_digests(source: str, revision: str | None = None) -> dict[str, str]:
    """Name → sha256 of every file that decides what the model computes: its configuration, weights and own code.

    Files are read whole: neither sizes nor times nor samples of the content are trusted. About 1 GB a second.
    """
    if source.endswith((".gguf", ".whl")):
        path = Path(source).expanduser()
        return {path.name: _sha256(path)}
    folder = folder_of(source) or _snapshot(source, revision)
    code = sorted(path.name for path in folder.glob("*.py"))
    return {name: _sha256(folder / name) for name in (CONFIG, *weight_files(folder), *code)}


def own_digests(model: Any) -> dict[str, str]:
    """The same for a model that the caller gave, of which no file is known: a digest of its weights."""
    return {IN_MEMORY: weights_fingerprint(model)}


def changed_model(then: dict[str, str], now: dict[str, str]) -> str | None:
    """The first file in which two models differ, None if they are the same."""
    return next((name for name in sorted({*then, *now}) if then.get(name) != now.get(name)), None)


def weights_fingerprint(model: Any) -> str:
    """Digest of every value of every weight, the same in every precision that holds them exactly."""
    sha = hashlib.sha256()
    for name, weight in model.named_parameters():
        sha.update(name.encode())
        for part in weight.detach().flatten().split(1 << 24):
            sha.update(part.float().cpu().numpy().tobytes())
    return sha.hexdigest()[:20]


def _snapshot(source: str, revision: str | None) -> Path:
    """The folder of a hub model in the local cache, where loading it has put its files."""
    try:
        found = cached_file(source, CONFIG, revision=revision, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UserError(f"model.name = {source!r}: its files are not in the local cache; load it again") from error
    if found is None:
        raise UserError(f"model.name = {source!r}: its files are not in the local cache; load it again")
    return Path(found).parent


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); fetch the model again") from error

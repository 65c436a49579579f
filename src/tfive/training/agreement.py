"""What all processes of a run must share before anything is written: configuration, code, libraries, model and text."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import tfive
from tfive.config.config import Config
from tfive.distributed.meeting import Meeting
from tfive.errors import UserError
from tfive.models.weights import weights_fingerprint
from tfive.text.sources import SourceFile

LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors", "numpy")
"""Whose versions decide numbers or the format of files."""


def code_digest(folder: Path | None = None) -> str:
    """A hash of every source file of the package, by name and content."""
    folder = Path(tfive.__file__).parent if folder is None else folder
    sha = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        content = path.read_bytes()
        sha.update(f"{path.relative_to(folder).as_posix()} {len(content)}\n".encode())
        sha.update(content)
    return sha.hexdigest()[:12]


def of_configuration(config: Config) -> dict[str, str]:
    """A configuration's keys, and the code and libraries that read them; where each rank computes is its own affair."""
    return {key: json.dumps(value, default=str) for key, value in config.leaves().items()} | of_code()


def of_code() -> dict[str, str]:
    """The code of tfive, and the versions of what it stands on."""
    code = {"tfive": f"{tfive.__version__} (code {code_digest()})", "python": platform.python_version()}
    return code | {name: version(name) for name in LIBRARIES}


def of_data(model: Mapping[str, str], corpus: str) -> dict[str, str]:
    """The digests of the model's files and of the prepared corpus."""
    return {f"model file {name}": digest for name, digest in model.items()} | {"prepared corpus": corpus}


def require_same_evaluation(
    met: Meeting, asked: Mapping[str, Any], model: Any = None, texts: Iterable[SourceFile] = ()
) -> None:
    """Refuse an evaluation of which some process has other code, options, texts or weights: each answers a share, and
    answers of two models would be taken for those of one. One process compares nothing, and reads nothing for it."""
    if met.place.size == 1:
        return
    own = {name: json.dumps(value, default=str) for name, value in asked.items()} | of_code()
    with met.refusals("files"):
        own |= {f"text {file.name}": file.digest() for file in texts}
        own |= {} if model is None else {"weights": weights_fingerprint(model)}
    require_same(met, "the evaluation", own, "give all ranks the same options, files and versions")


def require_same(met: Meeting, name: str, own: Mapping[str, str], remedy: str) -> None:
    """Refuse to begin where some process has another value than the first; every process raises the same line."""
    every = [json.loads(text) for text in met.exchange(name, json.dumps(own))]
    for rank, theirs in enumerate(every):
        keys = (*every[0], *(key for key in theirs if key not in every[0]))
        for key in keys:
            if theirs.get(key) != every[0].get(key):
                raise UserError(
                    f"rank {rank}: {key} = {_shown(theirs.get(key))}, rank 0 has {_shown(every[0].get(key))}; {remedy}"
                )


def _shown(value: str | None) -> str:
    return "nothing" if value is None else value if len(value) <= 80 else f"{value[:80]}…"

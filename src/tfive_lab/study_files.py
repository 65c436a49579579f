"""What the studies share: the methods compared, JSON files, figures under a prefix, and where a result comes from."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from tfive import __version__
from tfive.report import figures

METHODS = ("t5", "rlp", "quiet-star-grpo", "quiet-star-ppo", "anchor-only", "ntp", "base")
"""Every method that the studies compare: T⁵, those of the paper's comparison, and the controls."""


def write_json(path: Path, found: dict[str, Any]) -> None:
    """Write results as the committed files are written, one value a line; folders that are missing are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", "utf-8")


def software_versions() -> dict[str, str]:
    """Versions of everything that could change a number."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tfive": __version__,
    }


def file_sha256(path: Path) -> str | None:
    """The digest of a model file; None for a folder or a hub id, which are named by other means."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def without_folders(words: Sequence[str]) -> list[str]:
    """The words of a command; absolute paths are reduced to their last part, which is all that others can use."""
    return [Path(word).name if Path(word).is_absolute() else word for word in words]


def draw_study_figures(found: dict[str, Any], folder: Path, prefix: str) -> list[tuple[str, str]]:
    """Draw a comparison's figures as `folder/PREFIX-NAME.png`; returns each one's link from the page and its caption.

    None without matplotlib. Several pages keep their figures in one folder, hence the prefix.
    """
    if not figures.available():
        return []
    drawn = []
    for name, caption in figures.draw_study(found, folder):
        (folder / name).replace(folder / f"{prefix}-{name}")
        drawn.append((f"figures/{prefix}-{name}", caption))
    return drawn

"""Made-up documents and small settings for the tests of the text room."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tfive.text.prepared import PreparedCorpus
from tfive.text.settings import TextSettings

SAMPLE = (
    "the river runs past old mills and quiet farms while seven boats carry grain salt and paper to a market town "
    "where people count apples add numbers and write letters about rain wind snow light 12 37 48 café naïve 日本 🙂"
)
WORDS = SAMPLE.split()

Prepare = Callable[..., PreparedCorpus]
"""Prepares a corpus of the given settings; keywords change the other arguments of `prepare`."""

ROLES = {
    "train": {"actor": 2.0, "critic_fit": 1.0, "pilot": 1.0},
    "calibration": {"qualify": 1.0},
    "development": {"develop": 1.0},
    "test": {"test": 1.0},
}


def document(number: int, words: int = 60) -> str:
    """A made-up document; different numbers give different texts."""
    chosen = np.random.default_rng(number).choice(WORDS, size=words)
    return f"Entry {number}. " + " ".join(chosen) + "."


def write_jsonl(path: Path, texts: Iterable[str], **more: Any) -> Path:
    """Rows with a text field, gzip'd when the name says so."""
    content = "".join(json.dumps({"text": text, **more}, ensure_ascii=False) + "\n" for text in texts).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)
    return path


def text_settings(sources: Sequence[dict[str, Any]], **changes: Any) -> TextSettings:
    """Small splits over these sources."""
    plain: dict[str, Any] = {
        "sources": list(sources),
        "sequence_length": 32,
        "sequences": {"train": 16, "calibration": 4, "development": 4, "test": 4},
        "positions": {"per_text": 3},
    }
    return TextSettings.model_validate({**plain, **changes})

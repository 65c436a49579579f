"""The explorer's files of a made-up run: every number is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

STEPS, HORIZON, PER_TEXT, TOKENS = 4, 3, 2, 12
WORDS = ["", " the", " mill", "</script><img src=x onerror=alert(1)>", "\u202egrain", " \N{SNOWMAN}", "salt"]


def table(words: list[str]) -> dict[str, Any]:
    encoded = [word.encode() for word in words]
    ends = np.cumsum([len(one) for one in encoded], dtype=np.int32)
    return {"pieces": np.frombuffer(b"".join(encoded), np.uint8), "piece_ends": ends}


def write(folder: Path, arrays: dict[str, Any], name: str, about: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    whole = {key: np.ascontiguousarray(value) for key, value in arrays.items()}
    (folder / f"{name}.safetensors").write_bytes(save(whole, metadata={"explorer": json.dumps(about)}))


def places(items: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    texts = items // PER_TEXT
    return {
        "tokens": rng.integers(0, len(WORDS), (texts, TOKENS)).astype(np.int32),
        "document": np.repeat([[0, 1]], TOKENS // 2, 1).reshape(1, -1).repeat(texts, 0).astype(np.int32),
        "sequence": np.arange(texts, dtype=np.int64) + 7,
        "item": np.arange(items, dtype=np.int64) + 100,
        "text": np.repeat(np.arange(texts), PER_TEXT).astype(np.int32),
        "position": np.tile([2, 6], texts).astype(np.int32),
        "kind": np.full(items, 3, np.int32),
        "source": (np.arange(items) % 2).astype(np.int32),
        **table(WORDS),
    }


def moment(items: int, seed: int, *, critics: bool) -> dict[str, Any]:
    rng = np.random.default_rng(seed)

    def numbers(*shape: int) -> Any:
        return rng.normal(0, 1, shape).astype(np.float16)

    found = {
        "tokens": rng.integers(0, 3, (items, STEPS)).astype(np.int32),
        "length": rng.integers(1, STEPS + 1, items).astype(np.int32),
        "closed": np.zeros(items, np.uint8),
        "horizon": np.full(items, HORIZON, np.int32),
        **{name: np.abs(numbers(items, HORIZON)) for name in ("without", "own", "other", "empty")},
        **{name: numbers(items) for name in ("thought_gain", "content_gain", "other_gain", "empty_gain")},
        "gain_vs_base": numbers(items),
        # Another table than the texts' one: pages have to bring them together.
        **table(["close", " mill", "</script>"]),
    }
    if critics:
        found |= {"values": numbers(2, items, STEPS), "advantages": numbers(2, items, STEPS)}
        found |= {name: numbers(items, STEPS) for name in ("returns", "mixed")}
        found |= {"weight": rng.random((items, STEPS)).astype(np.float16), "mixed_gain": numbers(items)}
        found["gate"] = rng.random((items, HORIZON)).astype(np.float16)
    return found


def keep(run: Path, items: int = 6, windows: tuple[int, ...] = (0, 1, 2)) -> Path:
    """Write what a run of two windows keeps of so many items."""
    about = {"horizon": HORIZON, "length": STEPS, "checkpoints": [STEPS], "thinks": True, "critics": 2, "windows": 2}
    about |= {"sources": ["web", "books"], "kinds": ["match", "entropy", "every", "uniform"], "half_way": 1}
    write(run / "explorer", places(items), "texts", about)
    for window in windows:
        found = moment(items, window, critics=window > 0)
        write(run / "explorer", found, f"window-{window:05d}", {"window": window})
    return run

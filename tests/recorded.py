"""Runs as their folders would look, made up: every number is known, nothing was trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

TEXTS, PER_TEXT = 20, 5
IDENTITY = {"base_weights": "w", "corpus": "c", "positions": "p", "precision": "float32", "evaluation.horizon": 5}


def items(level: float, seed: int, mixed: bool) -> dict[str, Any]:
    """Gains around `level`; what a text adds is the same in every run, so that pairs cancel it."""
    text = np.repeat(np.arange(TEXTS, dtype=np.int32), PER_TEXT)
    by_text = np.random.default_rng(1).normal(0, 0.5, TEXTS)[text]
    noise = np.random.default_rng(100 + seed).normal(0, 0.01, len(text))
    gain = (level + by_text + noise).astype(np.float32)
    zero = np.zeros_like(gain)
    names = ("content_gain", "gain_vs_base", "other_gain", "empty_gain", "random_gain", "no_thought_drift")
    found = {"thought_gain": gain, **dict.fromkeys(names, zero), "no_thought_loss": zero + 1.5}
    if mixed:
        found |= {f"mixed_gain{end}": gain / 2 for end in ("", "_constant", "_oracle", "_other")}
    return found | {"text": text, "item": np.arange(len(text), dtype=np.int32)}


def measurement(window: int, gain: float, seconds: float) -> dict[str, Any]:
    cost = {
        "seconds": {"fit": seconds, "fit/inner": 99.0},
        "thought_tokens": 100 * window,
        "corpus_tokens": 10 * window,
    }
    names = ("thought_gain", "content_gain", "gain_vs_base", "other_gain", "empty_gain", "random_gain")
    found = dict.fromkeys(names, gain) | {"no_thought_drift": 0.0, "useful_fraction": 0.5, "worst_1_percent": -1.0}
    return {"window": window, "cost": cost, **found, "no_thought_loss": 1.5, "mean_thought_length": 4.0}


def run(
    folder: Path, method: str, seed: int, level: float, *, seconds: float = 10.0, mixed: bool = True, **changes: Any
) -> Path:
    """A finished run of two windows, `seconds` each, with the last gains around `level`."""
    folder.mkdir(parents=True)
    for split in ("develop", "test"):
        (folder / split).mkdir()
        save_file(items(level, seed, mixed), folder / split / "window-00002.safetensors")
    laps = []
    for window in (1, 2):
        spent = {"open": 1.0 * window, "fit": (seconds - 1) * window, "fit/inner": 50.0}
        laps.append({"window": window, "seconds": spent, "trajectories": 50 * window, "actor_items": f"{seed}{window}"})
    account = {"roles": {"actor": dict.fromkeys(("trajectories", "generated_tokens", "actor_tokens"), 8)}}
    summary = {
        "method": method, "model": "made-up", "seed": seed, "windows": 2, "seconds": 2 * seconds, "actor_steps": 2,
        "generated_tokens": 200, "identity": dict(IDENTITY), "place": {"device": "cpu"}, "account": account,
        "rollouts": {"items": 8, "actor": 8, "auxiliary": 20, "group": 8, "threshold": 56}, "laps": laps,
        "history": [measurement(w, level * w / 2, seconds * w) for w in (0, 1, 2)],
        "test": {"before": measurement(0, 0.0, 0.0), "after": measurement(2, level, 2 * seconds)},
        "r2": None, "retention": None,
    }  # fmt: skip
    (folder / "summary.json").write_text(json.dumps(summary | changes), "utf-8")
    return folder

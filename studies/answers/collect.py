"""What runs and headroom files of the study say, as the plain data of results/answers-study.json."""

from __future__ import annotations

import hashlib
import json
import statistics
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tfive.methods.registry import spec_of
from tfive.training.summary import SUMMARY

FAILURE = "failure.txt"
"""Beside a run's files: why it failed, in one line."""

ACCURACY = "accuracy.json"
"""In a run's folder: how often its model answered rightly."""

MACHINE = "machine.json"
"""Beside the run folders: device, versions and code of the machine that ran them."""

SETTINGS = (
    "anchor.next_token",
    "anchor.answers",
    "anchor.conditioned",
    "optimizer.lr",
    "qualify.eta",
    "window.items",
    "window.actor_steps",
    "sampling.temperature",
    "thought.checkpoints",
    "thought.horizon",
    "run.seed",
)
"""What differs between cells, and what a reader needs to place them."""

MEASURED = (
    "thought_gain",
    "content_gain",
    "gain_vs_base",
    "other_gain",
    "empty_gain",
    "random_gain",
    "no_thought_loss",
    "no_thought_drift",
)
"""Measures with 95 % intervals over texts."""

TESTED = ("thought_gain", "content_gain", "gain_vs_base", "empty_gain", "random_gain", "no_thought_loss", "mixed_gain",
          "mixed_gain_constant")  # fmt: skip
"""Measures of the test texts, from a run's summary; some have an interval there."""

ALONE = ("useful_fraction", "mean_thought_length", "items", "texts")
WINDOW = ("policy_kl", "clip_fraction", "r2.1", "r2.2", "actor_gain", "mean_thought_length")
HEADROOM = ("l0", "own", "other", "empty", "true", "true_other", "mean16", "best16", "spread", "right", "length")
LEFT_OUT = ("1", "2", "all", "every")
"""Lines of working that a text leaves out; `every`: all items together."""


def cell_of(folder: Path) -> dict[str, Any]:
    """One run: its settings, every measurement on the development texts, every window, and how it ended."""
    text = (folder / "config.toml").read_text("utf-8")
    config = tomllib.loads(text)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
    group = config["thought"]["group"]
    group = spec_of(config["method"]).group if group == "none" else int(group)
    settings = {key: config[key.split(".")[0]][key.split(".")[1]] for key in SETTINGS}
    per_window = settings["window.items"] * group
    events = [line["event"] for line in lines if "event" in line]
    summary, accuracy = folder / SUMMARY, folder / ACCURACY
    found: dict[str, Any] = {}
    if summary.is_file():
        found["test"] = _tested(json.loads(summary.read_text("utf-8")))
    if accuracy.is_file():
        found["accuracy"] = json.loads(accuracy.read_text("utf-8"))
    return found | {
        "method": config["method"],
        "status": _status(folder, lines),
        "settings": settings | {"group": group},
        "config_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "actor_thoughts_per_window": per_window,
        "qualification": {name: events.count(f"qualification: {name}") for name in ("passed", "failed")},
        "measured": [_measurement(line, settings, per_window) for line in lines if _is_measurement(line)],
        "windows": [
            {"window": line["step"]} | {key: _short(line[key]) for key in WINDOW if line.get(key) is not None}
            for line in lines
            if "policy_kl" in line
        ],
    }


def _tested(summary: dict[str, Any]) -> dict[str, Any]:
    """What a finished run measured on its test texts: a number, with its interval where the summary has one."""
    found: dict[str, Any] = {}
    for name in TESTED:
        value = summary.get(f"test_{name}_end", summary.get(f"test_{name}"))
        if value is not None:
            found[name] = [_short(one) for one in (value, *summary.get(f"test_{name}_interval", ()))]
    return found | {"mean_thought_length": _short(summary["test_mean_thought_length"])}


def _is_measurement(line: dict[str, Any]) -> bool:
    """A window's own line repeats what was measured after it; only the measurement itself counts."""
    return "development.thought_gain" in line and "policy_kl" not in line


def _measurement(line: dict[str, Any], settings: dict[str, Any], per_window: int) -> dict[str, Any]:
    """One measurement: each measure with its interval, and how much training came before it."""
    windows = line["step"]
    found: dict[str, Any] = {"window": windows, "steps": windows * settings["window.actor_steps"]}
    found |= {"actor_thoughts": windows * per_window, "seconds": round(line["seconds"])}
    for name in MEASURED:
        ends = [f"development.{name}_interval.{end}" for end in (1, 2)]
        found[name] = [_short(line[key]) for key in (f"development.{name}", *ends)]
    return found | {name: _short(line[f"development.{name}"]) for name in ALONE}


def _status(folder: Path, lines: Sequence[dict[str, Any]]) -> str:
    """How a run ended: the reason it gave, else the last window it completed."""
    if (folder / FAILURE).is_file():
        return f"failed: {(folder / FAILURE).read_text('utf-8').strip()}"
    return f"{max(line['step'] for line in lines)} windows"


def _short(value: float) -> float:
    """Four places: more than any of these numbers is known to."""
    return round(float(value), 4)


def headroom_rows(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over items by lines left out, and content gain (own minus another's) with its standard error."""
    rows = []
    for missing in LEFT_OUT:
        some = [item for item in items if missing in ("every", item["missing"])]
        if len(some) < 2:
            continue
        content = [item["own"] - item["other"] for item in some]
        row: dict[str, Any] = {"missing": missing, "items": len(some)}
        row |= {name: _short(statistics.fmean(item[name] for item in some)) for name in HEADROOM}
        row["content"] = _short(statistics.fmean(content))
        row["content_error"] = _short(statistics.stdev(content) / len(content) ** 0.5)
        rows.append(row)
    return rows


def collect(runs: Path) -> dict[str, Any]:
    """All that lies under `runs`: `machine.json`, `headroom-NAME.json`, `accuracy-NAME.json` and `benchmark-NAME.json`
    files, and a `cell-NAME.json` or a folder for each run."""
    machine = runs / MACHINE
    accuracy, benchmark = (
        {
            path.stem.removeprefix(f"{kind}-"): json.loads(path.read_text("utf-8"))
            for path in sorted(runs.glob(f"{kind}-*.json"))
        }
        for kind in ("accuracy", "benchmark")
    )
    headroom = {
        path.stem.removeprefix("headroom-"): headroom_rows(json.loads(path.read_text("utf-8")))
        for path in sorted(runs.glob("headroom-*.json"))
    }
    kept = [json.loads(path.read_text("utf-8")) for path in sorted(runs.rglob("cell-*.json"))]
    known = {one["name"] for one in kept}
    folders = sorted(path.parent for path in runs.rglob("metrics.jsonl") if path.parent.name not in known)
    cells = [{"name": str(folder.relative_to(runs)), **cell_of(folder)} for folder in folders]
    return {
        "machine": json.loads(machine.read_text("utf-8")) if machine.is_file() else {},
        "headroom": headroom,
        "accuracy": accuracy,
        "benchmark": benchmark,
        "cells": sorted([*cells, *kept], key=lambda one: str(one["name"])),
    }

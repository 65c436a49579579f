"""What runs and headroom files of the study say, as the plain data of results/answers-study.json."""

from __future__ import annotations

import hashlib
import json
import statistics
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from tfive.methods.registry import spec_of
from tfive.training.status_files import COSTS
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
    "anchor.lr",
    "optimizer.lr",
    "qualify.eta",
    "window.items",
    "window.actor_steps",
    "window.history",
    "window.crossed",
    "sampling.temperature",
    "thought.checkpoints",
    "thought.horizon",
    "critic.adapt",
    "critic.pair",
    "calibration.mode",
    "gae.alpha",
    "gae.unit",
    "grpo.normalisation",
    "run.seconds",
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

STARTED = ("thought_gain", "content_gain", "no_thought_loss")
"""Measures of the test texts before training."""

TESTED = ("thought_gain", "content_gain", "gain_vs_base", "empty_gain", "random_gain", "no_thought_loss", "mixed_gain",
          "mixed_gain_constant")  # fmt: skip
"""Measures of the test texts, from a run's summary; some have an interval there."""

BY_TEXT = ("thought_gain", "content_gain", "gain_vs_base", "no_thought_loss")
"""Measures of the test texts that are kept text by text, so that models can be paired."""
CREDITED = "actor_updates."
"""Before the names of where a window's advantages came from, with the updates that used them."""

ALONE = ("useful_fraction", "mean_thought_length", "items", "texts")
WINDOW = (
    "policy_kl",
    "clip_fraction",
    "r2.1",
    "r2.2",
    "r2_of_others",
    "twin_correlation",
    "retention",
    "accepted",
    "weight_deviation",
    "cross_fit_average",
    "cross_fit_change",
    "cross_fit_change_error",
    "actor_gain",
    "anchor_loss",
    "mean_thought_length",
)
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
        told = json.loads(summary.read_text("utf-8"))
        found["test"] = _tested(told)
        found["test_start"] = {name: _short(told[f"test_{name}_start"]) for name in STARTED}
        found["by_text"] = by_text(folder / "test" / f"window-{told['windows']:05d}.safetensors")
        found["by_text"]["digest"] = told["identity"]["test_items"]
    spent = _spent(folder / COSTS)
    if accuracy.is_file():
        found["accuracy"] = json.loads(accuracy.read_text("utf-8"))
    return found | {
        "method": config["method"],
        "start": Path(config["model"]["name"]).name,
        "status": _status(folder, lines),
        "settings": settings | {"group": group},
        "config_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "actor_thoughts_per_window": per_window,
        "qualification": {name: events.count(f"qualification: {name}") for name in ("passed", "failed")},
        "measured": [
            _measurement(line, settings, per_window) | spent.get(line["step"], {})
            for line in lines
            if _is_measurement(line)
        ],
        "windows": [_window(line) for line in lines if "policy_kl" in line],
    }


def _window(line: dict[str, Any]) -> dict[str, Any]:
    """What a window says of itself, and where its advantages came from where critics can fail."""
    found: dict[str, Any] = {"window": line["step"]}
    found |= {key: _short(line[key]) for key in WINDOW if line.get(key) is not None}
    credit = [key.removeprefix(CREDITED) for key, count in line.items() if key.startswith(CREDITED) and count]
    return found | ({"credit": credit[0]} if credit else {})


def _spent(path: Path) -> dict[int, dict[str, Any]]:
    """By window what training had taken by its end: seconds without measuring, thoughts and tokens of every role."""
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.is_file() else []
    return {
        one["window"]: {
            "training_seconds": round(sum(taken for phase, taken in one["seconds"].items() if "/" not in phase), 1),
            "thoughts": one["trajectories"],
            "generated_tokens": one["thought_tokens"],
        }
        for one in lines
    }


def by_text(path: Path) -> dict[str, str]:
    """Items of every text of a measurement and the sums of their gains in ten-thousandths, as numbers in a string."""
    kept = load_file(path)
    _, texts, counts = np.unique(kept["text"], return_inverse=True, return_counts=True)
    sums = {name: np.bincount(texts, kept[name].astype(np.float64)) for name in BY_TEXT if name in kept}
    found = {name: " ".join(str(round(1e4 * float(one))) for one in sums[name]) for name in sums}
    return {"items": " ".join(str(one) for one in counts), **found}


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
    accuracy = {
        path.stem.removeprefix("accuracy-"): json.loads(path.read_text("utf-8"))
        for path in sorted(runs.glob("accuracy-*.json"))
    }
    headroom = {
        path.stem.removeprefix("headroom-"): headroom_rows(json.loads(path.read_text("utf-8")))
        for path in sorted(runs.glob("headroom-*.json"))
    }
    kept = [json.loads(path.read_text("utf-8")) for path in sorted(runs.rglob("cell-*.json"))]
    known = {one["name"] for one in kept}
    folders = sorted(path.parent for path in runs.rglob("metrics.jsonl") if path.parent.name not in known)
    cells = [{"name": str(folder.relative_to(runs)), **cell_of(folder)} for folder in folders]
    models = [*accuracy.values(), *(one["accuracy"] for one in (*cells, *kept) if "accuracy" in one)]
    return {
        "clusters": shared_clusters(models),
        "machine": json.loads(machine.read_text("utf-8")) if machine.is_file() else {},
        "headroom": headroom,
        "accuracy": accuracy,
        "benchmarks": benchmarks(runs),
        "cells": sorted([*cells, *kept], key=lambda one: str(one["name"])),
    }


def benchmarks(runs: Path) -> dict[str, dict[str, Any]]:
    """What `benchmark-NAME.json` files hold, by benchmark and model; a file may hold one benchmark, whose name may end
    its own (`benchmark-warm-csqa.json`), or several."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(runs.glob("benchmark-*.json")):
        told = json.loads(path.read_text("utf-8"))
        common = {key: told[key] for key in ("model", "versions") if key in told}
        for name, one in told.get("benchmarks", {told.get("problems"): told}).items():
            model = path.stem.removeprefix("benchmark-").removesuffix(f"-{name}")
            found.setdefault(name, {})[model] = common | one
    return found


def merged(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Earlier results and those of `now` beside them: cells and models of the same name and code take their place."""
    names = {(one["name"], one.get("code")) for one in now["cells"]}
    cells = [one for one in before.get("cells", ()) if (one["name"], one.get("code")) not in names]
    found = {**before, "cells": sorted([*cells, *now["cells"]], key=lambda one: str(one["name"]))}
    for kind in ("headroom", "accuracy", "clusters"):
        found[kind] = {**before.get(kind, {}), **now[kind]}
    known = before.get("benchmarks", {})
    every = {
        name: {**known.get(name, {}), **now["benchmarks"].get(name, {})} for name in {**known, **now["benchmarks"]}
    }
    found |= {"benchmarks": every} if every else {}
    return {**found, "machine": before.get("machine") or now["machine"]}


def shared_clusters(models: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Whose answer each verdict is, by the problems that were asked; taken out of the models, which all agree on it.

    Models that were asked other questions keep theirs.
    """
    found: dict[str, str] = {}
    for model in models:
        known = model.get("clusters")
        if known is not None and found.setdefault(model["problems"], known) == known:
            del model["clusters"]
    return found

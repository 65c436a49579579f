"""The report of `tfive bench step`: ratios, a digest of the settings, a training run that used them, tables."""

from __future__ import annotations

import hashlib
import json
import statistics
from pathlib import Path
from typing import Any

from tfive.config.config import Config
from tfive.errors import UserError

GOAL = 0.589
"""The paper's ratio of mean step times at 2B, T⁵ over RLP (tab:qwen35-mean-step-time: 31.79 / 54.01)."""
LASTING_RUN = 100
"""Windows over which start-up is spread in the projected all-in figure (the paper names a release of 100 steps)."""


def protocol_hash(config: Config) -> str:
    """A digest of everything that says how a method is trained; model, text, engine and run settings do not count."""
    apart = ("model.", "text.", "engine.", "run.", "benchmarks.", "sampling.parity", "window.windows")
    kept = {key: value for key, value in config.leaves().items() if not key.startswith(apart)}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


def witness_of(folder: str | None, config: Config) -> dict[str, Any]:
    """What a training run on a real model with these settings reached: critics' R² and retention."""
    if folder is None:
        return {"run": None, "note": "no run of these settings on a real model was named"}
    path = Path(folder)
    if not (path / "summary.json").is_file():
        raise UserError(f"--witness {folder}: no finished run is here; name a folder that tfive train wrote")
    theirs = Config.load(path / "config.toml")
    summary = json.loads((path / "summary.json").read_text("utf-8"))
    apart = [key for key, value in config.leaves().items() if theirs.leaves().get(key) != value]
    counted = ("model.", "text.", "engine.", "run.", "window.windows")
    return {
        "run": path.name,
        "model": summary["model"],
        "same_hash": protocol_hash(theirs) == protocol_hash(config),
        "differs_in": [key for key in apart if not key.startswith(counted)],
        "r2": summary.get("r2"),
        "retention": summary.get("retention"),
    }


def ratios(methods: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Step time of every row of T⁵ over RLP's: steady state, all windows run, and start-up spread over 100 windows."""
    other = methods.get("rlp")
    if other is None or other["steady_step_s"] is None:
        return {}
    mine = {name: row for name, row in methods.items() if name == "t5" or name.startswith("t5, ")}
    return {name: _ratios_of(row, other) for name, row in mine.items() if row["steady_step_s"] is not None}


def _ratios_of(mine: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:

    def projected(one: dict[str, Any]) -> float:
        steady = statistics.median(one["window_s"][1:])
        return float((one["startup_s"] + (LASTING_RUN - 1) * steady) / LASTING_RUN)

    counted = [sum(one["counted_nodes_per_item"].values()) for one in (mine, other)]
    return {
        "counted_nodes": counted[0] / counted[1],
        "steady": mine["steady_step_s"] / other["steady_step_s"],
        "all_in_windows_run": mine["all_in_step_s"] / other["all_in_step_s"],
        f"all_in_{LASTING_RUN}_windows": projected(mine) / projected(other),
    }


def render(report: dict[str, Any]) -> str:
    """The report as tables for people."""
    lines = [f"{report['model']} · {report['compute']} · {report['device']}"]
    for entry in report["works"]:
        work = entry["work"]
        lines += [
            "",
            f"N {work['items']} actor items a step, {work['steps']} steps a window ({work['passes']} passes), "
            f"T {work['length']}, {work['positions']} positions in {work['tokens']} tokens",
            f"{'method':<22}{'steady s':>10}{'all-in s':>10}{'aux/item':>10}{'forced':>8}  phases of a window",
        ]
        for name, row in entry["methods"].items():
            phases = " ".join(f"{phase} {value:.2f}" for phase, value in row["phases_s"].items() if "/" not in phase)
            steady = "–" if row["steady_step_s"] is None else f"{row['steady_step_s']:.3f}"
            lines.append(
                f"{name:<22}{steady:>10}{row['all_in_step_s']:>10.3f}{row['auxiliary_per_item']:>10.2f}"
                f"{row['forced_tests']:>8}  {phases}"
            )
        if entry.get("skipped"):
            lines.append(f"not begun, the time was spent: {', '.join(entry['skipped'])}")
        for row, found in entry.get("ratios", {}).items():
            shown = ", ".join(f"{name} {value:.1%}" for name, value in found.items())
            lines.append(f"{row} / rlp: {shown} (goal {report['goal']:.1%} in the steady state)")
        for name, row in entry["methods"].items():
            gaps = ", ".join(f"{law} {one['mean']:.2g} ({one['largest']:.2g})" for law, one in row["law_gaps"].items())
            lines += [f"{name}: |log π − log π_old| before the first update, mean (largest): {gaps}"] if gaps else []
        lines += [f"{name}: {_described(row['critics'])}" for name, row in entry["methods"].items() if row["critics"]]
    rules = {(one["name"], one["reason"]) for one in _rules(report)}
    lines += [f"recurrent layers by {name}: {reason}" for name, reason in sorted(rules)]
    note = report["witness"]
    lines += ["", f"settings on a real model: {note.get('run') or note['note']}"]
    return "\n".join(lines)


def _rules(report: dict[str, Any]) -> list[dict[str, str]]:
    """The rules of recurrent layers that methods ran by."""
    rows = [row for entry in report["works"] for row in entry["methods"].values()]
    return [row["delta_rule"] for row in rows if row.get("delta_rule")]


def _described(critics: dict[str, Any]) -> str:
    """Critics in words: how many, and what is adapted of each."""
    blocks = critics.get("blocks", "few")
    kinds = {"head": "their heads alone adapted", "full": "all of them adapted"}
    kinds |= {"probe": f"value heads below the last {blocks} blocks"}
    what = kinds.get(critics["adapt"], f"{blocks} blocks ({critics['adapt']}) adapted")
    above = ", on the policy's features" if critics.get("features") == "policy" else ""
    return f"{critics['count']} critics, {what}{above}"

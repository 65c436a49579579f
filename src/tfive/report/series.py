"""What the training part of a page draws: curves by chart, phases of windows, critics, weights, account."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from tfive.report.record import RunRecord
from tfive.report.table import AXES

POINTS = 400
"""Most points of a curve: longer runs are thinned, so that a page does not grow with a run."""

GAINS, KL, SHARE = "nats per token", "nats", "share"

DEVELOPED: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("gain", "Gains on development texts", GAINS, ("thought_gain", "content_gain", "gain_vs_base")),
    ("controls", "What does not think in the thought's place", GAINS,
     ("thought_gain", "other_gain", "empty_gain", "random_gain")),
    ("harm", "Loss without a thought, against the base model", GAINS, ("no_thought_drift",)),
    ("mixture", "The gated mixture, beside simpler and wiser gates", GAINS,
     ("mixed_gain", "mixed_gain_constant", "mixed_gain_oracle", "mixed_gain_other")),
    ("useful", "Positions where the thought helps", SHARE, ("useful_fraction",)),
    ("worst", "The worst hundredth of positions", GAINS, ("worst_1_percent",)),
    ("kinds", "Thought gain by kind of position", GAINS,
     ("thought_gain_match", "thought_gain_entropy", "thought_gain_every", "thought_gain_uniform")),
    ("length", "Length of thoughts", "tokens", ("mean_thought_length",)),
    ("gate", "The gate", SHARE, ("mean_gate", "gate_deviation", "gate_utility_correlation")),
)  # fmt: skip
"""Charts of development measurements: id, title, unit, numbers."""

TRAINED: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("critics", "How well the critics predict (R²)", "share of variance", ("r2", "r2_within")),
    ("critic_loss", "The critics' fitting loss", "", ("critic_loss",)),
    ("values", "Spread and disagreement of values", "returns", ("value_spread", "value_disagreement")),
    ("retention", "Calibration: what is left of the offset", "", ("retention",)),
    ("moment", "Calibration: moment and signal", "", ("moment", "head_moment", "signal")),
    ("twins", "Agreement of the two advantages", "", ("twin_correlation", "twin_disagreement")),
    ("weights", "The weight of the first critic", "", ("weight_mean", "weight_deviation")),
    ("offset", "The offset, measured by probes", "", ("offset", "offset_average", "offset_change")),
    ("cross_fit", "The offset, cross-fitted", "", ("cross_fit_mixture", "cross_fit_average", "cross_fit_change")),
    ("drift", "Parts of the update", "",
     ("drift_covariance_first", "drift_covariance_last", "drift_mean_induced_first", "drift_mean_induced_last")),
    ("kl", "How far the policy moves in a window", KL, ("policy_kl", "policy_kl_last", "mismatch_kl")),
    ("clip", "Clipped tokens", SHARE, ("clip_fraction", "clip_fraction_last")),
    ("losses", "Losses of the anchors", GAINS, ("anchor_loss", "conditioned_loss")),
    ("reading", "How far gates let thoughts be read", SHARE, ("reading_openness",)),
    ("reward", "Gain of the actor's thoughts and scale of the reward", GAINS,
     ("actor_gain", "reward_scale", "information_gain")),
    ("gradient", "Gradient norm", "", ("gradient_norm",)),
    ("rate", "Learning rate", "", ("lr",)),
)  # fmt: skip
"""Charts of what every window reports."""

OPEN = ("gain", "controls", "harm", "critics")
"""Charts that are shown at once."""


def rounded(value: Any) -> float | None:
    """A number to five significant digits, null where there is none."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(f"{value:.5g}")


def thinned(points: Sequence[int], most: int = POINTS) -> list[int]:
    """At most so many of the points, evenly, the first and the last among them."""
    if len(points) <= most:
        return list(points)
    step = (len(points) - 1) / (most - 1)
    return [points[round(number * step)] for number in range(most)]


def curves(record: RunRecord) -> dict[str, Any]:
    """The entries `axes`, `charts`, `x` and `series` of a page."""
    history = {one["window"]: one for one in record.history}
    measured, trained = thinned(sorted(history)), thinned([w for w in sorted(record.metrics) if w > 0])
    names = [name for name in dict.fromkeys(n for one in history.values() for n in one) if _plain(history, name)]
    developed = {name: _developed([history[w] for w in measured], name) for name in names}
    reported = _reported([record.metrics[w] for w in trained])
    charts = [
        *_charts("development", DEVELOPED, developed),
        *_charts("training", TRAINED, reported),
        *_further(reported),
    ]
    shown = {name for chart in charts if chart["x"] == "training" for name in chart["series"]}
    return {
        "charts": charts,
        "x": {
            "development": {axis: _axis(record, axis, measured) for axis in AXES},
            "training": {axis: _axis(record, axis, trained) for axis in AXES},
        },
        "series": {
            "development": developed,
            "training": {name: one for name, one in reported.items() if name in shown},
        },
    }


def _axis(record: RunRecord, axis: str, windows: Iterable[int]) -> list[float | None] | None:
    found = [rounded(record.at(window, axis)) for window in windows]
    return None if found and all(value is None for value in found) else found


def _plain(history: dict[int, dict[str, Any]], name: str) -> bool:
    if name in ("window", "items", "texts") or name.endswith("_interval"):
        return False
    return any(isinstance(one.get(name), int | float) for one in history.values())


def _developed(rows: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    ends = [row.get(f"{name}_interval") or (None, None) for row in rows]
    low, high = ([rounded(pair[side]) for pair in ends] for side in (0, 1))
    known = any(value is not None for value in low)
    return {
        "value": [rounded(row.get(name)) for row in rows],
        "low": low if known else None,
        "high": high if known else None,
    }


def _reported(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Every number that windows report, but those of development texts, the clock and single steps of a thought."""
    skipped = re.compile(r"development\.|r2_per_step\.|(step|seconds|window)$")
    names = dict.fromkeys(name for row in rows for name in row if not skipped.match(name))
    found: dict[str, dict[str, Any]] = {
        name: {"value": [rounded(row.get(name)) for row in rows], "low": None, "high": None} for name in names
    }
    return {name: one for name, one in found.items() if any(value is not None for value in one["value"])}


def _charts(
    x: str, wanted: Sequence[tuple[str, str, str, tuple[str, ...]]], series: dict[str, dict[str, Any]]
) -> list[dict[str, Any]]:
    charts = []
    for key, title, unit, names in wanted:
        present = [name for base in names for name in series if name == base or name.partition(".")[0] == base]
        if present:
            charts.append(_chart(key, title, unit, x, present))
    return charts


def _further(series: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """A chart for each number that no other chart shows, so that nothing a method reports is lost."""
    known = {name for _, _, _, names in TRAINED for name in names}
    rest: dict[str, list[str]] = {}
    for name in series:
        base = name.partition(".")[0]
        if base not in known and not base.endswith("_error"):
            rest.setdefault(base, []).append(name)
    return [_chart(f"further-{base}", base.replace("_", " "), "", "training", names) for base, names in rest.items()]


def _chart(key: str, title: str, unit: str, x: str, names: list[str]) -> dict[str, Any]:
    zero = unit in (GAINS, "share of variance")
    return {"id": key, "title": title, "unit": unit, "zero": zero, "open": key in OPEN, "x": x, "series": names}


def events(record: RunRecord, most: int = 1000) -> dict[str, list[Any]]:
    """Transitions, the last ones of a run that has very many."""
    found = record.events[-most:]
    return {
        "window": [one.get("step") for one in found],
        "seconds": [rounded(one.get("seconds")) for one in found],
        "event": [str(one["event"]) for one in found],
        "detail": [str(one.get("detail", "")) for one in found],
    }


def timeline(record: RunRecord) -> dict[str, Any] | None:
    """Seconds of each phase in each window; neighbours of a very long run are added up."""
    windows = [window for window in sorted(record.costs) if window > 0 and record.costs[window].get("seconds")]
    if not windows:
        return None
    whole = [{k: v for k, v in record.costs[w]["seconds"].items() if "/" not in k} for w in windows]
    phases = list(dict.fromkeys(phase for one in whole for phase in one))
    kept = thinned(range(len(windows)))
    rows, before = [], dict.fromkeys(phases, 0.0)
    for number in kept:
        rows.append([rounded(whole[number].get(phase, 0.0) - before[phase]) for phase in phases])
        before = {phase: whole[number].get(phase, 0.0) for phase in phases}
    total = [rounded(before[phase]) for phase in phases]
    return {"phases": phases, "windows": [windows[n] for n in kept], "seconds": rows, "total": total}


def account(record: RunRecord) -> dict[str, Any] | None:
    """Thoughts and tokens by role, seconds by phase."""
    found = record.account
    if not found.get("roles") and not found.get("seconds"):
        return None
    roles = found.get("roles", {})
    kinds = list(dict.fromkeys(kind for amounts in roles.values() for kind in amounts))
    seconds = {phase: sum(by_role.values()) for phase, by_role in found.get("seconds", {}).items()}
    return {
        "roles": list(roles),
        "kinds": kinds,
        "amounts": [[amounts.get(kind, 0) for kind in kinds] for amounts in roles.values()],
        "phases": list(seconds),
        "seconds": [rounded(value) for value in seconds.values()],
        "wall_seconds": rounded(found.get("wall_seconds", record.summary.get("seconds"))),
    }


def critics(record: RunRecord, calibration: list[dict[str, Any]]) -> dict[str, Any] | None:
    """R² of the critics window by window, pooled, within steps and at each step, with their calibration plots."""
    windows = thinned([w for w in sorted(record.metrics) if w > 0 and "r2.1" in record.metrics[w]])
    rows = [record.metrics[window] for window in windows]
    count = sum(any(f"r2.{n}" in row for row in rows) for n in (1, 2))
    if not count and not calibration:
        return None
    count = count or 1 + max(one["critic"] for one in calibration)
    numbers = range(1, count + 1)
    steps = sorted({int(k.split(".")[2]) for row in rows for k in row if re.fullmatch(r"r2_per_step\.\d+\.\d+", k)})
    within = any("r2_within.1" in row for row in rows)
    return {
        "names": [f"critic {n}" for n in numbers],
        "needed": record.setting("qualify.eta") if count > 1 else None,
        "windows": windows,
        "r2": [[rounded(row.get(f"r2.{n}")) for row in rows] for n in numbers],
        "r2_within": [[rounded(row.get(f"r2_within.{n}")) for row in rows] for n in numbers] if within else None,
        "per_step": {
            "steps": steps,
            "r2": [[[rounded(row.get(f"r2_per_step.{n}.{t}")) for t in steps] for row in rows] for n in numbers],
        }
        if steps
        else None,
        "calibration": calibration,
    }


def weights(record: RunRecord, histogram: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Mean and spread of the mixing weight window by window, and how it lies on the kept thoughts."""
    windows = thinned([w for w in sorted(record.metrics) if "weight_mean" in record.metrics[w]])
    if not windows and not histogram:
        return None
    rows = [record.metrics[window] for window in windows]
    return {
        "windows": windows,
        "mean": [rounded(row.get("weight_mean")) for row in rows],
        "deviation": [rounded(row.get("weight_deviation")) for row in rows],
        "histogram": histogram,
    }

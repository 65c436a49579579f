"""The table of a study, from the files of its runs: every method, run and control, and equal-cost comparisons."""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tfive.report.runs import Run, done, training_seconds
from tfive.report.statistics import SeedInterval, mean_interval, rolling_median, worst_interval

GAINS = (
    "thought_gain", "content_gain", "gain_vs_base", "other_gain", "empty_gain", "random_gain", "mixed_gain",
    "mixed_gain_constant", "mixed_gain_oracle", "mixed_gain_other", "no_thought_drift",
)  # fmt: skip
"""Numbers that every item has, in the order of the table."""
MEASURED = (*GAINS, "useful_fraction", "worst_1_percent")
PAIRED = ("thought_gain", "content_gain", "gain_vs_base", "mixed_gain", "useful_fraction", "no_thought_drift")
"""Numbers whose difference from the reference method is shown."""
AXES = ("windows", "seconds", "corpus_tokens", "thought_tokens")
KEPT = (*MEASURED, "no_thought_loss", "mean_thought_length", "mean_gate")
"""Numbers of each measurement that curves and the page of a run show."""

RULES = (
    "The checkpoint is the last one of every run; this was fixed before anything was measured, and no run, seed or "
    "checkpoint was selected by its result.",
    "Results are those of test texts, measured once when a run is over; curves and equal-cost cuts are those of "
    "development texts, measured on the way.",
    "Intervals (95 %) are a bootstrap over seeds and over test texts at once, widened as Student's law asks for "
    "so few seeds; differences are paired by seed and position.",
)
LIMITS = (
    "Few seeds show the rough size of the seed's influence, no more; the interval of one seed is over texts alone.",
    "Development texts are held out from every update, but not from the choice of settings: progress on them was "
    "watched while settings were chosen. Test texts chose nothing.",
    "Equal steps are not equal compute, and equal seconds hold on the machine that was used. Methods share the "
    "settings they have in common; none was tuned by itself for this table.",
    "Gains are nats per token of the continuation, on this model and this text. They say nothing of benchmarks, of "
    "other models, or of longer training.",
)

StudyTable = dict[str, Any]


def study_table(runs: Sequence[Run], reference: str | None = None, limits: Sequence[str] = LIMITS) -> StudyTable:
    """Everything a page, a CSV or a figure shows, as plain data that can be stored and rendered without the runs.

    `limits` say what the table does not show.
    """
    finished = done(runs)
    labels = list(dict.fromkeys(run.label for run in runs))
    groups = {label: [run for run in finished if run.label == label] for label in labels}
    versus = reference or next((label for label in labels if groups[label]), labels[0])
    timed = _timed(groups)
    return {
        "reference": versus,
        "rules": list(RULES),
        "limits": [*limits, *_clocks(finished)],
        "methods": [
            _method(label, groups[label], [r for r in runs if r.label == label], timed[label]) for label in labels
        ],
        "differences": [
            _difference(label, groups[label], groups[versus])
            for label in labels
            if label != versus and groups[label] and groups[versus]
        ],
        "cuts": {axis: _cut(axis, timed if axis == "seconds" else groups, versus) for axis in AXES},
        "runs": [_run(run) for run in runs],
        "place": finished[0].summary["place"] if finished else {},
        "identity": finished[0].summary["identity"] if finished else {},
    }


def _clocks(finished: Sequence[Run]) -> list[str]:
    """Notes on why seconds of these runs do not compare; none if they do."""
    found = []
    places = [run.summary["place"] for run in finished]
    keys = sorted({key for place in places for key in place if any(one.get(key) != place[key] for one in places)})
    if keys:
        found.append(
            f"Runs differ in where they computed ({', '.join(keys)}); step times and equal seconds are of those alone "
            "that computed where most did."
        )
    if any(run.disturbed for run in finished):
        found.append("Some runs shared their machine with others: equal seconds and step times say little.")
    return found


def _timed(groups: dict[str, list[Run]]) -> dict[str, list[Run]]:
    """The runs of each label on the hardware that most of the study used: only their seconds compare."""
    places = [json.dumps(run.summary["place"], sort_keys=True) for runs in groups.values() for run in runs]
    most = max(places, key=places.count, default="")
    return {
        label: [run for run in runs if json.dumps(run.summary["place"], sort_keys=True) == most]
        for label, runs in groups.items()
    }


def _value(runs: Sequence[Run], name: str) -> npt.NDArray[np.float64] | None:
    """`[seeds, items]` of one number, or None where a run has not measured it."""
    stored = "thought_gain" if name in ("useful_fraction", "worst_1_percent") else name
    if not runs or any(stored not in run.items for run in runs):
        return None
    value_SI = np.stack([run.items[stored].astype(np.float64) for run in runs])
    return (value_SI > 0).astype(np.float64) if name == "useful_fraction" else value_SI


def _estimate(runs: Sequence[Run], name: str) -> dict[str, Any] | None:
    measure: Callable[..., SeedInterval] = worst_interval if name == "worst_1_percent" else mean_interval
    value_SI = _value(runs, name)
    return None if value_SI is None else measure(value_SI, runs[0].items["text"]).rounded()


def _method(label: str, finished: Sequence[Run], asked: Sequence[Run], timed: Sequence[Run]) -> dict[str, Any]:
    row: dict[str, Any] = {
        "label": label,
        "seeds": [run.seed for run in finished],
        "failed": [run.seed for run in asked if run.state == "failed"],
        "open": [run.seed for run in asked if run.state not in ("done", "failed")],
    }
    if not finished:
        return row
    start = [run.test["before"]["thought_gain"] for run in finished]
    return row | {
        "thought_gain_start": round(statistics.fmean(start), 6),
        "measured": {name: found for name in MEASURED if (found := _estimate(finished, name)) is not None},
        "step_time": _step_time(timed or finished),
        "rollouts": _rollouts(finished),
        "roles": _roles(finished),
        "tokens": {
            axis: round(statistics.fmean(run.history[-1]["cost"][axis] for run in finished))
            for axis in ("thought_tokens", "corpus_tokens")
        },
    }


def _step_time(runs: Sequence[Run]) -> dict[str, Any]:
    """Mean seconds of an optimizer step with what belongs to it, spread over windows, and where they go."""
    every = [seconds for run in runs for seconds in run.step_seconds]
    steady = [seconds for run in runs for seconds in run.step_seconds[run.starting_windows :]] or every
    phases = sorted({name for run in runs for name in run.phase_seconds})
    return {
        "mean": _mean(every),
        "steady_mean": _mean(steady),
        "deviation": round(statistics.stdev(steady), 4) if len(steady) > 1 else None,
        "steps_per_window": runs[0].summary["actor_steps"],
        "phases_per_window": {
            name: round(statistics.fmean(run.phase_seconds.get(name, 0.0) for run in runs), 4) for name in phases
        },
        "disturbed": any(run.disturbed for run in runs),
    }


def _mean(values: Sequence[float]) -> float | None:
    return round(statistics.fmean(values), 4) if values else None


def _rollouts(runs: Sequence[Run]) -> dict[str, Any]:
    """Thoughts generated per actor item: the actor's own, all others (n_aux), and the threshold (G − 1).

    Below it means fewer thoughts in all than groups of G, whatever a method does with them: N_roll < N·G, which for one
    actor thought an item is n_aux < (G − 1)·N (eq:grpo-rollout-threshold).
    """
    total = {key: sum(run.summary["rollouts"][key] for run in runs) for key in ("items", "actor", "auxiliary")}
    items = max(total["items"], 1)
    group = runs[0].summary["rollouts"]["group"]
    return {
        "actor_per_item": round(total["actor"] / items, 4),
        "auxiliary_per_item": round(total["auxiliary"] / items, 4),
        "threshold_per_item": group - 1,
        "below_threshold": total["actor"] + total["auxiliary"] < group * total["items"],
    }


def _roles(runs: Sequence[Run]) -> dict[str, dict[str, int]]:
    """Thoughts and tokens of each role, as means over seeds."""
    names = sorted({role for run in runs for role in run.summary["account"]["roles"]})
    shown = ("trajectories", "generated_tokens", "actor_tokens", "scored_tokens", "head_updates")
    return {
        role: {
            kind: round(statistics.fmean(run.summary["account"]["roles"].get(role, {}).get(kind, 0) for run in runs))
            for kind in shown
        }
        for role in names
    }


def _difference(label: str, mine: Sequence[Run], other: Sequence[Run]) -> dict[str, Any]:
    """The reference minus this method, item by item, on the seeds both have."""
    shared = sorted({run.seed for run in mine} & {run.seed for run in other})
    pairs = [sorted((r for r in runs if r.seed in shared), key=lambda run: run.seed) for runs in (other, mine)]
    found: dict[str, Any] = {}
    for name in PAIRED if shared else ():
        first, second = (_value(runs, name) for runs in pairs)
        if first is not None and second is not None:
            found[name] = mean_interval(first - second, pairs[0][0].items["text"]).rounded()
    return {"label": label, "seeds": shared, "measured": found}


def spent(measurement: dict[str, Any], axis: str) -> float:
    """How much of a budget had been used at a measurement."""
    if axis == "windows":
        return float(measurement["window"])
    return training_seconds(measurement["cost"]) if axis == "seconds" else float(measurement["cost"][axis])


def _cut(axis: str, groups: dict[str, list[Run]], versus: str) -> list[dict[str, Any]]:
    """Each method beside the reference at the largest budget that all runs of both reached, nothing interpolated."""
    rows = []
    for label, runs in groups.items():
        if label == versus or not runs or not groups[versus]:
            continue
        budget = min(spent(run.history[-1], axis) for run in (*runs, *groups[versus]))
        mine, other = _within(runs, axis, budget), _within(groups[versus], axis, budget)
        rows.append({"label": label, "budget": round(budget, 3), "method": mine, "reference": other})
    return rows


def _within(runs: Sequence[Run], axis: str, budget: float) -> dict[str, float | None]:
    """Means over seeds of each run's last measurement within a budget, and how much of it had been used by then; None
    where one run has no measurement that early, because its warm start alone took more than all of another run."""
    within = [[m for m in run.history if spent(m, axis) <= budget] for run in runs]
    if not all(within):
        return {"used": None, **dict.fromkeys(MEASURED)}
    last = [found[-1] for found in within]
    shown = {name: _mean([m[name] for m in last if m.get(name) is not None]) for name in MEASURED}
    return {"used": _mean([spent(m, axis) for m in last]), **shown}


def _run(run: Run) -> dict[str, Any]:
    """One cell with its curves; failures are kept with their reason."""
    row: dict[str, Any] = {"label": run.label, "seed": run.seed, "state": run.state}
    if run.state != "done":
        return row | {"failure": run.failure}
    if run.summary.get("note"):
        row["note"] = run.summary["note"]
    return row | {
        "windows": run.summary["windows"],
        "seconds": run.summary["seconds"],
        "disturbed": run.disturbed,
        "warmup_seconds": round(run.warmup_seconds, 2),
        "r2": run.summary.get("r2"),
        "retention": run.summary.get("retention"),
        "step_seconds": [round(value, 4) for value in run.step_seconds],
        "step_seconds_median_15": [round(value, 4) for value in rolling_median(run.step_seconds)],
        "test": _rounded(run.test["after"]),
        "curve": [{axis: round(spent(m, axis), 2) for axis in AXES} | _rounded(m) for m in run.history],
    }


def _rounded(measurement: dict[str, Any]) -> dict[str, float]:
    return {name: round(measurement[name], 5) for name in KEPT if isinstance(measurement.get(name), int | float)}


def final(row: dict[str, Any]) -> dict[str, float]:
    """A run's result: that of test texts, or its curve's end in studies stored before there were any."""
    found: dict[str, float] = row.get("test") or row["curve"][-1]
    return found


def rows_csv(found: StudyTable) -> str:
    """One line per method: every measured number with the ends of its interval, step time and counts."""
    out = io.StringIO()
    names = [f"{name}{end}" for name in MEASURED for end in ("", "_low", "_high")]
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(
        ["method", "seeds", "failed", "checkpoint", *names, "step_s", "steady_step_s", "step_s_disturbed",
         "actor_per_item", "auxiliary_per_item", "thought_tokens", "corpus_tokens"]
    )  # fmt: skip
    for row in found["methods"]:
        line: list[Any] = [row["label"], len(row["seeds"]), len(row["failed"]), "last"]
        for name in MEASURED:
            estimate = row.get("measured", {}).get(name) or {}
            line += [estimate.get(key, "") for key in ("mean", "low", "high")]
        if "measured" in row:
            time, rollouts, tokens = row["step_time"], row["rollouts"], row["tokens"]
            line += [time["mean"], time["steady_mean"], time["disturbed"], rollouts["actor_per_item"]]
            line += [rollouts["auxiliary_per_item"], tokens["thought_tokens"], tokens["corpus_tokens"]]
        writer.writerow(line)
    return out.getvalue()

"""Everything the page shows, computed from the folders of the cells: the content of results/smollm2-study.json."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from clock import runs_of, timed_windows
from plan import CONTROL, OPENINGS, PRESET, RESULT, SCORED, STUDIES, WRITTEN, opening_label
from search import JUDGED_BY, chosen, trials

from tfive.cli.report import tabulated
from tfive.config.config import read_source
from tfive.errors import UserError
from tfive.report.runs import Run, done, read_json, training_seconds
from tfive.report.statistics import mean_interval
from tfive.report.table import LIMITS
from tfive.training.run_folder import CONFIG

DIAGNOSED = {
    "r2_1": "r2.1", "r2_2": "r2.2", "retention": "retention", "weight": "weight_mean", "spread": "weight_deviation",
    "twin_correlation": "twin_correlation", "offset": "offset", "offset_error": "offset_error",
    "offset_change": "offset_change", "offset_change_error": "offset_change_error",
    "drift": "drift_mean_induced_net_last", "covariance": "drift_covariance_last",
    "kl": "policy_kl", "clipped": "clip_fraction",
}  # fmt: skip
"""Column of the page → the run's metric, for what T⁵ logs of its critics, its weight and its drift."""
AGAINST_CONTROL = ("thought_gain", "content_gain", "gain_vs_base", "mixed_gain")
NEEDED = (*AGAINST_CONTROL, "mixed_gain_other", "random_gain")
"""What is compared with the control, and what a run must have measured to be in that table."""
OPENED = ("thought_gain", "content_gain", "other_gain", "empty_gain")
"""What the page shows of each opening."""
NOT_SHOWN = (
    LIMITS[0],
    "Settings of every method were searched with equally many trials on development texts of their own, one seed and "
    "30 steps each; what is best after 100 may differ.",
    "Equal steps are not equal compute. Seconds are charged by a clock of three windows a method on one device; cuts "
    "at equal seconds have no intervals.",
    "Search, changes and openings were judged on development texts; the first on others than the rest. Changes were "
    "suggested by the first seed on the texts they were then judged on. There is no untouched test set.",
    LIMITS[-1],
)
"""What the tables of this study cannot show."""


def results_of(runs: Path) -> dict[str, Any]:
    """Everything the page shows, as plain data."""
    found: dict[str, Any] = {"preset": PRESET, "command": "python studies/smollm2/study.py table"}
    found |= {
        "trials": trials(runs),
        "chosen": chosen(runs),
        "judged_by": JUDGED_BY,
        "clocks": timed_windows(runs),
        "costs": costs(runs),
    }
    for study in ("main", "ablations", "changes"):
        cells_done = runs_of(study, runs)
        if any(run.label == "t5" for run in done(cells_done)) and (runs / study).is_dir():
            found[study] = tabulated(cells_done, "t5", NOT_SHOWN)
            # Compared seconds come from the clock; the seconds of the run itself may still be those of a shared device.
            for row, run in zip(found[study]["runs"], cells_done, strict=True):
                row["disturbed"] = bool(read_json(run.folder / RESULT)["disturbed"])
    main_cells = runs_of("main", runs)
    found |= {"control": beside_the_control(main_cells)}
    found |= {"scores": score_rows(main_cells), "course": score_course(main_cells)}
    found |= {"diagnostics": diagnostics(main_cells), "samples": samples(main_cells), "openings": openings(runs)}
    for study in ("ablations", "changes"):
        if study in found:
            found[f"{study}_diagnostics"] = diagnostics(runs_of(study, runs))
    found |= {"variances": variances(main_cells)}
    everyone = [run for study in ("main", "ablations", "changes") for run in runs_of(study, runs)]
    found |= {"configurations": configurations(everyone)}
    return found


def score_rows(found: Sequence[Run]) -> list[dict[str, Any]]:
    """Accuracy of every method on every benchmark over seeds and items together, of each seed, and minus the base
    model's, paired by item."""
    rows = []
    base: dict[str, str] = {}
    for run in done(found):
        if run.label == "base":
            base |= read_json(run.folder / RESULT).get("verdicts", {})
    for label in dict.fromkeys(run.label for run in found):
        results = [read_json(run.folder / RESULT) for run in done(found) if run.label == label]
        results = [result for result in results if "verdicts" in result]
        for task in (*SCORED, *WRITTEN):
            asked = [result["verdicts"][task] for result in results if task in result["verdicts"]]
            if not asked:
                continue
            verdict_SI = np.array([[int(one) for one in verdicts] for verdicts in asked], dtype=float)
            estimate = mean_interval(verdict_SI, np.arange(verdict_SI.shape[1])).rounded()
            each = [round(float(value), 5) for value in verdict_SI.mean(1)]
            row: dict[str, Any] = {"label": label, "task": task, **estimate, "each": each}
            if task in base and label != "base":
                apart_SI = verdict_SI - np.array([int(one) for one in base[task]], dtype=float)
                row["minus_base"] = mean_interval(apart_SI, np.arange(apart_SI.shape[1])).rounded()
            rows.append(row)
    return rows


def score_course(found: Sequence[Run]) -> list[dict[str, Any]]:
    """The mean over benchmarks at every checkpoint that was evaluated, seed by seed; every row starts at `base`."""

    def mean(verdicts: dict[str, str]) -> float:
        return round(statistics.fmean(verdicts[task].count("1") / len(verdicts[task]) for task in SCORED), 5)

    rows: list[dict[str, Any]] = []
    start: float | None = None
    for run in done(found):
        result = read_json(run.folder / RESULT)
        if "verdicts" not in result:
            continue
        if run.label == "base":
            start = mean(result["verdicts"])
            continue
        asked = [*result.get("earlier", ()), {"window": run.summary["windows"], "verdicts": result["verdicts"]}]
        spent = {lap["window"]: training_seconds(lap) for lap in run.summary["laps"]}
        points = [
            {"window": one["window"], "seconds": round(spent.get(one["window"], 0.0), 1), "mean": mean(one["verdicts"])}
            for one in sorted(asked, key=lambda one: one["window"])
        ]
        rows.append({"label": run.label, "seed": run.seed, "disturbed": run.disturbed, "points": points})
    for row in rows:
        row["points"] = [] if start is None else [{"window": 0, "seconds": 0.0, "mean": start}, *row["points"]]
    return [row for row in rows if row["points"]]


def variances(found: Sequence[Run]) -> list[dict[str, Any]]:
    """How much of the thought gain's variance comes from the thought rather than from the position.

    The content gain is the difference of two thoughts at one position; if both vary alike, half of its variance is what
    one thought contributes. The rest belongs to the position.
    """
    rows = []
    for run in done(found):
        gain, content = (float(np.var(run.items[name], dtype=float)) for name in ("thought_gain", "content_gain"))
        row = {"label": run.label, "seed": run.seed, "gain": round(gain, 5), "content": round(content, 5)}
        rows.append(row | {"of_thought": round(content / 2 / gain, 4) if gain else None})
    return rows


def diagnostics(found: Sequence[Run]) -> list[dict[str, Any]]:
    """What T⁵ logged of its critics, its weight and its drift, one row for each seed and window."""
    rows = []
    for run in done(found):
        if run.label.partition("+")[0] != "t5":
            continue
        lines = run.metrics()
        events = [line for line in lines if str(line.get("event", "")).startswith("qualification: ")]
        for line in lines:
            if "r2.1" not in line:
                continue
            outcomes = [event["event"].split()[-1] for event in events if event["step"] == line["window"]]
            kept = {name: round(line[key], 5) for name, key in DIAGNOSED.items() if line.get(key) is not None}
            tests = {kind: outcomes.count(kind) for kind in ("passed", "failed", "paused")}
            within = [_steps(line, critic) for critic in (1, 2)]
            flat = [value for one in within for value in one]
            kept |= {"r2_step_mean": round(statistics.fmean(flat), 5), "r2_steps": within} if flat else {}
            rows.append({"label": run.label, "seed": run.seed, "window": int(line["window"]), **tests, **kept})
    return rows


def _steps(line: dict[str, Any], critic: int) -> list[float]:
    """A critic's R² of each step's returns alone, in the order of the steps."""
    named = {
        key: value for key, value in line.items() if key.startswith(f"r2_per_step.{critic}.") and value is not None
    }
    return [round(named[key], 4) for key in sorted(named, key=lambda key: int(key.rpartition(".")[2]))]


def beside_the_control(found: Sequence[Run]) -> list[dict[str, Any]]:
    """Every method with thoughts minus the control, paired by seed and item.

    Also of the method itself: the mixed gain minus that with another text's thought, and the thought gain minus that of
    random tokens.
    """
    by: dict[str, list[Run]] = {}
    for run in done(found):
        if all(name in run.items for name in NEEDED):
            by.setdefault(run.label, []).append(run)
    control = {run.seed: run for run in by.get(CONTROL, ())}
    rows = []
    for label, mine in by.items():
        row: dict[str, Any] = {"label": label, "seeds": [run.seed for run in mine]}
        pairs = [(run, control[run.seed]) for run in mine if run.seed in control]
        if label != CONTROL and pairs:
            row |= {name: _apart([(one, name, other, name) for one, other in pairs]) for name in AGAINST_CONTROL}
        row["mixed_own_minus_other"] = _apart([(run, "mixed_gain", run, "mixed_gain_other") for run in mine])
        row["own_minus_random"] = _apart([(run, "thought_gain", run, "random_gain") for run in mine])
        rows.append(row)
    return rows


def _apart(pairs: Sequence[tuple[Run, str, Run, str]]) -> dict[str, Any]:
    """Mean and interval over seeds and items of one run's value minus another's: (run, name, other run, its name)."""
    value_SI = [
        np.asarray(run.items[name], dtype=float) - np.asarray(other.items[against], dtype=float)
        for run, name, other, against in pairs
    ]
    return mean_interval(np.stack(value_SI), pairs[0][0].items["text"]).rounded()


def openings(runs: Path) -> list[dict[str, Any]]:
    """Gains of the untrained model for each opening, and the content gain minus the first opening's, paired by item."""
    rows: list[dict[str, Any]] = []
    reference: Run | None = None
    known = {run.label: run for run in done(runs_of("openings", runs)) if run.seed == 0}
    for words in OPENINGS:
        run = known.get(opening_label(words))
        if run is None:
            continue
        reference = reference or run
        if not np.array_equal(run.items["item"], reference.items["item"]):
            raise UserError(f"{run.folder}: measured on other items than {reference.folder}; run both alike")
        items = {name: np.asarray(run.items[name], dtype=float) for name in OPENED}
        text_I = run.items["text"]
        row: dict[str, Any] = {"words": words, "items": len(text_I)}
        row |= {name: mean_interval(values[None], text_I).rounded() for name, values in items.items()}
        apart_I = items["content_gain"] - np.asarray(reference.items["content_gain"], dtype=float)
        row["content_gain_apart"] = mean_interval(apart_I[None], text_I).rounded() if run is not reference else None
        rows.append(row)
    return rows


def costs(runs: Path) -> list[dict[str, Any]]:
    """Cells, failures and seconds of every study."""
    rows = []
    for study in STUDIES:
        results = [read_json(path) for path in sorted((runs / study).glob(f"*/{RESULT}"))]
        if results:
            spent = sum(result["seconds"] for result in results)
            failed = sum("failure" in result for result in results)
            rows.append({"study": study, "cells": len(results), "failed": failed, "seconds": round(spent)})
    return rows


def configurations(found: Sequence[Run]) -> dict[str, dict[str, Any]]:
    """All settings of the first method's first run, and for every other label those that differ from them."""
    written: dict[str, dict[str, Any]] = {}
    for run in done(found):
        if run.label not in written and (run.folder / CONFIG).is_file():
            written[run.label] = {key: leaf.value for key, leaf in read_source(run.folder / CONFIG).items()}
    first = next(iter(written.values()), {})
    return {
        label: leaves if leaves is first else {key: value for key, value in leaves.items() if first.get(key) != value}
        for label, leaves in written.items()
    }


def samples(found: Sequence[Run]) -> list[dict[str, Any]]:
    """A few thoughts of each method's first seed, before and after training, at the same positions."""
    rows = []
    for label in dict.fromkeys(run.label for run in done(found)):
        history = next(run for run in done(found) if run.label == label).history
        for before, after in zip(history[0].get("samples", ()), history[-1].get("samples", ())):
            rows.append(
                {"label": label, **{key: before[key] for key in ("before", "after")},
                 "untrained": before["thought"], "trained": after["thought"]}
            )  # fmt: skip
    return rows

"""The comparison part of a study's page: methods, paired differences, and the curves of every run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfive.report.record import RunRecord
from tfive.report.runs import Run, done, mismatches
from tfive.report.sections import in_short, in_short_at_equal_cost
from tfive.report.series import rounded, thinned
from tfive.report.story import three_numbers, verdict
from tfive.report.table import AXES, KEPT, LIMITS, MEASURED, RULES, StudyTable, study_table

Story = dict[str, Any]


def compare_data(runs: Sequence[Run]) -> tuple[dict[str, Any], Story]:
    """The entries `compare` and `story` of a study's page; runs that may not stand in one table are listed without."""
    reasons = mismatches(runs)
    table = study_table(runs) if done(runs) and not reasons else None
    rows = [_run(run) for run in runs]
    shown = [name for name in KEPT if any(name in row["series"] for row in rows)]
    found = {
        "reference": table["reference"] if table else runs[0].label,
        "rules": list(RULES),
        "limits": list(table["limits"] if table else LIMITS) + [f"Not compared: {reason}." for reason in reasons[:5]],
        "metrics": shown,
        "methods": [_method(row) for row in table["methods"]] if table else [],
        "differences": table["differences"] if table else [],
        "runs": rows,
    }
    return found, _story(runs, table, reasons)


def _method(row: dict[str, Any]) -> dict[str, Any]:
    kept = {name: row[name] for name in ("label", "seeds", "failed", "open")}
    if "measured" not in row:
        return kept | {"measured": {}}
    return kept | {
        "start": row["thought_gain_start"],
        "measured": row["measured"],
        "seconds_per_step": row["step_time"]["mean"],
        "actor_per_item": row["rollouts"]["actor_per_item"],
        "auxiliary_per_item": row["rollouts"]["auxiliary_per_item"],
        **row["tokens"],
    }


def _run(run: Run) -> dict[str, Any]:
    record = RunRecord(run)
    history = record.history if run.folder.is_dir() else []
    kept = [history[n] for n in thinned(range(len(history)))]
    names = [name for name in KEPT if any(isinstance(one.get(name), int | float) for one in kept)]
    return {
        "label": run.label,
        "seed": run.seed,
        "state": run.state,
        "failure": record.failure,
        "disturbed": run.disturbed,
        "x": {axis: [rounded(record.at(one["window"], axis)) for one in kept] for axis in AXES},
        "series": {name: _series(kept, name) for name in names},
    }


def _series(history: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    ends = [one.get(f"{name}_interval") for one in history]
    return {
        "value": [rounded(one.get(name)) for one in history],
        "low": [rounded(pair[0]) if pair else None for pair in ends] if any(ends) else None,
        "high": [rounded(pair[1]) if pair else None for pair in ends] if any(ends) else None,
    }


def _story(runs: Sequence[Run], table: StudyTable | None, reasons: Sequence[str]) -> Story:
    """The reference's three numbers over its seeds, and how it stands beside the others."""
    limits = list(table["limits"] if table else LIMITS)
    if table is None:
        why = f"they differ in {reasons[0]}" if reasons else "none is finished"
        said = {"code": "unfinished", "headline": "These runs cannot be compared yet.", "sentence": f"Why: {why}."}
        return {"verdict": said, "numbers": [], "limits": limits}
    row = next(one for one in table["methods"] if one["label"] == table["reference"])
    own = [run for run in done(runs) if run.label == table["reference"]]
    last, first = _means(row, own)
    thinks = any(run.summary["account"].get("total", {}).get("generated_tokens", 1) for run in own)
    moved = any(run.summary["windows"] for run in own)
    said = verdict(last, thinks=thinks, state="done", moved=moved)
    standing = [block.text.removeprefix("- ") for block in (*in_short(table), *in_short_at_equal_cost(table))]
    seeds = f"{table['reference']}, {len(own)} seed{'s' if len(own) > 1 else ''}: "
    open_runs = [run for run in runs if run.state != "done"]
    if open_runs:
        standing.append(f"{len(open_runs)} of {len(runs)} runs are not finished or have failed.")
    said |= {"headline": seeds + said["headline"], "sentence": " ".join((said["sentence"], *standing))}
    return {"verdict": said, "numbers": three_numbers(first, last, None), "limits": limits}


def _means(row: dict[str, Any], runs: Sequence[Run]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The last and the first measurement over seeds; intervals are those of the table, over seeds and texts."""
    last: dict[str, Any] = {"window": 1}
    for name in MEASURED:
        if name in row["measured"]:
            found = row["measured"][name]
            last |= {name: found["mean"], f"{name}_interval": [found["low"], found["high"]]}
    first: dict[str, Any] = {"window": 0}
    for where, number in ((first, 0), (last, -1)):
        for name in (*MEASURED, "no_thought_loss"):
            values = [value for run in runs if isinstance(value := run.history[number].get(name), int | float)]
            if name not in where and len(values) == len(runs):
                where[name] = sum(values) / len(values)
    return last, first

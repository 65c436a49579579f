"""The page's sections on T⁵'s critics, weight and drift, for the main study and for variants."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from tfive.report.blocks import Block, paragraph, table

LATE = 4
"""R² of variants is averaged over windows after this one, when all critics have been fitted for a while."""


def _mean(some: Sequence[dict[str, Any]], name: str, form: str) -> str:
    """The mean of a column over the rows that have it, as a table's cell."""
    values = [row[name] for row in some if name in row]
    return format(statistics.fmean(values), form) if values else "–"


def diagnostics_blocks(rows: Sequence[dict[str, Any]]) -> list[Block]:
    """The main study's table: one row a window, means over seeds."""
    shown = []
    for window in sorted({row["window"] for row in rows}):
        some = [row for row in rows if row["window"] == window]
        tests = "/".join(str(sum(row[kind] for row in some)) for kind in ("passed", "failed", "paused"))
        learned = sum(row.get("spread", 0) > 0 for row in some)
        cells = [_mean(some, name, "+.3f") for name in ("r2_1", "r2_2", "r2_step_mean")]
        cells += [tests, _mean(some, "retention", ".4f")]
        cells += [f"{learned}/{len(some)}", _mean(some, "twin_correlation", ".3f")]
        cells += [f"{_mean(some, 'offset', '+.3f')} ± {_mean(some, 'offset_error', '.3f')}"]
        cells += [_mean(some, "offset_change", "+.4f"), _mean(some, "drift", ".3f"), _mean(some, "covariance", ".3f")]
        shown.append((str(window), *cells, _mean(some, "kl", ".3f"), _mean(some, "clipped", ".3f")))
    head = (
        "window", "R² first", "R² second", "within a step", "tests passed/failed/paused", "Ĉ/Q̂", "weight learned",
        "twin correlation", "offset R̂", "R̂(w) − R̂(½)", "mean-induced", "covariance", "policy KL", "clipped",
    )  # fmt: skip
    return [
        paragraph(
            "Means over seeds. Tests are fresh ones of both critics against η, on the R² of all steps of a thought "
            "together; within a step it is the mean over steps and critics of the R² of each step's returns alone, "
            "which knowing the step does not raise. Ĉ/Q̂ is the displacement that validation "
            "allows up to κ = 0.1; the weight counts as learned where it was accepted and is no constant; offset, its "
            "change by the weight, and the two parts of the update's drift come from the probes (a few dozen contexts "
            "a window with several continuations each, so they are rough; ± is one standard error), the drift at the "
            "last reuse step." + _moved(rows)
        ),
        table(head, shown),
    ]


def _moved(rows: Sequence[dict[str, Any]]) -> str:
    """The sentence on how learned weights changed the offset, all windows together."""
    known = [(row["offset_change"], row["offset_change_error"]) for row in rows if row.get("offset_change_error")]
    if not known:
        return ""
    mean = statistics.fmean(change for change, _ in known)
    error = sum(error**2 for _, error in known) ** 0.5 / len(known)
    return f" Over the {len(known)} windows with a learned weight R̂(w) − R̂(½) is {mean:+.4f} ± {error:.4f}."


def variant_critics_blocks(rows: Sequence[dict[str, Any]]) -> list[Block]:
    """The critics of T⁵ and its variants: a table of means over windows, and one of R² by step."""
    shown = []
    for label in dict.fromkeys(row["label"] for row in rows):
        some = [row for row in rows if row["label"] == label]
        runs = len({row["seed"] for row in some})
        late = [row for row in some if row["window"] > LATE]
        r2 = (_mean(late, name, "+.3f") for name in ("r2_1", "r2_2", "r2_step_mean"))
        tests = "/".join(f"{sum(row[kind] for row in some) / runs:.1f}" for kind in ("passed", "failed", "paused"))
        cells = [_mean(some, name, ".3f") for name in ("twin_correlation", "retention", "drift", "covariance")]
        shown.append((label, str(runs), *r2, tests, *cells))
    if not shown:
        return []
    head = (
        "variant", "seeds", f"R² first, after window {LATE}", "R² second, likewise", "within a step, likewise",
        "tests passed/failed/paused a run",
        "twin correlation", "Ĉ/Q̂", "mean-induced", "covariance",
    )  # fmt: skip
    return [
        paragraph("Their critics, means over windows and seeds:"),
        table(head, shown),
        paragraph(f"R² within each step of a thought, after window {LATE}, of the first and of the second critic:"),
        _within(rows),
    ]


def _within(rows: Sequence[dict[str, Any]]) -> Block:
    """R² step by step, one row for each variant and critic."""
    shown, steps = [], 0
    for label in dict.fromkeys(row["label"] for row in rows):
        late = [row["r2_steps"] for row in rows if row["label"] == label and row["window"] > LATE and "r2_steps" in row]
        for critic in (0, 1):
            each = list(zip(*(one[critic] for one in late if one[critic])))
            if each:
                steps = max(steps, len(each))
                shown.append((label, str(critic + 1), *(f"{statistics.fmean(values):+.2f}" for values in each)))
    return table(("variant", "critic", *(str(step + 1) for step in range(steps))), shown)

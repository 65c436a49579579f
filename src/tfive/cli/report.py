"""What `tfive compare` and `tfive report` print and write: pages, tables and figures of a study or of one run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tfive.errors import UserError
from tfive.report import figures
from tfive.report.page import markdown, write_pages
from tfive.report.runs import STUDY, SUMMARY, Run, done, mismatches, read_study
from tfive.report.sections import run_blocks, study_blocks
from tfive.report.table import LIMITS, StudyTable, rows_csv, study_table
from tfive.training.summary import read_summary

REPORT = "report"


def compare_command(
    sources: Sequence[str],
    methods: str,
    seeds: str,
    overrides: Sequence[str],
    out: str | None,
    *,
    jobs: int,
    retry: bool,
    as_json: bool,
    quiet: bool,
) -> tuple[str, bool]:
    """What `tfive compare` does: returns what to print and whether every run came to its end."""
    from tfive.training.compare import compare, seeds_of

    labels = [label.strip() for label in methods.split(",") if label.strip()]
    folder, runs = compare(
        sources, labels, seeds_of(seeds), overrides, Path(out) if out else None, jobs=jobs, retry=retry, quiet=quiet
    )
    return study_text(folder, runs, as_json=as_json), len(done(runs)) == len(runs)


def report_command(folder: str, *, as_json: bool) -> str:
    """What `tfive report` does: writes the pages and returns what to print."""
    path = Path(folder)
    try:
        return _reported(path, as_json=as_json)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        reason = " ".join(f"{error!r}".split())[:120]
        raise UserError(f"{folder}: holds something else than tfive train or compare writes ({reason})") from error


def _reported(path: Path, *, as_json: bool) -> str:
    if (path / STUDY).is_file():
        return study_text(path, read_study(path), as_json=as_json)
    if not (path / SUMMARY).is_file():
        raise UserError(f"{path}: neither {SUMMARY} nor {STUDY} is here; name a finished run or a study")
    summary = read_summary(path)
    run = Run(summary["method"], int(summary["seed"]), path)
    found = study_table([run])
    drawn = _drawn(found, path / REPORT)
    title = f"{summary['method']} on {summary['model']}, seed {summary['seed']}"
    pages = write_pages(path / REPORT, title, run_blocks(run, drawn))
    return json.dumps(found, indent=1, ensure_ascii=False) if as_json else "\n".join(str(page) for page in pages)


def study_text(folder: Path, runs: Sequence[Run], *, as_json: bool) -> str:
    """Writes a study's table, pages and figures; returns the table or the Markdown page."""
    found = tabulated(runs)
    report = folder / REPORT
    blocks = study_blocks(found, _drawn(found, report))
    title = f"Comparison: {', '.join(dict.fromkeys(run.label for run in runs))}"
    write_pages(report, title, blocks)
    text = json.dumps(found, indent=1, ensure_ascii=False)
    (report / "table.json").write_text(text + "\n", "utf-8")
    (report / "table.csv").write_text(rows_csv(found), "utf-8")
    return text if as_json else markdown(title, blocks) + f"\nwritten to {report}"


def tabulated(runs: Sequence[Run], reference: str | None = None, limits: Sequence[str] = LIMITS) -> StudyTable:
    """The table of runs that may stand in one; a `UserError` names the first thing in which they differ."""
    found = mismatches(runs)
    if found:
        rest = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise UserError(f"these runs cannot be compared: {found[0]}{rest}")
    if not done(runs):
        reasons = "; ".join(f"{run.folder.name}: {run.failure or run.state}" for run in runs)
        raise UserError(f"no run is finished, so there is nothing to compare ({reasons})")
    return study_table(runs, reference, limits)


def _drawn(found: dict[str, Any], folder: Path) -> figures.Drawn:
    """Figures where matplotlib is installed; pages do without them elsewhere."""
    return figures.draw_study(found, folder) if figures.available() else []

"""What `tfive compare` and `tfive report` print and write: pages, tables and figures of runs, studies, evaluations."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tfive.cli.options import loading
from tfive.errors import UserError
from tfive.report import figures
from tfive.report.assembly import page_html
from tfive.report.benchmarks import draw_benchmarks
from tfive.report.blocks import markdown, write_pages
from tfive.report.page_data import PageData, page_data, run_of, study_page
from tfive.report.runs import Run, done, mismatches, read_study
from tfive.report.sections import header_blocks, run_blocks, story_blocks, study_blocks
from tfive.report.table import LIMITS, StudyTable, rows_csv, study_table

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
    with loading(quiet):
        from tfive.training.compare import compare, seeds_of

    labels = [label.strip() for label in methods.split(",") if label.strip()]
    folder, runs = compare(
        sources, labels, seeds_of(seeds), overrides, Path(out) if out else None, jobs=jobs, retry=retry, quiet=quiet
    )
    return study_text(folder, runs, as_json=as_json), len(done(runs)) == len(runs)


def report_command(folders: Sequence[str], *, as_json: bool) -> str:
    """What `tfive report` does: writes the page into the first folder and returns what to print."""
    paths = [Path(folder) for folder in folders]
    for path in paths:
        if not path.is_dir():
            raise UserError(f"{path}: there is no such folder; name that of a run, of a study or of an evaluation")
    try:
        return _reported(paths, as_json=as_json)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        reason = " ".join(f"{error!r}".split())[:120]
        raise UserError(
            f"{', '.join(folders)}: holds something else than tfive train, compare or eval writes ({reason})"
        ) from error


def _reported(paths: Sequence[Path], *, as_json: bool) -> str:
    page = page_data(paths)
    if page["kind"] == "study" and done(read_study(paths[0])):
        return study_text(paths[0], read_study(paths[0]), as_json=as_json, page=page)
    found: dict[str, Any] = {key: page[key] for key in ("title", "state", "failure", "header", "story")}
    blocks = story_blocks(page)
    report = paths[0] / REPORT
    if page["kind"] == "run" and page["state"] == "done":
        run = run_of(paths[0])
        found = study_table([run])
        blocks += run_blocks(run)
    else:
        blocks += header_blocks(page)
    written = write_pages(report, page["title"], blocks, page_html(page))
    return json.dumps(found, indent=1, ensure_ascii=False) if as_json else "\n".join(str(path) for path in written)


def study_text(folder: Path, runs: Sequence[Run], *, as_json: bool, page: PageData | None = None) -> str:
    """Writes a study's table, pages and figures; returns the table or the Markdown page."""
    found = tabulated(runs)
    report = folder / REPORT
    blocks = study_blocks(found, _drawn(found, done(runs), report))
    title = f"Comparison: {', '.join(dict.fromkeys(run.label for run in runs))}"
    write_pages(report, title, blocks, page_html(page or study_page(folder)))
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


def _drawn(found: dict[str, Any], runs: Sequence[Run], folder: Path) -> figures.Drawn:
    """Figures where matplotlib is installed; pages do without them elsewhere."""
    return figures.draw_study(found, folder) + draw_benchmarks(runs, folder) if figures.available() else []

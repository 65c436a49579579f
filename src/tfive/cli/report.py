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
from tfive.report.blocks import MARKDOWN, PAGE, markdown, paragraph, table, write_pages
from tfive.report.page_data import PageData, page_data, run_of, study_page
from tfive.report.runs import Run, done, mismatches, read_study
from tfive.report.sections import (
    TITLES,
    header_blocks,
    in_short,
    in_short_at_equal_cost,
    interval,
    run_blocks,
    story_blocks,
    study_blocks,
)
from tfive.report.table import LIMITS, StudyTable, rows_csv, study_table
from tfive.training.cells import Study, seeds_of
from tfive.training.summary import SUMMARY, read_summary

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
    labels = [label.strip() for label in methods.split(",") if label.strip()]
    study = Study.planned(sources, labels, seeds_of(seeds), overrides, Path(out) if out else None)
    with loading(quiet):
        from tfive.training.compare import carried_out

    runs = carried_out(study, jobs=jobs, retry=retry, quiet=quiet)
    return study_text(study.folder, runs, as_json=as_json), len(done(runs)) == len(runs)


def report_command(folders: Sequence[str], *, as_json: bool) -> str:
    """What `tfive report` does: writes the page into the first folder and returns what to print."""
    paths = [Path(folder) for folder in folders]
    for path in paths:
        if not path.is_dir():
            raise UserError(f"{path}: there is no such folder; name that of a run, of a study or of an evaluation")
        if (path / SUMMARY).is_file():
            read_summary(path)  # one that is cut off or something else is refused by name
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
        blocks += run_blocks(run, draw_benchmarks([run], report) if figures.available() else [])
    else:
        blocks += header_blocks(page)
    written = write_pages(report, page["title"], blocks, page_html(page))
    return json.dumps(found, indent=1, ensure_ascii=False) if as_json else "\n".join(str(path) for path in written)


def study_text(folder: Path, runs: Sequence[Run], *, as_json: bool, page: PageData | None = None) -> str:
    """Writes a study's table, pages and figures; returns the table, or the study in short."""
    found = tabulated(runs)
    report = folder / REPORT
    blocks = study_blocks(found, _drawn(found, done(runs), report))
    title = f"Comparison: {', '.join(dict.fromkeys(run.label for run in runs))}"
    write_pages(report, title, blocks, page_html(page or study_page(folder)))
    text = json.dumps(found, indent=1, ensure_ascii=False)
    (report / "table.json").write_text(text + "\n", "utf-8")
    (report / "table.csv").write_text(rows_csv(found), "utf-8")
    return text if as_json else f"{brief(title, found)}\n\nall tables: {report / MARKDOWN}; the page: {report / PAGE}"


BRIEF = ("content_gain", "thought_gain", "mixed_gain", "no_thought_drift")
"""What a study's short table shows of every method."""


def brief(title: str, found: StudyTable) -> str:
    """A study for a terminal: what is told apart, a row for every method, what runs say of themselves first, and those
    that have not finished."""
    finished = [row for row in found["methods"] if "measured" in row]
    rows = [(row["label"], str(len(row["seeds"])), *(interval(row["measured"].get(name)) for name in BRIEF))
            for row in finished]  # fmt: skip
    shown = table(("method", "seeds", *(TITLES[name] for name in BRIEF)), rows)
    blocks = [*in_short(found), *in_short_at_equal_cost(found)]
    blocks += [paragraph(f"- {line}") for line in found["limits"] if line not in LIMITS]
    blocks += [shown, paragraph("The table is of test texts, equal cost of development texts, on the way.")]
    noted: dict[tuple[str, str], list[str]] = {}
    for run in found["runs"]:
        if "note" in run:
            noted.setdefault((run["label"], run["note"]), []).append(str(run["seed"]))
    blocks += [paragraph(f"- {label}, seed {', '.join(seeds)}: {note}") for (label, note), seeds in noted.items()]
    for run in found["runs"]:
        if run["state"] != "done":
            why = f", {run['failure']}" if run.get("failure") else ""
            blocks.append(paragraph(f"- not finished: {run['label']} seed {run['seed']}: {run['state']}{why}"))
    return markdown(title, blocks).rstrip()


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

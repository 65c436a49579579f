"""The data of a page: of one run, of a study, of evaluations. Plain JSON, read by the scripts of `report/page`.

Whatever a folder holds gives a page: a run that goes on, was stopped or has failed, and one of an older version. Its
parts and where they are made:

    header, story            what was trained on what; verdict, three numbers, limits (story.py)
    charts, x, series        curves by chart; `x` holds the axes, `series` value, low and high (series.py)
    events, timeline, critics, weights, account                             (series.py, thoughts.py)
    explorers                thoughts as columns, one explorer a run or method (thoughts.py, samples.py)
    compare, evaluation      runs and paired differences; scores and answers (comparison.py, evaluations.py)
    meanings                 what each number is, from docs/howto/diagnostics.md (meanings.py)
    absent                   part → why it is not there
    version, live            a hash of all the rest; what a served page does (assembly.py, cli/watch.py)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any

from tfive.errors import UserError
from tfive.report import series
from tfive.report.comparison import compare_data
from tfive.report.evaluations import RUN as EVALUATION
from tfive.report.evaluations import evaluation_data, evaluation_story
from tfive.report.meanings import meanings
from tfive.report.record import RunRecord
from tfive.report.runs import CONFIG, METRICS, STATUS, STUDY, SUMMARY, Run, read_study
from tfive.report.samples import sampled
from tfive.report.sections import TITLES
from tfive.report.story import growth, three_numbers, verdict
from tfive.report.table import AXES, LIMITS, RULES
from tfive.report.thoughts import calibration, explorer, read_thoughts, weight_histograms

FORMAT = 1
EXPLORER_BYTES = 1_650_000
"""Packed bytes that the thoughts of a page may take, so that it stays below three megabytes."""

PageData = dict[str, Any]


def page_data(folders: Sequence[Path]) -> PageData:
    """The page of one run or one study, of evaluations, or of a run with its evaluations."""
    runs = [folder for folder in folders if not (folder / EVALUATION).is_file()]
    evaluations = [folder for folder in folders if folder not in runs]
    if len(runs) > 1:
        raise UserError(f"{runs[1]}: a page shows one run or one study; compare several with tfive compare")
    if not runs:
        return _evaluation_page(evaluations)
    page = study_page(runs[0]) if (runs[0] / STUDY).is_file() else run_page(runs[0])
    if evaluations:
        page["evaluation"] = evaluation_data(evaluations)
    return _versioned(page)


def run_of(folder: Path) -> Run:
    """The run a folder holds; a `UserError` where it holds none."""
    if not any((folder / name).is_file() for name in (SUMMARY, CONFIG, METRICS, STATUS)):
        raise UserError(
            f"{folder}: neither {SUMMARY} nor {STUDY} nor {EVALUATION} nor {CONFIG} is here; name the folder of a run, "
            "of a study or of an evaluation"
        )
    known = RunRecord(Run(folder.name, 0, folder))
    return Run(known.method, known.seed, folder)


def run_in_short(folder: Path) -> str:
    """What came of a run, as its page says it first."""
    said = run_page(folder)["story"]["verdict"]
    return f"{said['headline']} {said['sentence']}"


def run_page(folder: Path) -> PageData:
    """Everything of one run, as far as it has come."""
    record = RunRecord(run_of(folder))
    thoughts = read_thoughts(record)
    shown = explorer(thoughts, EXPLORER_BYTES) if thoughts is not None else sampled(record)
    state = record.run.state
    page = _empty("run", f"{record.method} on {_short(record.model)}, seed {record.seed}", state) | {
        "failure": record.failure,
        "header": _header(record),
        "story": _story(record, bool(shown["thinks"]) if shown is not None else _thinks(record)),
        **series.curves(record),
        "events": series.events(record),
        "timeline": series.timeline(record),
        "critics": series.critics(record, calibration(thoughts)),
        "weights": series.weights(record, weight_histograms(thoughts)),
        "account": series.account(record),
        "explorers": [shown] if shown is not None else [],
        "absent": _absent(record, shown),
        "files": _files(folder),
    }
    return _versioned(page)


def study_page(folder: Path) -> PageData:
    """Several methods and seeds beside each other, and the thoughts of each method's first seed."""
    runs = read_study(folder)
    compare, story = compare_data(runs)
    labels = list(dict.fromkeys(run.label for run in runs))
    states = {run.state for run in runs}
    state = "done" if states == {"done"} else "running" if "running" in states else "unfinished"
    page = _empty("study", f"Comparison: {', '.join(labels)}", state) | {
        "header": _study_header(runs),
        "story": story,
        "explorers": _study_thoughts(runs, labels),
        "compare": compare,
        "files": [_file(name, what) for name, what in STUDY_FILES],
    }
    if not page["explorers"]:
        page["absent"] = {"explorers": "These runs kept no thoughts."}
    return _versioned(page)


STUDY_FILES = (
    ("report/table.json", "the table as data"),
    ("report/table.csv", "the table, a line a method"),
    ("cells/", "the folder of every run"),
)


def _study_thoughts(runs: Sequence[Run], labels: Sequence[str]) -> list[dict[str, Any]]:
    found = []
    for label in labels:
        own = (read_thoughts(RunRecord(run)) for run in runs if run.label == label and run.folder.is_dir())
        first = next((one for one in own if one is not None), None)
        found += [first] if first is not None else []
    return [explorer(one, EXPLORER_BYTES // len(found)) for one in found]


def _evaluation_page(folders: Sequence[Path]) -> PageData:
    found = evaluation_data(folders)
    names = " and ".join(_short(one["name"]) for one in found["models"])
    state = "done" if all((folder / "scores.json").is_file() for folder in folders) else "unfinished"
    page = _empty("evaluation", f"Evaluation of {names}", state)
    page |= {"story": evaluation_story(found), "evaluation": found}
    page["header"] = [_entry(f"model {n}", one["name"]) for n, one in enumerate(found["models"], 1)]
    page["files"] = [_file("scores.json", "the scores"), _file("*.jsonl", "every answer, a line each")]
    return _versioned(page)


def _empty(kind: str, title: str, state: str) -> PageData:
    nothing: PageData = dict.fromkeys(("failure", "live", "timeline", "critics", "weights", "account", "compare"))
    return {
        "format": FORMAT,
        "version": "",
        "kind": kind,
        "title": title,
        "state": state,
        **nothing,
        "header": [],
        "story": {},
        "meanings": {},
        "axes": [{"id": axis, "title": TITLES[axis]} for axis in AXES],
        "charts": [],
        "x": {"development": {}, "training": {}},
        "series": {"development": {}, "training": {}},
        "events": {"window": [], "seconds": [], "event": [], "detail": []},
        "explorers": [],
        "evaluation": None,
        "absent": {},
        "files": [],
    }


def _versioned(page: PageData) -> PageData:
    """The page with the meanings of all its numbers, and a version that changes with its content."""
    names = {name for one in page["series"].values() for name in one}
    names |= {one["metric"] for number in page["story"]["numbers"] for one in (number, number["control"])}
    names |= set(page["compare"]["metrics"]) if page["compare"] else set()
    names |= {"r2", "r2_within", "r2_per_step", "weight_mean", "mixed_gain", "gain_vs_base", "other_gain", "empty_gain"}
    page = page | {"meanings": meanings(names), "version": ""}
    content = json.dumps(page, ensure_ascii=False, sort_keys=True).encode()
    return page | {"version": hashlib.sha256(content).hexdigest()[:16]}


def _story(record: RunRecord, thinks: bool) -> dict[str, Any]:
    history = record.history
    first, last = (history[0], history[-1]) if history else ({"window": 0}, {"window": 0})
    if "test" in record.summary:
        # Texts that chose nothing, measured once when training was over.
        first = {"window": 0, **record.summary["test"]["before"]}
        last = {"window": record.windows, **record.summary["test"]["after"]}
    last = {**last, "reading_openness": record.summary.get("reading_openness")}
    grown = growth(record) or {}
    said = verdict(last | grown, thinks=thinks, state=record.run.state, moved=record.windows > 0)
    limits = ["One seed: another seed may come to something else; compare several with tfive compare.", *LIMITS[1::2]]
    return {
        "verdict": said,
        "numbers": three_numbers(first, last, record.setting("thought.horizon"), gated=_reading(record) == "gated"),
        "limits": limits,
    }


def _thinks(record: RunRecord) -> bool:
    """Whether a run of an older version sampled thoughts to train on; one that is not finished is given the benefit."""
    total = record.account.get("total", {})
    return record.run.state != "done" or "generated_tokens" not in total or bool(total["generated_tokens"])


def _reading(record: RunRecord) -> str:
    """How text reads thoughts in a run, empty where an older one does not say."""
    return str(record.summary.get("reading") or record.setting("thought.reading") or "")


def _header(record: RunRecord) -> list[dict[str, str]]:
    cost = record.costs.get(max(record.costs, default=0), {})
    sources = record.setting("text.sources", [])
    windows = f"{record.windows} of {record.planned}" if record.planned else str(record.windows)
    seconds = record.account.get("wall_seconds", record.summary.get("seconds"))
    place = record.summary.get("place", {})
    entries = [
        _entry("method", record.method),
        _entry("model", _short(record.model)),
        _entry("text", ", ".join(str(one.get("name", "")) for one in sources if isinstance(one, dict))),
        _entry("windows", windows, "a window collects thoughts, fits what judges them, and updates the model"),
        _entry("time", "" if seconds is None else _duration(float(seconds))),
        _entry("thought tokens", _count(cost.get("thought_tokens")), "tokens sampled inside thoughts, all roles"),
        _entry("corpus tokens", _count(cost.get("corpus_tokens")), "tokens of every text drawn, all roles"),
        _entry("measured on", _measured_on(record), "held out from every update"),
        _entry("thoughts", _shape(record)),
        _entry("reading", _reading(record)),
        _entry("seed", str(record.seed)),
        _entry("device", str(place.get("device", ""))),
        _entry("phase", str(record.run.status.get("phase", "")) if record.run.state == "running" else ""),
    ]
    return [one for one in entries if one["value"]]


def _study_header(runs: Sequence[Run]) -> list[dict[str, str]]:
    done = [run for run in runs if run.state == "done"]
    entries = [
        _entry("methods", ", ".join(dict.fromkeys(run.label for run in runs))),
        _entry("seeds", ", ".join(map(str, dict.fromkeys(run.seed for run in runs)))),
        _entry("runs", f"{len(done)} of {len(runs)} finished"),
        _entry("model", _short(str(done[0].summary["model"])) if done else ""),
        _entry("rule", RULES[0]),
    ]
    return [one for one in entries if one["value"]]


def _measured_on(record: RunRecord) -> str:
    """The texts behind the three numbers: test texts once the run is over, development texts until then."""
    test = record.summary.get("test")
    last = test["after"] if test else record.history[-1] if record.history else {}
    if not last.get("items") or not last.get("texts"):
        return ""
    return f"{last['items']:g} places in {last['texts']:g} {'test' if test else 'development'} texts"


def _shape(record: RunRecord) -> str:
    length, horizon = record.setting("thought.length"), record.setting("thought.horizon")
    return f"up to {length} tokens, judged by the next {horizon}" if length and horizon else ""


def _entry(name: str, value: str, hint: str = "") -> dict[str, str]:
    return {"name": name, "value": value, "hint": hint}


def _count(value: Any) -> str:
    return f"{int(value):,}" if isinstance(value, int | float) and value else ""


def _duration(seconds: float) -> str:
    minutes, hours = seconds / 60, seconds / 3600
    return f"{seconds:.0f} s" if minutes < 2 else f"{minutes:.0f} minutes" if hours < 2 else f"{hours:.1f} hours"


def _short(model: str) -> str:
    """A hub id or a name as it is, a path by its last part: a page goes further than the machine."""
    return PurePath(model).name if model.startswith(("/", "~", ".")) or "\\" in model else model


def _absent(record: RunRecord, shown: Any) -> dict[str, str]:
    if shown is not None and shown.get("sources"):
        return {}
    if shown is not None:
        return {"explorers": "This run was written before thoughts were kept token by token; these are its samples."}
    if record.setting("run.explorer_items") == 0:
        return {"explorers": "run.explorer_items = 0: this run keeps no thoughts."}
    return {"explorers": "No thoughts were kept: the run has not measured any yet, or is of an older version."}


def _files(folder: Path) -> list[dict[str, str]]:
    known = (
        (METRICS, "every number of every window and every event, a line of JSON each"),
        (SUMMARY, "the result, every measurement, the account"),
        ("costs.jsonl", "what had been spent when each window closed"),
        ("develop/", "gains of every development item"),
        ("explorer/", "the thoughts of this page, token by token"),
        (CONFIG, "every setting"),
    )
    return [_file(name, what) for name, what in known if (folder / name).exists()]


def _file(name: str, what: str) -> dict[str, str]:
    return {"name": name, "what": what}

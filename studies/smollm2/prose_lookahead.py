"""Thoughts that guess the next sentence: run folders, ended or not, into JSON, and the page's tables.

`prose.py --lookahead FOLDER` calls it: FOLDER holds the runs of `lookahead.toml` by the names below, and in `writer`
`told.json`, what `lookahead_gains.py` printed of its model; docs/studies/smollm2-study.md has the commands.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tfive.errors import UserError
from tfive.report.runs import read_json
from tfive.training.summary import SUMMARY
from tfive.training.warmstart_kept import SPENT
from tfive_lab.study_tables import drawn

RESULTS = "smollm2-lookahead.json"
WRITERS = {"writer": "in the text", "gated-writer": "behind gates"}
"""Runs without careful reading, and where their thoughts are read."""
READERS = {"t5": "T⁵", "anchor-only": "anchors alone", "t5-slow": "T⁵"}
"""Runs after careful reading."""
TOLD = "told.json"
GAINS = {"thought_gain": "thought gain", "content_gain": "content gain", "empty_gain": "empty"}
LOSS = "no_thought_loss"
KINDS = {
    "own": "the model's own guess",
    "best_or_none": "the best of eight guesses or none, picked with the continuation in sight",
    "other": "a guess of another text",
    "own − other": "own minus another's",
    "before": "the last content words before the place, by a program",
    "own − before": "own minus these",
    "empty": "nothing between the delimiters",
    "random": "random tokens",
    "true": "the words to come",
    "true_other": "the words to come of another text",
}
Found = dict[str, Any]


def collected(runs: Path, code: str) -> Found:
    """What the runs measured, their warm starts, and what guesses of the writer were worth."""
    found: Found = {"model": "SmolLM2-135M-Instruct (Q4_1, de-quantised)", "code": code, "runs": {}}
    for name in (*WRITERS, *READERS):
        if not (runs / name / "metrics.jsonl").is_file():
            raise UserError(f"--lookahead {runs}: no run {name} in it; docs/studies/smollm2-study.md has the commands")
        found["runs"][name] = _read(_run, runs / name, "is cut off or no run; run it again")
    return {**found, "told": _read(_told, runs / "writer" / TOLD, "not what lookahead_gains.py prints")}


def _read(reader: Callable[[Path], Found], path: Path, otherwise: str) -> Found:
    try:
        return reader(path)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"{path}: {otherwise} ({error!r:.80})") from error


def _told(path: Path) -> Found:
    told = json.loads(path.read_text("utf-8"))
    told["words"] = {name: one for name, one in told["words"].items() if name in KINDS}
    kept = (*KINDS, "mean", "loss", "items", "texts", "thoughts", "length", "closed", "words")
    return {name: told[name] for name in kept}


def _run(folder: Path) -> Found:
    config = tomllib.loads((folder / "config.toml").read_text("utf-8"))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
    measured = {int(line["step"]): line for line in lines if "development.content_gain" in line}
    windows = [line for line in lines if "r2.1" in line]
    start = {key: one for key, one in read_json(folder / "warmstart.json").items() if key != SPENT}
    return {
        "method": config["method"],
        "settings": {
            "thought.reading": config["thought"]["reading"],
            "run.seed": config["run"]["seed"],
            "window.windows": config["window"]["windows"],
            **{f"warmstart.{key}": config["warmstart"][key] for key in ("steps", "lr", "reading")},
        },
        "warmstart": _short(start),
        "measured": [{"window": window, **_gains(line)} for window, line in sorted(measured.items())],
        "texts": int(measured[0]["development.texts"]),
        "test": _test(folder / SUMMARY),
        "r2": [[round(line["r2.1"], 4), round(line["r2.2"], 4)] for line in windows],
        "admitted": sum(bool(line.get("actor_updates.qualified")) for line in windows),
        "actor_thoughts": read_json(folder / "status.json")["account"]["roles"]["actor"]["trajectories"],
    }


def _test(path: Path) -> Found | None:
    """Gains on test texts before rewards, and in the end with intervals; None where a run did not come to them."""
    summary = read_json(path) if path.is_file() else {}
    if "test_thought_gain_end" not in summary:
        return None
    names = ("thought_gain", "content_gain")
    ends = {name: [summary[f"test_{name}_end"], *summary[f"test_{name}_interval"][-2:]] for name in names}
    found: Found = _short({"start": {name: summary[f"test_{name}_start"] for name in names}, **ends})
    return found


def _short(value: Any) -> Any:
    """Numbers of a report to five places."""
    if isinstance(value, dict):
        return {key: _short(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_short(one) for one in value]
    return round(value, 5) if isinstance(value, float) else value


def _gains(line: Found) -> Found:
    keys = {name: [f"development.{name}", *(f"development.{name}_interval.{end}" for end in (1, 2))] for name in GAINS}
    loss = round(line[f"development.{LOSS}"], 5)
    return {**{name: [round(line[key], 5) for key in names] for name, names in keys.items()}, LOSS: loss}


def course(found: Found) -> str:
    """Development texts as the model comes, after writing, after careful reading, and as training goes on."""
    runs = found["runs"]
    before = runs["writer"]["warmstart"]["before"]
    told = (signed(before["thought_gain"]), signed(before["content_gain"]), "–")
    rows: list[Sequence[str]] = [("as it comes, read in the text", "–", *told, f"{before[LOSS]:.3f}")]
    for name, where in WRITERS.items():
        rows.append(_row(f"after writing, read {where}", runs[name]["measured"][0]))
    for name in ("t5", "t5-slow"):
        rate = f"{runs[name]['settings']['warmstart.lr']:g}"
        rows.append(_row(f"after writing and careful reading at {rate}", runs[name]["measured"][0]))
        same = [one for one in READERS if runs[one]["warmstart"]["after"] == runs[name]["warmstart"]["after"]]
        rows += [_row(f"{READERS[one]} after it", runs[one]["measured"][-1]) for one in same]
    return drawn(("model", "window", *GAINS.values(), "loss without"), rows)


def _row(title: str, one: Found) -> Sequence[str]:
    when = str(one["window"]) if one["window"] else "–"
    return title, when, *(spread(one[key]) for key in GAINS), f"{one[LOSS]:.3f}"


def worth(found: Found) -> str:
    """What kinds of guesses are worth, and what their words are."""
    told = found["told"]
    rows = []
    for name, title in KINDS.items():
        words = told["words"].get(name)
        said = (f"{words[0]:.1f}", *(f"{100 * one:.1f} %" for one in words[1:])) if words and words[0] else ["–"] * 3
        rows.append((title, spread(told[name]), *said))
    return drawn(("thought", "nats a token", "words", "of them that come", "that stood before"), rows)


def spread(one: Sequence[float]) -> str:
    """A mean with its interval."""
    mean, low, high = map(signed, one)
    return f"{mean} ({low} … {high})"


def signed(value: float) -> str:
    """A gain with its sign and three decimals."""
    return f"{value:+.3f}".replace("-", "−")

"""The search for settings: which trial of every method did best, and the configuration of a cell that follows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plan import PRESET, RESULT, SETTINGS, TRIALS

from tfive.config.config import Config, read_source
from tfive.errors import UserError
from tfive.report.runs import read_json
from tfive.training.cells import configured
from tfive.training.summary import SUMMARY

JUDGED_BY = "content_gain"
"""What the search maximises; results from before it was this name `gain_vs_base`."""


def merit(method: str, last: dict[str, Any]) -> float:
    """What the search maximises: the final content gain. Gains against no thought also rise by learning to read past
    thoughts, which the fastest rate does best. NTP writes no thoughts, so its loss without one counts.
    """
    return -float(last["no_thought_loss"]) if method == "ntp" else float(last[JUDGED_BY])


def trials(runs: Path) -> list[dict[str, Any]]:
    """One row for every trial that has been run, failed ones and ones outside the plan included."""
    found = []
    for path in sorted((runs / "search").glob(f"*/{RESULT}")):
        result = read_json(path)
        method, _, trial = result["label"].partition("+")
        row = {"method": method, "trial": trial, "seconds": result["seconds"], "failure": result.get("failure")}
        if (path.parent / SUMMARY).is_file():
            last = read_json(path.parent / SUMMARY)["history"][-1]
            names = ("thought_gain", "content_gain", "gain_vs_base", "mixed_gain", "no_thought_loss")
            row |= {name: last.get(name) for name in names} | {"merit": merit(method, last)}
        found.append(row)
    return found


def chosen(runs: Path) -> dict[str, str]:
    """The best planned trial of every method; a method whose trials have not all ended is missing."""
    found: dict[str, str] = {}
    for method, planned in TRIALS.items():
        tried = [row for row in trials(runs) if row["method"] == method and row["trial"] in planned]
        finished = [row for row in tried if "merit" in row]
        if len(tried) == len(planned) and finished:
            found[method] = max(finished, key=lambda row: row["merit"])["trial"]
    return found


def configuration(study: str, label: str, seed: int, runs: Path, overrides: Sequence[str]) -> Config:
    """The configuration of a cell: the preset, the search's choice for its method, then what its label adds."""
    method, *rest = label.split("+")
    taken = "" if study == "search" or method == "base" else chosen(runs).get(method)
    if taken is None:
        raise UserError(f"{label}: the search of {method} is not finished in {runs}; run all its trials first")
    # Values in a label override presets whatever their order: leave out of the choice what an ablation preset sets.
    own = {key for part in rest if "=" not in part for key in read_source(part)}
    kept = [part for part in taken.split("+") if part and part.partition("=")[0] not in own]
    words = [*overrides, *SETTINGS.get(study, ())]
    return configured([PRESET], "+".join((method, *kept, *rest)), seed, words)


def taken_pair(runs: Path) -> str | None:
    """The pair of critics that the search chose for T⁵, None before it has."""
    return dict(part.split("=") for part in chosen(runs).get("t5", "").split("+") if part).get("critic.pair")

"""Seconds of training: each method's windows were timed on a device of its own, and its runs are charged by that.

Cells of the main study may share a device, so their own seconds say little. The cells of `clock` time three windows of
every method with nothing else on the device.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from plan import RESULT, cells, folder_name

from tfive.report.runs import Run, read_json, training_seconds
from tfive.training.summary import SUMMARY


@dataclass(frozen=True)
class Clock:
    """Seconds of a method's windows on a device of its own, by phase."""

    windows: list[dict[str, float]]
    """Seconds by phase of each window that was timed; the first includes the warm-up."""
    thoughts: list[int]
    """How many thoughts were drawn in each window."""

    @classmethod
    def of(cls, laps: Sequence[dict[str, Any]]) -> Clock:
        """From a summary's `laps`, whose seconds and thoughts add up from the start of the run."""
        each = [_spent_in(lap, before) for before, lap in pairwise([None, *laps]) if lap is not None]
        drawn = [after - before for before, after in pairwise([0, *(lap["trajectories"] for lap in laps)])]
        return cls(each, drawn)

    def window(self, number: int, thoughts: int) -> dict[str, float]:
        """Seconds by phase that window `number` (from 1) is charged when so many thoughts are drawn in it.

        The first window costs what the first timed one did, others the mean of the later timed ones. Windows in which
        critics are refitted draw more thoughts: where the timed windows differ in that, a line through them is used.
        """
        later = self.windows[1:] or self.windows
        timed = self.thoughts[1:] or self.thoughts
        if number == 1:
            rates = {name: _line(timed, [one.get(name, 0.0) for one in later])[1] for name in self.windows[0]}
            more = max(thoughts - self.thoughts[0], 0)
            return {name: spent + rates[name] * more for name, spent in self.windows[0].items()}
        lines = {name: _line(timed, [one.get(name, 0.0) for one in later]) for name in later[-1]}
        # The line is not extended to windows with fewer thoughts than were timed.
        return {name: start + rate * max(thoughts, min(timed)) for name, (start, rate) in lines.items()}


def _line(thoughts: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Intercept and slope of seconds over thoughts; 0 as slope if it is negative or thoughts hardly differ."""
    if max(thoughts) > 1.1 * min(thoughts):
        rate, start = np.polyfit(thoughts, seconds, 1)
        if rate > 0:
            return float(start), float(rate)
    return statistics.fmean(seconds), 0.0


def _spent_in(lap: dict[str, Any], before: dict[str, Any] | None) -> dict[str, float]:
    """Seconds by phase of one window: its lap minus the lap before."""
    return {
        name: spent - (before["seconds"].get(name, 0.0) if before else 0.0) for name, spent in lap["seconds"].items()
    }


@dataclass(frozen=True)
class Clocked(Run):
    """A run whose seconds are replaced by what its method's clock charges; as it is without a clock."""

    clock: Clock | None = field(default=None)

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The run's summary, seconds of laps and measurements replaced."""
        found = read_json(self.folder / SUMMARY)
        if self.clock is not None:
            spent: dict[int, dict[str, float]] = {0: {}}
            thoughts = 0
            for lap in found["laps"]:
                one = self.clock.window(lap["window"], lap["trajectories"] - thoughts)
                so_far = spent[lap["window"] - 1]
                spent[lap["window"]] = {name: so_far.get(name, 0.0) + seconds for name, seconds in one.items()}
                thoughts = lap["trajectories"]
                lap["seconds"] = spent[lap["window"]]
            for measured in found["history"]:
                measured["cost"]["seconds"] = spent[measured["window"]]
        return found


def clocks(runs: Path) -> dict[str, Clock]:
    """The clock of every method; empty if any method of `main` lacks one, as charged and own seconds do not compare."""
    found: dict[str, Clock] = {}
    asked: set[str] = set()
    for path in sorted((runs / "main").glob(f"*/{RESULT}")):
        result = read_json(path)
        if result["label"] in asked or result["label"] == "base" or not (path.parent / SUMMARY).is_file():
            continue
        asked.add(result["label"])
        clock = _clock_beside(runs / "clock" / folder_name(result["label"], 0), result, path.parent)
        found |= {result["label"]: clock} if clock else {}
    return found if len(found) == len(asked) else {}


def _clock_beside(folder: Path, cell: dict[str, Any], run: Path) -> Clock | None:
    """The clock of a cell: None if it shared its device, or had another device or other settings than the cell."""
    if not (folder / RESULT).is_file() or not (folder / SUMMARY).is_file():
        return None
    mine, summary = read_json(folder / RESULT), read_json(folder / SUMMARY)
    alike = all(mine.get(key) == cell.get(key) for key in ("optimizer.lr", "critic.pair"))
    there = read_json(run / SUMMARY)["place"].get("device_name")
    if mine["disturbed"] or not alike or summary["place"].get("device_name") != there or not summary["laps"]:
        return None
    return Clock.of(summary["laps"])


def runs_of(study: str, runs: Path) -> list[Run]:
    """The cells of a study that have a result, in the order of the plan; variants follow their methods from `main`."""
    clock, found = clocks(runs) if study == "main" else {}, []
    paths = sorted((runs / study).glob(f"*/{RESULT}"))
    if study in ("ablations", "changes"):
        for method in sorted({label.partition("+")[0] for label, _ in cells(study, 1)}):
            paths += sorted((runs / "main").glob(f"{folder_name(method, 0)[:-1]}*/{RESULT}"))
    for path in paths:
        result = read_json(path)
        known = clock.get(result["label"])
        apart = bool(result["disturbed"]) and known is None and result["label"] != "base"
        facts = (result["label"], int(result["seed"]), path.parent, result.get("failure"))
        found.append(Clocked(*facts, disturbed=apart, clock=known))
    order = {label: place for place, (label, _) in enumerate(cells(study, 1))}
    return sorted(found, key=lambda run: (order.get(run.label, -1), "+" in run.label, run.label, run.seed))


def timed_windows(runs: Path) -> dict[str, list[dict[str, Any]]]:
    """The timed windows of every method as plain data."""
    return {
        label: [
            {"thoughts": thoughts, "seconds": round(training_seconds({"seconds": window}), 4)}
            | {"phases": {name: round(spent, 4) for name, spent in window.items()}}
            for window, thoughts in zip(clock.windows, clock.thoughts)
        ]
        for label, clock in clocks(runs).items()
    }

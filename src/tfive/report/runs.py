"""The folder of a run read as plain data: summary, measurements item by item, events, failure."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file

from tfive.errors import UserError

STUDY, SUMMARY, METRICS, ITEMS = "study.json", "summary.json", "metrics.jsonl", "test"
CONFIG, STATUS = "config.toml", "status.json"

ItemArrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Run:
    """One run: a (method, seed) cell of a study, or a run by itself."""

    label: str
    seed: int
    folder: Path
    failure: str | None = None
    disturbed: bool = False
    """Whether other processes shared the machine, so that its seconds are unreliable."""

    @property
    def state(self) -> str:
        """`done`, `failed`, `running`, `stopped`, `unfinished` (it ended without a word) or `missing`."""
        if (self.folder / SUMMARY).is_file():
            return "done"
        if self.failure is not None:
            return "failed"
        if not self.folder.is_dir():
            return "missing"
        said = self.status.get("state")
        if said == "running" and not _works(self.status):
            return "unfinished"
        return said if said in ("running", "stopped", "failed") else "unfinished"

    @cached_property
    def status(self) -> dict[str, Any]:
        """What the run last said of itself; empty for one that says nothing."""
        path = self.folder / STATUS
        return read_json(path) if path.is_file() else {}

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The summary of a finished run."""
        return read_json(self.folder / SUMMARY)

    @cached_property
    def history(self) -> list[dict[str, Any]]:
        """Every measurement on development texts, the first before training."""
        return list(self.summary["history"])

    @property
    def test(self) -> dict[str, Any]:
        """The measurements on test texts, `before` (the base model) and `after` training."""
        if "test" not in self.summary:
            raise UserError(f"{self.folder}: no test texts were measured (an earlier tfive wrote it); train it again")
        found: dict[str, Any] = self.summary["test"]
        return found

    @cached_property
    def items(self) -> ItemArrays:
        """The gains on test texts, item by item (the checkpoint rule: the last, whatever it shows)."""
        window = self.summary["windows"]
        path = self.folder / ITEMS / f"window-{window:05d}.safetensors"
        if not path.is_file():
            raise UserError(f"{path} is missing; the run {self.folder} cannot be compared item by item without it")
        try:
            return load_file(path)
        except (SafetensorError, ValueError, TypeError) as error:
            raise UserError(
                f"{path}: holds no gains item by item ({error!r:.80}); restore it, or run it again"
            ) from error

    @cached_property
    def step_seconds(self) -> list[float]:
        """Training seconds of each window divided by its optimizer steps; measuring and saving are left out."""
        spent = [0.0, *(training_seconds(lap) for lap in self.summary["laps"])]
        steps = max(1, int(self.summary["actor_steps"]))
        return [(after - before) / steps for before, after in pairwise(spent)]

    @cached_property
    def phase_seconds(self) -> dict[str, float]:
        """Mean seconds a window of each phase."""
        laps = self.summary["laps"]
        return {} if not laps else {name: spent / len(laps) for name, spent in laps[-1]["seconds"].items()}

    @property
    def warmup_seconds(self) -> float:
        """Seconds of the open, fit and qualify phases before critics first drove an actor update."""
        laps = self.summary["laps"][self.starting_windows - 1 :]
        return sum(laps[0]["seconds"].get(phase, 0.0) for phase in ("open", "fit", "qualify")) if laps else 0.0

    @property
    def starting_windows(self) -> int:
        """Windows until the warm-up is over: up to the first that fitted critics, one where no critic is fitted."""
        fitted = (number for number, lap in enumerate(self.summary["laps"], 1) if lap["seconds"].get("fit"))
        return next(fitted, 1)

    def metrics(self) -> list[dict[str, Any]]:
        """Every line of numbers and every event, in the order of writing."""
        path = self.folder / METRICS
        return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.is_file() else []


def _works(status: dict[str, Any]) -> bool:
    """Whether the process that wrote a status is there; one of another machine is taken at its word."""
    process = status.get("process")
    if status.get("machine") != platform.node() or os.name != "posix" or not isinstance(process, int):
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it is there, and somebody else's
    return True


def training_seconds(cost: dict[str, Any]) -> float:
    """Seconds of whole phases; a phase inside another is part of it."""
    return sum(spent for phase, spent in cost["seconds"].items() if "/" not in phase)


def read_json(path: Path) -> dict[str, Any]:
    """The object a file holds; a `UserError` where it holds none."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path}: cannot be read ({error}); name a folder that tfive train or tfive compare wrote"
        ) from error
    if not isinstance(found, dict):
        raise UserError(f"{path}: holds no JSON object; name a folder that tfive train or tfive compare wrote")
    return found


def read_study(folder: Path) -> list[Run]:
    """The cells of a study in the order they were asked for."""
    return [
        Run(cell["label"], int(cell["seed"]), folder / cell["folder"], cell.get("failure"), bool(cell.get("disturbed")))
        for cell in read_json(folder / STUDY)["cells"]
    ]


def done(runs: Sequence[Run]) -> list[Run]:
    """The finished ones."""
    return [run for run in runs if run.state == "done"]


def mismatches(runs: Sequence[Run]) -> list[str]:
    """Why these runs cannot be compared in one table: one line per difference.

    Everything in a run's identity must be equal, and the optimizer steps of a window, so that equal windows are equal
    steps; runs of one seed must also have drawn the same actor texts in every window they share, for as long as they
    draw texts that all methods have in common for the first time.
    """
    finished = done(runs)
    found: list[str] = []
    for run in finished[1:]:
        mine, other = (
            {**one.summary["identity"], "window.actor_steps": one.summary["actor_steps"]} for one in (finished[0], run)
        )
        names = finished[0].folder.name, run.folder.name
        found += [
            f"{key}: {_short(mine.get(key))} in {names[0]}, {_short(other.get(key))} in {names[1]}"
            for key in sorted({*mine, *other})
            if mine.get(key) != other.get(key)
        ]
    drawn: dict[tuple[int, int], tuple[str, str]] = {}
    for run in finished:
        for lap in run.summary["laps"]:
            if lap["actor_items"] is None:
                continue
            before = drawn.setdefault((run.seed, lap["window"]), (lap["actor_items"], run.folder.name))
            if before[0] != lap["actor_items"]:
                found.append(f"actor items of window {lap['window']}: {before[1]} and {run.folder.name} differ")
    return found


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 24 else f"{text[:21]}…"

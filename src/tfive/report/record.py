"""What any run has left in its folder, in one form: finished, running, stopped, failed, or of an older version.

A finished run is read from its summary; any other from its configuration, its metrics, and the costs and the status it
writes as it goes. What is not there is empty, never an error.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tfive.report.runs import CONFIG, METRICS, ItemArrays, Run, training_seconds

COSTS, DEVELOP = "costs.jsonl", "develop"
DEVELOPMENT = "development."


@dataclass(frozen=True)
class RunRecord:
    """One run as far as it has come."""

    run: Run

    @property
    def folder(self) -> Path:
        return self.run.folder

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The summary; empty where the run has none yet."""
        return self.run.summary if self.run.state == "done" else {}

    @cached_property
    def config(self) -> dict[str, Any]:
        """The configuration as written; empty where it is missing or damaged."""
        try:
            return tomllib.loads((self.folder / CONFIG).read_text("utf-8"))
        except (OSError, ValueError):
            return {}

    def setting(self, path: str, default: Any = None) -> Any:
        """One value of the configuration, by its dotted key; TOML writes none as `"none"`."""
        found: Any = self.config
        for part in path.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        return default if found is None or found == "none" else found

    @property
    def method(self) -> str:
        return str(self.summary.get("method") or self.setting("method") or self.run.label)

    @property
    def model(self) -> str:
        return str(self.summary.get("model") or self.setting("model.name") or "an unknown model")

    @property
    def seed(self) -> int:
        return int(self.summary.get("seed", self.setting("run.seed", self.run.seed)))

    @property
    def failure(self) -> str | None:
        """Why it is not finished, in one line that names no folder: a page goes further than the machine."""
        said = self.run.failure or self.run.status.get("failure")
        if self.run.state in ("done", "running") or not said:
            return None
        return str(said).partition(" (the last checkpoint is in ")[0].partition(": saved in ")[0]

    @cached_property
    def lines(self) -> list[dict[str, Any]]:
        """Every whole line of the metrics; one that is being written is left for the next time."""
        return list(_json_lines(self.folder / METRICS))

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if "event" in line]

    @cached_property
    def metrics(self) -> dict[int, dict[str, Any]]:
        """Window → its numbers; those of the measurement before training are window 0's."""
        found: dict[int, dict[str, Any]] = {}
        for line in self.lines:
            if "event" not in line and isinstance(line.get("step"), int):
                found.setdefault(line["step"], {}).update(line)
        return found

    @cached_property
    def costs(self) -> dict[int, dict[str, Any]]:
        """Window → what had been spent when it closed."""
        if self.summary:
            found = {one["window"]: one.get("cost", {}) for one in self.history}
            return found | {lap["window"]: {**found.get(lap["window"], {}), **lap} for lap in self.summary["laps"]}
        return {line["window"]: line for line in _json_lines(self.folder / COSTS) if "window" in line}

    @cached_property
    def history(self) -> list[dict[str, Any]]:
        """Every measurement on development texts, as a summary has them."""
        if self.summary:
            return list(self.summary["history"])
        costs = self.costs
        return [
            {"window": window, "cost": costs.get(window, {}), **_measured(values)}
            for window, values in sorted(self.metrics.items())
            if f"{DEVELOPMENT}thought_gain" in values
        ]

    @property
    def windows(self) -> int:
        """Closed windows."""
        return int(self.summary.get("windows") or max(self.costs, default=0))

    @property
    def planned(self) -> int | None:
        """Windows asked for; of a finished run that a clock could end, those it had."""
        if self.summary and self.setting("run.seconds") is not None:
            return self.windows
        found = self.setting("window.windows")
        return int(found) if isinstance(found, int) else self.summary.get("windows")

    @property
    def account(self) -> dict[str, Any]:
        return self.summary.get("account") or self.run.status.get("account") or {}

    def items(self, window: int) -> ItemArrays:
        """Gains item by item of one measurement; empty where they were not kept."""
        from safetensors.numpy import load_file

        path = self.folder / DEVELOP / f"window-{window:05d}.safetensors"
        return load_file(path) if path.is_file() else {}

    def at(self, window: int, axis: str) -> float | None:
        """How much of a budget had been spent when a window closed; None where it was not kept."""
        if axis == "windows":
            return float(window)
        cost = self.costs.get(window, {})
        if axis == "seconds" and "seconds" in cost:
            return training_seconds(cost)
        if axis == "seconds":
            # Without costs, seconds of the clock.
            return self.metrics.get(window, {}).get("seconds")
        found = cost.get(axis)
        return None if found is None else float(found)


def _measured(values: dict[str, Any]) -> dict[str, Any]:
    """The numbers of a measurement with their intervals as pairs, from the dotted names of the metrics."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if not key.startswith(DEVELOPMENT):
            continue
        name, _, end = key.removeprefix(DEVELOPMENT).partition(".")
        if end:
            found.setdefault(name, [None, None])[int(end) - 1] = value
        else:
            found[name] = value
    return found


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines, without a last line that is not whole."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            found = json.loads(line)
            if isinstance(found, dict):
                yield found

"""Benchmarks over training: the records that `[benchmarks]` leaves in `metrics.jsonl`, and their figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tfive.report.figures import PALETTE, Drawn, plotting
from tfive.report.runs import Run

PREFIX = "benchmarks."
SCORES = "Benchmark scores over training time (measuring left out), one line a run"
GAINS = "Thought and mixed gain before right answers, nats per token, over steps"
SPENT = ("steps", "seconds", "tokens")
"""What had been spent at a measurement: optimizer steps, seconds of training alone, thought tokens."""


def read_benchmarks(run: Run) -> list[dict[str, Any]]:
    """A run's measurements in their order: `steps`, `seconds`, `tokens`, and `tasks` as task → measure → number."""
    points = []
    for line in run.metrics():
        own = {name.removeprefix(PREFIX): value for name, value in line.items() if name.startswith(PREFIX)}
        if not own:
            continue
        tasks: dict[str, dict[str, float | None]] = {}
        for name, value in own.items():
            task, dot, measure = name.partition(".")
            if dot:
                tasks.setdefault(task, {})[measure] = value
        points.append({name: own[name] for name in SPENT} | {"tasks": tasks})
    return points


def curves(points: Sequence[dict[str, Any]], measure: str) -> dict[str, list[tuple[dict[str, Any], float]]]:
    """Task → its points that have this measure, each with what had been spent; `mean` over tasks where all have it."""
    tasks = list(dict.fromkeys(task for point in points for task in point["tasks"]))
    found: dict[str, list[tuple[dict[str, Any], float]]] = {}
    for task in tasks:
        own = [(point, point["tasks"][task].get(measure)) for point in points if task in point["tasks"]]
        kept = [(point, float(value)) for point, value in own if value is not None]
        found |= {task: kept} if kept else {}
    together = [
        point for point in points if all(point["tasks"].get(task, {}).get(measure) is not None for task in found)
    ]
    if len(found) > 1 and together:
        found["mean"] = [
            (point, sum(point["tasks"][task][measure] for task in found) / len(found)) for point in together
        ]
    return found


def draw_benchmarks(runs: Sequence[Run], folder: Path) -> Drawn:
    """Scores over training time, and gains over steps, of every run that measured any; nothing where none did."""
    read = [(run, read_benchmarks(run)) for run in runs]
    found = [(run, points) for run, points in read if points]
    drawn: Drawn = []
    if not found:
        return drawn
    folder.mkdir(parents=True, exist_ok=True)
    wanted = (
        (("score",), "seconds", "benchmark_scores.png", SCORES),
        (("thought_gain", "mixed_gain"), "steps", "benchmark_gains.png", GAINS),
    )
    for measures, axis, name, caption in wanted:
        if any(curves(points, measure) for _, points in found for measure in measures):
            _panels(found, measures, axis, folder / name)
            drawn.append((name, caption))
    return drawn


def _panels(found: Sequence[tuple[Run, list[dict[str, Any]]]], measures: Sequence[str], axis: str, path: Path) -> None:
    """One panel a task, one row a measure, one colour a label."""
    plt = plotting()
    colours = {label: PALETTE[n % len(PALETTE)] for n, label in enumerate(dict.fromkeys(run.label for run, _ in found))}
    lines = {measure: [(run, curves(points, measure)) for run, points in found] for measure in measures}
    tasks = list(dict.fromkeys(task for own in lines.values() for _, one in own for task in one))
    figure, cells = plt.subplots(
        len(measures), len(tasks), figsize=(4.2 * len(tasks), 3.2 * len(measures)), squeeze=False
    )
    for row, measure in enumerate(measures):
        for column, task in enumerate(tasks):
            cell = cells[row][column]
            for run, one in lines[measure]:
                points = [(point[axis], value) for point, value in one.get(task, ())]
                if points:
                    cell.plot(*zip(*points), color=colours[run.label], marker=".", lw=1)
            if measure != "score":
                cell.axhline(0, color="#999999", lw=0.5)
            cell.set(
                title=task, xlabel={"seconds": "seconds of training"}.get(axis, axis), ylabel=measure.replace("_", " ")
            )
    handles = [plt.Line2D([], [], color=colour, label=label) for label, colour in colours.items()]
    figure.legend(handles=handles, loc="upper center", ncols=min(len(handles), 7), frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.94))
    figure.savefig(path, dpi=110)
    plt.close(figure)

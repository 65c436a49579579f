"""Pictures of a study or a run, drawn from its table alone. Needs matplotlib (the extra `figures`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tfive.errors import UserError
from tfive.extras import install_hint
from tfive.report.sections import TITLES
from tfive.report.table import AXES, StudyTable

CURVES = ("thought_gain", "content_gain", "mixed_gain", "useful_fraction", "worst_1_percent", "no_thought_drift")
CONTROLS = (
    "other_gain", "empty_gain", "random_gain", "mixed_gain_constant", "mixed_gain_oracle", "mixed_gain_other",
)  # fmt: skip
PALETTE = ("#1f5fa8", "#a2323a", "#3b7d4f", "#b58b00", "#6b4fa0", "#5b6770", "#c46a1a", "#2a9d9d")

Drawn = list[tuple[str, str]]
"""File name and caption of each picture."""


def plotting() -> Any:
    """matplotlib's pyplot, drawing to files; a `UserError` names the extra where it is missing."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise UserError(f"figures need matplotlib: {install_hint('figures')}") from error
    return plt


def available() -> bool:
    """Whether figures can be drawn here."""
    import importlib.util

    return importlib.util.find_spec("matplotlib") is not None


def draw_study(found: StudyTable, folder: Path) -> Drawn:
    """Curves against every kind of cost, step times with their medians, and thoughts per actor item."""
    folder.mkdir(parents=True, exist_ok=True)
    own = "Development texts: one line a seed, nats per token against each cost"
    controls = "The same of what does not think: another's, no and random thoughts, and other gates"
    drawn = [
        _curves(found, CURVES, folder / "curves.png", own),
        _curves(found, CONTROLS, folder / "controls.png", controls),
    ]
    if any(run.get("step_seconds") for run in found["runs"]):
        drawn += [_step_times(found, folder), _rollouts(found, folder)]
    return drawn


def _colours(found: StudyTable) -> dict[str, str]:
    labels = list(dict.fromkeys(run["label"] for run in found["runs"]))
    return {label: PALETTE[number % len(PALETTE)] for number, label in enumerate(labels)}


def _curves(found: StudyTable, names: Sequence[str], path: Path, caption: str) -> tuple[str, str]:
    plt, colours = plotting(), _colours(found)
    shown = [name for name in names if any(name in point for run in found["runs"] for point in run.get("curve", ()))]
    figure, cells = plt.subplots(len(shown), len(AXES), figsize=(15, 2.5 * len(shown)), sharey="row", squeeze=False)
    for row, name in enumerate(shown):
        for column, axis in enumerate(AXES):
            cell = cells[row][column]
            for run in found["runs"]:
                points = [(p[axis], p[name]) for p in run.get("curve", ()) if name in p]
                cell.plot(*zip(*points), color=colours[run["label"]], alpha=0.75, marker=".", lw=1) if points else None
            if name != "useful_fraction":
                cell.axhline(0, color="#999999", lw=0.5)
            cell.set_xlabel(TITLES[axis] if row == len(shown) - 1 else "")
            cell.set_ylabel(TITLES[name] if column == 0 else "")
    handles = [plt.Line2D([], [], color=colour, label=label) for label, colour in colours.items()]
    figure.legend(handles=handles, loc="upper center", ncols=min(len(handles), 7), frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.96))
    return _save(figure, path, caption)


def _step_times(found: StudyTable, folder: Path) -> tuple[str, str]:
    plt, colours = plotting(), _colours(found)
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 4))
    for run in found["runs"]:
        if run.get("step_seconds"):
            windows = range(1, len(run["step_seconds"]) + 1)
            left.plot(windows, run["step_seconds"], ".", color=colours[run["label"]], alpha=0.4)
            left.plot(windows, run["step_seconds_median_15"], color=colours[run["label"]], lw=1.2)
    left.set(xlabel="window", ylabel="seconds a step", title="raw values and medians of 15")
    rows = [row for row in found["methods"] if "step_time" in row]
    phases = list(dict.fromkeys(p for row in rows for p in row["step_time"]["phases_per_window"] if "/" not in p))
    below = [0.0] * len(rows)
    for number, phase in enumerate(phases):
        heights = [
            row["step_time"]["phases_per_window"].get(phase, 0.0) / max(row["step_time"]["steps_per_window"], 1)
            for row in rows
        ]
        right.bar(range(len(rows)), heights, bottom=below, label=phase, color=PALETTE[number % len(PALETTE)])
        below = [low + height for low, height in zip(below, heights)]
    right.set_xticks(range(len(rows)), [row["label"] for row in rows], rotation=30, ha="right", fontsize=8)
    right.set(ylabel="seconds a step", title="by phase (all windows)")
    right.legend(fontsize=8, frameon=False)
    figure.tight_layout()
    return _save(figure, folder / "step_time.png", "Step time: raw values, rolling medians of 15, and phases")


def _rollouts(found: StudyTable, folder: Path) -> tuple[str, str]:
    plt = plotting()
    rows = [row for row in found["methods"] if "rollouts" in row]
    figure, cell = plt.subplots(figsize=(7, 3.5))
    places = range(len(rows))
    actor = [row["rollouts"]["actor_per_item"] for row in rows]
    cell.bar(places, actor, label="actor", color=PALETTE[0])
    other = [row["rollouts"]["auxiliary_per_item"] for row in rows]
    cell.bar(places, other, bottom=actor, label="auxiliary", color=PALETTE[3])
    cell.axhline(8, color="#333333", lw=0.8, ls="--", label="groups of 8")
    cell.set_xticks(places, [row["label"] for row in rows], rotation=30, ha="right", fontsize=8)
    cell.set_ylabel("thoughts an actor item")
    cell.legend(fontsize=8, frameon=False)
    figure.tight_layout()
    return _save(figure, folder / "rollouts.png", "Thoughts generated per actor item, against groups of eight")


def draw_warmup(points: Sequence[dict[str, Any]], path: Path) -> tuple[str, str]:
    """Final score against measured warm-up time, one point per run, labelled by the threshold η."""
    plt = plotting()
    figure, cells = plt.subplots(1, 2, figsize=(11, 4))
    for cell, name in zip(cells, ("thought_gain", "content_gain")):
        for point in points:
            cell.plot(point["warmup_seconds"], point[name], "o", color=PALETTE[0])
            cell.annotate(f" η {point['eta']:g}", (point["warmup_seconds"], point[name]), fontsize=7)
        cell.set(xlabel="seconds before the actor moved", ylabel=f"{TITLES[name]} at the end")
    figure.tight_layout()
    return _save(figure, path, "Warm-up sweep: final gains against measured warm-up time")


def draw_diagnostic(curves: Sequence[Sequence[dict[str, Any]]], frozen: int, path: Path) -> tuple[str, str]:
    """Thought and mixed gain, useful positions and worst 1 % against steps; shaded while the actor is frozen."""
    plt = plotting()
    figure, cells = plt.subplots(1, 2, figsize=(12, 4))
    pairs = (("thought_gain", "mixed_gain"), ("useful_fraction", "worst_1_percent"))
    for cell, (first, second) in zip(cells, pairs):
        twin = cell.twinx()
        for curve in curves:
            for axis, name, colour in ((cell, first, PALETTE[0]), (twin, second, PALETTE[1])):
                points = [(point["windows"], point[name]) for point in curve if name in point]
                axis.plot(*zip(*points), color=colour, marker=".", lw=1) if points else None
        cell.axvspan(0, frozen, color="#dddddd", zorder=0)
        cell.set_xlabel("steps")
        cell.set_ylabel(TITLES[first], color=PALETTE[0])
        twin.set_ylabel(TITLES[second], color=PALETTE[1])
    figure.tight_layout()
    return _save(figure, path, f"Naive PPO: the actor is frozen for the first {frozen} steps (shaded)")


def _save(figure: Any, path: Path, caption: str) -> tuple[str, str]:
    figure.set_layout_engine(None)  # everything has its place, and is not drawn once more to find it
    figure.savefig(path, dpi=110)
    plotting().close(figure)
    return path.name, caption

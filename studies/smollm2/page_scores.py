"""The page's section on benchmarks: accuracy of every method, and over training."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plan import LONGEST, SCORED, WRITTEN

from tfive.report import figures
from tfive.report.blocks import Block, paragraph, picture, table
from tfive.report.sections import interval


def score_blocks(rows: Sequence[dict[str, Any]]) -> list[Block]:
    """Accuracy by method and benchmark, then the same minus the base model's."""
    if not rows:
        return [paragraph("No benchmark was asked yet.")]
    by = {(row["label"], row["task"]): row for row in rows}
    labels = list(dict.fromkeys(row["label"] for row in rows))
    tasks = [task for task in (*SCORED, *WRITTEN) if any(row["task"] == task for row in rows)]
    shown = [(label, *(interval(by.get((label, task)), ".4f") for task in tasks)) for label in labels]
    written = f" ({', '.join(WRITTEN)}: of one written answer of up to {LONGEST} tokens, greedily; of the seeds asked)"
    return [
        paragraph(
            f"Accuracy without thoughts, whole benchmarks, over seeds and items at once, by log-likelihood"
            f"{written if set(WRITTEN) & set(tasks) else ''}."
        ),
        table(("method", *tasks), shown),
        paragraph("The same minus the base model's, paired by item:"),
        table(
            ("method", *tasks),
            [
                (label, *(interval(by.get((label, task), {}).get("minus_base"), "+.4f") for task in tasks))
                for label in labels
                if label != "base"
            ],
        ),
    ]


def course_blocks(rows: Sequence[dict[str, Any]], folder: Path) -> list[Block]:
    """The mean over the benchmarks at the start, half-way and at the end."""
    if not rows:
        return []
    windows = sorted({point["window"] for row in rows for point in row["points"]})
    shown = []
    for label in dict.fromkeys(row["label"] for row in rows):
        cells = []
        for window in windows:
            points = [(row["points"], row["seed"]) for row in rows if row["label"] == label]
            means = [point["mean"] for some, _ in points for point in some if point["window"] == window]
            cells.append(f"{statistics.fmean(means):.4f} ({len(means)})" if means else "–")
        shown.append((label, *cells))
    blocks = [
        paragraph("Mean of the three over training: after so many windows of ten steps, mean over seeds (how many)."),
        table(("method", *(f"window {window}" for window in windows)), shown),
    ]
    if figures.available() and any(len(row["points"]) > 2 for row in rows):
        name, caption = draw_course(rows, folder / "smollm2-benchmarks.png")
        blocks.append(picture(f"figures/{name}", caption))
    return blocks


def draw_course(rows: Sequence[dict[str, Any]], path: Path) -> tuple[str, str]:
    """Mean accuracy against training seconds, a line for each run; returns the figure's name and caption."""
    plt = figures.plotting()
    labels = list(dict.fromkeys(row["label"] for row in rows))
    figure, cell = plt.subplots(figsize=(7, 4))
    for row in rows:
        place = labels.index(row["label"])
        first = row is next(other for other in rows if other["label"] == row["label"])
        points = [(point["seconds"], point["mean"]) for point in row["points"]]
        colour = figures.PALETTE[place % len(figures.PALETTE)]
        cell.plot(*zip(*points), marker=".", lw=1, color=colour, label=row["label"] if first else None)
    cell.set(xlabel="seconds of training", ylabel="mean accuracy")
    cell.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
    shared = " (some shared the device)" if any(row["disturbed"] for row in rows) else ""
    return path.name, f"Mean of the three benchmarks against training seconds{shared}, one line a seed"

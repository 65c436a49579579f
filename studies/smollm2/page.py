"""The page of results, drawn from the content of results/smollm2-study.json alone."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from page_critics import diagnostics_blocks, variant_critics_blocks
from page_scores import course_blocks, score_blocks
from plan import CONTROL, SEARCH_SEED, TRIALS
from results import AGAINST_CONTROL, OPENED

from tfive.report.blocks import Block, heading, paragraph, table
from tfive.report.sections import TITLES, interval, number, study_blocks, variant_blocks
from tfive_lab.study_files import draw_study_figures


def blocks_of(found: dict[str, Any], folder: Path) -> list[Block]:
    """The page, section by section; figures go into `folder`."""
    intro = "Tables and figures of the study of [smollm2-study](smollm2-study.md), drawn from"
    blocks = [paragraph(intro, "[results/smollm2-study.json](../../results/smollm2-study.json) by `table --render`.")]
    if found["costs"]:
        rows = [(r["study"], str(r["cells"]), str(r["failed"]), f"{r['seconds']:,}") for r in found["costs"]]
        blocks += [heading("What it cost"), table(("study", "cells", "failed", "seconds, all cells"), rows)]
    blocks += [heading("The search for settings"), *search_blocks(found)]
    if "main" in found:
        drawn = draw_study_figures(found["main"], folder, "smollm2")
        # Step times come from the clock and are the same in every window: no figure of them over training.
        shown = [(link, caption) for link, caption in drawn if not link.endswith("-step_time.png")]
        (folder / "smollm2-step_time.png").unlink(missing_ok=True)
        blocks += _with_clock(study_blocks(found["main"], shown), found)
        blocks += [heading("Beside the control"), *control_blocks(found.get("control", ()))]
        blocks += [heading("Benchmarks"), *score_blocks(found["scores"]), *course_blocks(found["course"], folder)]
        blocks += [heading("Critics, weight and drift"), *diagnostics_blocks(found["diagnostics"])]
        blocks += [heading("Where the variance lies"), *variance_blocks(found["variances"])]
        blocks += [heading("Thoughts"), *sample_blocks(found)]
    for study, title in (("ablations", "Ablations"), ("changes", "Changes that the first seed suggested")):
        if study in found:
            shared = "Run on a shared device, so seconds are left out. The methods' own rows are those of above."
            blocks += [heading(title), paragraph(shared), *variant_blocks(found[study])]
            blocks += variant_critics_blocks(found.get(f"{study}_diagnostics", ()))
    if found.get("openings"):
        blocks += [heading("Other words before a thought"), *opening_blocks(found["openings"])]
    return blocks


def search_blocks(found: dict[str, Any]) -> list[Block]:
    """Every trial of the search, and which was taken."""
    names = ("gain_vs_base", "thought_gain", "content_gain", "mixed_gain", "no_thought_loss")
    rows = []
    for row in found["trials"]:
        planned = row["trial"] in TRIALS.get(row["method"], ())
        taken = found["chosen"].get(row["method"]) == row["trial"]
        note = row["failure"] or ("taken" if taken else "" if planned else "beyond the plan")
        rows.append((row["method"], row["trial"], *(number(row.get(name), "+.4f") for name in names), note))
    head = ("method", "trial", "gain vs base", "thought gain", "content gain", "mixed gain", "no-thought loss", "")
    judged = {"gain_vs_base": "gain against the base model", "content_gain": "content gain"}[found["judged_by"]]
    return [
        paragraph(
            f"Seed {SEARCH_SEED}, 30 steps, measured on 256 development texts that the other studies pass over. The "
            f"largest {judged} is taken (NTP: the smallest loss)."
        ),
        table(head, rows),
    ]


def _with_clock(blocks: Sequence[Block], found: dict[str, Any]) -> list[Block]:
    """The blocks of a study with the clock's table in the section on step times, whose figures come from it."""
    if not found["clocks"]:
        return list(blocks)
    start = next(place for place, block in enumerate(blocks) if block.text == "Step time")
    stop = next(place for place, block in enumerate(blocks) if place > start and block.kind == "heading")
    return [*blocks[: start + 1], *clock_blocks(found), *blocks[stop:]]


def clock_blocks(found: dict[str, Any]) -> list[Block]:
    """What was timed of every method, and what its runs are charged by that."""
    shown = []
    for row in found["main"]["methods"]:
        windows = found["clocks"].get(row["label"])
        if windows is None or "step_time" not in row:
            continue
        time = row["step_time"]
        whole = {name: spent for name, spent in time["phases_per_window"].items() if "/" not in name}
        parts = ", ".join(
            f"{n} {s / sum(whole.values()):.0%}" for n, s in whole.items() if s > 0.01 * sum(whole.values())
        )
        timed = " / ".join(f"{window['seconds']:.2f}" for window in windows)
        drawn = " / ".join(f"{window['thoughts']:,}" for window in windows)
        runs = [run for run in found["main"]["runs"] if run["label"] == row["label"] and run["state"] == "done"]
        charged = f"{statistics.fmean(run['curve'][-1]['seconds'] for run in runs):.1f}"
        shown.append((row["label"], timed, drawn, charged, f"{time['mean']:.3f}", parts))
    return [
        paragraph(
            "Measured: seconds of each of the clock's windows of ten steps, on a device of its own, without measuring, "
            "diagnoses and saving; the first holds the warm-up. Charged: what a run of the study would take by them, "
            "its first window as the first, others as the mean of the later ones; where those differ in their thoughts "
            "(critics were refitted), by a line through them, phase by phase. The runs themselves shared the device."
        ),
        table(
            ("method", "measured s a window", "thoughts", "charged s a run", "charged s a step", "where they go"), shown
        ),
    ]


def control_blocks(rows: Sequence[dict[str, Any]]) -> list[Block]:
    """Every method minus the control."""
    names = (*AGAINST_CONTROL, "mixed_own_minus_other", "own_minus_random")
    shown = [(row["label"], str(len(row["seeds"])), *(interval(row.get(name)) for name in names)) for row in rows]
    head = ("method", "seeds", *(TITLES[name] for name in AGAINST_CONTROL))
    return [
        paragraph(
            f"Each method minus {CONTROL}, which only reads, paired by seed and position. Then of the method itself: "
            "mixed gain with its own thought minus the same gate's with another's, and thought gain minus that of "
            "random tokens."
        ),
        table((*head, "gate: own − another's", "own − random tokens"), shown),
    ]


def opening_blocks(rows: Sequence[dict[str, Any]]) -> list[Block]:
    """The untrained model by the words before its thoughts."""
    shown = [
        (f"`{row['words']}`", *(interval(row[name]) for name in OPENED), interval(row["content_gain_apart"]))
        for row in rows
    ]
    return [
        paragraph(
            f"The untrained model on {rows[0]['items']:,} items, seed 0; intervals are over texts. The last column is "
            "the content gain minus the first row's, paired by item."
        ),
        table(("words", "thought gain", "content gain", "another's thought", "empty thought", "apart"), shown),
    ]


def variance_blocks(rows: Sequence[dict[str, Any]]) -> list[Block]:
    """Which share of the thought gain's variance is the thought's, means over seeds."""
    shown = []
    for label in dict.fromkeys(row["label"] for row in rows):
        some = [row for row in rows if row["label"] == label]
        cells = []
        for name in ("gain", "content", "of_thought"):
            known = [row[name] for row in some if row[name] is not None]
            cells.append(f"{statistics.fmean(known):.4f}" if known else "–")
        shown.append((label, str(len(some)), *cells))
    return [
        paragraph(
            "Variance over development items of the thought gain, and of the content gain, which is the difference of "
            "two thoughts at one place. If both vary alike, half of the latter is what the choice of a thought adds; "
            "its share of the former is in the last column. All else is the place's: a reward against the loss without "
            "a thought carries it as noise, unless a baseline knows the text that follows (a group's mean does)."
        ),
        table(("method", "seeds", "var(thought gain)", "var(content gain)", "share of the thought"), shown),
    ]


def sample_blocks(found: dict[str, Any]) -> list[Block]:
    """Thoughts before and after training."""

    def cell(text: str) -> str:
        return f"`{' '.join(text.split()).replace('`', chr(39))}`"

    rows = [
        (row["label"], cell(row["before"][-60:]), cell(row["untrained"]), cell(row["trained"]), cell(row["after"]))
        for row in found["samples"]
    ]
    return [table(("method", "text so far", "untrained thought", "trained thought", "what follows"), rows)]

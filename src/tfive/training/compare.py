"""Several methods, several seeds: one (method, seed) cell at a time, each an ordinary run in a folder of its own.

A study is restarted by the same command: finished cells are kept, unfinished ones go on from their checkpoint, failed
ones stay recorded. Cells share nothing but their settings, so different machines may run different cells of one study.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tfive.config.config import Config
from tfive.errors import RunFailed, UserError
from tfive.report.runs import STUDY, Run, read_study
from tfive.training.begin import PREPARED
from tfive.training.cells import Cell, Study
from tfive.training.checkpoint import CheckpointStore
from tfive.training.console import Console
from tfive.training.live_status import PROGRESS
from tfive.training.lock import held
from tfive.training.progress import ProgressReport
from tfive.training.run_folder import CHECKPOINTS, CONFIG
from tfive.training.stop_signal import ended_by_signals
from tfive.training.summary import SUMMARY

CORES = 2
"""Cores of each cell when several run at once, if no cell says how many threads it takes (`run.threads`)."""


class CellsStatus:
    """The headline of a study: how many runs are over, and the line of each that works now."""

    def __init__(self, all_cells: int, to_do: int) -> None:
        self.all_cells, self.over = all_cells, all_cells - to_do
        self.running: tuple[Cell, ...] = ()

    def line(self) -> str:
        """A line for the study and one for every running cell, as it tells of itself in its folder."""
        lines = [f"{self.over} of {self.all_cells} runs done"]
        for cell in self.running:
            said = cell.folder / PROGRESS
            with contextlib.suppress(OSError):  # it comes and goes with the run
                lines.append(f"{cell.folder.name}: {said.read_text('utf-8').strip()}")
                continue
            lines.append(f"{cell.folder.name}: loading model and text")
        return "\n  ".join(lines)

    def fraction(self) -> float | None:
        """The share of the runs that are over."""
        return self.over / self.all_cells


def cores_each(cells: Sequence[Cell]) -> int:
    """Cores that every cell gets when several run at once: as many as the one with the most threads takes."""
    return max(cell.config.run.threads or CORES for cell in cells)


def run_cells(cells: Sequence[Cell], *, jobs: int = 1, retry: bool = False, console: Console | None = None) -> None:
    """Run what is not finished, `jobs` at a time; returns when nothing is left to do, whatever failed."""
    console = console or Console(quiet=True)
    waiting = [cell for cell in cells if _to_do(cell, retry)]
    console.say(f"{len(cells)} runs: {len(cells) - len(waiting)} finished or failed before, {len(waiting)} to do")
    status = CellsStatus(len(cells), len(waiting))
    with ProgressReport(sys.stderr).showing(status, drawn=bool(waiting) and not console.quiet):
        _run_waiting(waiting, jobs, cores_each(cells), console, status)


def _run_waiting(waiting: list[Cell], jobs: int, width: int, console: Console, status: CellsStatus) -> None:
    running: dict[int, tuple[Cell, Any]] = {}
    began = time.monotonic()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                slot = next(number for number in range(jobs) if number not in running)
                cell = waiting.pop(0)
                cell.note(failure=None, disturbed=bool(cell.known().get("disturbed")) or jobs > 1)
                running[slot] = cell, launch(cell, range(slot * width, (slot + 1) * width) if jobs > 1 else None)
            for slot, (cell, process) in list(running.items()):
                code = process.poll()
                if code is not None:
                    del running[slot]
                    status.over += 1
                    console.say(f"  {time.monotonic() - began:7.0f} s  {cell.folder.name}: {_judge(cell, code)}")
            status.running = tuple(cell for cell, _ in running.values())
            if running:
                time.sleep(0.05)
    finally:
        # Reached with something running only on Ctrl-C: each cell saves and ends after its present micro-step.
        for _, process in running.values():
            process.send_signal(signal.SIGTERM)
        for _, process in running.values():
            process.wait()


def _to_do(cell: Cell, retry: bool) -> bool:
    if (cell.folder / SUMMARY).is_file():
        return False
    return retry or cell.known().get("failure") is None


def _require_same(cell: Cell) -> None:
    """A cell found in the folder was run with the settings asked for now."""
    if not (cell.folder / CONFIG).is_file():
        return
    was, now = Config.load(cell.folder / CONFIG).leaves(), cell.config.leaves()
    changed = [key for key in now if was.get(key) != now[key]]
    if changed:
        key = changed[0]
        raise UserError(
            f"{cell.folder}: was run with {key} = {was.get(key)!r}, now {now[key]!r} is asked for; use another --out"
        )


def launch(cell: Cell, cores: range | None) -> Any:
    """Start a cell in a process of its own, on these of the cores there are or (`None`) on all."""
    cell.settings.parent.mkdir(parents=True, exist_ok=True)
    cell.settings.write_text(cell.config.to_toml(), "utf-8")
    words = [sys.executable, "-m", "tfive", "resume", str(cell.folder), "--quiet"]
    prepared = (cell.folder / CONFIG).is_file() and any((cell.folder / name).exists() for name in PREPARED)
    if not prepared and not CheckpointStore(cell.folder / CHECKPOINTS).paths():
        _clear(cell)
        words = [
            sys.executable,
            "-m",
            "tfive",
            "train",
            str(cell.settings),
            "--out",
            str(cell.folder),
            "--quiet",
        ]
    environment = dict(os.environ) if cores is None else os.environ | {"OMP_NUM_THREADS": str(len(cores))}
    with cell.log.open("ab") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log, env=environment, start_new_session=True)
    if cores is not None and hasattr(os, "sched_setaffinity"):
        usable = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(process.pid, [usable[number % len(usable)] for number in cores])
    return process


def _clear(cell: Cell) -> None:
    """Remove what a run left that ended before its first checkpoint: it begins anew."""
    if (owner := held(cell.folder)) is not None:
        raise UserError(f"{cell.folder}: in use by {owner}; wait until it ends, or use another --out")
    for path in sorted(cell.folder.rglob("*"), reverse=True) if cell.folder.is_dir() else ():
        path.rmdir() if path.is_dir() else path.unlink()


def _judge(cell: Cell, status: int) -> str:
    """What an exit status means; a cell that was stopped or killed is unfinished, one that ended badly has failed."""
    finished = (cell.folder / SUMMARY).is_file()
    if status == 0 and finished:
        return "done"
    said = [line for line in cell.log.read_text("utf-8", errors="replace").splitlines() if line.strip()]
    last = said[-1] if said else f"exit status {status}"
    if finished:
        # A run that destroyed its model is a result of the comparison, and says so.
        return f"done, but {last.removeprefix('tfive: error: ')}"
    if status < 0 or "go on with: tfive resume" in last:
        return f"unfinished ({last if status > 0 else f'killed by signal {-status}'})"
    # Tables go further than the machine: what they keep of a failure names no folder of it.
    reason = last.removeprefix("tfive: error: ").partition(" (the last checkpoint is in ")[0]
    cell.note(failure=reason)
    return f"failed: {reason}"


def write_study(out: Path, cells: Sequence[Cell], command: dict[str, Any]) -> list[Run]:
    """`study.json`: what was asked for and what became of every cell; returns the cells as runs."""
    out.mkdir(parents=True, exist_ok=True)
    content = {
        **command,
        "cells": [
            {
                "label": cell.label,
                "seed": cell.seed,
                "folder": str(cell.folder.relative_to(out)),
                **{key: value for key, value in cell.known().items() if key in ("failure", "disturbed")},
            }
            for cell in cells
        ],
    }
    (out / STUDY).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", "utf-8")
    return read_study(out)


def compare(
    sources: Sequence[str],
    methods: Sequence[str],
    seeds: Sequence[int],
    overrides: Sequence[str] = (),
    out: Path | None = None,
    *,
    jobs: int = 1,
    retry: bool = False,
    quiet: bool = False,
) -> tuple[Path, list[Run]]:
    """Run (or go on with) a study; returns its folder and its runs, whatever state they are in."""
    study = Study.planned(sources, methods, seeds, overrides, out)
    return study.folder, carried_out(study, jobs=jobs, retry=retry, quiet=quiet)


def carried_out(study: Study, *, jobs: int = 1, retry: bool = False, quiet: bool = False) -> list[Run]:
    """Run (or go on with) a study that was planned; returns its runs, whatever state they are in."""
    folder, cells = study.folder, study.cells
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    width = cores_each(cells)
    if jobs > 1 and jobs * width > cores:
        each = f"{width} cores" if width > 1 else "one core"
        raise UserError(f"--jobs {jobs}: each takes {each} (run.threads) and there are {cores}; use fewer")
    for cell in cells:
        _require_same(cell)
        if (owner := held(cell.folder)) is not None:
            raise UserError(f"{cell.folder}: in use by {owner}; wait until it ends, or use another --out")
    write_study(folder, cells, study.command)
    said = f"interrupted: what ran is saved in {folder}; the same command goes on"
    try:
        # A study that is asked to end, or whose terminal closes, lets its cells save first.
        with ended_by_signals(lambda _: RunFailed(said)):
            run_cells(cells, jobs=jobs, retry=retry, console=Console(quiet=quiet))
    finally:
        runs = write_study(folder, cells, study.command)
    return runs

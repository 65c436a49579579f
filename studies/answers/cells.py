"""Cells of the study: several runs side by side on one device, then each one's accuracy, kept as small JSON files.

A cell is a method with what is set for it, `METHOD+KEY=VALUE+…`, and a seed. Each runs in a process of its own, in a
folder named after it; one that has a result is passed over, one that was stopped goes on from its checkpoint or begins
again. `cell-NAME.json` beside the folders holds all that the tables need, so that cells of several machines add up.
"""

from __future__ import annotations

import gc
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accuracy import development_texts, load, measure, measure_benchmark, read_items, test_texts
from collect import ACCURACY, FAILURE, cell_of
from questions import different

from tfive.config.config import Config
from tfive.errors import RunFailed, UserError
from tfive.inference.thought_model import ThoughtModel
from tfive.models.load import Loaded, load_model
from tfive.training.corpus import corpus_of
from tfive.training.devices import place
from tfive.training.export import export
from tfive.training.run_folder import CHECKPOINTS, CRITICS
from tfive.training.start import resume, train
from tfive.training.summary import SUMMARY
from tfive.training.warmstart_kept import WEIGHTS
from tfive_lab.study_files import software_versions, write_json

PRESET = Path(__file__).with_name("answers.toml")
EXPORTED = "exported"
ROOM = 4 / 3
"""Of the device's memory, cells side by side may each have an even share and a third of it more: not all need most of
theirs at once."""
DIFFERENCES = ("own - none", "own - other", "own - empty")
SMALL, EVERY = 2**20, 60.0
"""Bytes of the largest file that an archive takes, and the seconds after which it is made anew."""


@dataclass(frozen=True)
class Cell:
    """One run of the study."""

    label: str
    """The method and what is set for it alone, joined by `+`."""
    seed: int
    overrides: tuple[str, ...]
    """What is set for every cell of the command."""

    @property
    def name(self) -> str:
        """Its folder: label, settings and seed; a long one is cut and told apart by its digest."""
        whole = "+".join([self.label, *self.overrides])
        name = re.sub(r"[^A-Za-z0-9._=+-]", "_", whole)
        if len(name) > 120:
            name = f"{name[:100]}-{hashlib.sha256(whole.encode()).hexdigest()[:8]}"
        return f"{name}-seed{self.seed}"

    def config(self) -> Config:
        """Its configuration."""
        method, *own = self.label.split("+")
        overrides = [f"method={method}", f"run.seed={self.seed}", *self.overrides, *own]
        return Config.load(str(PRESET), overrides=overrides)

    def result(self, runs: Path) -> Path:
        """The file that holds its result."""
        return runs / f"cell-{self.name}.json"

    def command(self, runs: Path, measuring: Measuring, share: float) -> list[str]:
        """How it is run by itself, with a share of the device's memory."""
        words = [sys.executable, str(Path(__file__).with_name("run.py")), "cell", self.label, "--seed", str(self.seed)]
        words += ["--runs", str(runs), "--alone", "--share", f"{share:.3f}", *measuring.words()]
        return [*words, *(f"--set={one}" for one in self.overrides)]


@dataclass(frozen=True)
class Measuring:
    """Whose accuracy is measured when a cell is trained, and what is kept of it."""

    problems: str = "none"
    limit: int = 0
    samples: int = 1
    models: bool = False
    benchmarks: tuple[str, ...] = ()
    """Files of the benchmarks whose questions are asked as well."""
    code: str = ""
    """The commit of the code that runs, for the results."""

    def words(self) -> list[str]:
        """The same as options of the command."""
        named = ["--problems", self.problems, "--limit", str(self.limit), "--samples", str(self.samples)]
        named += [word for path in self.benchmarks for word in ("--benchmark", path)]
        return [*named, *(["--models"] if self.models else [])]

    def accuracy(self, model: ThoughtModel, config: Config) -> dict[str, Any]:
        """Accuracies of a trained model, and those on the questions of each benchmark, by its name."""
        sheets = Path(config.text.sources[0].path or "").parent
        texts = test_texts(sheets) if self.problems == "test" else development_texts(config, model.tokenizer)
        items = read_items(sheets, texts, model.tokenizer)[: self.limit or None]
        found = {"problems": self.problems, **measure(model, items, self.samples, config.run.seed)}
        paths, how = different([Path(path) for path in self.benchmarks]), (self.limit, self.samples, config.run.seed)
        if paths:
            found["benchmarks"] = {name: measure_benchmark(model, path, *how) for name, path in paths.items()}
        return found


def start_of(config: Config) -> Loaded:
    """The model that a cell begins with."""
    placement = place(config.model.device, config.model.compute)
    name, revision = config.model.name, config.model.revision
    return load_model(name, device=placement.device, dtype=placement.compute, revision=revision)


def run_one(cell: Cell, runs: Path, measuring: Measuring) -> None:
    """Train a cell to its end, or go on with it, and measure it; why it failed is kept too."""
    folder, config = runs / cell.name, cell.config()
    if (folder / SUMMARY).is_file() or (folder / FAILURE).is_file():
        return
    begun = (folder / CHECKPOINTS).is_dir() and any((folder / CHECKPOINTS).iterdir())
    if folder.exists() and not begun:
        shutil.rmtree(folder)
    try:
        if begun:
            resume(folder)
        else:
            loaded = start_of(config)
            train(config, folder, model=loaded)
            if (
                measuring.problems != "none"
                and config.thought.reading == "inline"
                and config.thought.delimiters == "text"
            ):
                # The model is there already; reading it back from a checkpoint would take longer than this.
                gc.collect()
                torch.cuda.empty_cache()
                model = ThoughtModel(
                    loaded.model.requires_grad_(False), loaded.tokenizer, config.thought, config.sampling
                )
                write_json(folder / ACCURACY, measuring.accuracy(model, config))
    except RunFailed as error:
        (folder / FAILURE).write_text(f"{error}\n", "utf-8")


def archive(runs: Path, path: Path) -> None:
    """All small files under `runs` as one .tgz: courses, results, logs and what was measured item by item, no weights.
    What a file holds that is written meanwhile may be cut off; the archive itself is whole or the one before."""
    part = path.with_name(f"{path.name}.part")
    with tarfile.open(part, "w:gz") as kept:
        for file in sorted(runs.rglob("*")):
            with suppress(FileNotFoundError):  # runs remove checkpoints, and put new files in the place of old ones
                if file.is_file() and file.stat().st_size <= SMALL and file.absolute() not in (path, part):
                    entry, data = tarfile.TarInfo(str(file.relative_to(runs))), file.read_bytes()
                    entry.size = len(data)
                    kept.addfile(entry, io.BytesIO(data))
    part.replace(path)


def run_side_by_side(
    cells: Sequence[Cell], runs: Path, jobs: int, measuring: Measuring, kept_in: Path | None = None
) -> list[str]:
    """Each cell in a process of its own, at most `jobs` at once; one that has been measured, too, leaves its result as
    it ends, and an archive is made of all every minute where asked for: the machine may be gone before the last has
    ended. Returns a line for each that broke."""
    for config in {cell.config().text.model_dump_json(): cell.config() for cell in cells}.values():
        corpus_of(config)  # prepared once, not by all at once
    waiting, working, broken = list(cells), dict[Cell, subprocess.Popen[bytes]](), []
    due = time.monotonic() + EVERY
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // jobs))}
    while waiting or working:
        while waiting and len(working) < jobs:
            cell = waiting.pop(0)
            with (runs / f"{cell.name}.log").open("wb") as log:
                command = cell.command(runs, measuring, min(1.0, ROOM / jobs))
                working[cell] = subprocess.Popen(
                    command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **threads}
                )
            print(f"began {cell.name}", flush=True)
        time.sleep(0.5)
        if kept_in is not None and time.monotonic() > due:
            archive(runs, kept_in)
            due = time.monotonic() + EVERY
        for cell, process in list(working.items()):
            if process.poll() is not None:
                del working[cell]
                print(f"ended {cell.name}: {process.returncode}", flush=True)
                if not process.returncode and ((runs / cell.name / ACCURACY).is_file() or measuring.problems == "none"):
                    # At once; what is left to measure waits.
                    keep(cell, runs, measuring)
                if process.returncode:
                    tail = (runs / f"{cell.name}.log").read_text("utf-8", "replace").strip().splitlines()[-1:]
                    broken.append(f"{cell.name}: exit status {process.returncode}: {' '.join(tail)}")
    return broken


def keep(cell: Cell, runs: Path, measuring: Measuring) -> dict[str, Any]:
    """The cell's result: its course, and its accuracy on the problems asked for. Weights go unless models stay."""
    folder, config = runs / cell.name, cell.config()
    found: dict[str, Any] = {"name": cell.name, **cell_of(folder), "versions": software_versions()}
    found |= {"code": measuring.code} if measuring.code else {}
    found["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    trained = (folder / SUMMARY).is_file()
    measured = (folder / ACCURACY).is_file()
    if (
        trained
        and not (folder / EXPORTED).is_dir()
        and (measuring.models or (measuring.problems != "none" and not measured))
    ):
        export(folder, folder / EXPORTED, model=start_of(config))
    if trained and not measured and measuring.problems != "none":
        model = load(str(folder / EXPORTED), config, config.model.device, config.model.compute)
        found["accuracy"] = measuring.accuracy(model, config)
        del model
        torch.cuda.empty_cache()
    if trained:
        summary = json.loads((folder / SUMMARY).read_text("utf-8"))
        found |= {name: summary[name] for name in ("warmstart", "seconds", "generated_tokens") if name in summary}
    write_json(cell.result(runs), found)
    (folder / WEIGHTS).unlink(missing_ok=True)
    for name in (CRITICS, CHECKPOINTS, *(() if measuring.models else (EXPORTED,))):
        shutil.rmtree(folder / name, ignore_errors=True)
    return found


def line_of(found: dict[str, Any]) -> str:
    """A result in one line: last measurement, then accuracies."""
    words = [found["name"], found["status"]]
    if found["measured"]:
        last = found["measured"][-1]
        names = {
            "thought_gain": "thought",
            "gain_vs_base": "vs start",
            "content_gain": "content",
            "no_thought_loss": "l0",
        }
        words += [f"{short} {last[name][0]:+.3f}" for name, short in names.items()]
    if "accuracy" in found:
        for missing, row in found["accuracy"]["results"].items():
            shown = " ".join(f"{name} {100 * own[0]:.1f}" for name, own in row["accuracy"].items())
            pairs = " ".join(
                f"{name.replace(' ', '')} {100 * one[0]:+.1f} ({100 * one[1]:+.1f} … {100 * one[2]:+.1f})"
                for name in DIFFERENCES
                for one in [row["difference"][name]]
            )
            words.append(f"\n    left out {missing}, {row['items']} answers, %: {shown}; {pairs}")
    return "  ".join(words)


def run_cells(
    batches: Sequence[Sequence[Cell]], runs: Path, jobs: int, measuring: Measuring, kept_in: Path | None = None
) -> None:
    """Batch after batch: its cells without a result side by side, then what is left to measure of them, and lines for
    each cell. Cells of one batch share the device with each other alone; one that broke keeps no other from running."""
    runs.mkdir(parents=True, exist_ok=True)
    broken = [line for cells in batches for line in run_batch(cells, runs, jobs, measuring, kept_in)]
    if broken:
        raise UserError("; ".join(broken))


def run_batch(
    cells: Sequence[Cell], runs: Path, jobs: int, measuring: Measuring, kept_in: Path | None = None
) -> list[str]:
    """Cells that share the device; returns a line for each that broke."""
    todo = [cell for cell in cells if not cell.result(runs).is_file()]
    broken: list[str] = []
    if len(todo) == 1 and kept_in is None:
        run_one(todo[0], runs, measuring)
    elif todo:
        broken = run_side_by_side(todo, runs, jobs, measuring, kept_in)
    for cell in cells:
        if cell.result(runs).is_file():
            found = json.loads(cell.result(runs).read_text("utf-8"))
        elif any(line.startswith(f"{cell.name}: ") for line in broken):
            continue
        else:
            found = keep(cell, runs, measuring)
        print(line_of(found), flush=True)
    if kept_in is not None:
        archive(runs, kept_in)
    return broken

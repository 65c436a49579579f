"""Running cells: train, evaluate on the benchmarks, keep the numbers and delete the weights."""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from plan import LONGEST, RESULT, SCORED, WRITTEN, cells, folder_name
from search import configuration, taken_pair

from tfive.cli.evaluate_suite import Wanted, evaluate
from tfive.config.config import Config
from tfive.errors import RunFailed, UserError
from tfive.evaluate.compare import answers_of
from tfive.evaluate.suite import generated_values, option_values
from tfive.report.runs import read_json
from tfive.rl.roles import MEASURED
from tfive.training.checkpoint import CheckpointStore
from tfive.training.export import export
from tfive.training.loop import Stopped
from tfive.training.run_folder import CHECKPOINTS, CRITICS
from tfive.training.start import train
from tfive.training.summary import SUMMARY


def run_cell(asked: argparse.Namespace) -> dict[str, Any]:
    """Train one cell, evaluate it, delete its weights; returns its result, which is read where the cell has one.

    A run that ends by one of its own rules (critics that do not qualify, say) is a result too: `failure` says why.
    """
    folder = asked.runs / asked.study / folder_name(asked.label, asked.seed)
    if (folder / RESULT).is_file():
        return read_json(folder / RESULT)
    config = configuration(asked.study, asked.label, asked.seed, asked.runs, asked.overrides)
    trained = (folder / SUMMARY).is_file()
    if folder.exists() and not trained:
        shutil.rmtree(folder)
    began = time.perf_counter()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    result: dict[str, Any] = {"label": asked.label, "seed": asked.seed, "study": asked.study, "disturbed": asked.shared}
    result["optimizer.lr"], result["critic.pair"] = config.optimizer.lr, config.critic.pair
    try:
        if not trained:
            train(config, folder, quiet=True)
    except Stopped:
        raise
    except RunFailed as error:
        result["failure"] = str(error).partition(" (the last checkpoint is in ")[0]
    if trained:
        # Training finished the last time and evaluation did not; only that is repeated.
        began -= float(read_json(folder / SUMMARY)["seconds"])
    result["train_seconds"] = round(time.perf_counter() - began, 1)
    if torch.cuda.is_available():
        result["peak_bytes"] = torch.cuda.max_memory_allocated()
    if "failure" not in result and asked.study == "main" and asked.scores:
        result |= benchmarks(config, folder, WRITTEN if asked.written else ())
    result["seconds"] = round(time.perf_counter() - began, 1)
    _keep_small(folder)
    (folder / RESULT).write_text(json.dumps(result, ensure_ascii=False) + "\n", "utf-8")
    return result


def benchmarks(config: Config, folder: Path, written: Sequence[str] = ()) -> dict[str, Any]:
    """Verdicts of the trained model without thoughts, per benchmark a string of 0 and 1, one for each item.

    Checkpoints go from the newest to the oldest; earlier ones are evaluated by log-likelihood alone. Each is deleted
    once it has been evaluated, because an export takes the newest there is.
    """
    data = None if config.text.decontaminate.data is None else Path(config.text.decontaminate.data)
    found: list[dict[str, Any]] = []
    for checkpoint in reversed(CheckpointStore(folder / CHECKPOINTS).paths()):
        where = folder / "scores"
        window = export(folder, folder / "exported")["window"]
        model = str(folder / "exported")
        evaluate(Wanted(model, SCORED, data, where, ways=("likelihood",)), quiet=True)
        values = {task: option_values(answers_of(where, task)[1])["raw"] for task in SCORED}
        if written and not found:
            there = folder / "written"
            asked = Wanted(model, tuple(written), data, there, ways=("generated",), max_new_tokens=LONGEST)
            evaluate(asked, quiet=True)
            values |= {task: generated_values(answers_of(there, task)[0])["pass@1"] for task in written}
        verdicts = {task: "".join(str(int(own[name])) for name in sorted(own)) for task, own in values.items()}
        found.append({"window": window, "verdicts": verdicts})
        for path in (checkpoint, folder / "exported", where):
            shutil.rmtree(path)
    return {"verdicts": found[0]["verdicts"], "earlier": found[1:]}


def _keep_small(folder: Path) -> None:
    """Delete weights and evaluations; of the files with a value for each item only the last stays."""
    for name in (CHECKPOINTS, CRITICS, "exported", "scores", "written"):
        shutil.rmtree(folder / name, ignore_errors=True)
    for path in sorted((folder / MEASURED["development"]).glob("*.safetensors"))[:-1]:
        path.unlink()


def to_do(study: str, seeds: int, runs: Path) -> Iterator[tuple[str, int]]:
    """Cells without a result; the pair of critics that the search chose is T⁵ itself and no ablation."""
    for label, seed in cells(study, seeds):
        itself = label == f"t5+ablation-pair-{taken_pair(runs)}"
        if not itself and not (runs / study / folder_name(label, seed) / RESULT).is_file():
            yield label, seed


def run_all(asked: argparse.Namespace) -> int:
    """Run every cell without a result, one after another; returns 1 if any failed.

    An error such as lack of memory is printed as `broken`; the cell gets no result, so it stays on the list.
    """
    bad = False
    for label, seed in list(to_do(asked.study, asked.seeds, asked.runs)):
        cell = argparse.Namespace(**vars(asked) | {"label": label, "seed": seed, "shared": False})
        try:
            result = run_cell(cell)
        except (UserError, Stopped):
            raise
        except RuntimeError as error:
            result = {"label": label, "seed": seed, "broken": f"{type(error).__name__}: {error}"}
        bad |= "failure" in result or "broken" in result
        print(json.dumps(result, ensure_ascii=False), flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    return int(bad)

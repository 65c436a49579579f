"""All methods on SmolLM2-135M-Instruct (Q4_1, de-quantised) and real text, in cells that accumulate over machines.

    python benchmarks/smollm2_study.py list search           # cells that have no result yet
    python benchmarks/smollm2_study.py all search            # run them, one after another, on a device of their own
    python benchmarks/smollm2_study.py cell t5 0             # one run with its benchmarks; prints JSON
    python benchmarks/smollm2_study.py table                 # results/smollm2-study.json and its page in docs/studies

Only a cell's folder under `--runs` counts, and it holds no weights. `search` tries three settings of every method on
development texts of its own and takes the one with the largest gain against the base model; `main`, `ablations` and
`changes` use what was taken and are measured on other development texts; `clock` times a few windows of every method on
a device of its own, because cells of the other studies may share one; `openings` measures the untrained model with
other words before its thoughts. Run where the preset's files are: the wheel (or
`--set model.name=…`) and the folders `corpora` and `benchmarks` (docs/studies/smollm2-study.md).
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tfive.cli.evaluate_suite import Wanted, evaluate
from tfive.cli.options import script
from tfive.cli.report import tabulated
from tfive.config.config import Config, read_source
from tfive.errors import RunFailed, UserError
from tfive.evaluate.compare import answers_of
from tfive.evaluate.suite import generated_values, option_values
from tfive.report import figures
from tfive.report.page import Block, heading, markdown, paragraph, picture, table
from tfive.report.runs import Run, done, read_json, training_seconds
from tfive.report.sections import TITLES, interval, number, study_blocks, variant_blocks
from tfive.report.statistics import mean_interval
from tfive.report.table import LIMITS
from tfive.training.checkpoint import CheckpointStore
from tfive.training.compare import configured
from tfive.training.export import export
from tfive.training.loop import CHECKPOINTS, CONFIG, CRITICS, ITEMS, SUMMARY, Stopped
from tfive.training.start import train

PRESET = "smollm2-135m-instruct"
METHODS = ("t5", "rlp", "quiet-star-grpo", "quiet-star-ppo", "anchor-only", "ntp", "base")
RATES = ("5e-5", "1e-4", "2e-4")
TRIALS = {method: tuple(f"optimizer.lr={rate}" for rate in RATES) for method in METHODS[1:6]} | {
    "t5": (
        "optimizer.lr=1e-4+critic.pair=same",
        "optimizer.lr=2e-4+critic.pair=same",
        "optimizer.lr=2e-4+critic.pair=bracket",
    )
}
"""Three trials for every trained method; T⁵ has its pair of critics to choose too, and pays for that with a rate."""
SEARCH_SEED = 100
ABLATIONS = (
    "fixed-average", "minimum", "no-qualification", "single-critic", "pair-same", "pair-disjoint", "pair-bracket",
)  # fmt: skip
CHANGES = (
    "t5+reward.reference=foreign",
    "t5+ablation-no-qualification+reward.reference=foreign",
    "quiet-star-ppo+reward.reference=foreign",
    "t5+window.reading=3",
    "t5+reward.reference=foreign+window.reading=3",
    "t5+anchor.mixture=0.5",
)
"""What the first seed suggested (docs/studies/smollm2-study.md), each beside its method as `main` ran it."""
OPENINGS = (
    "(", "(that is,", "(in other words,", "(keywords:", "(next:", "(this is about",
    "(note: the following text will say", "—",
)  # fmt: skip
"""Words before a thought; the first is the reference. A bracket is closed by one, a dash by another."""
STUDIES = ("search", "main", "clock", "ablations", "changes", "openings")
SETTINGS = {
    "search": ("window.windows=3", "run.develop_every=3", "run.develop_after=0", "run.develop_items=4096"),
    "clock": ("window.windows=3", "run.develop_every=3", "run.develop_items=64"),
    "main": ("run.checkpoint_every=5",),
    "ablations": ("run.develop_every=5",),
    "changes": ("run.develop_every=5",),
    "openings": ("window.windows=1", "run.develop_every=1", "run.develop_items=4096"),
}
"""What a study changes of the preset. The search looks at the first 256 development texts, which others pass over; a
checkpoint half-way lets the benchmarks be asked there too."""
SCORED = ("piqa", "arc_challenge", "csqa")
"""Benchmarks by log-likelihood, whole."""
WRITTEN = ("gsm8k_greedy", "math500_greedy")
"""Benchmarks with written answers (`--written`), at the end of a run, up to `LONGEST` tokens each."""
LONGEST = 400
LATE = 4
"""Windows after which the critics of all variants have been fitted for a while."""
DIAGNOSED = {
    "r2_1": "r2.1", "r2_2": "r2.2", "retention": "retention", "weight": "weight_mean", "spread": "weight_deviation",
    "twin_correlation": "twin_correlation", "offset": "offset", "offset_error": "offset_error",
    "offset_change": "offset_change", "offset_change_error": "offset_change_error", "drift": "drift_mean_induced_last",
    "covariance": "drift_covariance_last", "kl": "policy_kl", "clipped": "clip_fraction",
}  # fmt: skip
"""What the page shows of T⁵'s own reports, by the names of a run's metrics."""
CONTROL = "anchor-only"
AGAINST_CONTROL = ("thought_gain", "content_gain", "gain_vs_base", "mixed_gain")
NEEDED = (*AGAINST_CONTROL, "mixed_gain_other", "random_gain")
"""What is compared with the control, and what of a method itself stands beside it."""
OPENED = ("thought_gain", "content_gain", "other_gain", "empty_gain")
"""What the page shows of the untrained model by the words before a thought."""
RESULT = "cell.json"
NOT_SHOWN = (
    LIMITS[0],
    "Settings of every method were searched with equally many trials on development texts of their own, one seed and "
    "30 steps each; what is best after 100 may differ.",
    "Equal steps are not equal compute. Seconds are charged by a clock of three windows a method on one device; cuts "
    "at equal seconds have no intervals.",
    "Search, changes and openings were judged on development texts; the first on others than the rest. Changes were "
    "suggested by the first seed on the texts they were then judged on. There is no untouched test set.",
    LIMITS[-1],
)
"""What the tables of this study cannot show."""
ROOT = Path(__file__).resolve().parents[1]


def folder_name(label: str, seed: int) -> str:
    """Folder of a cell."""
    return f"{label.replace('/', '_')}-seed{seed}"


def cells(study: str, seeds: int) -> list[tuple[str, int]]:
    """The cells of a study, seeds outermost so that a study cut short has every method."""
    if study == "search":
        return [(f"{method}+{trial}", SEARCH_SEED) for method, trials in TRIALS.items() for trial in trials]
    if study == "clock":
        return [(method, 0) for method in METHODS if method != "base"]
    if study == "openings":
        return [(opening_label(words), 0) for words in OPENINGS]
    labels = {
        "main": METHODS,
        "ablations": tuple(f"t5+ablation-{name}" for name in ABLATIONS),
        "changes": CHANGES,
    }[study]
    return [(label, seed) for seed in range(seeds) for label in labels]


def opening_label(words: str) -> str:
    """The untrained model with these words before a thought."""
    close = ")" if words.startswith("(") else words
    # Quoted, so that no value is trimmed or read as anything but text.
    quoted = (json.dumps(one, ensure_ascii=False) for one in (words, close))
    return "base+thought.open={}+thought.close={}".format(*quoted)


def merit(method: str, last: dict[str, Any]) -> float:
    """What the search goes by: the gain against the base model's loss without a thought, at the end.

    It cannot be won by a worse loss without thoughts. NTP writes none, so its own such loss counts.
    """
    return -float(last["no_thought_loss"]) if method == "ntp" else float(last["gain_vs_base"])


def trials(runs: Path) -> list[dict[str, Any]]:
    """Every trial of the search that has been run, failures included, and any beyond the plan."""
    found = []
    for path in sorted((runs / "search").glob(f"*/{RESULT}")):
        result = read_json(path)
        method, _, trial = result["label"].partition("+")
        row = {"method": method, "trial": trial, "seconds": result["seconds"], "failure": result.get("failure")}
        if (path.parent / SUMMARY).is_file():
            last = read_json(path.parent / SUMMARY)["history"][-1]
            names = ("thought_gain", "content_gain", "gain_vs_base", "mixed_gain", "no_thought_loss")
            row |= {name: last.get(name) for name in names} | {"merit": merit(method, last)}
        found.append(row)
    return found


def chosen(runs: Path) -> dict[str, str]:
    """For every method its planned trial that did best; none before all of them have come to an end."""
    found: dict[str, str] = {}
    for method, planned in TRIALS.items():
        tried = [row for row in trials(runs) if row["method"] == method and row["trial"] in planned]
        finished = [row for row in tried if "merit" in row]
        if len(tried) == len(planned) and finished:
            found[method] = max(finished, key=lambda row: row["merit"])["trial"]
    return found


def configuration(study: str, label: str, seed: int, runs: Path, overrides: Sequence[str]) -> Config:
    """What a cell runs: the preset, what the search took for its method, then what its label adds."""
    method, *rest = label.split("+")
    taken = "" if study == "search" or method == "base" else chosen(runs).get(method)
    if taken is None:
        raise UserError(f"{label}: the search of {method} is not finished in {runs}; run all its trials first")
    # Values of a label win over presets wherever they stand, so what an ablation sets is not taken from the search.
    own = {key for part in rest if "=" not in part for key in read_source(part)}
    kept = [part for part in taken.split("+") if part and part.partition("=")[0] not in own]
    words = [*overrides, *SETTINGS.get(study, ())]
    return configured([PRESET], "+".join((method, *kept, *rest)), seed, words)


def run_cell(asked: argparse.Namespace) -> dict[str, Any]:
    """Train, ask the benchmarks, keep what is small; a run that fails by its own rules is a result too."""
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
        # Asking the benchmarks failed the last time; what was trained stands.
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
    """Verdicts of the trained model without thoughts, item by item as a row of 0 and 1; at earlier checkpoints those
    by log-likelihood too."""
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
        # An export takes the newest checkpoint there is.
        for path in (checkpoint, folder / "exported", where):
            shutil.rmtree(path)
    return {"verdicts": found[0]["verdicts"], "earlier": found[1:]}


def _keep_small(folder: Path) -> None:
    """Weights go, numbers stay; of the measurements item by item the last alone."""
    for name in (CHECKPOINTS, CRITICS, "exported", "scores", "written"):
        shutil.rmtree(folder / name, ignore_errors=True)
    for path in sorted((folder / ITEMS).glob("*.safetensors"))[:-1]:
        path.unlink()


@dataclass(frozen=True)
class Clock:
    """Seconds of a method's windows on a device of its own, by phase."""

    windows: list[dict[str, float]]
    """Each window that was timed; the first holds the warm-up."""
    thoughts: list[int]
    """How many thoughts were drawn in each of them."""

    @classmethod
    def of(cls, laps: Sequence[dict[str, Any]]) -> Clock:
        each = [_spent_in(lap, before) for before, lap in pairwise([None, *laps])]
        drawn = [after - before for before, after in pairwise([0, *(lap["trajectories"] for lap in laps)])]
        return cls(each, drawn)

    def window(self, number: int, thoughts: int) -> dict[str, float]:
        """Seconds of window `number` (from 1) with so many thoughts, phase by phase.

        The first is charged like the first, others like the mean of the later ones; windows in which critics are
        refitted draw more thoughts, and each is charged by a line through the later windows.
        """
        later = self.windows[1:] or self.windows
        timed = self.thoughts[1:] or self.thoughts
        if number == 1:
            rates = {name: _line(timed, [one.get(name, 0.0) for one in later])[1] for name in self.windows[0]}
            more = max(thoughts - self.thoughts[0], 0)
            return {name: spent + rates[name] * more for name, spent in self.windows[0].items()}
        lines = {name: _line(timed, [one.get(name, 0.0) for one in later]) for name in later[-1]}
        # Nothing is known of windows with fewer thoughts than were timed.
        return {name: start + rate * max(thoughts, min(timed)) for name, (start, rate) in lines.items()}


def _line(thoughts: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Seconds at no thought and for each: rising with thoughts where windows differ in them by enough to say."""
    if max(thoughts) > 1.1 * min(thoughts):
        rate, start = np.polyfit(thoughts, seconds, 1)
        if rate > 0:
            return float(start), float(rate)
    return statistics.fmean(seconds), 0.0


def _spent_in(lap: dict[str, Any], before: dict[str, Any] | None) -> dict[str, float]:
    """Seconds of one window alone; laps add up from the beginning."""
    return {
        name: spent - (before["seconds"].get(name, 0.0) if before else 0.0) for name, spent in lap["seconds"].items()
    }


@dataclass(frozen=True)
class Clocked(Run):
    """A run whose seconds are those its method takes on a device of its own."""

    clock: Clock | None = field(default=None)

    @cached_property
    def summary(self) -> dict[str, Any]:
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
    """The clock of every method, or none where any method of `main` lacks one: seconds of two kinds do not compare.

    A clock that shared its device is none, nor one of another device or other settings than its method's runs.
    """
    found, asked = {}, set()
    for path in sorted((runs / "main").glob(f"*/{RESULT}")):
        result = read_json(path)
        if result["label"] in asked or result["label"] == "base" or not (path.parent / SUMMARY).is_file():
            continue
        asked.add(result["label"])
        clock = _clock_beside(runs / "clock" / folder_name(result["label"], 0), result, path.parent)
        found |= {result["label"]: clock} if clock else {}
    return found if len(found) == len(asked) else {}


def _clock_beside(folder: Path, cell: dict[str, Any], run: Path) -> Clock | None:
    if not (folder / RESULT).is_file() or not (folder / SUMMARY).is_file():
        return None
    mine, summary = read_json(folder / RESULT), read_json(folder / SUMMARY)
    alike = all(mine.get(key) == cell.get(key) for key in ("optimizer.lr", "critic.pair"))
    there = read_json(run / SUMMARY)["place"].get("device_name")
    if mine["disturbed"] or not alike or summary["place"].get("device_name") != there or not summary["laps"]:
        return None
    return Clock.of(summary["laps"])


def runs_of(study: str, runs: Path) -> list[Run]:
    """Every cell of a study that has a result, in the order of the plan; variants beside their methods from `main`."""
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


def score_rows(found: Sequence[Run]) -> list[dict[str, Any]]:
    """Accuracy of every method on every benchmark, over seeds and items at once; each seed's own beside it, and the
    difference to the base model item by item."""
    rows = []
    base: dict[str, str] = {}
    for run in done(found):
        if run.label == "base":
            base |= read_json(run.folder / RESULT).get("verdicts", {})
    for label in dict.fromkeys(run.label for run in found):
        results = [read_json(run.folder / RESULT) for run in done(found) if run.label == label]
        results = [result for result in results if "verdicts" in result]
        for task in (*SCORED, *WRITTEN):
            asked = [result["verdicts"][task] for result in results if task in result["verdicts"]]
            if not asked:
                continue
            verdict_SI = np.array([[int(one) for one in verdicts] for verdicts in asked], dtype=float)
            estimate = mean_interval(verdict_SI, np.arange(verdict_SI.shape[1])).rounded()
            each = [round(float(value), 5) for value in verdict_SI.mean(1)]
            row = {"label": label, "task": task, **estimate, "each": each}
            if task in base and label != "base":
                apart_SI = verdict_SI - np.array([int(one) for one in base[task]], dtype=float)
                row["minus_base"] = mean_interval(apart_SI, np.arange(apart_SI.shape[1])).rounded()
            rows.append(row)
    return rows


def score_course(found: Sequence[Run]) -> list[dict[str, Any]]:
    """The mean over the benchmarks at every checkpoint that was asked, seed by seed; `base` is the start of all."""

    def mean(verdicts: dict[str, str]) -> float:
        return round(statistics.fmean(verdicts[task].count("1") / len(verdicts[task]) for task in SCORED), 5)

    rows, start = [], None
    for run in done(found):
        result = read_json(run.folder / RESULT)
        if "verdicts" not in result:
            continue
        if run.label == "base":
            start = mean(result["verdicts"])
            continue
        asked = [*result.get("earlier", ()), {"window": run.summary["windows"], "verdicts": result["verdicts"]}]
        spent = {lap["window"]: training_seconds(lap) for lap in run.summary["laps"]}
        points = [
            {"window": one["window"], "seconds": round(spent.get(one["window"], 0.0), 1), "mean": mean(one["verdicts"])}
            for one in sorted(asked, key=lambda one: one["window"])
        ]
        rows.append({"label": run.label, "seed": run.seed, "disturbed": run.disturbed, "points": points})
    for row in rows:
        row["points"] = [] if start is None else [{"window": 0, "seconds": 0.0, "mean": start}, *row["points"]]
    return [row for row in rows if row["points"]]


def variances(found: Sequence[Run]) -> list[dict[str, Any]]:
    """How much of what a thought gains depends on which thought it is: var(content gain) is that of the difference of
    two thoughts at one place, twice what one of them adds if both are alike; the rest is the place's own."""
    rows = []
    for run in done(found):
        gain, content = (float(np.var(run.items[name], dtype=float)) for name in ("thought_gain", "content_gain"))
        row = {"label": run.label, "seed": run.seed, "gain": round(gain, 5), "content": round(content, 5)}
        rows.append(row | {"of_thought": round(content / 2 / gain, 4) if gain else None})
    return rows


def diagnostics(found: Sequence[Run]) -> list[dict[str, Any]]:
    """What T⁵ reports of its critics, its weight and its drift, window by window and seed by seed."""
    rows = []
    for run in done(found):
        if run.label.partition("+")[0] != "t5":
            continue
        lines = run.metrics()
        events = [line for line in lines if str(line.get("event", "")).startswith("qualification: ")]
        for line in lines:
            if "r2.1" not in line:
                continue
            told = [event["event"].split()[-1] for event in events if event["step"] == line["window"]]
            kept = {name: round(line[key], 5) for name, key in DIAGNOSED.items() if line.get(key) is not None}
            tests = {kind: told.count(kind) for kind in ("passed", "failed", "paused")}
            within = [_steps(line, critic) for critic in (1, 2)]
            flat = [value for one in within for value in one]
            kept |= {"r2_step_mean": round(statistics.fmean(flat), 5), "r2_steps": within} if flat else {}
            rows.append({"label": run.label, "seed": run.seed, "window": int(line["window"]), **tests, **kept})
    return rows


def _steps(line: dict[str, Any], critic: int) -> list[float]:
    """A critic's R² within each step of a thought."""
    named = {
        key: value for key, value in line.items() if key.startswith(f"r2_per_step.{critic}.") and value is not None
    }
    return [round(named[key], 4) for key in sorted(named, key=lambda key: int(key.rpartition(".")[2]))]


def beside_the_control(found: Sequence[Run]) -> list[dict[str, Any]]:
    """Every thought method minus anchors alone, paired by seed and item; and its own thought minus another's under the
    gate, minus random tokens without one."""
    by: dict[str, list[Run]] = {}
    for run in done(found):
        if all(name in run.items for name in NEEDED):
            by.setdefault(run.label, []).append(run)
    control = {run.seed: run for run in by.get(CONTROL, ())}
    rows = []
    for label, mine in by.items():
        row: dict[str, Any] = {"label": label, "seeds": [run.seed for run in mine]}
        pairs = [(run, control[run.seed]) for run in mine if run.seed in control]
        if label != CONTROL and pairs:
            row |= {name: _apart([(one, name, other, name) for one, other in pairs]) for name in AGAINST_CONTROL}
        row["mixed_own_minus_other"] = _apart([(run, "mixed_gain", run, "mixed_gain_other") for run in mine])
        row["own_minus_random"] = _apart([(run, "thought_gain", run, "random_gain") for run in mine])
        rows.append(row)
    return rows


def _apart(pairs: Sequence[tuple[Run, str, Run, str]]) -> dict[str, Any]:
    """The mean over seeds and items of one number minus another, with its interval."""
    value_SI = [
        np.asarray(run.items[name], dtype=float) - np.asarray(other.items[against], dtype=float)
        for run, name, other, against in pairs
    ]
    return mean_interval(np.stack(value_SI), pairs[0][0].items["text"]).rounded()


def openings(runs: Path) -> list[dict[str, Any]]:
    """The untrained model's gains by the words before its thoughts, and the content gain minus the first opening's,
    paired by item."""
    rows: list[dict[str, Any]] = []
    reference: Run | None = None
    known = {run.label: run for run in done(runs_of("openings", runs)) if run.seed == 0}
    for words in OPENINGS:
        run = known.get(opening_label(words))
        if run is None:
            continue
        reference = reference or run
        if not np.array_equal(run.items["item"], reference.items["item"]):
            raise UserError(f"{run.folder}: measured on other items than {reference.folder}; run both alike")
        items = {name: np.asarray(run.items[name], dtype=float) for name in OPENED}
        text_I = run.items["text"]
        row: dict[str, Any] = {"words": words, "items": len(text_I)}
        row |= {name: mean_interval(values[None], text_I).rounded() for name, values in items.items()}
        apart_I = items["content_gain"] - np.asarray(reference.items["content_gain"], dtype=float)
        row["content_gain_apart"] = mean_interval(apart_I[None], text_I).rounded() if run is not reference else None
        rows.append(row)
    return rows


def costs(runs: Path) -> list[dict[str, Any]]:
    """Cells and seconds of every study: what the results were bought with."""
    rows = []
    for study in STUDIES:
        results = [read_json(path) for path in sorted((runs / study).glob(f"*/{RESULT}"))]
        if results:
            spent = sum(result["seconds"] for result in results)
            failed = sum("failure" in result for result in results)
            rows.append({"study": study, "cells": len(results), "failed": failed, "seconds": round(spent)})
    return rows


def configurations(found: Sequence[Run]) -> dict[str, dict[str, Any]]:
    """Every setting of the first method's first run, and what each other method's differs in."""
    written: dict[str, dict[str, Any]] = {}
    for run in done(found):
        if run.label not in written and (run.folder / CONFIG).is_file():
            written[run.label] = {key: leaf.value for key, leaf in read_source(run.folder / CONFIG).items()}
    first = next(iter(written.values()), {})
    return {
        label: leaves if leaves is first else {key: value for key, value in leaves.items() if first.get(key) != value}
        for label, leaves in written.items()
    }


def results(runs: Path) -> dict[str, Any]:
    """Everything the page shows, as plain data."""
    found: dict[str, Any] = {"preset": PRESET, "command": "python benchmarks/smollm2_study.py table"}
    found |= {"trials": trials(runs), "chosen": chosen(runs), "clocks": _timed(runs), "costs": costs(runs)}
    for study in ("main", "ablations", "changes"):
        cells_done = runs_of(study, runs)
        if any(run.label == "t5" for run in done(cells_done)) and (runs / study).is_dir():
            found[study] = tabulated(cells_done, "t5", NOT_SHOWN)
            # A clock gives the seconds that are compared; what a run itself took was with others beside it.
            for row, run in zip(found[study]["runs"], cells_done, strict=True):
                row["disturbed"] = bool(read_json(run.folder / RESULT)["disturbed"])
    main_cells = runs_of("main", runs)
    found |= {"control": beside_the_control(main_cells)}
    found |= {"scores": score_rows(main_cells), "course": score_course(main_cells)}
    found |= {"diagnostics": diagnostics(main_cells), "samples": samples(main_cells), "openings": openings(runs)}
    for study in ("ablations", "changes"):
        if study in found:
            found[f"{study}_diagnostics"] = diagnostics(runs_of(study, runs))
    found |= {"variances": variances(main_cells)}
    everyone = [run for study in ("main", "ablations", "changes") for run in runs_of(study, runs)]
    found |= {"configurations": configurations(everyone)}
    return found


def _timed(runs: Path) -> dict[str, list[dict[str, Any]]]:
    """The windows of every clock as plain data."""
    return {
        label: [
            {"thoughts": thoughts, "seconds": round(training_seconds({"seconds": window}), 4)}
            | {"phases": {name: round(spent, 4) for name, spent in window.items()}}
            for window, thoughts in zip(clock.windows, clock.thoughts)
        ]
        for label, clock in clocks(runs).items()
    }


def samples(found: Sequence[Run]) -> list[dict[str, Any]]:
    """A few thoughts of each method's first seed, before and after training, at the same places."""
    rows = []
    for label in dict.fromkeys(run.label for run in done(found)):
        history = next(run for run in done(found) if run.label == label).history
        for before, after in zip(history[0].get("samples", ()), history[-1].get("samples", ())):
            rows.append(
                {"label": label, **{key: before[key] for key in ("before", "after")},
                 "untrained": before["thought"], "trained": after["thought"]}
            )  # fmt: skip
    return rows


def blocks_of(found: dict[str, Any], folder: Path) -> list[Block]:
    """The page of results."""
    intro = "Tables and figures of the study of [smollm2-study](smollm2-study.md), drawn from"
    blocks = [paragraph(intro, "[results/smollm2-study.json](../../results/smollm2-study.json) by `table --render`.")]
    if found["costs"]:
        rows = [(r["study"], str(r["cells"]), str(r["failed"]), f"{r['seconds']:,}") for r in found["costs"]]
        blocks += [heading("What it cost"), table(("study", "cells", "failed", "seconds, all cells"), rows)]
    blocks += [heading("The search for settings"), *_search(found)]
    if "main" in found:
        drawn = figures.draw_study(found["main"], folder) if figures.available() else []
        for name, _ in drawn:
            (folder / name).replace(folder / f"smollm2-{name}")
        # Windows charged by a clock have no course of their own.
        shown = [(f"figures/smollm2-{name}", caption) for name, caption in drawn if name != "step_time.png"]
        (folder / "smollm2-step_time.png").unlink(missing_ok=True)
        blocks += _with_clock(study_blocks(found["main"], shown), found)
        blocks += [heading("Beside the control"), *_control(found.get("control", ()))]
        blocks += [heading("Benchmarks"), *_scores(found["scores"]), *_course(found["course"], folder)]
        blocks += [heading("Critics, weight and drift"), *_diagnostics(found["diagnostics"])]
        blocks += [heading("Where the variance lies"), *_variances(found["variances"])]
        blocks += [heading("Thoughts"), *_samples(found)]
    for study, title in (("ablations", "Ablations"), ("changes", "Changes that the first seed suggested")):
        if study in found:
            shared = "Run on a shared device, so seconds are left out. The methods' own rows are those of above."
            blocks += [heading(title), paragraph(shared), *variant_blocks(found[study])]
            blocks += _variant_critics(found.get(f"{study}_diagnostics", ()))
    if found.get("openings"):
        blocks += [heading("Other words before a thought"), *_openings(found["openings"])]
    return blocks


def _search(found: dict[str, Any]) -> list[Block]:
    names = ("gain_vs_base", "thought_gain", "content_gain", "mixed_gain", "no_thought_loss")
    rows = []
    for row in found["trials"]:
        planned = row["trial"] in TRIALS.get(row["method"], ())
        taken = found["chosen"].get(row["method"]) == row["trial"]
        note = row["failure"] or ("taken" if taken else "" if planned else "beyond the plan")
        rows.append((row["method"], row["trial"], *(number(row.get(name), "+.4f") for name in names), note))
    head = ("method", "trial", "gain vs base", "thought gain", "content gain", "mixed gain", "no-thought loss", "")
    return [
        paragraph(
            f"Seed {SEARCH_SEED}, 30 steps, measured on 256 development texts that the other studies pass over. The "
            "largest gain against the base model is taken (NTP: the smallest loss)."
        ),
        table(head, rows),
    ]


def _scores(rows: Sequence[dict[str, Any]]) -> list[Block]:
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


def _course(rows: Sequence[dict[str, Any]], folder: Path) -> list[Block]:
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
        name, caption = _draw_course(rows, folder / "smollm2-benchmarks.png")
        blocks.append(picture(f"figures/{name}", caption))
    return blocks


def _draw_course(rows: Sequence[dict[str, Any]], path: Path) -> tuple[str, str]:
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


def _mean(some: Sequence[dict[str, Any]], name: str, form: str) -> str:
    values = [row[name] for row in some if name in row]
    return format(statistics.fmean(values), form) if values else "–"


def _diagnostics(rows: Sequence[dict[str, Any]]) -> list[Block]:
    """One row a window, means over seeds."""
    shown = []
    for window in sorted({row["window"] for row in rows}):
        some = [row for row in rows if row["window"] == window]
        tests = "/".join(str(sum(row[kind] for row in some)) for kind in ("passed", "failed", "paused"))
        learned = sum(row.get("spread", 0) > 0 for row in some)
        cells = [_mean(some, name, "+.3f") for name in ("r2_1", "r2_2", "r2_step_mean")]
        cells += [tests, _mean(some, "retention", ".4f")]
        cells += [f"{learned}/{len(some)}", _mean(some, "twin_correlation", ".3f")]
        cells += [f"{_mean(some, 'offset', '+.3f')} ± {_mean(some, 'offset_error', '.3f')}"]
        cells += [_mean(some, "offset_change", "+.4f"), _mean(some, "drift", ".3f"), _mean(some, "covariance", ".3f")]
        shown.append((str(window), *cells, _mean(some, "kl", ".3f"), _mean(some, "clipped", ".3f")))
    head = (
        "window", "R² first", "R² second", "within a step", "tests passed/failed/paused", "Ĉ/Q̂", "weight learned",
        "twin correlation", "offset R̂", "R̂(w) − R̂(½)", "mean-induced", "covariance", "policy KL", "clipped",
    )  # fmt: skip
    return [
        paragraph(
            "Means over seeds. Tests are fresh ones of both critics against η, on the R² of all steps of a thought "
            "together; within a step it is the mean over steps and critics of the R² of each step's returns alone, "
            "which knowing the step does not raise. Ĉ/Q̂ is the displacement that validation "
            "allows up to κ = 0.1; the weight counts as learned where it was accepted and is no constant; offset, its "
            "change by the weight, and the two parts of the update's drift come from the probes (a few dozen contexts "
            "a window with several continuations each, so they are rough; ± is one standard error), the drift at the "
            "last reuse step." + _moved(rows)
        ),
        table(head, shown),
    ]


def _moved(rows: Sequence[dict[str, Any]]) -> str:
    """What the learned weights did to the offset, all windows together."""
    known = [(row["offset_change"], row["offset_change_error"]) for row in rows if row.get("offset_change_error")]
    if not known:
        return ""
    mean = statistics.fmean(change for change, _ in known)
    error = sum(error**2 for _, error in known) ** 0.5 / len(known)
    return f" Over the {len(known)} windows with a learned weight R̂(w) − R̂(½) is {mean:+.4f} ± {error:.4f}."


def _variant_critics(rows: Sequence[dict[str, Any]]) -> list[Block]:
    """How the critics of T⁵ and its variants did over all windows."""
    shown = []
    for label in dict.fromkeys(row["label"] for row in rows):
        some = [row for row in rows if row["label"] == label]
        runs = len({row["seed"] for row in some})
        late = [row for row in some if row["window"] > LATE]
        r2 = (_mean(late, name, "+.3f") for name in ("r2_1", "r2_2", "r2_step_mean"))
        tests = "/".join(f"{sum(row[kind] for row in some) / runs:.1f}" for kind in ("passed", "failed", "paused"))
        cells = [_mean(some, name, ".3f") for name in ("twin_correlation", "retention", "drift", "covariance")]
        shown.append((label, str(runs), *r2, tests, *cells))
    if not shown:
        return []
    head = (
        "variant", "seeds", f"R² first, after window {LATE}", "R² second, likewise", "within a step, likewise",
        "tests passed/failed/paused a run",
        "twin correlation", "Ĉ/Q̂", "mean-induced", "covariance",
    )  # fmt: skip
    return [
        paragraph("Their critics, means over windows and seeds:"),
        table(head, shown),
        paragraph(f"R² within each step of a thought, after window {LATE}, of the first and of the second critic:"),
        _within(rows),
    ]


def _within(rows: Sequence[dict[str, Any]]) -> Block:
    """R² step by step, a row a critic."""
    shown, steps = [], 0
    for label in dict.fromkeys(row["label"] for row in rows):
        late = [row["r2_steps"] for row in rows if row["label"] == label and row["window"] > LATE and "r2_steps" in row]
        for critic in (0, 1):
            each = list(zip(*(one[critic] for one in late if one[critic])))
            if each:
                steps = max(steps, len(each))
                shown.append((label, str(critic + 1), *(f"{statistics.fmean(values):+.2f}" for values in each)))
    return table(("variant", "critic", *(str(step + 1) for step in range(steps))), shown)


def _with_clock(blocks: Sequence[Block], found: dict[str, Any]) -> list[Block]:
    """The page with the clock in place of step times, which are charged by it."""
    if not found["clocks"]:
        return list(blocks)
    start = next(place for place, block in enumerate(blocks) if block.text == "Step time")
    stop = next(place for place, block in enumerate(blocks) if place > start and block.kind == "heading")
    return [*blocks[: start + 1], *_clock(found), *blocks[stop:]]


def _clock(found: dict[str, Any]) -> list[Block]:
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


def _control(rows: Sequence[dict[str, Any]]) -> list[Block]:
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


def _openings(rows: Sequence[dict[str, Any]]) -> list[Block]:
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


def _variances(rows: Sequence[dict[str, Any]]) -> list[Block]:
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


def _samples(found: dict[str, Any]) -> list[Block]:
    def cell(text: str) -> str:
        return f"`{' '.join(text.split()).replace('`', chr(39))}`"

    rows = [
        (row["label"], cell(row["before"][-60:]), cell(row["untrained"]), cell(row["trained"]), cell(row["after"]))
        for row in found["samples"]
    ]
    return [table(("method", "text so far", "untrained thought", "trained thought", "what follows"), rows)]


def to_do(study: str, seeds: int, runs: Path) -> Iterator[tuple[str, int]]:
    """Cells without a result."""
    for label, seed in cells(study, seeds):
        # The pair of critics that the search took is T⁵ itself.
        itself = label == f"t5+ablation-pair-{_taken_pair(runs)}"
        if not itself and not (runs / study / folder_name(label, seed) / RESULT).is_file():
            yield label, seed


def _taken_pair(runs: Path) -> str | None:
    return dict(part.split("=") for part in chosen(runs).get("t5", "").split("+") if part).get("critic.pair")


def run_all(asked: argparse.Namespace) -> int:
    """Every cell without a result, one after another; one that breaks is told and left to do. 1 if any failed."""
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


def arguments(given: list[str] | None) -> argparse.Namespace:
    """What was typed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("cell", help="run one cell and its benchmarks; prints JSON")
    one.add_argument("label", help="a method, with +preset or +key=value behind it")
    one.add_argument("seed", type=int)
    one.add_argument("--study", choices=STUDIES, default="main")
    one.add_argument("--shared", action="store_true", help="others compute on the device: seconds say little")
    some = commands.add_parser("list", help="cells that have no result yet")
    every = commands.add_parser("all", help="run them one after another, in one process")
    for command in (some, every):
        command.add_argument("study", choices=STUDIES)
        command.add_argument("--seeds", type=int, default=3)
    for command in (one, every):
        command.add_argument("--no-scores", action="store_false", dest="scores", help="no benchmarks")
        command.add_argument("--written", action="store_true", help=f"written answers too: {', '.join(WRITTEN)}")
        command.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    last = commands.add_parser("table", help="tabulate all cells and draw the page")
    last.add_argument("--render", action="store_true", help="only draw the page from the results")
    last.add_argument("--out", type=Path, default=ROOT / "results" / "smollm2-study.json")
    last.add_argument("--page", type=Path, default=ROOT / "docs" / "studies" / "smollm2-results.md")
    for command in (one, some, every, last):
        command.add_argument("--runs", type=Path, default=Path("runs/smollm2-study"))
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> int:
    """One cell, the list of those to do, or the table of those done."""
    asked = arguments(given)
    if asked.command == "list":
        for label, seed in to_do(asked.study, asked.seeds, asked.runs):
            print(label, seed)
        return 0
    if asked.command == "table":
        if not asked.render and not asked.runs.is_dir():
            raise UserError(f"--runs {asked.runs}: there is no such folder; name the one the cells were written to")
        found = read_json(asked.out) if asked.render else results(asked.runs)
        if not asked.render:
            asked.out.parent.mkdir(parents=True, exist_ok=True)
            asked.out.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", "utf-8")
        folder = asked.page.parent / "figures"
        folder.mkdir(parents=True, exist_ok=True)
        asked.page.write_text(markdown("SmolLM2 study: results", blocks_of(found, folder)), "utf-8")
        print(asked.page)
        return 0
    if asked.command == "all":
        return run_all(asked)
    result = run_cell(asked)
    print(json.dumps(result, ensure_ascii=False))
    return 1 if "failure" in result else 0


if __name__ == "__main__":
    script(main)

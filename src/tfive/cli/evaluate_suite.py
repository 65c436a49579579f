"""What `tfive eval run` does: load a model, ask it the items of a suite, write answers and scores."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tfive import __version__
from tfive.cli.evaluate_gains import LIMIT
from tfive.config.config import resolve
from tfive.distributed.environment import launched
from tfive.distributed.launch import joined
from tfive.distributed.meeting import meeting
from tfive.distributed.pulse import Pulse
from tfive.distributed.transfer import transferred
from tfive.distributed.world import World
from tfive.errors import UserError
from tfive.evaluate.compare import answers_of, compare_runs, comparison_table, explained, find_item
from tfive.evaluate.equivalence import Verifier, installed
from tfive.evaluate.evaluated import load_evaluated, parse_thoughts
from tfive.evaluate.records import SCORES, open_folder, read_run, read_scores, write_text
from tfive.evaluate.shared_tasks import run_task_together
from tfive.evaluate.suite import (
    TaskPlan,
    check_task,
    flips,
    mean_of_tasks,
    plan_task,
    primary_values,
    task_scores,
)
from tfive.evaluate.tasks import Items, find_tasks, load_items
from tfive.inference.requests import When
from tfive.inference.thought_model import ThoughtModel
from tfive.models.weights import weights_fingerprint
from tfive.training.agreement import require_same_evaluation
from tfive.training.devices import place
from tfive.training.lock import FolderLock
from tfive.training.recorder import Recorder
from tfive.training.watchdog import watching


@dataclass(frozen=True)
class Wanted:
    """What was typed for `tfive eval MODEL`; None leaves a choice to the task."""

    model: str
    names: tuple[str, ...] = ("primary",)
    data: Path | None = None
    out: Path | None = None
    limit: int | None = None
    samples: int | None = None
    temperature: float | None = None
    max_new_tokens: int | None = None
    ways: tuple[str, ...] = ("generated", "likelihood")
    thoughts: str = "none"
    config: Path | None = None
    chat: bool = False
    bare: bool = False
    seed: int = 0
    parity: bool = False
    rows: int = 0
    flips: int = 0
    device: str = "auto"
    compute: str = "auto"
    timeout: float = 600.0
    """Seconds without a sign from one of several processes after which it ends the others."""


def load_subject(wanted: Wanted, process: int | None = None) -> tuple[ThoughtModel, When, dict[str, Any]]:
    """The model, the positions at which it thinks, and the facts that identify it. `process`: this one's number among
    several on this machine."""
    placed = place(wanted.device, wanted.compute, process=process)
    where, dtype = placed.device, placed.compute
    untrained = None
    if wanted.config is not None:
        given = resolve([wanted.config]).config
        untrained = given.thought, given.sampling
    model, when, name = load_evaluated(wanted.model, wanted.thoughts, where, dtype, untrained)
    facts: dict[str, Any] = {
        "name": name,
        "weights": weights_fingerprint(model.model),
        "precision": str(dtype).removeprefix("torch."),
        "thoughts": wanted.thoughts,
    }
    if when.ever:
        facts |= {"thought": model.thought.model_dump(mode="json"), "law": model.sampling.model_dump(mode="json")}
        facts |= {"gate": model.gate is not None, "origin": model.origin}
    return model, when, facts


def plan_of(wanted: Wanted) -> list[Items]:
    """The items of every task asked for; a missing or changed one is refused before anything is loaded or written."""
    if wanted.limit is not None and wanted.limit < 1:
        raise UserError(f"--limit {wanted.limit}: give 1 or more items")
    if wanted.data is not None and not wanted.data.is_dir():
        raise UserError(f"--data {wanted.data}: there is no such folder")
    return [load_items(task, wanted.data) for task in find_tasks(wanted.names, wanted.data)]


def evaluate(wanted: Wanted, *, quiet: bool = False) -> dict[str, Any]:
    """Evaluate, or resume a stopped evaluation; writes `scores.json` and `scores.md` beside the answers and returns the
    scores. Of several processes, which answer a share of the items each, the first one writes."""
    with meeting() as met, watching(met, pulse := Pulse(), wanted.timeout, LIMIT), ExitStack() as held:
        several = met.place.size > 1
        with met.refusals("evaluation"):
            items = plan_of(wanted)
            # Bad options are refused before a model is loaded.
            for one in items:
                _plan_task(wanted, one, parse_thoughts(wanted.thoughts, 1))
            model, when, facts = load_subject(wanted, met.place.local_rank if several else None)
            plans = [_plan_task(wanted, one, when) for one in items]
            for plan in plans:
                check_task(model, plan)
        tasks = {f"task {plan.task.name}": plan.record(model.tokenizer) for plan in plans}
        require_same_evaluation(met, {"seed": wanted.seed, "chat": wanted.chat, **facts, **tasks})
        folder = _folder(wanted, facts)
        with met.refusals("folder"):
            if met.place.first:
                _open(wanted, model, plans, facts, folder)
                held.enter_context(FolderLock(folder))
        with joined(model.model.device, store=met.store, pulse=pulse) as world:
            return _answered(wanted, model, plans, folder, world, quiet=quiet or not world.leads)


def _folder(wanted: Wanted, facts: dict[str, Any]) -> Path:
    return wanted.out or Path("evaluations") / re.sub(
        r"[^\w.\-]+", "-", f"{facts['name']}-{wanted.thoughts}{'-bare' * wanted.bare}"
    )


def _open(wanted: Wanted, model: ThoughtModel, plans: Sequence[TaskPlan], facts: dict[str, Any], folder: Path) -> None:
    versions = {"tfive": __version__} | {name: version(name) for name in ("transformers", "torch")}
    tasks = {plan.task.name: plan.record(model.tokenizer) for plan in plans}
    open_folder(
        folder, {"model": facts, "seed": wanted.seed, "chat": wanted.chat, "versions": versions, "tasks": tasks}
    )


def _answered(
    wanted: Wanted, model: ThoughtModel, plans: Sequence[TaskPlan], folder: Path, world: World, *, quiet: bool
) -> dict[str, Any]:
    """Ask what is not answered yet, score and write."""
    before = read_scores(folder)["tasks"] if (folder / SCORES).is_file() else {}
    seconds = {name: float(task["seconds"]) for name, task in before.items()}
    flipped: dict[str, Any] = {}
    with Recorder(quiet=quiet) as telemetry, _verifier(plans) as verifier:
        for plan in plans:
            began = time.perf_counter()
            world.pulse.at(plan.task.name)
            run_task_together(model, plan, folder, world, verifier=verifier, telemetry=telemetry)
            seconds[plan.task.name] = seconds.get(plan.task.name, 0.0) + time.perf_counter() - began
            if wanted.flips and plan.generates and world.leads:
                found = flips(model, plan, wanted.flips, world)
                flipped[plan.task.name] = {**asdict(found), "rate": found.rate}
    world.pulse.at("scores")
    if not world.leads:
        return dict(transferred(world, None, 0))
    scores = collect(folder, seconds) | ({"flips": flipped} if flipped else {})
    write_text(folder / SCORES, json.dumps(scores, indent=1, ensure_ascii=False) + "\n")
    write_text(folder / "scores.md", table(scores) + "\n")
    return dict(transferred(world, scores, 0))


def _plan_task(wanted: Wanted, items: Items, when: When) -> TaskPlan:
    return plan_task(
        items,
        samples=wanted.samples,
        temperature=wanted.temperature,
        max_new_tokens=wanted.max_new_tokens,
        limit=wanted.limit,
        ways=wanted.ways,
        chat=wanted.chat,
        bare=wanted.bare,
        when=when,
        seed=wanted.seed,
        parity=wanted.parity,
        rows=wanted.rows,
    )


@contextmanager
def _verifier(plans: Sequence[TaskPlan]) -> Iterator[Verifier | None]:
    """math-verify where it is installed and there is mathematics."""
    if not installed() or not any(plan.task.kind == "math" and plan.generates for plan in plans):
        yield None
        return
    with Verifier() as verifier:
        yield verifier


def collect(folder: Path, seconds: dict[str, float]) -> dict[str, Any]:
    """The scores of a run from its answers; `seconds` are what finished calls have spent on each task."""
    run = read_run(folder)
    found: dict[str, Any] = {"model": run["model"], "folder": str(folder), "tasks": {}}
    values: dict[str, dict[str, float]] = {}
    for name, facts in run["tasks"].items():
        generated, compared = answers_of(folder, name)
        if not generated and not compared:
            continue
        values[name] = primary_values(generated, compared)
        scores = {key: asdict(one) for key, one in task_scores(facts["kind"], generated, compared).items()}
        found["tasks"][name] = {
            "items": facts["items"],
            "of": facts["of"],
            "manifest": facts["manifest"],
            "primary": next(iter(scores)),
            "scores": scores,
            "seconds": round(seconds.get(name, 0.0), 2),
            "written_tokens": sum(int(one["tokens"]) for one in generated),
            "thought_tokens": sum(int(one["thought_tokens"]) for one in (*generated, *compared)),
        }
    found["mean"] = asdict(mean_of_tasks(values)) if values else None
    return found


_COLUMNS = {
    "pass@4": "pass@4",
    "equivalent pass@1": "equivalent pass@1",
    "coverage": "coverage",
    "log-likelihood raw": "log-likelihood",
    "log-likelihood per_character": "per character",
    "log-likelihood per_byte": "per byte",
}
"""Scores beside the primary one, and their heads in the table."""


def table(scores: dict[str, Any]) -> str:
    """The scores as Markdown."""
    model = scores["model"]
    measured = {key for task in scores["tasks"].values() for key in task["scores"]}
    shown = [key for key in _COLUMNS if key in measured]
    heads = ["task", "items", "primary score (95 %)", *(_COLUMNS[key] for key in shown)]
    heads += ["tokens", "thought tokens", "seconds"]
    rows = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]

    def cell(one: dict[str, Any] | None, scale: float = 100.0, places: int = 2) -> str:
        return "" if one is None else f"{scale * one['mean']:.{places}f}"

    for name, task in scores["tasks"].items():
        own = task["scores"]
        first = own[task["primary"]]
        spread = f"{cell(first)} ({100 * first['low']:.2f} … {100 * first['high']:.2f})"
        items = str(task["items"]) if task["items"] == task["of"] else f"{task['items']} of {task['of']}"
        cells = [name, items, spread, *(cell(own.get(key)) for key in shown), cell(own.get("tokens"), 1.0, 1)]
        rows.append("| " + " | ".join([*cells, str(task["thought_tokens"]), f"{task['seconds']:.1f}"]) + " |")
    if scores["mean"] is not None and len(scores["tasks"]) > 1:
        mean = scores["mean"]
        rows.append(
            f"| mean of {len(scores['tasks'])} | {mean['items']} | {100 * mean['mean']:.2f} "
            f"({100 * mean['low']:.2f} … {100 * mean['high']:.2f}) |" + " |" * (len(heads) - 3)
        )
    return "\n".join([f"{model['name']}, {model['precision']}, thoughts: {model['thoughts']}", "", *rows])


def evaluate_command(wanted: Wanted, *, as_json: bool, quiet: bool) -> str | None:
    """What `tfive eval MODEL` prints; None where another process does."""
    scores = evaluate(wanted, quiet=quiet or as_json)
    if not launched().first:
        return None
    if as_json:
        return json.dumps(scores, ensure_ascii=False)
    return table(scores) + f"\n\n{scores['folder']}: answers, scores.json and scores.md"


def explain_command(folder: Path, item: str, *, as_json: bool) -> str:
    """What `tfive eval explain` prints."""
    found = find_item(folder, item)
    return json.dumps(found, ensure_ascii=False) if as_json else explained(found)


def compare_command(first: Path, second: Path, *, as_json: bool) -> str:
    """What `tfive eval compare` prints."""
    found = compare_runs(first, second)
    return json.dumps(found, ensure_ascii=False) if as_json else comparison_table(found)

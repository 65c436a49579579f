"""Benchmarks during a run, on a schedule of optimizer steps: gains before right answers, and scores.

They are what the paper's `fig:learning-dynamics` and `fig:training-time` show, measured for every method alike and only
reported: nothing of the run depends on them. Records lie in `metrics.jsonl`, answers in `benchmarks/step-N`.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tfive.config.config import Config
from tfive.distributed.transfer import transferred
from tfive.evaluate.compare import answers_of
from tfive.evaluate.evaluated import parse_thoughts
from tfive.evaluate.metrics import mean_with_interval
from tfive.evaluate.shared_tasks import answer_gains_together, run_task_together
from tfive.evaluate.suite import TaskPlan, check_task, plan_task, primary_values
from tfive.evaluate.tasks import Items, find_tasks, load_items
from tfive.inference.requests import NEVER
from tfive.inference.thought_model import ThoughtModel
from tfive.models.load import Loaded
from tfive.telemetry import Telemetry
from tfive.training.build import Assembly
from tfive.training.settings import BenchmarkSettings
from tfive.tree.settings import ThoughtSettings

FOLDER = "benchmarks"


@dataclass(frozen=True)
class Benchmarks:
    """The items that a run is measured on, read once before it begins."""

    settings: BenchmarkSettings
    gains: tuple[Items, ...]
    scores: tuple[Items, ...]
    seed: int

    def due(self, window: int, actor_steps: int, windows: int) -> bool:
        """Whether `window` is measured: the first that reaches a multiple of `every` steps, the start and the end."""
        reached, before = (steps * actor_steps // self.settings.every for steps in (window, window - 1))
        return window in (0, windows) or reached > before

    def check(self, loaded: Loaded) -> None:
        """Refuse prompts that do not fit the model, before anything is written."""
        bare = ThoughtSettings(length=1, checkpoints=(1,), horizon=1, delimiters="none")
        plain = ThoughtModel(loaded.model, loaded.tokenizer, bare)
        for plan in self._plans(None):
            check_task(plain, plan)

    def measure(self, assembly: Assembly, folder: Path, window: int, telemetry: Telemetry) -> dict[str, Any]:
        """Every task's gains and score by the actor's present weights, nested as task → measure → number."""
        thinker, world = thought_model(assembly, gated=window > 0), assembly.actor.world
        found: dict[str, Any] = {}
        for items in self.gains:
            asked = items.items[: self.settings.items]
            measured = partial(answer_gains_together, thinker, items.task, asked, world, seed=self.seed)
            gains = assembly.method.parts.rollout.passes.fit_told(measured)
            telemetry.count("extra", trajectories=len(asked), generated_tokens=gains.thought_tokens)
            found.setdefault(items.task.name, {}).update(gains.summary())
        steps = window * assembly.config.window.actor_steps
        answers = folder / FOLDER / f"step-{steps:06d}"
        # What an interrupted measurement left was answered by weights of a lost course.
        if world.leads:
            shutil.rmtree(answers, ignore_errors=True)
        for plan in self._plans(assembly.plan.horizon):
            if world.leads:
                answers.mkdir(parents=True, exist_ok=True)
            run_task_together(thinker, plan, answers, world, telemetry=telemetry)
            score = _score(answers, plan.task.name) if world.leads else None
            found.setdefault(plan.task.name, {}).update(transferred(world, score, 0))
        return found

    def _plans(self, horizon: int | None) -> list[TaskPlan]:
        """Options by log-likelihood, everything else by one greedy answer: what a curve needs, at the least cost."""
        when = NEVER if horizon is None else parse_thoughts(self.settings.thoughts, horizon)
        return [
            plan_task(
                items,
                samples=1,
                temperature=0.0,
                limit=self.settings.items,
                ways=("likelihood",) if items.task.kind == "choice" else ("generated",),
                when=when,
                seed=self.seed,
            )
            for items in self.scores
        ]


def _score(answers: Path, task: str) -> dict[str, float]:
    """The mean of a task's primary values with its interval."""
    score = mean_with_interval(list(primary_values(*answers_of(answers, task)).values()))
    return {"score": score.mean, "score_low": score.low, "score_high": score.high}


def benchmarks_of(config: Config, loaded: Loaded) -> Benchmarks | None:
    """What `[benchmarks]` asks for, checked against the model; None where it asks for nothing."""
    settings = config.benchmarks
    if not settings.every:
        return None
    parse_thoughts(settings.thoughts, 1)
    folder = None if settings.data is None else Path(settings.data).expanduser()
    read = {task.name: load_items(task, folder) for task in find_tasks((*settings.gains, *settings.scores), folder)}

    def of(names: tuple[str, ...]) -> tuple[Items, ...]:
        return tuple(read[task.name] for task in find_tasks(names, folder))

    found = Benchmarks(settings, of(settings.gains), of(settings.scores), config.run.seed)
    found.check(loaded)
    return found


def thought_model(assembly: Assembly, *, gated: bool) -> ThoughtModel:
    """The actor with its delimiters and gates as it stands; without the prediction gate before it was ever fitted."""
    engine, config = assembly.actor.engine, assembly.config
    gate = assembly.gate.gate if gated and assembly.gate is not None else None
    return ThoughtModel(
        assembly.loaded.model,
        assembly.loaded.tokenizer,
        config.thought,
        config.sampling,
        gate,
        engine.delimiters,
        gates=engine.gates,
    )

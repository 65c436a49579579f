"""A suite on a model: every item asked and graded, and the scores with their intervals.

Primary is what the paper reports: pass@1 of generated answers for mathematics, their accuracy for options. Beside it
stand pass@4, equivalence, coverage, length, and the options compared by log-likelihood.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tfive.distributed.world import SINGLE, World
from tfive.errors import UserError
from tfive.evaluate.answers import grade
from tfive.evaluate.equivalence import Verifier
from tfive.evaluate.generate import Decoding, Flips, GenerationRequest, check_lengths, flip_rate, generate, item_number
from tfive.evaluate.likelihood import Likelihood, chosen, log_likelihoods
from tfive.evaluate.metrics import SCORE, ScoreInterval, mean_with_interval, pass_at_k, suite_mean
from tfive.evaluate.prompts import options, prompt
from tfive.evaluate.records import GENERATED, OPTIONS, Answers, answers_file
from tfive.evaluate.tasks import LETTERS, Item, Items, Task
from tfive.inference.requests import NEVER, When
from tfive.inference.thought_model import ThoughtModel
from tfive.telemetry import Silent, Telemetry

WAYS = ("generated", "likelihood")
"""How a model may be asked; options both ways, mathematics by generation alone."""

BARE_TOKENS = 32
"""Most tokens of a bare answer, a formula included."""

LENGTHS = ("tokens", "thought tokens")
"""Measures that count tokens; all others are shares."""


@dataclass(frozen=True)
class TaskPlan:
    """How a task is evaluated: the task's own settings with the caller's overrides."""

    items: Items
    decoding: Decoding
    max_new_tokens: int
    ways: tuple[str, ...] = WAYS
    limit: int | None = None
    """Evaluate only the first `limit` items."""
    chat: bool = False
    bare: bool = False
    """Ask for one line, the answer without its working."""

    @property
    def task(self) -> Task:
        """The task."""
        return self.items.task

    @property
    def asked(self) -> tuple[Item, ...]:
        """The items that are asked."""
        return self.items.items[: self.limit]

    @property
    def generates(self) -> bool:
        """Whether answers are generated."""
        return "generated" in self.ways

    @property
    def compares(self) -> bool:
        """Whether options are compared by log-likelihood."""
        return "likelihood" in self.ways and self.task.kind == "choice"

    def record(self, tokenizer: Any) -> dict[str, Any]:
        """Everything that determines the prompts and answers, for `run.json`."""
        first = prompt(self.task, self.asked[0], tokenizer, self.chat, self.bare)
        found: dict[str, Any] = {"items": len(self.asked), "of": len(self.items), "sha256": self.items.sha256}
        found |= {"manifest": self.items.state, "kind": self.task.kind}
        if self.generates:
            found["prompt"] = {"version": first.version, "demonstrations": list(first.demonstrations)}
            found["prompt"]["stop"] = list(first.stop)
            found["decoding"] = {**asdict(self.decoding), "max_new_tokens": self.max_new_tokens}
            del found["decoding"]["rows"]
        if self.compares:
            found["options"] = {"context": self.task.context, "continuation": self.task.continuation}
        return found


def plan_task(
    items: Items,
    *,
    samples: int | None = None,
    temperature: float | None = None,
    max_new_tokens: int | None = None,
    limit: int | None = None,
    ways: tuple[str, ...] = WAYS,
    chat: bool = False,
    bare: bool = False,
    when: When = NEVER,
    seed: int = 0,
    parity: bool = False,
    rows: int = 0,
) -> TaskPlan:
    """The plan of a task; None leaves a setting to the task."""
    task = items.task
    if when.at_answer in ("other", "empty") and task.kind == "choice" and "likelihood" in ways:
        raise UserError(f"--thoughts answer={when.at_answer}: a control of written answers; add --ways generated")
    own_samples, own_temperature = (1, 0.0) if bare else (task.samples, task.temperature)
    most = BARE_TOKENS if bare else task.max_new_tokens
    decoding = Decoding(
        samples=own_samples if samples is None else samples,
        temperature=own_temperature if temperature is None else temperature,
        top_p=task.top_p,
        seed=seed,
        when=when,
        parity=parity,
        rows=rows,
    )
    return TaskPlan(items, decoding, max_new_tokens or most, ways, limit, chat, bare)


def check_task(model: ThoughtModel, plan: TaskPlan) -> None:
    """Refuse prompts that do not fit the model, before anything is written."""
    if plan.generates:
        check_lengths(model, _requests(model, plan)[0], plan.decoding)


def run_task(
    model: ThoughtModel,
    plan: TaskPlan,
    folder: Path,
    *,
    verifier: Verifier | None = None,
    telemetry: Telemetry | None = None,
    world: World = SINGLE,
) -> None:
    """Evaluate every item that has no answer in `folder` yet; a process of `world` gives signs of life meanwhile."""
    telemetry = telemetry or Silent()
    if plan.compares:
        _compare_options(model, plan, answers_file(folder, plan.task.name, OPTIONS), telemetry, world)
    if plan.generates:
        _generate(model, plan, answers_file(folder, plan.task.name, GENERATED), verifier, telemetry, world)


def _generate(
    model: ThoughtModel, plan: TaskPlan, path: Path, verifier: Verifier | None, telemetry: Telemetry, world: World
) -> None:
    task, items = plan.task, {item.id: item for item in plan.asked}
    requests, stops = _requests(model, plan)
    with Answers(path) as answers:
        done = frozenset((str(record["id"]), int(record["sample"])) for record in answers.known)
        shown: dict[str, Any] = {"telemetry": telemetry, "label": f"{task.name}: writing", "world": world}
        for request, sample, output in generate(model, requests, stops, plan.decoding, done=done, **shown):
            item = items[request.id]
            verdict = grade(task, item, judged(task, output.text, plan.bare), verifier=verifier)
            answers.add(
                {
                    "id": item.id,
                    "sample": sample,
                    **asdict(verdict),
                    "tokens": len(output.ids),
                    "ended": output.ended,
                    "prompt_tokens": output.prompt_tokens,
                    "thoughts": list(output.thoughts),
                    "thought_tokens": output.thought_tokens,
                    "question": item.question,
                    "choices": list(item.choices),
                    "output": output.text,
                }
            )


def judged(task: Task, text: str, bare: bool) -> str:
    """What is graded of an output: a bare mathematical answer is the whole line, not the last number in it."""
    line = text.strip().removesuffix(".")
    return f"\\boxed{{{line}}}" if bare and task.kind == "math" and line else text


def _requests(model: ThoughtModel, plan: TaskPlan) -> tuple[list[GenerationRequest], tuple[str, ...]]:
    """The prompts of all items, and the strings at which their outputs end."""
    name = plan.task.name
    prompts = [(item.id, prompt(plan.task, item, model.tokenizer, plan.chat, plan.bare)) for item in plan.asked]
    requests = [GenerationRequest(i, one.text, plan.max_new_tokens, item_number(name, i)) for i, one in prompts]
    return requests, prompts[0][1].stop


def _compare_options(model: ThoughtModel, plan: TaskPlan, path: Path, telemetry: Telemetry, world: World) -> None:
    task = plan.task
    with Answers(path) as answers:
        done = {str(record["id"]) for record in answers.known}
        items = [item for item in plan.asked if item.id not in done]
        found = log_likelihoods(
            model,
            [options(task, item) for item in items],
            when=plan.decoding.when,
            seed=plan.decoding.seed,
            numbers=[item_number(task.name, item.id) for item in items],
            parity=plan.decoding.parity,
            telemetry=telemetry,
            label=f"{task.name}: comparing options",
            world=world,
        )
        for number, likelihoods in found:
            answers.add(_compared(items[number], likelihoods))


def _compared(item: Item, likelihoods: Sequence[Likelihood]) -> dict[str, Any]:
    taken = {way: LETTERS[index] for way, index in chosen(likelihoods).items()}
    return {
        "id": item.id,
        "gold": item.answer,
        **{way: letter == item.answer for way, letter in taken.items()},
        "taken": taken,
        "log_likelihood": [one.total for one in likelihoods],
        "tokens": [one.tokens for one in likelihoods],
        "characters": [one.characters for one in likelihoods],
        "thoughts": sum(one.thoughts for one in likelihoods),
        "thought_tokens": sum(one.thought_tokens for one in likelihoods),
        "question": item.question,
        "choices": list(item.choices),
    }


def by_item(records: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Generated answers of each item, in the order of their samples."""
    found: dict[str, list[dict[str, Any]]] = {}
    for record in sorted(records, key=lambda record: int(record["sample"])):
        found.setdefault(record["id"], []).append(record)
    return found


def generated_values(records: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Every measure of generated answers, item by item: measure → item → value."""
    values: dict[str, dict[str, float]] = {}
    verified = any(record["equivalent"] is not None for record in records)
    for name, own in by_item(records).items():
        right, count = sum(bool(record["correct"]) for record in own), len(own)
        each = {"pass@1": right / count}
        if count >= 4:
            each["pass@4"] = pass_at_k(count, right, 4)
        if verified:
            # Where equivalence is undecided (for example without an answer), exact match counts.
            each["equivalent pass@1"] = _mean(
                [record["correct"] if record["equivalent"] is None else record["equivalent"] for record in own]
            )
        each["coverage"] = _mean([record["extracted"] is not None for record in own])
        each["tokens"] = _mean([record["tokens"] for record in own])
        each["cut off"] = _mean([record["ended"] == "length" for record in own])
        each["thought tokens"] = _mean([record["thought_tokens"] for record in own])
        for measure, value in each.items():
            values.setdefault(measure, {})[name] = value
    return values


def option_values(records: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Accuracy of every way of comparing options, item by item."""
    ways = ("raw", "per_character", "per_byte")
    return {way: {record["id"]: float(record[way]) for record in records} for way in ways}


def _mean(values: Sequence[float | bool]) -> float:
    return sum(map(float, values)) / len(values)


def task_scores(
    kind: str, generated: Sequence[dict[str, Any]], compared: Sequence[dict[str, Any]]
) -> dict[str, ScoreInterval]:
    """All scores of a task with their 95 % intervals over items."""
    scores: dict[str, ScoreInterval] = {}
    if generated:
        for measure, values in generated_values(generated).items():
            name = "accuracy" if kind == "choice" and measure == "pass@1" else measure
            bounds = None if measure in LENGTHS else SCORE
            scores[name] = mean_with_interval(list(values.values()), bounds=bounds)
    if compared:
        for way, values in option_values(compared).items():
            scores[f"log-likelihood {way}"] = mean_with_interval(list(values.values()))
        per_item = [float(record["thought_tokens"]) for record in compared]
        scores["log-likelihood thought tokens"] = mean_with_interval(per_item, bounds=None)
    return scores


def primary_values(generated: Sequence[dict[str, Any]], compared: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The primary value of every item: of generated answers, or by log-likelihood where none were generated."""
    return generated_values(generated)["pass@1"] if generated else option_values(compared)["raw"]


def mean_of_tasks(values: dict[str, dict[str, float]]) -> ScoreInterval:
    """The unweighted mean of tasks, from the primary values of their items."""
    return suite_mean({task: list(own.values()) for task, own in values.items()})


def flips(model: ThoughtModel, plan: TaskPlan, limit: int, world: World = SINGLE) -> Flips:
    """How often an output of the first `limit` items changes when it is written by itself instead of among others."""
    requests, stops = _requests(model, plan)
    together, alone = (
        list(generate(model, requests[:limit], stops, replace(plan.decoding, parity=parity), world=world))
        for parity in (False, True)
    )
    return flip_rate(together, alone)

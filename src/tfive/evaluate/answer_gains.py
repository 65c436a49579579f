"""What a thought before the answer is worth on benchmark items: the loss of the right answer with and without it.

The question is asked as the task does, without worked examples, and one thought stands right before the answer. Options
are those of the log-likelihood, so the right one's letter or text is predicted; elsewhere the gold answer after “The
answer is”. A gain is in nats per token of the answer, over the tokens that the thought serves (fig:learning-dynamics).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tfive.distributed.world import SINGLE, World
from tfive.errors import UserError
from tfive.evaluate.generate import item_number
from tfive.evaluate.likelihood import encoded_pair
from tfive.evaluate.metrics import mean_with_interval
from tfive.evaluate.prompts import options, prompt
from tfive.evaluate.tasks import LETTERS, Item, Task
from tfive.inference.thought_model import ThoughtModel


@dataclass(frozen=True)
class AnswerGains:
    """Gains of every item in nats per token of its answer, and the tokens that its thought took."""

    thought: list[float]
    mixed: list[float] | None
    """None without a gate."""
    thought_tokens: int

    def summary(self) -> dict[str, float]:
        """Means with 95 % intervals over items, the share of items that gain, and the worst hundredth."""
        found: dict[str, float] = {}
        for name, values in (("thought_gain", self.thought), ("mixed_gain", self.mixed)):
            if values is not None:
                interval = mean_with_interval(values, bounds=None)
                found |= {name: interval.mean, f"{name}_low": interval.low, f"{name}_high": interval.high}
        worst = sorted(self.thought)[: max(1, len(self.thought) // 100)]
        found["useful_fraction"] = sum(gain > 0 for gain in self.thought) / len(self.thought)
        found["worst_1_percent"] = sum(worst) / len(worst)
        return found


def question_and_answer(task: Task, item: Item) -> tuple[str, str]:
    """What precedes the right answer, and the right answer."""
    if task.kind == "choice":
        return options(task, item)[LETTERS.index(item.answer)]
    asked = prompt(task.model_copy(update={"demonstrations": None}), item).text
    return f"{asked} The answer is", f" {item.answer}"


@torch.no_grad()
def answer_gains(
    model: ThoughtModel,
    task: Task,
    items: Sequence[Item],
    *,
    seed: int = 0,
    rows: int = 8,
    world: World = SINGLE,
) -> AnswerGains:
    """Gains of `items`, the same thoughts' random numbers every time, so that two measurements differ by the model. A
    process of `world` gives a sign of life with every pass."""
    pairs = [_encoded(model, task, item) for item in items]
    order = sorted(range(len(items)), key=lambda number: -sum(map(len, pairs[number])))
    thought, mixed, tokens = [0.0] * len(items), [0.0] * len(items), 0
    for start in world.beating(range(0, len(order), rows)):
        some = order[start : start + rows]
        places = [len(pairs[number][0]) - 1 for number in some]
        found = model.score(
            [[*pairs[number][0], *pairs[number][1]] for number in some],
            [[place] for place in places],
            seed=seed,
            items=[item_number(task.name, items[number].id) for number in some],
        )
        for number, place, scores in zip(some, places, found):
            served = ~scores.thoughtful[place:].isnan()
            plain = scores.plain[place:][served].double()
            thought[number] = float((scores.thoughtful[place:][served].double() - plain).mean())
            mixed[number] = float((scores.mixed[place:][served].double() - plain).mean())
            tokens += sum(len(one.ids) for one in scores.thoughts)
    return AnswerGains(thought, mixed if model.gate is not None else None, tokens)


def _encoded(model: ThoughtModel, task: Task, item: Item) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Question and answer in tokens; a question that does not fit loses its beginning."""
    before, after = encoded_pair(model.tokenizer, *question_and_answer(task, item))
    room = None if model.limit is None else model.limit - len(after) - model.plan.reach
    if not after or (room is not None and room < 1):
        raise UserError(f"task {task.name}, item {item.id}: an answer of {len(after)} tokens cannot be predicted here")
    return (before if room is None else before[-room:]), after

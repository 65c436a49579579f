"""Gains before right answers, against one plain row per item through the model itself."""

from __future__ import annotations

import pytest
import torch

from tfive.evaluate.answer_gains import answer_gains, question_and_answer
from tfive.evaluate.generate import item_number
from tfive.evaluate.tasks import TASKS, Item, Task
from tfive.inference.thought_model import ThoughtModel
from tfive.tree.settings import ThoughtSettings
from tiny import model, tokenizer

pytestmark = pytest.mark.model

TASK = Task(name="places", kind="text", file="places.jsonl", prompt="short-v1")
ITEMS = [
    Item("a", "7 boat", "river mill town"),
    Item("b", "8 salt rain", "wind"),
    Item("c", "9", "farm boat grain salt"),
]
THOUGHT = ThoughtSettings(length=4, checkpoints=(4,), horizon=3, open="(", close=")")


@torch.no_grad()
def test_gains_are_those_of_plain_rows() -> None:
    thinker = ThoughtModel(model(), tokenizer(), THOUGHT)
    found = answer_gains(thinker, TASK, ITEMS, seed=3, rows=2)
    assert found.mixed is None
    assert found.thought_tokens == 4 * len(ITEMS)
    for item, gain in zip(ITEMS, found.thought):
        context, answer = question_and_answer(TASK, item)
        before = tokenizer().encode(context)
        whole = tokenizer().encode(context + answer)
        after = whole[len(before) :]
        # The thought serves as many tokens of the answer as the horizon has.
        served = after[:3]
        (scores,) = thinker.score([whole], [[len(before) - 1]], seed=3, items=[item_number("places", item.id)])
        thought = [*thinker.plan.open_ids, *scores.thoughts[0].ids, *thinker.plan.close_ids]
        losses = []
        for row in ([*before, *served], [*before, *thought, *served]):
            log = thinker.model(torch.tensor([row])).logits[0].double().log_softmax(-1)
            places = range(len(row) - len(served) - 1, len(row) - 1)
            losses.append(-sum(float(log[place, token]) for place, token in zip(places, served)) / len(served))
        assert gain == pytest.approx(losses[0] - losses[1], abs=1e-5)


def test_the_right_answer_follows_the_question_as_the_task_asks_it() -> None:
    choice = Item("d", "Where?", "B", ("bank", "library"))
    assert question_and_answer(TASKS["csqa"], choice) == ("Question: Where?\nA. bank\nB. library\nAnswer:", " B")
    assert question_and_answer(TASKS["arc_challenge"], choice) == ("Question: Where?\nAnswer:", " library")
    assert question_and_answer(TASKS["gsm8k"], Item("s", "1 + 1?", "2")) == (
        "Question: 1 + 1?\nAnswer: The answer is", " 2",
    )  # fmt: skip

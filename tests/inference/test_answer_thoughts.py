"""One thought right before an answer: it serves the whole answer, and a given one stands in place of a drawn one. The
reference is the stock model on whole rows of text, opening, thought, close and answer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from tfive.inference.requests import Completion, TokenRequest, When, WritingMode
from tfive.inference.thought_model import ThoughtModel
from tfive.tree.gated import ReadingGates
from tfive.tree.settings import SamplingSettings, ThoughtSettings

pytestmark = pytest.mark.model

PROMPTS = ("37 boxes of 48 pencils each, which makes", "A thought is written between the lines, and")
MOST, T = 9, 5
GREEDY = SamplingSettings(top_k=1)


@pytest.fixture(scope="module")
def lively(llama: LlamaForCausalLM) -> Any:
    """Predictions that depend strongly on everything before them, without rounding to hide behind."""
    model = copy.deepcopy(llama).double()
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(std=0.4, generator=generator)
    return model.eval()


def thinker(model: Any, tokenizer: Any, reading: str = "inline", variable: bool = True) -> ThoughtModel:
    thought = ThoughtSettings(length=T, checkpoints=(T,), horizon=2, variable_length=variable, reading=reading)
    gates = None
    if reading == "gated":
        gates = ReadingGates.of(model)
        gates.gate.data.fill_(0.7)
    return ThoughtModel(model, tokenizer, thought, GREEDY, gates=gates)


def answers(model: ThoughtModel, thoughts: list[tuple[int, ...] | None], rows: int = 2) -> list[Completion]:
    tokenizer: Any = model.tokenizer
    requests = [
        TokenRequest(tuple(tokenizer.encode(text, add_special_tokens=False)), MOST, number, thought=thought)
        for number, (text, thought) in enumerate(zip(PROMPTS, thoughts))
    ]
    mode = WritingMode(None, GREEDY, When(at_answer="own"), ())
    return [one for _, one in sorted(model.write(requests, mode, rows=rows))]


@torch.no_grad()
def plain(model: Any, ids: list[int], count: int) -> list[int]:
    """The likeliest tokens after `ids`, one by one, each time from the whole row."""
    for _ in range(count):
        ids = [*ids, int(model(torch.tensor([ids])).logits[0, -1].argmax())]
    return ids[-count:]


@pytest.mark.parametrize("variable", [False, True])
def test_an_answer_goes_on_from_its_thought_to_the_end(
    lively: Any, tokenizer: PreTrainedTokenizerFast, variable: bool
) -> None:
    model = thinker(lively, tokenizer, variable=variable)
    closing = list(model.plan.close_ids)
    given: list[tuple[int, ...] | None] = [tuple(tokenizer.encode("8 + 9", add_special_tokens=False))[:3], ()]
    drawn: list[tuple[int, ...] | None] = [None, None]
    for thoughts in (drawn, given):
        for prompt, found, thought in zip(PROMPTS, answers(model, thoughts), thoughts):
            assert len(found.thoughts) == 1
            position, written, closed = found.thoughts[0]
            before = tokenizer.encode(prompt, add_special_tokens=False)
            assert position == len(before) - 1
            assert thought is None or tuple(written) == thought
            row = [*before, *model.plan.open_ids, *written, *([] if closed else closing)]
            assert found.ids == plain(lively, row, MOST)


def test_a_closed_thought_may_be_given_and_rows_do_not_matter(lively: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    model = thinker(lively, tokenizer)
    closed = (*tokenizer.encode("8", add_special_tokens=False), *model.plan.close_ids)
    together, alone = answers(model, [closed, None]), answers(model, [closed, None], rows=1)
    assert [one.ids for one in together] == [one.ids for one in alone]
    assert together[0].thoughts[0][1:] == (list(closed), True)
    before = tokenizer.encode(PROMPTS[0], add_special_tokens=False)
    assert together[0].ids == plain(lively, [*before, *model.plan.open_ids, *closed], MOST)


def test_gated_reading_reads_a_given_thought_as_a_drawn_one(lively: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    model = thinker(lively, tokenizer, "gated")
    drawn = answers(model, [None, None])
    thoughts: list[tuple[int, ...] | None] = [tuple(one.thoughts[0][1]) for one in drawn]
    again = answers(model, thoughts)
    assert [one.ids for one in again] == [one.ids for one in drawn]
    torch.testing.assert_close(again[0].log_probs, drawn[0].log_probs)
    swapped = answers(model, thoughts[::-1])
    assert not torch.allclose(swapped[0].log_probs[:, 1], drawn[0].log_probs[:, 1])


def test_a_thought_that_does_not_fit_is_refused(lively: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match="a thought of 6 tokens does not fit"):
        answers(thinker(lively, tokenizer), [(5,) * (T + 1), None])

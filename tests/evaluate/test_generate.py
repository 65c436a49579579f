"""Outputs against transformers' own generation; randomness, stops, parity and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from tfive.errors import UserError
from tfive.evaluate.generate import (
    Decoding,
    GenerationRequest,
    Output,
    encoded,
    flip_rate,
    generate,
    item_number,
    rows_that_fit,
)
from tfive.inference.requests import When
from tfive.inference.thought_model import ThoughtModel

pytestmark = pytest.mark.model

PROMPTS = ["The box", "Seven red pens and a", "One", "Two boxes of pens are on the table, and", "A pen", "It was"]


def requests(most: int = 10) -> list[GenerationRequest]:
    return [
        GenerationRequest(f"item-{n}", text, most, item_number("task", f"item-{n}")) for n, text in enumerate(PROMPTS)
    ]


def written(
    model: ThoughtModel, decoding: Decoding, stops: tuple[str, ...] = (), count: int = 6, most: int = 10, **more: Any
) -> dict[Any, Output]:
    found = list(generate(model, requests(most)[:count], stops, decoding, **more))
    assert len({(request.id, sample) for request, sample, _ in found}) == len(found)
    return {(request.id, sample): output for request, sample, output in found}


@torch.no_grad()
def test_greedy_outputs_in_few_rows_are_transformers_own(
    thinker: ThoughtModel, lively: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    found = written(thinker, Decoding(rows=2))
    for request in requests():
        ids = torch.tensor([tokenizer.encode(request.prompt)])
        stock = cast(Any, lively).generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, do_sample=False)
        output = found[request.id, 0]
        assert list(output.ids) == stock[0, ids.shape[1] :].tolist()
        assert output.prompt_tokens == ids.shape[1]
        assert (output.thoughts, output.thought_tokens) == ((), 0)


@pytest.mark.parametrize("when", [When(), When(2), When(entropy_above=0.5)])
def test_random_numbers_belong_to_item_and_sample_whatever_the_batch(thinker: ThoughtModel, when: When) -> None:
    decoding = Decoding(samples=2, temperature=0.9, top_p=0.95, seed=4, when=when)
    many, few = (written(thinker, replace(decoding, rows=rows), count=3, most=5) for rows in (5, 2))
    alone = written(thinker, replace(decoding, parity=True), count=3, most=5)
    assert len(many) == 6
    assert many == few == alone
    assert len({output.ids for output in many.values()}) == len(many)
    assert all((len(output.thoughts) > 0) == when.ever for output in many.values())
    other = written(thinker, replace(decoding, seed=5, rows=6), count=3, most=5)
    assert sum(other[name].ids != many[name].ids for name in many) > len(many) // 2


def test_one_item_asked_alone_in_parity_mode_gives_the_same(thinker: ThoughtModel) -> None:
    decoding = Decoding(temperature=1.0, parity=True, when=When(3))
    together = written(thinker, decoding, count=3, most=5)
    for request in requests(5)[1:3]:
        ((_, _, output),) = generate(thinker, [request], (), decoding)
        assert output == together[request.id, 0]


def test_finished_outputs_are_not_written_again(thinker: ThoughtModel) -> None:
    decoding = Decoding(samples=2, temperature=1.0, rows=3)
    whole = written(thinker, decoding)
    done = frozenset(list(whole)[:5])
    rest = written(thinker, decoding, done=done)
    assert set(rest) == set(whole) - done
    assert all(rest[name] == whole[name] for name in rest)
    assert written(thinker, decoding, done=frozenset(whole)) == {}


def test_stops_cut_the_text_and_the_tokens(thinker: ThoughtModel, tokenizer: PreTrainedTokenizerFast) -> None:
    free = written(thinker, Decoding(rows=4))
    name = ("item-1", 0)
    stop = free[name].text[3:5]
    found = written(thinker, Decoding(rows=4), stops=("never there", stop))
    for key, output in found.items():
        if stop in free[key].text:
            assert output.ended == "stop"
            assert output.text == free[key].text[: free[key].text.find(stop)]
            assert output.ids == free[key].ids[: len(output.ids)]
            assert stop in tokenizer.decode(list(output.ids))
            assert stop not in tokenizer.decode(list(output.ids[:-1]))
        else:
            assert output == free[key]
    assert found[name].ended == "stop"


def test_an_output_is_as_long_as_the_model_allows(thinker: ThoughtModel, tokenizer: PreTrainedTokenizerFast) -> None:
    limit = thinker.limit
    assert limit is not None
    prompt = "pens " * 400
    while len(tokenizer.encode(prompt)) >= limit - 3:
        prompt = prompt[:-5]
    room = limit - len(tokenizer.encode(prompt))
    ((_, _, output),) = generate(thinker, [GenerationRequest("long", prompt, 500, 1)], (), Decoding())
    assert len(output.ids) == room
    with pytest.raises(UserError, match=r"item long: .* positions"):
        list(generate(thinker, [GenerationRequest("long", prompt + " pens" * 40, 5, 1)], (), Decoding()))
    with pytest.raises(UserError, match="empty prompt"):
        list(generate(thinker, [GenerationRequest("none", "", 5, 1)], (), Decoding()))
    with pytest.raises(UserError, match="temperature 0"):
        Decoding(samples=4)


def test_flips_are_counted_with_the_place_of_the_first_difference() -> None:
    def output(*ids: int) -> Output:
        return Output("", ids, "length", 1, (), 0)

    asked = requests()[:3]
    together = [(asked[0], 0, output(1, 2, 3)), (asked[1], 0, output(4, 5)), (asked[2], 0, output(6, 7, 8))]
    alone = [(asked[1], 0, output(4, 5)), (asked[0], 0, output(1, 9, 3)), (asked[2], 0, output(6, 7, 9))]
    found = flip_rate(together, alone)
    assert (found.outputs, found.flipped, found.first_difference) == (3, 2, 1.5)
    assert found.rate == pytest.approx(2 / 3)


def test_numbers_and_tokens(thinker: ThoughtModel, tokenizer: PreTrainedTokenizerFast) -> None:
    assert item_number("a", "b") != item_number("ab", "")
    assert 0 <= item_number("gsm8k", "7") < 2**32
    assert rows_that_fit(thinker, 100, True) >= 1
    begin = tokenizer.bos_token
    if begin:
        assert encoded(tokenizer, f"{begin} pens") == tokenizer.encode(f"{begin} pens", add_special_tokens=False)
    assert encoded(tokenizer, "pens") == tokenizer.encode("pens")

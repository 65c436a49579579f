"""Log-likelihood of options against the stock model on whole rows, and against the written text with thoughts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3_5TextConfig

from tfive.errors import UserError
from tfive.evaluate.likelihood import Likelihood, chosen, encoded_pair, log_likelihoods
from tfive.inference.requests import When
from tfive.inference.thought_model import ThoughtModel
from tfive.tree.settings import ThoughtSettings

pytestmark = pytest.mark.model

QUESTIONS = [
    [("Question: how many?\nAnswer:", " seven"), ("Question: how many?\nAnswer:", " eight red pens")],
    [("One", " two"), ("One", " three boxes"), ("One", "s"), ("Two ", "boxes")],
    [("A longer context about pens, boxes and the table they lie on, again and again:", " yes")],
    [("", "pens")],
]


@torch.no_grad()
def plain(model: Any, tokenizer: Any, context: str, continuation: str) -> tuple[float, bool]:
    before, after = encoded_pair(tokenizer, context, continuation)
    log_p = model(torch.tensor([[*before, *after]])).logits[0, len(before) - 1 : -1].double().log_softmax(-1)
    target = torch.tensor(after)
    return float(log_p.gather(1, target[:, None]).sum()), bool((log_p.argmax(-1) == target).all())


@pytest.mark.parametrize("nodes", [0, 1, 60])
def test_options_are_as_likely_as_on_whole_rows(
    thinker: ThoughtModel, lively: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, nodes: int
) -> None:
    found = dict(log_likelihoods(thinker, QUESTIONS, nodes=nodes))
    assert sorted(found) == list(range(len(QUESTIONS)))
    for number, options in enumerate(QUESTIONS):
        for one, (context, continuation) in zip(found[number], options, strict=True):
            total, likeliest = plain(lively, tokenizer, context, continuation)
            assert one.total == pytest.approx(total, abs=2e-4)
            assert one.likeliest == likeliest
            assert one.tokens == len(encoded_pair(tokenizer, context, continuation)[1])
            assert one.characters == len(continuation.removeprefix(" "))
            assert one.per_character == pytest.approx(one.total / one.characters)


def test_a_continuation_the_model_would_write_is_the_likeliest(
    thinker: ThoughtModel, lively: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    ids = torch.tensor([tokenizer.encode("One red")])
    with torch.no_grad():
        best = lively(ids).logits[0, -1].argsort(descending=True)
    words = [str(tokenizer.decode([int(i)])) for i in best]
    good = next(
        word for word in words if encoded_pair(tokenizer, "One red", word)[1] == (int(best[words.index(word)]),)
    )
    ((_, (first, second)),) = log_likelihoods(thinker, [[("One red", good), ("One red", " boxes boxes")]])
    assert first.likeliest == (good == words[0])
    assert not second.likeliest


def test_recurrent_layers_read_options_apart(tokenizer: PreTrainedTokenizerFast) -> None:
    config = Qwen3_5TextConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=128, linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=6, linear_value_head_dim=6, tie_word_embeddings=True,
        layer_types=["linear_attention", "linear_attention", "full_attention"],
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        body = AutoModelForCausalLM.from_config(config).eval()
    for parameter in body.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(std=0.3, generator=torch.Generator().manual_seed(1))
    model = ThoughtModel(body, tokenizer, ThoughtSettings(length=1, checkpoints=(1,), horizon=1, delimiters="none"))
    for number, found in log_likelihoods(model, QUESTIONS[:2]):
        for one, pair in zip(found, QUESTIONS[number], strict=True):
            assert one.total == pytest.approx(plain(body, tokenizer, *pair)[0], abs=1e-3)


@pytest.mark.parametrize("when", [When(1), When(3), When(entropy_above=0.3)])
def test_with_thoughts_options_are_thought_about_as_if_written(thinker: ThoughtModel, when: When) -> None:
    pair = ("Seven boats on the river", " and the mill")
    before, after = encoded_pair(thinker.tokenizer, *pair)
    row, first = [*before, *after], len(before) - 1
    places = list(range(first, len(row) - 1, when.every or 1))
    if when.entropy_above is not None:
        (plainly,) = thinker.score([row], [[]])
        places = []
        for p in range(first, len(row) - 1):
            if plainly.entropy[p] > when.entropy_above and (not places or p - places[-1] >= thinker.plan.horizon):
                places.append(p)
    (scores,) = thinker.score([row], [places], seed=6, items=[21])
    ((_, (found,)),) = log_likelihoods(thinker, [[pair]], when=when, seed=6, numbers=[21])
    assert found.total == pytest.approx(float(scores.mixed[first:].double().sum()), abs=1e-4)
    assert found.thoughts == len(places) > 1
    assert found.thought_tokens == sum(len(thought.ids) for thought in scores.thoughts)
    ((_, (alone,)),) = log_likelihoods(thinker, [[pair]])
    assert abs(alone.total - found.total) > 1e-3


def test_thoughts_do_not_depend_on_the_batch(thinker: ThoughtModel) -> None:
    asked: dict[str, Any] = {"when": When(2), "seed": 3, "numbers": [4, 5, 6]}
    many = dict(log_likelihoods(thinker, QUESTIONS[:3], **asked))
    alone = dict(log_likelihoods(thinker, QUESTIONS[:3], parity=True, **asked))
    for number, options in many.items():
        for one, other in zip(options, alone[number], strict=True):
            assert one.total == pytest.approx(other.total, abs=1e-3)
            assert (one.thoughts, one.thought_tokens) == (other.thoughts, other.thought_tokens)
    assert sum(one.thoughts for options in many.values() for one in options) > 4


def test_choices_by_each_way_of_comparing() -> None:
    options = [
        Likelihood(-3.0, 1, 2, 4, False),
        Likelihood(-4.0, 2, 8, 8, False),
        Likelihood(-5.0, 3, 9, 30, False),
        Likelihood(-3.0, 1, 2, 4, False),
    ]
    assert chosen(options) == {"raw": 0, "per_character": 1, "per_byte": 2}


def test_pairs_are_split_where_the_context_ends(tokenizer: PreTrainedTokenizerFast) -> None:
    whole = tokenizer.encode("Two boxes")
    before, after = encoded_pair(tokenizer, "Two ", "boxes")
    assert [*before, *after] == whole
    assert list(before) == tokenizer.encode("Two")
    begin, all_of_it = encoded_pair(tokenizer, "", "Two boxes")
    assert begin == (tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id,)
    assert tokenizer.decode(list(all_of_it)) == "Two boxes"


def test_what_cannot_be_scored_is_one_line(thinker: ThoughtModel) -> None:
    with pytest.raises(UserError, match="question 1, option 2: no text"):
        list(log_likelihoods(thinker, [[("One", " two"), ("One", "")]]))
    with pytest.raises(UserError, match="question 1, option 1"):
        list(log_likelihoods(thinker, [[("One", " two" * 2000)]]))


@torch.no_grad()
def test_a_context_that_is_too_long_keeps_its_end(
    thinker: ThoughtModel, lively: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    context = "".join(f"{number} pens " for number in range(400))
    ((_, (found,)),) = log_likelihoods(thinker, [[(context, "yes")]])
    before, after = encoded_pair(tokenizer, context, "yes")
    # 256 positions, the last of which predicts nothing.
    kept = before[-(256 - 1 - len(after)) :]
    log_p = lively(torch.tensor([[*kept, *after]])).logits[0, len(kept) - 1 : -1].double().log_softmax(-1)
    assert len(kept) < len(before)
    assert found.total == pytest.approx(float(log_p.gather(1, torch.tensor(after)[:, None]).sum()), abs=2e-4)

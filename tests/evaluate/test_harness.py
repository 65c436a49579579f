"""The adapter for lm-evaluation-harness; where that package is missing, three of its names stand in for it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from tfive.evaluate.generate import Decoding, GenerationRequest, generate
from tfive.evaluate.likelihood import log_likelihoods
from tfive.inference.requests import When
from tfive.inference.thought_model import ThoughtModel
from tfive.tree.settings import ThoughtSettings

pytestmark = pytest.mark.model


@dataclass(frozen=True)
class Asked:
    args: tuple[Any, ...]


def stand_in() -> dict[str, ModuleType]:
    """The part of lm_eval that the adapter touches."""
    names = ("lm_eval", "lm_eval.api", "lm_eval.api.model", "lm_eval.api.registry", "lm_eval.utils")
    made: dict[str, Any] = {name: ModuleType(name) for name in names}
    made["lm_eval.api.model"].LM = type("LM", (), {"__init__": lambda self: None})
    registered: dict[str, Any] = {}

    def register(name: str) -> Callable[[type], type]:
        return lambda cls: registered.setdefault(name, cls)

    def windows(tokens: list[int], prefix: int, most: int, context: int) -> Iterator[tuple[list[int], list[int]]]:
        for start in range(0, len(tokens), most):
            predicted = tokens[start : start + most]
            yield [prefix, *tokens][start : start + len(predicted)], predicted

    made["lm_eval.api.registry"].register_model = register
    made["lm_eval.api.registry"].registered = registered
    made["lm_eval.utils"].get_rolling_token_windows = windows
    made["lm_eval.utils"].make_disjoint_window = lambda pair: (pair[0][: len(pair[0]) - len(pair[1]) + 1], pair[1])
    return made


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Any:
    if importlib.util.find_spec("lm_eval") is None:
        for name, module in stand_in().items():
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.delitem(sys.modules, "tfive.evaluate.harness", raising=False)
    return importlib.import_module("tfive.evaluate.harness")


def test_the_name_is_registered(harness: Any) -> None:
    registry = importlib.import_module("lm_eval.api.registry")
    known = getattr(registry, "registered", None)
    assert (known["tfive"] if known is not None else registry.get_model("tfive")) is harness.HarnessModel


@pytest.mark.parametrize("when", [When(), When(2)])
def test_requests_are_answered_in_their_order(harness: Any, thinker: ThoughtModel, when: When) -> None:
    model = harness.HarnessModel.of(thinker, when, seed=3)
    pairs = [("One river", " mill"), ("One river", " farm"), ("Two", " boats"), ("One river", " salt")]
    found = model.loglikelihood([Asked(pair) for pair in pairs])
    for pair, (total, _) in zip(pairs, found, strict=True):
        ((_, (alone,)),) = log_likelihoods(thinker, [[pair]], when=when, seed=3)
        assert total == pytest.approx(alone.total, abs=1e-3)
    short: dict[str, Any] = {"until": ["e"], "max_gen_toks": 4}
    long: dict[str, Any] = {"until": [], "max_gen_toks": 6}
    asked = [("The river", long), ("Seven", short), ("A", long)]
    written = model.generate_until([Asked(one) for one in asked])
    for number, (text, settings) in enumerate(asked):
        request = GenerationRequest("x", text, settings["max_gen_toks"], number)
        ((_, _, output),) = generate(thinker, [request], tuple(settings["until"]), Decoding(seed=3, when=when))
        assert written[number] == output.text


@torch.no_grad()
def test_whole_texts_are_scored_in_windows(harness: Any, thinker: ThoughtModel, lively: Any) -> None:
    model = harness.HarnessModel.of(thinker)
    text = "river mill farm " * 6
    (found,) = model.loglikelihood_rolling([Asked((text,))])
    tokenizer: Any = thinker.tokenizer
    ids = [tokenizer.eos_token_id, *tokenizer.encode(text)]
    log_p = lively(torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)
    assert found == pytest.approx(float(log_p.gather(1, torch.tensor(ids[1:])[:, None]).sum()), abs=1e-3)


def test_whole_texts_are_thought_about_where_they_are_uncertain(harness: Any, thinker: ThoughtModel) -> None:
    text = "river mill farm " * 2
    at_every, at_uncertain, never = (
        harness.HarnessModel.of(thinker, when).loglikelihood_rolling([Asked((text,))])[0]
        for when in (When(thinker.plan.horizon), When(entropy_above=0.0), When())
    )
    # Every prediction is more uncertain than not at all, so thoughts stand wherever none serves yet.
    assert at_uncertain == pytest.approx(at_every, abs=1e-4)
    assert at_uncertain != pytest.approx(never, abs=1e-3)


@torch.no_grad()
def test_learned_positions_are_never_exceeded(harness: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    end = tokenizer.eos_token_id
    shape = GPT2Config(
        n_layer=1, n_head=2, n_embd=16, n_positions=64, vocab_size=len(tokenizer), bos_token_id=end, eos_token_id=end
    )
    plain = GPT2LMHeadModel(shape).eval()
    with torch.no_grad():
        plain.transformer.wpe.weight.normal_(std=2.0, generator=torch.Generator().manual_seed(5))
    silent = ThoughtModel(plain, tokenizer, ThoughtSettings(length=1, checkpoints=(1,), horizon=1, delimiters="none"))
    model = harness.HarnessModel.of(silent)
    # Of 64 positions one is the context's and two are kept for a thought of one token and what it predicts.
    size = 61
    repeats = next(n for n in range(50, 200) if len(tokenizer.encode("river mill farm " * n)) % size == 0)
    text = "river mill farm " * repeats
    ids = [end, *tokenizer.encode(text)]
    (found,) = model.loglikelihood_rolling([Asked((text,))])
    expected = 0.0
    for start in range(0, len(ids) - 1, size):
        row = ids[start : start + size + 1]
        log_p = plain(torch.tensor([row])).logits[0, :-1].double().log_softmax(-1)
        expected += float(log_p.gather(1, torch.tensor(row[1:])[:, None]).sum())
    assert len(ids) > 2 * 64
    assert found == pytest.approx(expected, rel=1e-6)

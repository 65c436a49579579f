"""A model with thoughts, against the stock model reading whole concatenated rows: no cache, no tree, no stream."""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    LlamaForCausalLM,
    MistralConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3_5TextConfig,
)

from pretended_graphs import PretendedGraphs
from tfive import __version__, rng
from tfive.errors import UserError
from tfive.inference import writer
from tfive.inference.requests import TokenRequest, When, WritingMode
from tfive.inference.results import Thought
from tfive.inference.thought_model import ThoughtModel, plan_for, uncertain_places
from tfive.inference.writer import TextWriter
from tfive.rl.gate import PredictionGate
from tfive.tree.fast.cuda_graph import CudaGraphs
from tfive.tree.forward import Delimiters, TreeModel
from tfive.tree.layout import TextBatch
from tfive.tree.settings import SamplingSettings, ThoughtSettings

pytestmark = pytest.mark.model

TEXT = "37 boxes of 48 pencils each, which makes 1776 pencils, and the text goes on."
H, T = 4, 5
_SMALL: dict[str, Any] = {"vocab_size": 320, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_ROTARY = {
    **_SMALL,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
_FAMILIES: dict[str, Callable[[], Any]] = {
    "mistral": lambda: MistralConfig(**_ROTARY, sliding_window=7),
    "gpt2": lambda: GPT2Config(**_SMALL, n_embd=16, n_layer=2, n_head=4, n_positions=96),
    "qwen3_5": lambda: Qwen3_5TextConfig(
        **{**_ROTARY, "num_hidden_layers": 3},
        layer_types=["linear_attention", "linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=6,
        linear_value_head_dim=6,
        tie_word_embeddings=True,
    ),
}


@pytest.fixture(scope="module")
def lively(llama: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A model whose predictions depend strongly on everything before them, and that is fond of closing parentheses."""
    model = spread(LlamaForCausalLM(llama.config))
    model.get_input_embeddings().weight.data[tokenizer.convert_tokens_to_ids(")")] *= 5
    return model


@pytest.fixture(scope="module")
def precise(lively: LlamaForCausalLM) -> LlamaForCausalLM:
    """The same in float64, so that mistakes cannot hide behind rounding."""
    return copy.deepcopy(lively).double()


def spread(model: PreTrainedModel) -> Any:
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(std=0.4, generator=generator)
    return model.eval()


def settings(kind: str = "text", variable: bool = False) -> ThoughtSettings:
    return ThoughtSettings(
        length=T, checkpoints=(2, T), horizon=H, delimiters=kind, variable_length=variable, open=" (", close=")"
    )


def opinionated(width: int) -> PredictionGate:
    """A gate far from constant."""
    gate = PredictionGate(width, width=8, seed=2)
    gate.last.weight.data.mul_(300)
    return gate


def thought_model(
    model: PreTrainedModel, tokenizer: Any, kind: str = "text", variable: bool = False, gated: bool = True, **law: Any
) -> ThoughtModel:
    thought = settings(kind, variable)
    delimiters = None
    if kind == "learned":
        delimiters = Delimiters(torch.randn(2, 16, generator=torch.Generator().manual_seed(1)))
    return ThoughtModel(
        model, tokenizer, thought, SamplingSettings(**law), opinionated(16) if gated else None, delimiters
    )


class Plain:
    """The stock model on rows of embeddings, each read whole."""

    def __init__(self, thinker: ThoughtModel) -> None:
        self.own, self.model, self.plan = thinker, thinker.model, thinker.plan

    def embed(self, ids: list[int]) -> Tensor:
        return self.model.get_input_embeddings()(torch.tensor(ids, dtype=torch.int64))

    def delimiter(self, which: int) -> Tensor:
        if self.own.delimiters is not None:
            return self.own.delimiters.weight_2D[which : which + 1]
        return self.embed(list((self.plan.open_ids, self.plan.close_ids)[which]))

    def thought(self, thought: Thought) -> Tensor:
        if thought.closed and self.own.delimiters is not None:
            return torch.cat([self.delimiter(0), self.embed(list(thought.ids[:-1])), self.delimiter(1)])
        parts = [self.delimiter(0), self.embed(list(thought.ids))]
        return torch.cat(parts if thought.closed else [*parts, self.delimiter(1)])

    @torch.no_grad()
    def last(self, row: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden state and log-probabilities behind the last input of a row."""
        hidden = self.model.base_model(inputs_embeds=row[None], use_cache=False).last_hidden_state[0, -1]
        return hidden, self.model.get_output_embeddings()(hidden).log_softmax(-1)

    @torch.no_grad()
    def expects(self, ids: list[int], thought: Thought | None) -> tuple[Tensor, Tensor | None, float, Tensor]:
        """Plain, thoughtful, gate and mixed predictions of the token after `ids`."""
        without, plain = self.last(self.embed(ids))
        if thought is None:
            return plain, None, 0.0, plain
        p = thought.position
        row = torch.cat([self.embed(ids[: p + 1]), self.thought(thought), self.embed(ids[p + 1 :])])
        with_thought, after = self.last(row)
        beta = 1.0
        if self.own.gate is not None:
            pair = torch.zeros(2, H, len(without), dtype=without.dtype)
            place = len(ids) - 1 - p
            pair[0, place], pair[1, place] = with_thought, without
            beta = float(torch.sigmoid(self.own.gate(*pair))[place])
        return plain, after, beta, (beta * after.exp() + (1 - beta) * plain.exp()).log()


def serving(thoughts: tuple[Thought, ...], token: int) -> Thought | None:
    """The newest thought at most H tokens before `token`."""
    found = [thought for thought in thoughts if thought.position < token <= thought.position + H]
    return max(found, key=lambda thought: thought.position, default=None)


def check(model: ThoughtModel, ids: list[int], first: int, scores: Any, close: float = 1e-5) -> None:
    """Every number of `scores` (about tokens `first` …) by plain rows."""
    plain = Plain(model)
    for index, token in enumerate(range(first, len(ids))):
        thought = serving(scores.thoughts, token)
        alone, after, beta, mixed = plain.expects(ids[:token], thought)
        assert scores.plain[index] == pytest.approx(float(alone[ids[token]]), abs=close)
        assert scores.gate[index] == pytest.approx(beta, abs=close)
        assert scores.mixed[index] == pytest.approx(float(mixed[ids[token]]), abs=close)
        if after is None:
            assert scores.thoughtful[index].isnan()
        else:
            assert scores.thoughtful[index] == pytest.approx(float(after[ids[token]]), abs=close)
    assert scores.served.any()


KINDS = [("text", False), ("text", True), ("none", False), ("learned", False), ("learned", True)]


@pytest.mark.parametrize(("kind", "variable"), KINDS)
def test_prediction_is_that_of_plain_rows(
    precise: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, kind: str, variable: bool
) -> None:
    model = thought_model(precise, tokenizer, kind, variable)
    found = model.predict(TEXT, every=5, seed=2)
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    assert list(found.ids) == ids
    assert "".join(found.tokens) == TEXT
    assert [thought.position for thought in found.thoughts] == list(range(4, len(ids) - 1, 5))
    assert len(found.plain) == len(ids) - 1
    check(model, ids, 1, found)
    served = found.served
    assert 0 < int((~served).sum()) < len(served)
    assert found.gate[served].std() > 0.01
    assert found.mixed_gain == pytest.approx(float((found.mixed - found.plain).mean()))
    assert {thought.closed for thought in found.thoughts} == ({False, True} if variable else {False})
    for thought in found.thoughts:
        assert thought.closed == (thought.ids[-1] == model.plan.stop_id)
        assert thought.text == tokenizer.decode(list(thought.ids[: len(thought.ids) - thought.closed]))


@pytest.mark.parametrize("family", sorted(_FAMILIES))
def test_every_family_predicts_and_writes_as_plain_rows_do(family: str, tokenizer: PreTrainedTokenizerFast) -> None:
    torch.manual_seed(0)  # vectors keep their first values
    body = spread(AutoModelForCausalLM.from_config(_FAMILIES[family]())).double()
    model = thought_model(body, tokenizer)
    short = "boxes of 48 pencils each"
    check(model, tokenizer.encode(short, add_special_tokens=False), 1, model.predict(short))
    above = model.predict(short, entropy_above=0.5)
    check(model, list(above.ids), 1, above)
    written = model.generate(short, max_new_tokens=9, every=3)
    prompt = tokenizer.encode(short, add_special_tokens=False)
    check(model, prompt + list(written.ids), len(prompt), written)


@pytest.mark.parametrize(
    ("kind", "variable", "every"), [(*kind, 3) for kind in KINDS] + [("text", False, H), ("text", False, 6)]
)
def test_written_text_is_that_of_plain_rows(
    precise: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, kind: str, variable: bool, every: int
) -> None:
    model = thought_model(precise, tokenizer, kind, variable)
    written = model.generate("A thought", max_new_tokens=12, every=every, seed=5)
    prompt = tokenizer.encode("A thought", add_special_tokens=False)
    expected = list(range(len(prompt) - 1, len(prompt) - 1 + len(written.ids), every))
    assert [thought.position for thought in written.thoughts] == expected
    check(model, prompt + list(written.ids), len(prompt), written)


@torch.no_grad()
def test_the_whole_next_token_distribution_is_mixed_in_probability(
    lively: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    model = thought_model(lively, tokenizer)
    ids = tokenizer.encode(TEXT, add_special_tokens=False)[:7]
    mode = WritingMode(SamplingSettings(), model.sampling, When(100), (), 0)
    text_writer = TextWriter(model.engine(), model.gate, mode, 1, 7 + H + 2, H + 2)
    text_writer.fill({0: TokenRequest(tuple(ids), H + 2)})
    plain, seen = Plain(model), []
    for _ in range(model.plan.open_width + T + model.plan.close_width):
        assert int(text_writer.written_B) == 0
        text_writer.advance(len(ids))
    for _ in range(H + 1):
        mixed_BV, beta_B = text_writer.expects()
        (thought,) = [model._thought(*t) for t in text_writer.result(0, 1, "length").thoughts]
        served = thought if len(ids) <= 6 + H else None
        _, _, beta, mixed = plain.expects(ids, served)
        torch.testing.assert_close(mixed_BV[0].exp(), mixed.exp(), atol=1e-6, rtol=1e-5)
        assert float(mixed_BV[0].exp().sum()) == pytest.approx(1, abs=1e-5)
        assert float(beta_B) == pytest.approx(beta, abs=1e-5)
        seen.append(beta)
        text_writer.advance(len(ids) + 1)
        ids.append(int(text_writer.out_Bo[0, int(text_writer.written_B) - 1]))
    assert seen[-1] == 0.0
    assert max(seen) - min(seen[:-1]) > 0.05


def test_prediction_is_the_engines_score(lively: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    model = thought_model(lively, tokenizer)
    chosen = [3, 9, 15]
    found = model.predict(TEXT, positions=chosen, seed=4)
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    tokens = torch.tensor([ids])
    texts = TextBatch(tokens, torch.zeros_like(tokens), torch.tensor([chosen]), torch.tensor([chosen]))
    numbers = torch.stack(
        [torch.from_numpy(rng.uniforms(4, "thought", 0, p, 0, torch.arange(T).numpy())) for p in chosen]
    )
    engine = TreeModel(lively, plan_for(model.thought, lively, tokenizer))
    thoughts = engine.sample(texts, numbers[None], model.sampling)
    scores = engine.score(texts, thoughts)
    for r, p in enumerate(chosen):
        assert found.thoughts[r].ids == tuple(thoughts.tokens_BRT[0, r].tolist())
        torch.testing.assert_close(found.thoughtful[p : p + H], -scores.token_BRH[0, r])
        torch.testing.assert_close(found.plain[p : p + H], -scores.no_thought_token_BRH[0, r])


def test_the_newest_thought_wins_and_is_dropped_after_its_horizon(
    lively: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    model = thought_model(lively, tokenizer)
    both = model.predict(TEXT, positions=[5, 7])
    older, newer = model.predict(TEXT, positions=[5]), model.predict(TEXT, positions=[7])
    assert both.thoughts == (*older.thoughts, *newer.thoughts)
    close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5, equal_nan=True)
    close(both.thoughtful[:7], older.thoughtful[:7])
    close(both.thoughtful[7:], newer.thoughtful[7:])
    assert not torch.allclose(older.thoughtful[7:9], newer.thoughtful[7:9], atol=1e-2)
    assert both.served.nonzero().flatten().tolist() == list(range(5, 7 + H))
    assert both.mixed[~both.served].equal(both.plain[~both.served])


@pytest.mark.parametrize("when", [When(3), When(entropy_above=1.0)])
def test_writing_many_and_predicting_agree(
    lively: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, when: When
) -> None:
    model = thought_model(lively, tokenizer, variable=True)
    prompts = ["A thought", "37 boxes of 48 pencils each", "the", "lines, and the text", "each", "which makes"]
    requests = [
        TokenRequest(tuple(tokenizer.encode(text, add_special_tokens=False)), 9 + number % 3, item=number, sample=0)
        for number, text in enumerate(prompts)
    ]
    mode = WritingMode(SamplingSettings(), model.sampling, when, (), 8)
    found = dict(model.write(requests, mode, rows=3, poll=2))
    assert sorted(found) == list(range(len(requests)))
    for number, request in enumerate(requests):
        alone = next(model.write([request], mode))[1]
        written = found[number]
        assert written.ids == alone.ids
        assert len(written.ids) == request.max_new_tokens
        assert written.thoughts == alone.thoughts
        rows, places = [[*request.ids, *written.ids]], [[thought[0] for thought in written.thoughts]]
        (scores,) = model.score(rows, places, seed=8, items=[number])
        assert [(t.position, list(t.ids), t.closed) for t in scores.thoughts] == written.thoughts
        first = len(request.ids) - 1
        torch.testing.assert_close(scores.mixed[first:], written.log_probs[:, 3], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(scores.gate[first:], written.log_probs[:, 2], atol=1e-5, rtol=1e-5)
        if when.entropy_above is not None:
            entropy = scores.entropy[first:]

            def uncertain(_: int, found: Tensor, first: int = first) -> list[int]:
                return [first + p for p in uncertain_places(found[first:], 1.0, H)]

            (again,) = model.score(rows, uncertain, seed=8, items=[number])
            assert [t.position for t in again.thoughts] == places[0]
            assert all(entropy[p - first] > 1.0 for p in places[0])
    assert len({tuple(written.ids) for written in found.values()}) == len(requests)


@pytest.mark.parametrize("family", ["mistral", "qwen3_5"])
def test_replayed_steps_write_the_same(
    family: str, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The captured route, with the step itself in place of the graph: warming up in the middle must leave no trace."""
    model = thought_model(spread(AutoModelForCausalLM.from_config(_FAMILIES[family]())), tokenizer)
    requests = [TokenRequest(tuple(range(5 + 20 * n)), 9, item=n) for n in range(4)]
    mode = WritingMode(SamplingSettings(), model.sampling, When(3), (), 8)
    eager = dict(model.write(requests, mode, rows=2, poll=2))
    graphs = PretendedGraphs()
    monkeypatch.setattr(CudaGraphs, "on", lambda *_: graphs)
    monkeypatch.setattr(writer, "SPAN", 32)
    replayed = dict(model.write(requests, mode, rows=2, poll=2))
    assert len(graphs.graphs) > 1
    for number, one in eager.items():
        assert replayed[number].ids == one.ids
        assert replayed[number].thoughts == one.thoughts
        torch.testing.assert_close(replayed[number].log_probs, one.log_probs, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_without_thoughts_greedy_writing_is_transformers_own(
    lively: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    model = thought_model(lively, tokenizer)
    prompts = ["A thought is", "37 boxes", "the lines, and"]
    for prompt in prompts:
        ids = torch.tensor([tokenizer.encode(prompt, add_special_tokens=False)])
        stock = cast(Any, lively).generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
        written = model.generate(prompt, max_new_tokens=20, every=0, temperature=0)
        assert list(written.ids) == stock[0, ids.shape[1] :].tolist()
        assert written.thoughts == ()
        assert written.mixed.equal(written.plain)


def test_a_shut_gate_writes_plainly_and_an_open_one_trusts_the_thought(
    lively: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    plainly = thought_model(lively, tokenizer).generate("37 boxes", max_new_tokens=8, every=0, temperature=0)
    model = thought_model(lively, tokenizer)
    assert model.gate is not None
    model.gate.last.weight.data.zero_()
    model.gate.last.bias.data.fill_(-40.0)
    shut = model.generate("37 boxes", max_new_tokens=8, temperature=0)
    assert shut.ids == plainly.ids
    assert len(shut.thoughts) == 2
    trusting = thought_model(lively, tokenizer, gated=False).generate("37 boxes", max_new_tokens=8, temperature=0)
    assert trusting.gate.tolist() == [1.0] * 8
    torch.testing.assert_close(trusting.mixed, trusting.thoughtful, atol=1e-6, rtol=1e-6)
    assert trusting.ids != plainly.ids


def test_seeds_decide_and_text_draws_follow_the_law(
    lively: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    model = thought_model(lively, tokenizer)
    first, again = (model.generate("boxes", max_new_tokens=10, seed=1) for _ in range(2))
    assert first.ids == again.ids
    assert first.thoughts == again.thoughts
    assert model.generate("boxes", max_new_tokens=10, seed=2).ids != first.ids
    narrow = model.generate("boxes", max_new_tokens=10, top_k=1, seed=3)
    assert narrow.ids == model.generate("boxes", max_new_tokens=10, temperature=0, seed=3).ids


def test_a_law_of_one_token_thinks_greedily(lively: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    model = thought_model(lively, tokenizer, top_k=1)
    assert model.predict(TEXT, every=6, seed=1).thoughts == model.predict(TEXT, every=6, seed=2).thoughts


def test_ends_and_stops(lively: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    model = thought_model(lively, tokenizer)
    free = model.generate("the text", max_new_tokens=16, seed=3)
    assert free.finish_reason == "length"
    assert free.text == tokenizer.decode(list(free.ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    word = free.text[9:12]
    stopped = model.generate("the text", max_new_tokens=16, seed=3, stop=["never there", word])
    assert stopped.finish_reason == "stop"
    assert stopped.text == free.text[: free.text.find(word)]
    assert stopped.ids == free.ids[: len(stopped.ids)]
    end = free.ids[5]
    lively.generation_config.eos_token_id = [end, 319]
    try:
        ended = model.generate("the text", max_new_tokens=16, seed=3)
    finally:
        lively.generation_config.eos_token_id = 0
    assert ended.finish_reason == "end"
    assert ended.ids == free.ids[: free.ids.index(end) + 1]
    assert ended.text == tokenizer.decode(
        list(ended.ids[:-1]), skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


def test_shown_thoughts_stand_where_they_were_had(lively: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    model = thought_model(lively, tokenizer)
    hidden, shown = (model.generate("37 boxes", max_new_tokens=9, seed=4, show=show) for show in (False, True))
    text, ids = shown.text, list(hidden.ids)
    pieces = [str(tokenizer.decode(ids[a:b], clean_up_tokenization_spaces=False)) for a, b in ((0, 4), (4, 8), (8, 9))]
    if "".join(pieces) != hidden.text:
        pytest.fail("choose another seed: a thought stands inside a character here")
    assert text == "".join(f"⟨{thought.text}⟩{piece}" for thought, piece in zip(shown.thoughts, pieces))


def test_entropy_chooses_uncertain_positions(lively: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    model = thought_model(lively, tokenizer)
    everywhere = model.predict(TEXT, positions=[])
    assert everywhere.thoughts == ()
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    with torch.no_grad():
        log_p = lively(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    torch.testing.assert_close(everywhere.entropy, entropy, atol=1e-5, rtol=1e-5)
    threshold = float(entropy.median())
    chosen = [thought.position for thought in model.predict(TEXT, entropy_above=threshold).thoughts]
    assert chosen
    assert all(entropy[p] > threshold for p in chosen)
    assert all(b - a >= H for a, b in pairwise(chosen))
    skipped = [p for p in range(len(entropy)) if entropy[p] > threshold and p not in chosen]
    assert all(any(0 < p - q < H for q in chosen) for p in skipped)


@pytest.mark.parametrize("kind", ["text", "learned"])
def test_saved_and_loaded_it_is_the_same(
    lively: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, kind: str
) -> None:
    model = thought_model(lively, tokenizer, kind, variable=True, temperature=0.9, top_k=50)
    folder = tmp_path / "deep" / "out"
    model.save_pretrained(folder)
    again = ThoughtModel.from_pretrained(folder, device="cpu", dtype=torch.float32)
    assert again.thought == model.thought
    assert again.sampling == model.sampling
    before, after = model.predict(TEXT), again.predict(TEXT)
    assert before.thoughts == after.thoughts
    assert before.mixed.equal(after.mixed)
    assert before.gate.equal(after.gate)
    assert model.generate("37", max_new_tokens=6).ids == again.generate("37", max_new_tokens=6).ids
    alone = AutoModelForCausalLM.from_pretrained(folder)
    row = torch.arange(1, 20)[None]
    assert alone(row).logits.equal(lively(row).logits)
    assert AutoTokenizer.from_pretrained(folder).encode(TEXT) == tokenizer.encode(TEXT)
    files = {path.name for path in (folder / "thoughts").iterdir()}
    assert files == {"thought.json", "gate.safetensors"} | ({"delimiters.safetensors"} if kind == "learned" else set())
    assert [path.name for path in folder.parent.iterdir()] == ["out"]
    without = tmp_path / "plain"
    replace_gate = ThoughtModel(lively, tokenizer, settings())
    replace_gate.save_pretrained(without)
    assert ThoughtModel.from_pretrained(without, device="cpu").gate is None


def test_a_source_tree_that_is_not_installed_can_save(
    lively: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def installed(name: str) -> str:
        if name == "tfive":
            raise PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr("tfive.inference.files.version", installed)
    ThoughtModel(lively, tokenizer, settings()).save_pretrained(tmp_path / "out")
    written = json.loads((tmp_path / "out" / "thoughts" / "thought.json").read_text("utf-8"))
    assert written["versions"] == {"tfive": __version__, "transformers": "1.0", "torch": "1.0"}


def one_line(error: pytest.ExceptionInfo[UserError]) -> str:
    message = str(error.value)
    assert "\n" not in message
    assert len(message) < 400
    return message


def test_what_cannot_be_loaded_is_one_line(
    lively: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, saved: Path
) -> None:
    (saved / "thoughts").mkdir()
    with pytest.raises(UserError, match=r"no thoughts/thought\.json") as error:
        ThoughtModel.from_pretrained(saved)
    one_line(error)
    folder = tmp_path / "out"
    thought_model(lively, tokenizer, "learned").save_pretrained(folder)
    with pytest.raises(UserError, match="not empty") as error:
        thought_model(lively, tokenizer).save_pretrained(folder)
    one_line(error)
    described = (folder / "thoughts" / "thought.json").read_text("utf-8")
    content = json.loads(described)
    wrong: list[tuple[str, str, str]] = [
        ("thought.json", "{", "cannot be read"),
        ("thought.json", "[]", "format None"),
        ("thought.json", json.dumps(content | {"format": 99}), "format 99"),
        ("thought.json", json.dumps(content | {"thought": {"length": 0}}), "cannot be read"),
        ("thought.json", json.dumps(content | {"tokenizer": "another"}), "tokenizer"),
        ("thought.json", json.dumps(content | {"gate": {"features": 10**9, "width": 10**9}}), "says 1000000000"),
        ("thought.json", json.dumps(content | {"gate": {"features": 1e400, "width": 9}}), "cannot be read"),
        ("thought.json", json.dumps(content | {"thought": {"length": 10**9, "checkpoints": [10**9]}}), "cannot be"),
        ("thought.json", json.dumps(content | {"origin": 3}), "cannot be read"),
        ("thought.json", "[" * 5000, "cannot be read"),
        ("thought.json", json.dumps(content | {"gate": {"features": 16, "width": 9}}), "gate.safetensors"),
        ("gate.safetensors", "damaged", "gate.safetensors"),
        ("delimiters.safetensors", "damaged", "delimiters.safetensors"),
    ]
    for name, text, part in wrong:
        path = folder / "thoughts" / name
        before = path.read_bytes()
        path.write_text(text, "utf-8")
        with pytest.raises(UserError, match=part) as error:
            ThoughtModel.from_pretrained(folder, device="cpu")
        one_line(error)
        path.write_bytes(before)
    (folder / "thoughts" / "gate.safetensors").unlink()
    with pytest.raises(UserError, match=r"gate\.safetensors"):
        ThoughtModel.from_pretrained(folder, device="cpu")


def test_bad_requests_are_one_line(lively: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    model = thought_model(lively, tokenizer)
    assert model.limit == 256
    requests: list[tuple[Callable[[], Any], str]] = [
        (lambda: model.predict("A"), "at least 2"),
        (lambda: model.predict("word " * 300), "the model has 256"),
        (lambda: model.predict(TEXT, positions=[-1]), "positions -1"),
        (lambda: model.predict(TEXT, positions=[10_000]), "positions 10000"),
        (lambda: model.predict(TEXT, every=0), "every = 0"),
        (lambda: model.predict(TEXT, every=2, positions=[1]), "positions and every given"),
        (lambda: model.generate("", max_new_tokens=3), "prompt of 0 tokens"),
        (lambda: model.generate("A", max_new_tokens=0), "max_new_tokens = 0"),
        (lambda: model.generate("A", max_new_tokens=250), "the model has 256"),
        (lambda: model.generate("A", max_new_tokens=5, every=-1), "every = -1"),
        (lambda: model.generate("A", max_new_tokens=5, temperature=-1.0), "temperature = -1"),
        (lambda: model.generate("A", max_new_tokens=5, top_p=0.0), "top_p = 0"),
    ]
    for request, part in requests:
        with pytest.raises(UserError, match=part) as error:
            request()
        one_line(error)
    with pytest.raises(UserError, match="gate reads 8 features"):
        ThoughtModel(lively, tokenizer, settings(), gate=PredictionGate(8))
    with pytest.raises(UserError, match="only they, have weights"):
        ThoughtModel(lively, tokenizer, settings("learned"))
    assert len(model.generate("A", max_new_tokens=250, every=0, stop=" ").ids) > 0


def test_thoughts_never_hold_what_is_no_action(lively: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    plan = plan_for(settings(), lively, tokenizer)
    assert set(range(len(tokenizer), 320)) | {0} <= set(plan.special_ids)
    found = thought_model(lively, tokenizer).predict(TEXT, every=1)
    used = {token for thought in found.thoughts for token in thought.ids}
    assert not used & set(plan.forbidden_ids)
    assert replace(plan, checkpoints=(T,), group=1) == thought_model(lively, tokenizer).plan

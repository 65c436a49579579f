"""A model that reads its thoughts through gates: written as predicted, plain while the gates are shut, saved with them.

Prediction runs through the tree engine, which `tests/tree/test_gated.py` holds to a plain reference; writing has a pass
of its own, compared with it here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaForCausalLM,
    MistralConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from tfive.errors import UserError
from tfive.inference.files import FOLDER, READING_GATES
from tfive.inference.requests import TokenRequest, When, WritingMode
from tfive.inference.thought_model import ThoughtModel
from tfive.rl.gate import PredictionGate
from tfive.tree.delimiters import Delimiters
from tfive.tree.gated import ReadingGates
from tfive.tree.settings import SamplingSettings, ThoughtSettings

pytestmark = pytest.mark.model

TEXT = "37 boxes of 48 pencils each, which makes 1776 pencils, and the text goes on."
_SMALL: dict[str, Any] = {"vocab_size": 320, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_FAMILIES: dict[str, Any] = {
    "gpt2": GPT2Config(**_SMALL, n_embd=16, n_layer=2, n_head=4, n_positions=96),
    "mistral": MistralConfig(
        **_SMALL, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=128, sliding_window=7,
    ),
}  # fmt: skip


def lively(model: PreTrainedModel) -> Any:
    """Predictions that depend strongly on everything before them."""
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(std=0.4, generator=generator)
    return model.eval()


def gated_model(
    body: PreTrainedModel, tokenizer: Any, kind: str = "text", variable: bool = False, opened: bool = True
) -> ThoughtModel:
    thought = ThoughtSettings(
        length=5, checkpoints=(2, 5), horizon=4, delimiters=kind, variable_length=variable, reading="gated"
    )
    gates = ReadingGates.of(body)
    if opened:
        gates.gate.data.copy_(torch.randn(gates.gate.shape, generator=torch.Generator().manual_seed(4)))
    trust = PredictionGate(16, width=8, seed=2)
    trust.last.weight.data.mul_(300)
    delimiters = None
    if kind == "learned":
        delimiters = Delimiters(torch.randn(2, 16, generator=torch.Generator().manual_seed(1)))
    return ThoughtModel(body, tokenizer, thought, None, trust, delimiters, gates=gates)


@pytest.fixture(scope="module")
def precise(llama: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A lively Llama in float64 that is fond of closing parentheses."""
    model = lively(LlamaForCausalLM(llama.config))
    model.get_input_embeddings().weight.data[tokenizer.convert_tokens_to_ids(")")] *= 5
    return model.double()


def written_as_predicted(model: ThoughtModel, tokenizer: PreTrainedTokenizerFast, rows: int = 3) -> list[bool]:
    """Checks several texts written at once against prediction; returns which thoughts closed themselves."""
    prompts = ["A thought", "37 boxes of 48 pencils each", "t", "lines, and the text"]
    requests = [
        TokenRequest(tuple(tokenizer.encode(text, add_special_tokens=False)), 9 + number, item=number)
        for number, text in enumerate(prompts)
    ]
    mode = WritingMode(SamplingSettings(), model.sampling, When(3), (), 8)
    closed = []
    for number, written in model.write(requests, mode, rows=rows, poll=2):
        prompt = requests[number].ids
        places = [thought[0] for thought in written.thoughts]
        (scores,) = model.score([[*prompt, *written.ids]], [places], seed=8, items=[number])
        assert [(t.position, list(t.ids), t.closed) for t in scores.thoughts] == written.thoughts
        first = len(prompt) - 1
        for column, expected in enumerate((scores.plain, scores.thoughtful, scores.gate, scores.mixed)):
            found = written.log_probs[:, column].to(expected)
            torch.testing.assert_close(found, expected[first:], atol=1e-5, rtol=1e-5, equal_nan=True)
        assert not torch.allclose(scores.thoughtful[first:], scores.plain[first:], atol=1e-2)
        closed += [thought[2] for thought in written.thoughts]
    return closed


@pytest.mark.parametrize(
    ("kind", "variable"), [("text", False), ("text", True), ("none", False), ("learned", False), ("learned", True)]
)
def test_writing_and_predicting_agree(
    precise: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, kind: str, variable: bool
) -> None:
    closed = written_as_predicted(gated_model(precise, tokenizer, kind, variable), tokenizer)
    assert set(closed) == ({False, True} if variable else {False})


@pytest.mark.parametrize("family", sorted(_FAMILIES))
def test_other_families_write_as_they_predict(family: str, tokenizer: PreTrainedTokenizerFast) -> None:
    body = lively(AutoModelForCausalLM.from_config(_FAMILIES[family])).double()
    written_as_predicted(gated_model(body, tokenizer), tokenizer)


def test_shut_gates_predict_and_write_plainly_bit_for_bit(
    llama: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    model = gated_model(lively(LlamaForCausalLM(llama.config)), tokenizer, opened=False)
    found = model.predict(TEXT, every=5)
    assert found.served.any()
    assert torch.equal(found.thoughtful[found.served], found.plain[found.served])
    assert torch.equal(found.mixed, found.plain)
    assert found.mixed_gain == 0.0
    thinking, plainly = (model.generate("A thought", max_new_tokens=12, every=every) for every in (3, 0))
    assert thinking.thoughts
    assert thinking.ids == plainly.ids
    assert torch.equal(thinking.mixed, thinking.plain)
    assert torch.equal(thinking.thoughtful[thinking.served], thinking.plain[thinking.served])


def test_saved_and_loaded_it_reads_the_same(
    precise: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    model = gated_model(precise, tokenizer)
    model.save_pretrained(tmp_path / "out")
    again = ThoughtModel.from_pretrained(tmp_path / "out", dtype=torch.float64)
    assert again.thought.reading == "gated"
    before, after = model.predict(TEXT), again.predict(TEXT)
    assert before.thoughts == after.thoughts
    assert torch.equal(before.thoughtful.nan_to_num(), after.thoughtful.nan_to_num())
    assert model.generate("A thought", max_new_tokens=9).ids == again.generate("A thought", max_new_tokens=9).ids
    (tmp_path / "out" / FOLDER / READING_GATES).unlink()
    with pytest.raises(UserError, match=READING_GATES):
        ThoughtModel.from_pretrained(tmp_path / "out")


def test_gates_and_reading_belong_together(llama: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    inline, gated = ThoughtSettings(), ThoughtSettings(reading="gated")
    with pytest.raises(UserError, match=r"thought\.reading = 'gated'"):
        ThoughtModel(llama, tokenizer, gated)
    with pytest.raises(UserError, match=r"thought\.reading = 'inline'"):
        ThoughtModel(llama, tokenizer, inline, gates=ReadingGates.of(llama))
    with pytest.raises(UserError, match="1 layers of 3 heads"):
        ThoughtModel(llama, tokenizer, gated, gates=ReadingGates(1, 3))

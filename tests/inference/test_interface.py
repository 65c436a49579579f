"""What a person expects of `ThoughtModel`: any model, lists, places in words, and something to look at."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from model_fixtures import LlamaForCausalLM, PreTrainedTokenizerFast
from tfive.errors import UserError
from tfive.inference.display import coloured
from tfive.inference.places import Places
from tfive.inference.thought_model import ThoughtModel
from tfive.rl.gate import PredictionGate
from tfive.tree.settings import ThoughtSettings

TEXT = "The cat sat on the mat. The dog sat on the log. The cat saw the dog."
SHORT = ThoughtSettings(length=3, checkpoints=(3,), horizon=4)


@pytest.fixture
def model(llama: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> ThoughtModel:
    return ThoughtModel(llama, tokenizer, SHORT)


def texts_before(model: ThoughtModel, positions: list[int], text: str) -> list[str]:
    ids = model._encode(text, 1, "text")
    return [model._decode(ids[: at + 1]) for at in positions]


def test_any_model_loads_with_untrained_thoughts(saved: Path) -> None:
    model = ThoughtModel.from_pretrained(saved, thought=SHORT, device="cpu")
    assert model.gate is None
    assert model.plan.length == 3
    assert "untrained thoughts" in repr(model)
    assert len(model.predict(TEXT).thoughts) > 0


def test_the_embedded_model_loads_by_its_name() -> None:
    model = ThoughtModel.from_pretrained("nano", device="cpu")
    assert "nano" in repr(model)
    assert len(model.generate("37 boxes", max_new_tokens=3).ids) == 3


def test_a_trained_folder_keeps_its_own_thoughts(model: ThoughtModel, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "out")
    with pytest.raises(UserError, match="leave out thought"):
        ThoughtModel.from_pretrained(tmp_path / "out", thought=SHORT, device="cpu")


def test_lists_give_what_each_text_gives(model: ThoughtModel) -> None:
    found = model.predict([TEXT, "The dog."], every=2)
    assert [len(one.ids) for one in found] == [len(model.predict(text, every=2).ids) for text in (TEXT, "The dog.")]
    assert torch.equal(found[0].mixed, model.predict(TEXT, every=2).mixed)
    written = model.generate(["The cat", "The dog sat on"], max_new_tokens=4, temperature=0)
    alone = model.generate("The dog sat on", max_new_tokens=4, temperature=0, every=0)
    assert len(written) == 2
    plain = model.generate(["The cat", "The dog sat on"], max_new_tokens=4, temperature=0, every=0)
    assert plain[1].ids == alone.ids


def test_places_after_a_text_or_a_pattern(model: ThoughtModel) -> None:
    ids = model._encode(TEXT, 1, "text")
    places = Places(after=". ").chosen(ids, 4, model._decode) if ". " in model._decode(ids) else []
    dots = Places(after=".").chosen(ids, 4, model._decode)
    assert all(text.endswith(".") for text in texts_before(model, dots, TEXT))
    assert len(dots) == 2
    assert set(places) <= set(range(len(ids)))
    either = Places(after=["cat", "dog"]).chosen(ids, 4, model._decode)
    assert Places(pattern="cat|dog").chosen(ids, 4, model._decode) == either
    found = model.predict(TEXT, after=".")
    assert [thought.position for thought in found.thoughts] == dots


def test_the_gate_chooses_places(llama: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    gate = PredictionGate(llama.config.hidden_size)
    with torch.no_grad():
        gate.last.weight.zero_()
        gate.last.bias.fill_(0.0)
    model = ThoughtModel(llama, tokenizer, SHORT, gate=gate)
    every = [thought.position for thought in model.predict(TEXT).thoughts]
    assert [thought.position for thought in model.predict(TEXT, gate_above=0.4).thoughts] == every
    assert model.predict(TEXT, gate_above=0.6).thoughts == ()


@pytest.mark.parametrize(
    ("places", "said"),
    [
        ({"after": "zebra"}, "no token of this text ends there"),
        ({"pattern": "("}, "not a regular expression"),
        ({"after": "cat", "every": 2}, "every and after given"),
        ({"gate_above": 0.5}, "has no gate"),
        ({"gate_above": 2.0}, "gate_above = 2.0"),
    ],
)
def test_places_that_cannot_be_are_one_line(model: ThoughtModel, places: dict[str, object], said: str) -> None:
    with pytest.raises(UserError, match=said) as error:
        model.predict(TEXT, **places)  # type: ignore[call-overload]
    assert "\n" not in str(error.value)


def test_temperature_zero_is_greedy_and_below_it_says_so(model: ThoughtModel) -> None:
    written = [model.generate("The cat", max_new_tokens=5, temperature=0, every=0, seed=seed).ids for seed in (0, 1)]
    assert written[0] == written[1]
    with pytest.raises(UserError, match=r"temperature = -1: give 0 \(always the most likely token\) or more"):
        model.generate("The cat", temperature=-1)


class Reader(HTMLParser):
    """Text and tags of a piece of HTML."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.words, self.tags = "", set[str]()
        self.feed(html)

    def handle_data(self, data: str) -> None:
        self.words += data

    def handle_starttag(self, tag: str, attributes: object) -> None:
        self.tags.add(tag)


def test_a_notebook_shows_text_thoughts_and_gains_as_text(model: ThoughtModel) -> None:
    hostile = "The <script>alert(1)</script> cat & the dog sat on the mat."
    found = model.predict(hostile, every=5)
    page = Reader(found._repr_html_())
    assert page.tags == {"div", "span"}
    assert page.words.startswith("".join(found.tokens[: found.thoughts[0].position + 1]))
    assert not any(ord(letter) < 32 for letter in page.words)
    assert coloured(["a\x1b[2J"], torch.tensor([0.5]), {0: "<b>"}, "").count("␛") == 1
    assert "b" not in Reader(coloured(["a"], torch.tensor([0.5]), {0: "<b>"}, "")).tags
    written = model.generate("The cat", max_new_tokens=6)
    assert Reader(written._repr_html_()).tags == {"div", "span"}
    assert "thoughts" in repr(found)
    assert repr(written).startswith("Generation(")

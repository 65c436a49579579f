"""`studies/real_model/gains.py` on a tiny random model: what it reports is right; a wrong tree would show."""

from __future__ import annotations

import gzip
import json
import math
import shlex
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import scripts
from tfive.errors import UserError

pytestmark = pytest.mark.model
ROOT = Path(__file__).resolve().parents[2]
WORDS = ("river", "mill", "farm", "boat", "grain", "salt", "paper", "town", "rain", "wind", "(", ")", ".")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return scripts.script("studies/real_model/gains.py")


def document(number: int) -> str:
    return f"{number} " + " ".join(np.random.default_rng(number).choice(WORDS, size=60))


def save_model(folder: Path) -> Path:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([document(n) for n in range(40)], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        initializer_range=0.4,
    )
    LlamaForCausalLM(shape).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and two corpus files; the second also holds documents that are too short."""
    folder = tmp_path_factory.mktemp("gains")
    save_model(folder / "model")
    rows = {
        "first": [{"text": document(n), "source": "town/a"} for n in range(20)],
        "second": [{"text": document(n), "source": "farm/b"} for n in range(20, 30)]
        + [{"text": "too short", "source": "farm/c"} for _ in range(10)],
    }
    for name, some in rows.items():
        with gzip.open(folder / f"{name}.jsonl.gz", "wt", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in some)
    return folder


def words(place: Path, *more: str) -> list[str]:
    corpus = [f"{place}/first.jsonl.gz=3", f"{place}/second.jsonl.gz"]
    shape = shlex.split("--texts 4 --tokens 40 --positions 2 --length 4 --checkpoints 2 4 --horizon 5 --plain-texts 2")
    return ["--model", str(place / "model"), "--corpus", *corpus, *shape, *more]


def test_the_report_holds_what_it_promises(
    script: ModuleType, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "gains.json"
    assert script.main(words(place, "--same-text", "--delimiters", *script.DELIMITERS, "--out", str(out))) == 0
    report = json.loads(out.read_text("utf-8"))
    assert set(report["gains"]) == set(script.DELIMITERS)
    for found in report["gains"].values():
        assert found["items"] == 8
        assert found["texts"] == 4
        mean = {name: value["mean"] for name, value in found.items() if isinstance(value, dict) and "mean" in value}
        assert all(math.isfinite(value) for value in mean.values())
        assert mean["content_gain"] == pytest.approx(mean["thought_gain"] - mean["other_gain"], abs=1e-6)
        low, high = found["thought_gain"]["interval_95"]
        assert low < mean["thought_gain"] < high
        assert {name: part["texts"] for name, part in found["by_file"].items()} == {
            "first.jsonl.gz": 3,
            "second.jsonl.gz": 1,
        }
    assert report["gains"]["none"]["empty_gain"]["mean"] == pytest.approx(0, abs=1e-5)
    assert report["gains"]["dashes"]["empty_gain"]["mean"] != pytest.approx(0, abs=1e-3)
    assert "/" not in report["command"].replace("studies/real_model/gains.py", "")
    assert " --same-text --rows 2 " in report["command"]
    assert report["admission"]["dtype"] == "float32"
    assert "thought_gain" in capsys.readouterr().out


def test_the_tree_agrees_with_plain_rows(script: ModuleType, place: Path) -> None:
    found = script.report_of(script.arguments(words(place)), lambda line: None)["tree_against_plain"]
    assert found["thoughts"] == 4
    assert found["thought_log_prob"]["count"] == 16
    assert found["checkpoint_loss"]["count"] == 8
    compared = ("thought_log_prob", "sampled_thought_log_prob", "checkpoint_loss", "no_thought_loss")
    for name in (*compared, "sampled_and_recomputed"):
        assert found[name]["max_abs"] < 1e-4
        assert found[name]["mean_abs"] <= found[name]["max_abs"]


def test_a_wrong_tree_shows(script: ModuleType, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tfive.tree import reader, scoring

    honest = reader.grow

    def wrong(*given: Any, **named: Any) -> Any:
        layout = honest(*given, **named)
        layout.position_BN[:, layout.trunk_width :] += 1
        return layout

    for module in (reader, scoring):
        monkeypatch.setattr(module, "grow", wrong)
    monkeypatch.setattr(script, "asdict", lambda admitted: admitted)
    monkeypatch.setattr(script, "admit", lambda engine, longest: {})
    found = script.report_of(script.arguments(words(place)), lambda line: None)["tree_against_plain"]
    assert found["thought_log_prob"]["max_abs"] > 1e-2
    assert found["checkpoint_loss"]["max_abs"] > 1e-2
    assert found["no_thought_loss"]["max_abs"] < 1e-4


def test_texts_depend_on_the_seed_alone(script: ModuleType, place: Path) -> None:
    loaded = script.load_model(place / "model", dtype=torch.float32, device="cpu")
    one, same, other = (
        script.sample_texts(script.arguments(words(place, "--seed", seed)), loaded) for seed in ("1", "1", "2")
    )
    assert one.sha256 == same.sha256 != other.sha256
    assert sorted(one.source_B) == ["first.jsonl.gz"] * 3 + ["second.jsonl.gz"]
    positions = one.texts.positions_BP
    assert int(positions.min()) >= 0
    assert int(positions.max()) + 5 < 40
    assert len({tuple(row) for row in one.texts.tokens_BS.tolist()}) == 4


def test_rows_can_be_left_out_by_a_field(script: ModuleType, place: Path) -> None:
    loaded = script.load_model(place / "model", dtype=torch.float32, device="cpu")
    asked = script.arguments([*words(place), "--only", "source=town"])
    with pytest.raises(UserError, match=r"second.jsonl.gz: 0 documents of 40 tokens, 1 are needed"):
        script.sample_texts(asked, loaded)
    asked.corpus = asked.corpus[:1]
    assert set(script.sample_texts(asked, loaded).source_B) == {"first.jsonl.gz"}


def test_a_thought_of_the_same_text_is_another_positions(script: ModuleType, place: Path) -> None:
    asked = script.arguments(words(place, "--same-text", "--plain-texts", "0"))
    found = script.report_of(asked, lambda line: None)["gains"]["parenthesis"]
    own, same, content = (
        found[name]["mean"] for name in ("thought_gain", "same_text_gain", "content_gain_against_same_text")
    )
    assert content == pytest.approx(own - same, abs=1e-6)
    assert content != pytest.approx(0, abs=1e-6)
    tokens_BRT = torch.arange(12).view(2, 3, 2)
    valid_BR = torch.tensor([[True, True, True], [True, True, False]])
    nothing = torch.zeros(2, 3)
    thoughts = script.Thoughts(tokens_BRT, nothing, valid_BR, nothing, nothing)
    assert script.shifted(thoughts).tokens_BRT[..., 0].tolist() == [[2, 4, 0], [8, 6, 10]]
    with pytest.raises(UserError, match="text 1 has 1 positions"):
        script.shifted(script.replace(thoughts, valid_BR=torch.tensor([[True, True, False], [True, False, False]])))


@pytest.mark.parametrize(
    ("more", "part"),
    [
        (["--only", "source"], "write FIELD=START"),
        (["--corpus", "first.jsonl.gz=much"], "'much' is not a number"),
        (["--corpus", "first.jsonl.gz=-1"], "must be above 0"),
        (["--corpus", "absent.jsonl.gz"], "no such file"),
    ],
)
def test_bad_input_is_named(script: ModuleType, place: Path, more: list[str], part: str) -> None:
    with pytest.raises(UserError, match=part):
        script.sources_of(script.arguments([*words(place), *more]))


def test_a_missing_folder_is_found_before_the_work(script: ModuleType, place: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no folder"):
        script.main(words(place, "--out", str(tmp_path / "absent" / "gains.json")))


COMMITTED = sorted(p for name in ("gains*", "tree-*") for p in (ROOT / "results").glob(f"smollm2-{name}.json"))


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_committed_results_say_what_they_are(path: Path) -> None:
    report = json.loads(path.read_text("utf-8"))
    assert report["model"] == "SmolLM2-135M-Instruct (Q4_1, de-quantised)"
    assert len(report["model_sha256"]) == len(report["text"]["sha256"]) == 64
    shown = (ROOT / "docs" / "studies" / "real-model.md").read_text("utf-8")
    assert path.name in shown
    differences = [part["max_abs"] for part in report.get("tree_against_plain", {}).values() if isinstance(part, dict)]
    assert all(difference < 1e-4 for difference in differences)
    assert differences or "wikipedia" in path.name or "same-text" in path.name
    for found in report["gains"].values() if path.name.startswith("smollm2-gains") else ():
        mean = found["thought_gain"]["mean"]
        assert f"{mean:.2f}".replace("-", "−") in shown

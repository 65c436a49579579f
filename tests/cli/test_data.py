"""`tfive data`: what it prints, where it keeps corpora, and what the base model's entropy is."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tfive.cli import app as cli
from tfive.config.config import Config
from tfive.errors import UserError
from tfive.models.weights import weights_fingerprint
from tfive.rl.roles import Ledger
from tfive.training.corpus import base_entropies, cache_folder, corpus_of, inspect, prepare, stats

WORDS = "grain and salt go down the river to the town where nine boats wait for wind".split()  # noqa: SIM905


def passage(number: int) -> str:
    return f"Note {number}: " + " ".join(np.random.default_rng(number).choice(WORDS, size=50)) + ".\n[unfinished"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model (tokenizer and weights), two sources and a configuration."""
    folder = tmp_path_factory.mktemp("data")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([passage(n) for n in range(20)], trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")
    wrapped.save_pretrained(folder / "model")
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=320, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, head_dim=8
    )
    LlamaForCausalLM(shape).save_pretrained(folder / "model")
    for name, numbers in (("a", range(300)), ("b", range(300, 600))):
        rows = "".join(json.dumps({"text": passage(n)}) + "\n" for n in numbers)
        (folder / f"{name}.jsonl").write_text(rows, encoding="utf-8")
    (folder / "run.toml").write_text(
        f"""
        [model]
        name = "{folder / "model"}"
        [text]
        sequence_length = 48
        cache = "{folder / "cache"}"
        sequences = {{train = 32, calibration = 4, development = 4, test = 2}}
        positions = {{per_text = 3, uniform = 0.5, match = 0.5, pattern = " the"}}
        [[text.sources]]
        name = "a"
        path = "{folder / "a.jsonl"}"
        share = 3
        [[text.sources]]
        name = "b"
        path = "{folder / "b.jsonl"}"
        [thought]
        horizon = 4
        [window]
        items = 24
        [run]
        develop_items = 6
        """
    )
    return folder


def toml(home: Path) -> list[str]:
    return [str(home / "run.toml")]


def test_prepare_says_what_it_made_and_where(home: Path) -> None:
    made = json.loads(prepare(toml(home), [], as_json=True))
    assert made["sequences"] == 42
    assert made["tokens"] == 42 * 48
    assert Path(made["folder"]).parent == home / "cache"
    line = prepare(toml(home), [], quiet=True)
    assert line.startswith("42 sequences of 48 tokens with ")
    assert line.endswith(made["folder"])


def test_stats_count_every_split_role_source_and_kind(home: Path) -> None:
    found = json.loads(stats(toml(home), [], as_json=True))
    rows = found["roles"]
    assert [row["role"] for row in rows[-3:]] == ["qualify", "develop", "test"]
    for row in rows:
        assert row["tokens"] == row["sequences"] * 48 == sum(one["tokens"] for one in row["sources"].values())
        assert row["sources"]["a"]["tokens"] == row["tokens"] * 3 / 4
        assert row["items"] == sum(row["kinds"].values()) == sum(one["items"] for one in row["sources"].values())
        assert row["documents"] == sum(one["documents"] for one in row["sources"].values())
        assert row["kinds"]["entropy"] == row["kinds"]["every"] == 0
    assert found["total"]["items"] == sum(row["items"] for row in rows)
    table = stats(toml(home), [], quiet=True)
    assert re.search(r"^calibration +qualify +4 .* 75\.0% +25\.0% ", table, re.MULTILINE)
    assert "a: read 300 documents" in table
    assert "\x1b" not in table


def test_inspect_marks_the_selected_positions(home: Path) -> None:
    views = json.loads(inspect(toml(home), [], split="development", count=2, as_json=True))
    plain = inspect(toml(home), [], split="development", count=2)
    config = Config.load(*toml(home))
    corpus = corpus_of(config)
    assert [view["sequence"] for view in views] == corpus.sequences("development")[:2].tolist()
    for view, shown in zip(views, plain.split("\n\n")):
        number = view["sequence"]
        assert view["text"] == corpus.tokenizer.decode(corpus.tokens[number])
        assert len(view["positions"]) == corpus.items_in[number] == len(re.findall("⟦(?:match|uniform)⟧", shown))
        for mark in view["positions"]:
            p = mark["position"]
            assert view["text"][: mark["character"]] == corpus.tokenizer.decode(corpus.tokens[number, : p + 1])
            assert mark["continuation"] == corpus.tokenizer.decode(corpus.tokens[number, p + 1 : p + 5])
            if mark["kind"] == "match":
                assert mark["before"].endswith(" the")
            assert f"{mark['before'][-5:]}⟦{mark['kind']}⟧" in shown
        for document in view["documents"]:
            assert f"── document {document['document']} ({document['source']}) ──" in shown
    # Square brackets of the text are text, not mark-up.
    everything = inspect(toml(home), [], count=40)
    assert "[unfinished" in everything
    assert "\x1b[" not in everything
    assert "\x1b[" in inspect(toml(home), [], count=1, colour=True)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--set", "text.sources=[]"], "text.sources"),
        (["--set", "text.sequences.train=-1"], "text.sequences.train"),
        (["--set", "text.sequence_length=many"], "text.sequence_length"),
        (["--set", "text.positions.pattern=("], "text.positions"),
        (["--set", "text.cach=x"], "did you mean text.cache"),
        (["--role", "nobody"], "nobody"),
        (["--start", "4000"], "--start 4000"),
        (["--count", "0"], "--count 0"),
        (["--start", "-1"], "--start -1"),
    ],
)
def test_bad_requests_end_in_one_line_and_status_2(
    home: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["data", "inspect", *toml(home), *arguments])
    printed = capsys.readouterr()
    assert ended.value.code == 2
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    assert reason in printed.err


def test_the_commands_print_what_the_functions_return(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("prepare", "stats", "inspect"):
        with pytest.raises(SystemExit) as ended:
            cli.main(["data", command, *toml(home), "--json"])
        assert ended.value.code == 0
        assert json.loads(capsys.readouterr().out)


def test_a_callers_own_texts_take_the_place_of_sources(home: Path) -> None:
    config = Config.load(*toml(home))
    corpus = corpus_of(config, texts=(passage(n) for n in range(1000, 1250)))
    assert corpus.sources == ["texts"]
    assert corpus.manifest["read"]["texts"]["documents"] == 250
    Ledger(corpus, config.window, seed=0).draw("actor", 1)


def test_where_corpora_are_kept(home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = Config.load(*toml(home), overrides=["text.cache=none"])
    monkeypatch.setenv("TFIVE_CACHE", str(tmp_path / "mine"))
    assert cache_folder(config) == tmp_path / "mine"
    monkeypatch.delenv("TFIVE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder(config) == tmp_path / "tfive" / "corpora"
    assert cache_folder(Config.load(*toml(home))) == home / "cache"


@pytest.mark.model
def test_entropy_is_that_of_each_document_alone(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = LlamaForCausalLM.from_pretrained(home / "model").eval()
    tokens_BS = np.random.default_rng(0).integers(0, 320, (3, 20))
    document_BS = np.array([[0] * 20, [3] * 7 + [4] * 13, [5] * 1 + [6] * 18 + [7] * 1])
    expected = np.zeros((3, 20))
    for row in range(3):
        for number in np.unique(document_BS[row]):
            here = document_BS[row] == number
            with torch.no_grad():
                logits = model(torch.from_numpy(tokens_BS[row][here])[None]).logits[0]
            expected[row, here] = torch.distributions.Categorical(logits=logits).entropy().numpy()
    assert base_entropies(model)(tokens_BS, document_BS) == pytest.approx(expected, abs=1e-5)
    monkeypatch.setattr("tfive.training.corpus.LOGIT_BYTES", 1)
    assert base_entropies(model)(tokens_BS, document_BS) == pytest.approx(expected, abs=1e-5)


@pytest.mark.model
def test_positions_by_entropy_use_the_configured_model(home: Path) -> None:
    overrides = ["text.positions.match=0", "text.positions.uniform=0", "text.positions.entropy=1", "model.device=cpu"]
    found = json.loads(stats(toml(home), overrides, as_json=True))
    assert found["total"]["items"] == sum(row["kinds"]["entropy"] for row in found["roles"]) > 40
    manifest = json.loads((Path(found["folder"]) / "manifest.json").read_text("utf-8"))
    assert manifest["base_model"].startswith("model ")


@pytest.mark.model
def test_a_trained_model_has_another_fingerprint(home: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(home / "model")
    before = weights_fingerprint(model)
    assert weights_fingerprint(LlamaForCausalLM.from_pretrained(home / "model")) == before
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1e-3
    assert weights_fingerprint(model) != before


def test_an_unknown_model_is_named(home: Path) -> None:
    with pytest.raises(UserError, match="nowhere"):
        prepare(toml(home), ["model.name=./nowhere"])


def test_a_pattern_that_finds_almost_nothing_is_told_with_counts(home: Path) -> None:
    assert json.loads(stats(toml(home), [], as_json=True))["notes"] == []
    rare = ["text.positions.pattern=which makes"]
    found = json.loads(stats(toml(home), rare, as_json=True))
    (note,) = found["notes"]
    counts = f"fits 0 of {found['total']['items']:,} positions, 50% were asked for"
    assert note.startswith(f"warning: text.positions.pattern 'which makes' {counts}")
    assert note in stats(toml(home), rare, quiet=True).splitlines()
    assert prepare(toml(home), rare, quiet=True).splitlines()[0] == note


def test_how_plain_text_was_cut_is_told(home: Path, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("\n\n".join(passage(n) * 3 for n in range(400)), encoding="utf-8")
    (tmp_path / "book.toml").write_text(f'[[text.sources]]\nname = "book"\npath = "{tmp_path / "book.txt"}"\n', "utf-8")
    found = json.loads(stats([*toml(home), str(tmp_path / "book.toml")], ["text.allow_fewer=true"], as_json=True))
    documents = found["read"]["book"]["documents"]
    assert 100 < documents < 400
    assert found["notes"] == [
        "source book: .txt cut at form feeds and blank lines into documents of about 2,000 bytes, 8,000 at most, "
        f"{documents} in all; another cut: the source's separator"
    ]


def test_all_missing_sources_are_named_at_once(home: Path) -> None:
    sources = '[{name = "x", path = "absent-1.txt"}, {name = "y", path = "absent-2"}]'
    with pytest.raises(UserError, match=r"^2 things are missing: text x: absent-1.txt: .* text y: absent-2: "):
        stats(toml(home), [f"text.sources={sources}"])
    config = Config.load(*toml(home), overrides=[f"text.sources={sources}"])
    with pytest.raises(UserError, match=r"^2 sources are missing: absent-1.txt \(source x\), absent-2 \(source y\)"):
        corpus_of(config)

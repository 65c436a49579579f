"""The embedded model: what ships is what the recipe makes, loads anywhere, and meets its design condition."""

from __future__ import annotations

import gzip
import hashlib
import json
import random
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import asides
import make_text
import measure
import muon
import numpy as np
import phrases
import plain_thoughts
import pytest
import ship
import torch
import train_model
import train_tokenizer
import worked_prose
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from tfive.config.config import Config
from tfive.training.corpus import corpus_of

ROOT = Path(__file__).parents[2]
NANO = ROOT / "src" / "tfive" / "data" / "nano"
REDISTRIBUTABLE = re.compile(r"CC0 1\.0|CC BY(-SA)? \d\.\d|public domain \(USA\)")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(NANO)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(NANO, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def card() -> dict[str, Any]:
    return json.loads((NANO / "card.json").read_text(encoding="utf-8"))


def corpus(name: str) -> list[dict[str, str]]:
    return measure.read_corpus(NANO / "corpus", name)


# --- what ships -----------------------------------------------------------------------------------------------------


@pytest.mark.model
def test_it_is_a_stock_llama_of_about_five_million_tied_parameters(model: PreTrainedModel) -> None:
    assert type(model).__name__ == "LlamaForCausalLM"
    assert 4e6 < model.num_parameters() < 6e6
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert model.config.max_position_embeddings == 512


def test_weights_are_bf16_and_small() -> None:
    path = NANO / "model.safetensors"
    assert path.stat().st_size < 12e6
    with safe_open(path, framework="pt") as stored:
        assert {stored.get_tensor(name).dtype for name in stored.keys()} == {torch.bfloat16}  # noqa: SIM118


def test_every_shipped_file_has_its_recorded_sha256(card: dict[str, Any]) -> None:
    for name, digest in card["files"].items():
        assert hashlib.sha256((NANO / name).read_bytes()).hexdigest() == digest, name
    shipped = {str(path.relative_to(NANO)) for path in NANO.rglob("*") if path.is_file()}
    assert shipped == {*card["files"], "card.json", "README.md"}


def test_the_card_states_what_was_measured(card: dict[str, Any]) -> None:
    page = (NANO / "README.md").read_text(encoding="utf-8")
    assert tuple(card["measured"]) == measure.ROWS
    for kind, row in card["measured"].items():
        stated = next(line for line in page.splitlines() if line.startswith(f"| {kind} |"))
        for column in ("sampled", "empty", "other", "random", "content"):
            assert f"{row[column][0]:+.3f} ± {row[column][1]:.3f}" in stated
        assert ("working" in row) == (kind in (*measure.RESULT_KINDS, measure.RESULTS))
    assert phrases.MATCH_PATTERN in page
    assert f"{card['log']['tokens']:,} tokens" in page


def test_the_card_states_hashes_licences_commands_and_limits(card: dict[str, Any]) -> None:
    page = (NANO / "README.md").read_text(encoding="utf-8")
    for name, digest in card["files"].items():
        assert f"| `{name}` | `{digest}` |" in page
    for source in (*card["inputs"]["pretrain_documents"], "nano-worked-prose"):
        assert f"| {ship.ORIGINS[source]} | {make_text.LICENCES[source]} |" in page
    for script in ("make_text", "train_tokenizer", "train_model", "ship", "measure"):
        assert f"    python recipes/nano/{script}.py" in page
    assert "\n## Limits\n- " in page


def test_the_card_belongs_to_this_recipe(card: dict[str, Any]) -> None:
    """Settings are recorded when the model is trained; the recipe beside it must not have moved on."""
    for name, value in card["text"].items():
        current = getattr(asides, name.upper())
        assert value == (list(current) if isinstance(current, tuple) else current), name
    assert card["recipe"]["shape"] == train_model.SHAPE
    assert card["inputs"]["licences"] == make_text.LICENCES
    assert {f"corpus/{name}.jsonl.gz" for name in ("real", "worked")} < set(card["inputs"]["written"])
    for name, digest in card["inputs"]["written"].items():
        assert card["files"].get(name, digest) == digest


# --- tokenizer ------------------------------------------------------------------------------------------------------


def test_digits_and_parentheses_stand_alone(tokenizer: PreTrainedTokenizerBase) -> None:
    assert tokenizer.tokenize("1480 + 296") == ["1", "4", "8", "0", "Ġ+", "Ġ2", "9", "6"]
    for token in tokenizer.get_vocab():
        plain = token.lstrip("Ġ")
        assert len(plain) == 1 or not any(mark in plain for mark in "0123456789()"), token
    assert len(tokenizer(" (").input_ids) == len(tokenizer(")").input_ids) == 1


@given(st.text(max_size=60))
@settings(max_examples=60, deadline=None)
def test_the_tokenizer_gives_text_back(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    text = text.replace("<|endoftext|>", "")
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_every_working_fits_in_a_thought(tokenizer: PreTrainedTokenizerBase) -> None:
    rng = random.Random(0)
    lengths = [
        len(tokenizer(worked_prose.draw_figure(rng, kind, held_out=True).working).input_ids)
        for kind in worked_prose.KINDS
        for _ in range(200)
    ]
    assert max(lengths) < measure.LONGEST


# --- corpus ---------------------------------------------------------------------------------------------------------


def test_corpus_rows_are_licensed_and_distinct() -> None:
    rows = corpus("real") + corpus("worked")
    assert all(REDISTRIBUTABLE.fullmatch(row["licence"]) for row in rows)
    assert all(row["licence"] == make_text.LICENCES[make_text.family(row["source"])] for row in rows)
    assert len({row["id"] for row in rows}) == len({row["text"] for row in rows}) == len(rows)
    assert sum(path.stat().st_size for path in (NANO / "corpus").iterdir()) < 3e6


def test_worked_prose_of_the_corpus_shows_no_working_and_no_learnt_product() -> None:
    for row in corpus("worked"):
        assert not re.search(r"[()+]|that is", row["text"])
        for found in re.finditer(phrases.MATCH_PATTERN, row["text"]):
            operands = [int(n) for n in re.findall(r"\d+", found.group())]
            assert len(operands) != 2 or worked_prose.pair_is_held_out(*operands)


def test_pre_training_multiplies_no_held_out_pair() -> None:
    rng = random.Random(1)
    for _ in range(500):
        assert not worked_prose.pair_is_held_out(*worked_prose.draw_figure(rng, "product", held_out=False).operands)


def test_the_corpus_is_what_the_recipe_draws(card: dict[str, Any]) -> None:
    rows = list(make_text.worked_rows(card["inputs"]["seed"], 300))
    assert rows == corpus("worked")[:300]


def figures_in(text: str) -> list[int]:
    """How many operands each figure of a text has, every result checked against the printed numbers alone."""
    counts = []
    for found in re.finditer(phrases.MATCH_PATTERN, text):
        operands = [int(n) for n in re.findall(r"\d+", found.group())]
        follows = re.match(r" (\d+) ", text[found.end() :])
        assert follows is not None
        result = int(follows.group(1))
        if len(operands) == 3:
            containers, each, loose = sorted(operands)
            assert result == containers * each + loose
        else:
            assert result == (operands[0] * operands[1] if len(operands) == 2 else sum(operands))
        counts.append(len(operands))
    assert len(counts) == sum(text.count(cue) for cue in phrases.CUES)
    return counts


def test_results_of_the_corpus_are_right_found_by_the_pattern_and_of_the_stated_kinds() -> None:
    seen = [count for row in corpus("worked") for count in figures_in(row["text"])]
    assert set(seen) == {2, 4}  # products and sums, no loads
    assert seen.count(2) / len(seen) == pytest.approx(1 / 3, abs=0.02)


def test_results_of_pre_training_prose_are_right_and_of_three_kinds_alike() -> None:
    pieces = [worked_prose.draw_document(5, "test", n, reckoned=0.0, held_out=False) for n in range(600)]
    seen = [count for one in pieces for count in figures_in(worked_prose.document_text(one))]
    assert set(seen) == {2, 3, 4}
    for operands in (2, 3, 4):
        assert seen.count(operands) / len(seen) == pytest.approx(1 / 3, abs=0.05)


def test_products_of_a_split_and_role_occur_in_no_other(tmp_path: Path) -> None:
    """What is measured, or qualifies, normalises and calibrates, must be worked out: it was never learned from."""
    prepared = corpus_of(Config.load("nano", overrides=[f"text.cache={tmp_path}"]))
    texts = {hashlib.blake2b(row["text"].encode(), digest_size=16).digest(): row["text"] for row in corpus("worked")}
    products: dict[int, set[int]] = {}
    for record in prepared.documents:
        text = texts.get(record["high"].tobytes() + record["low"].tobytes(), "")
        for found in re.finditer(phrases.MATCH_PATTERN, text):
            operands = [int(n) for n in re.findall(r"\d+", found.group())]
            if len(operands) == 2:
                products.setdefault(int(record["group"]), set()).add(operands[0] * operands[1])
    assert {prepared.ranges[group].split for group in products} == {"train", "calibration", "development", "test"}
    assert sum(map(len, products.values())) == len(set().union(*products.values())) > 600


def test_the_pattern_hardly_occurs_in_real_text() -> None:
    assert sum(bool(re.search(phrases.MATCH_PATTERN, row["text"])) for row in corpus("real")) <= 3


# --- the world ------------------------------------------------------------------------------------------------------


def test_documents_depend_on_their_number_alone() -> None:
    def draw(number: int) -> str:
        return worked_prose.document_text(worked_prose.draw_document(3, "test", number, reckoned=0.3, held_out=False))

    forwards = [draw(number) for number in range(50)]
    assert forwards == [draw(number) for number in reversed(range(50))][::-1]
    assert len(set(forwards)) == 50


def test_notebooks_are_right() -> None:
    for number in range(50):
        for line in worked_prose.draw_notebook(1, "test", number).split("\n"):
            values = {eval(side.replace(" x ", " * ")) for side in line.split(" = ")}
            assert len(values) == 1, line


@pytest.fixture(scope="module")
def book(tokenizer: PreTrainedTokenizerBase) -> asides.Book:
    documents = [np.array(tokenizer(row["text"]).input_ids, dtype=np.uint16) for row in corpus("real")[:40]]
    return asides.Book(tokenizer.backend_tokenizer, documents)


def without_asides(tokens: list[int], book: asides.Book) -> list[int]:
    """Drop everything from a silent opening to the next close. Natural parentheses have no silent opening."""
    out: list[int] = []
    inside = False
    for token in tokens:
        if token == book.open | asides.SILENT:
            inside = True
        if not inside:
            out.append(token)
        if inside and token & (asides.SILENT - 1) == book.close:
            inside = False
    return out


def test_text_goes_on_after_an_aside_as_if_nothing_had_been_said(book: asides.Book) -> None:
    for number in range(60):
        rng = random.Random(number)
        plain: list[int] = []
        figures: dict[int, worked_prose.Figure] = {}
        for piece in worked_prose.draw_document(1, "strew", number, reckoned=0.0, held_out=False):
            if piece.figure:
                figures[len(plain)] = piece.figure
            plain += book.encode(piece.text)
        strewn = asides.strew(rng, book, plain, figures, density=0.1)
        assert without_asides(strewn, book) == plain
        assert all(token < asides.SILENT for token in without_asides(strewn, book))


def test_asides_before_results_have_the_stated_shares_and_only_true_workings_are_taught(book: asides.Book) -> None:
    rng = random.Random(7)
    counts = {"silent": 0, "working": 0}
    for _ in range(4000):
        figure = worked_prose.draw_figure(rng, "product", held_out=False)
        opening, *inner, close = asides.aside_at_result(rng, book, book.encode("37 boxes of 48 pencils each"), figure)
        assert opening == book.open | asides.SILENT
        assert len(inner) <= asides.LONGEST
        assert close & (asides.SILENT - 1) == book.close
        text = book.tokenizer.decode([token & (asides.SILENT - 1) for token in inner])
        taught = close < asides.SILENT
        counts["silent"] += not taught
        if taught and "+" in text:
            assert text == figure.working
            counts["working"] += inner[0] < asides.SILENT
    shares = asides.AT_RESULTS
    assert sum(shares.values()) == pytest.approx(1)
    silent = shares["cut"] + shares["slip"] + shares["wrong guess"] + shares["foreign"]
    assert counts["silent"] / 4000 == pytest.approx(silent, abs=0.03)
    assert counts["working"] / 4000 == pytest.approx(shares["working"], abs=0.02)


def test_shards_are_reproducible_and_exact_in_size(book: asides.Book) -> None:
    first = asides.make_shard(1, 3, 5000, book)
    assert first.shape == (5000,)
    assert (first == asides.make_shard(1, 3, 5000, book)).all()
    assert (first != asides.make_shard(1, 4, 5000, book)).any()


# --- training -------------------------------------------------------------------------------------------------------


@pytest.mark.model
def test_the_fast_forward_is_the_stock_forward() -> None:
    small = train_model.build_model(300, 0, 1, train_model.SHAPE | {"num_hidden_layers": 2})
    tokens = torch.randint(0, 300, (2, 21), generator=torch.Generator().manual_seed(0))
    stock = small.model(tokens).last_hidden_state
    torch.testing.assert_close(train_model.hidden_states(small, tokens, torch.float32), stock, rtol=1e-5, atol=1e-5)


def test_silent_tokens_are_no_targets() -> None:
    small = train_model.build_model(50, 0, 1, train_model.SHAPE | {"num_hidden_layers": 1})
    rows = torch.randint(1, 50, (2, 12), generator=torch.Generator().manual_seed(0))
    marked = rows.clone()
    marked[:, 5:] |= asides.SILENT
    full = torch.nn.functional.cross_entropy(small(rows).logits[:, :4].reshape(-1, 50), rows[:, 1:5].reshape(-1))
    torch.testing.assert_close(train_model.stream_loss(small, marked), full)


def test_muon_makes_matrices_nearly_orthogonal_and_moves_by_the_stated_amount() -> None:
    stack = torch.randn(2, 24, 60, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(muon.orthogonal(stack))
    assert values.min() > 0.6
    assert values.max() < 1.3
    layer = torch.nn.Linear(60, 24)
    before = layer.weight.detach().clone()
    optimizer = muon.MuonWithAdamW(layer, torch.tensor(0.01), decay=0.0)
    layer.weight.grad = stack[0].clone()
    optimizer.step()
    moved = (layer.weight.detach() - before).norm().item()
    expected = 0.01 * 0.2 * 60**0.5 * 24**0.5  # an orthogonal 24 × 60 matrix has Frobenius norm √24
    assert moved == pytest.approx(expected, rel=0.25)


def write_gzip(path: Path, rows: list[dict[str, str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def test_the_whole_recipe_runs_small_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sentence = "The harbour of this small town was built by fishermen who had come from the north many years ago. "
    rows = [
        {"id": f"doc-{n}", "text": f"Town {n}\n\n" + sentence.replace("town", f"town {n}") * 4, "source": source}
        for n, source in enumerate(["wikinews", "wikihow", "gutenberg_fiction", "nlab"] * 10)
    ]
    write_gzip(tmp_path / "in" / "web_curated.jsonl.gz", rows)
    write_gzip(tmp_path / "in" / "arxiv.jsonl.gz", [rows[0] | {"id": "a", "source": "arxiv/cs.CL"}])
    work = tmp_path / "work"
    record = make_text.make(tmp_path / "in", work, seed=5, per_source=50, worked_documents=30)
    assert set(record["pretrain_documents"]) | set(record["midtrain_passages"]) <= set(make_text.LICENCES)
    trained_on = {row["id"] for row in measure.read_corpus(work, "pretrain_real")}
    shipped = {row["id"].rsplit("-", 1)[0] for row in measure.read_corpus(work / "corpus", "real")}
    assert shipped
    assert not trained_on & shipped
    again = make_text.make(tmp_path / "in", tmp_path / "again", seed=5, per_source=50, worked_documents=30)
    assert again["written"] == record["written"]

    trained = train_tokenizer.train(work / "pretrain_real.jsonl.gz", work / "tokenizer", 5, vocabulary=600, worked=300)
    train_tokenizer.write_tokens(trained, work)
    command = ["train_model.py", "--text", str(work), "--out", str(work / "model"), "--smoke", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", command)
    log = train_model.train(train_model.parse())
    assert log["steps"] == 4
    assert np.isfinite(log["stream_loss"])

    ship.ship(work / "model", work, tmp_path / "shipped", per_kind=4, device="CPU")
    card = json.loads((tmp_path / "shipped" / "card.json").read_text(encoding="utf-8"))
    assert tuple(card["measured"]) == measure.ROWS
    assert card["files"]["corpus/worked.jsonl.gz"] == record["written"]["corpus/worked.jsonl.gz"]
    page = (tmp_path / "shipped" / "README.md").read_text(encoding="utf-8")
    assert "on one CPU" in page
    assert f"{log['tokens']:,} tokens (4 steps of 2 × 512" in page


# --- the design condition -------------------------------------------------------------------------------------------


def place_of(kind: str, text: int) -> plain_thoughts.Place:
    return plain_thoughts.Place(text, kind, (1,), (2,))


def test_means_have_texts_as_their_unit() -> None:
    values = [1.0, 2.0, 4.0, 7.0]
    mean, error = measure.mean_and_error(values, [place_of("x", n) for n in range(4)], {"x": 1.0})
    assert mean == pytest.approx(3.5)
    assert error == pytest.approx(np.std(values, ddof=1) / 2)
    doubled = measure.mean_and_error(values * 2, [place_of("x", n) for n in range(4)] * 2, {"x": 1.0})
    assert doubled == pytest.approx((mean, error))  # the same texts again tell nothing new


def test_a_mixture_weighs_kinds_not_places() -> None:
    places = [place_of("x", 0), place_of("x", 1), place_of("x", 2), place_of("y", 3), place_of("y", 4)]
    mean, error = measure.mean_and_error([1.0, 2.0, 3.0, 10.0, 20.0], places, {"x": 0.75, "y": 0.25})
    assert mean == pytest.approx(0.75 * 2 + 0.25 * 15)
    assert error == pytest.approx(((2 * 0.25**2 + 2 * 0.625**2) * 5 / 4) ** 0.5)  # what each text adds to the mean


def test_the_shares_of_selected_positions() -> None:
    shares = measure.selected_shares(match=0.6, real=0.25)
    assert measure.result_shares() == pytest.approx({"product result": 1 / 3, "sum result": 2 / 3})
    assert shares == pytest.approx(
        {"product result": 0.2, "sum result": 0.4, "worked prose elsewhere": 0.3, "real text": 0.1}
    )


def test_the_mixture_is_the_one_the_preset_asks_for() -> None:
    text = tomllib.loads((ROOT / "src" / "tfive" / "config" / "presets" / "nano.toml").read_text(encoding="utf-8"))[
        "text"
    ]
    positions, shares = text["positions"], {source["name"]: source["share"] for source in text["sources"]}
    assert positions["match"] / (positions["match"] + positions["uniform"]) == pytest.approx(measure.MATCH)
    assert shares["real"] / (shares["real"] + shares["worked"]) == pytest.approx(measure.REAL)
    assert phrases.MATCH_PATTERN.endswith(positions["pattern"])


@pytest.mark.model
def test_the_plain_scorer_is_the_loss_of_the_written_out_row(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    law = measure.thought_law(tokenizer)
    asked = ("Anna packed 37 boxes of 48 pencils each, which makes", " 37 boxes of 48 pencils each, which makes")
    after, inner = " 1776 pencils", ("1480 + 296", "")
    places = [
        plain_thoughts.Place(number, "x", tuple(tokenizer(text).input_ids), tuple(tokenizer(after).input_ids))
        for number, text in enumerate(asked)
    ]
    with torch.no_grad():
        scored = plain_thoughts.losses(model, places, [tokenizer(thought).input_ids for thought in inner], law)
        plain = plain_thoughts.losses(model, places, None, law)
        rows = [f"{text} ({thought}){after}" for text, thought in zip(asked, inner, strict=True)]
        for row, loss in zip([*rows, *(text + after for text in asked)], [*scored, *plain], strict=True):
            whole = tokenizer(row, return_tensors="pt").input_ids
            logits = model(whole).logits[0, -6:-1].log_softmax(-1)
            expected = -logits.gather(1, whole[0, -5:, None]).mean().item()
            assert loss.item() == pytest.approx(expected, abs=1e-4), row


def test_the_card_meets_the_design_condition(card: dict[str, Any]) -> None:
    """At every kind of result the true working helps by at least 0.2 nats a token; untrained thoughts hurt on average
    over the selected positions, beyond the error of measurement.
    """
    measured = card["measured"]
    for kind in measure.RESULT_KINDS:
        gain, error = measured[kind]["working"]
        assert gain - 2 * error > 0.2
    for rows in (measure.RESULTS, "worked prose elsewhere", "real text", measure.SELECTED):
        mean, error = measured[rows]["sampled"]
        assert mean + 2 * error < 0, rows  # each part is, so any mixture of the three is
    assert card["selected"] == pytest.approx(measure.selected_shares())
    weighted = sum(share * measured[kind]["sampled"][0] for kind, share in card["selected"].items())
    assert mean == pytest.approx(weighted)


@pytest.mark.model
def test_a_fresh_sample_agrees_with_the_card(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, card: dict[str, Any]
) -> None:
    """Other places and other random numbers than the card's; thrice the standard error of a sample of this size."""
    places = measure.all_places(NANO / "corpus", tokenizer, 24, seed=3, skip=3000)[: 3 * 24]
    places += measure.all_places(NANO / "corpus", tokenizer, 24, seed=3, skip=600)[3 * 24 :]
    table = measure.measure(model, tokenizer, places, seed=3)
    for kind, row in table.items():
        stated = card["measured"][kind]
        for column in ("working", "sampled", "empty", "random") if kind in measure.RESULT_KINDS else ("sampled",):
            mean, error = stated[column]
            wide = 3 * error * (stated["places"] / row["places"]) ** 0.5
            assert row[column][0] == pytest.approx(mean, abs=wide), (kind, column)
    for kind in measure.RESULT_KINDS:
        assert table[kind]["working"][0] > 0.2

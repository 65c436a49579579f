"""Gains on texts of one's own: the same items, groups that add up, and what needs a base model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from tfive.cli import evaluate_gains
from tfive.cli.evaluate_gains import parse_corpus
from tfive.errors import UserError
from tfive.evaluate.diagnostics import SampleSize, diagnose, gains_table, sample_texts
from tfive.inference.thought_model import ThoughtModel
from tfive.text.settings import KINDS, Positions

pytestmark = pytest.mark.model


@pytest.fixture
def corpus(tmp_path: Path) -> list[str]:
    for name, first in (("near.jsonl", 0), ("far.jsonl", 100)):
        rows = [{"text": tiny.document(first + n)} for n in range(12)]
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return [f"{tmp_path / 'near.jsonl'}=3", f"{tmp_path / 'far.jsonl'}"]


SIZE = SampleSize(texts=8, tokens=40, rows=3)
POSITIONS = Positions(per_text=3, uniform=0.5, entropy=0.5)


def test_gains_of_all_items_are_those_of_their_groups(thinker: ThoughtModel, corpus: list[str]) -> None:
    sample = sample_texts(parse_corpus(corpus), thinker, POSITIONS, SIZE)
    assert sorted(sample.source_B) == ["far.jsonl"] * 2 + ["near.jsonl"] * 6
    assert {KINDS[kind] for kind in sample.kind_BP[sample.kind_BP >= 0].tolist()} == {"entropy", "uniform"}
    found = diagnose(thinker, sample, SIZE, base=thinker.model)
    whole = found["all"]
    assert whole["items"] == int((sample.texts.positions_BP >= 0).sum())
    for groups in (found["by_kind"], found["by_source"]):
        assert sum(one["items"] for one in groups.values()) == whole["items"]
        for name in ("thought_gain", "content_gain", "mixed_gain", "no_thought_loss"):
            total = sum(one["items"] * one[name]["mean"] for one in groups.values())
            assert total / whole["items"] == pytest.approx(whole[name]["mean"], abs=1e-6)
    loss = whole["no_thought_loss"]["mean"] - whole["thought_gain"]["mean"]
    assert whole["continuation_loss"]["mean"] == pytest.approx(loss, abs=1e-5)
    content = whole["thought_gain"]["mean"] - whole["other_gain"]["mean"]
    assert whole["content_gain"]["mean"] == pytest.approx(content, abs=1e-5)
    assert whole["no_thought_drift"]["mean"] == pytest.approx(0, abs=1e-6)
    assert whole["mixed_gain_oracle"]["mean"] >= whole["mixed_gain"]["mean"]
    assert whole["worst_1_percent"] <= whole["thought_gain"]["mean"]
    table = gains_table(found)
    assert "| content_gain |" in table
    assert "near.jsonl" in table


def test_positions_by_entropy_stand_where_the_model_is_uncertain(thinker: ThoughtModel, corpus: list[str]) -> None:
    positions = Positions(per_text=3, uniform=0, entropy=1)
    sample = sample_texts(parse_corpus(corpus), thinker, positions, SIZE)
    tokens = sample.texts.tokens_BS.tolist()
    entropy = torch.stack([score.entropy for score in thinker.score(tokens, [[] for _ in tokens])])
    chosen = [float(entropy[b, p]) for b, row in enumerate(sample.texts.positions_BP.tolist()) for p in row if p >= 0]
    assert min(chosen) >= float(torch.nn.functional.pad(entropy, (0, 1)).quantile(0.8)) - 1e-5


def test_the_same_seed_asks_the_same_and_no_base_says_nothing_of_it(thinker: ThoughtModel, corpus: list[str]) -> None:
    plain = Positions(per_text=2)
    first, again = (sample_texts(parse_corpus(corpus), thinker, plain, SIZE) for _ in range(2))
    assert first.texts.tokens_BS.equal(again.texts.tokens_BS)
    assert first.texts.positions_BP.equal(again.texts.positions_BP)
    other = sample_texts(parse_corpus(corpus), thinker, plain, SampleSize(texts=8, tokens=40, seed=1))
    assert not first.texts.tokens_BS.equal(other.texts.tokens_BS)
    found = diagnose(thinker, first, SIZE)
    assert "gain_vs_base" not in found["all"]
    assert "thought_gain" in found["all"]


def test_too_little_text_is_one_line(thinker: ThoughtModel, corpus: list[str]) -> None:
    with pytest.raises(UserError, match=r"near\.jsonl: .* are needed"):
        sample_texts(parse_corpus(corpus), thinker, POSITIONS, SampleSize(texts=40, tokens=40))
    for wrong in (["x=0"], [f"{corpus[1]}=much"], []):
        with pytest.raises(UserError, match="--corpus"):
            parse_corpus(wrong)


def test_a_configuration_stands_for_its_sources(thinker: ThoughtModel, corpus: list[str], tmp_path: Path) -> None:
    near, far = (text.partition("=")[0] for text in corpus)
    (tmp_path / "book.txt").write_text("\n\n".join(tiny.document(n) * 12 for n in range(40)), "utf-8")
    written = "".join(
        f'[[text.sources]]\nname = "{name}"\npath = "{path}"\nshare = {share}\n'
        for name, path, share in (("near", near, 3), ("book", tmp_path / "book.txt", 1))
    )
    (tmp_path / "mine.toml").write_text(written, "utf-8")
    found = parse_corpus([str(tmp_path / "mine.toml"), f"{far}=0.5"])
    assert [(one.name, one.share) for one in found] == [("near", 0.75), ("book", 0.25), ("far.jsonl", 0.5)]
    sample = sample_texts(found, thinker, Positions(per_text=2), SampleSize(texts=6, tokens=40))
    assert sorted(sample.source_B) == ["book", "far.jsonl", "far.jsonl", "near", "near", "near"]


def test_a_folder_is_one_source_however_many_files_it_has(thinker: ThoughtModel, tmp_path: Path) -> None:
    folder = tmp_path / "letters"
    folder.mkdir()
    for number in range(30):
        (folder / f"{number}.txt").write_text(tiny.document(number), "utf-8")
    (found,) = parse_corpus([str(folder)])
    assert (found.name, len(found.files)) == ("letters", 30)
    sample = sample_texts([found], thinker, Positions(per_text=2), SampleSize(texts=8, tokens=40))
    assert set(sample.source_B) == {"letters"}


@pytest.mark.parametrize(
    ("content", "thought", "said"),
    [
        (0.05, 0.1, "what its thoughts say helps here: content gain +0.0500 ± 0.0196"),
        (
            0.05,
            -0.1,
            "thoughts say helps here: content gain +0.0500 ± 0.0196, but having one at all costs more (thought",
        ),
        (-0.05, -0.1, "what its thoughts say harms here: content gain -0.0500 ± 0.0196"),
        (
            0.01,
            0.1,
            "whether what its thoughts say helps here cannot be told: content gain +0.0100 ± 0.0196; more --te",
        ),
    ],
)
def test_the_verdict_rests_on_content_gain_and_its_interval(content: float, thought: float, said: str) -> None:
    means = {"content_gain": content, "thought_gain": thought}
    told = evaluate_gains.verdict({name: {"mean": mean, "error": 0.01} for name, mean in means.items()})
    assert said in told
    assert ("costs more" in told) == ("costs more" in said)
    unread = {name: {"mean": 0.0, "error": 0.0} for name in means}
    assert "they are not read" in evaluate_gains.verdict(unread)
    assert "is no number here" in evaluate_gains.verdict({})


def test_a_model_that_predicts_worse_than_its_base_is_told() -> None:
    told = evaluate_gains.worse({"no_thought_drift": {"mean": 0.45, "error": 0.05}})
    assert told.startswith("without a thought it predicts these texts worse than its base (+0.4500 ± 0.0980 nats")
    assert evaluate_gains.worse({"no_thought_drift": {"mean": 0.05, "error": 0.05}}) == ""
    assert evaluate_gains.worse({}) == ""


def test_a_pattern_that_finds_nothing_is_told(
    corpus: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, thinker: ThoughtModel
) -> None:
    monkeypatch.setattr(evaluate_gains, "thinker_of", lambda *_: thinker)
    options: dict[str, Any] = {
        "base": None,
        "size": SIZE,
        "per_text": 3,
        "entropy": 0.0,
        "device": "cpu",
        "compute": "float32",
    }
    text = evaluate_gains.gains_command("any", corpus, pattern="never this", as_json=False, **options)
    assert "warning: text.positions.pattern 'never this' fits 0 of " in str(text).splitlines()[-2]
    legend = next(line for line in str(text).splitlines() if line.startswith("content_gain: "))
    assert legend == "content_gain: loss with another item's thought − loss with one's own"
    assert "other_gain, empty_gain, random_gain: gain of another item's thought, of bare delimiters" in str(text)
    assert str(text).splitlines()[-1].partition(":")[0].startswith(("what its thoughts say", "whether what its"))
    pattern = "(?:river|mill|farm|boat|grain|salt|town)"
    found = json.loads(str(evaluate_gains.gains_command("any", corpus, pattern=pattern, as_json=True, **options)))
    assert found["notes"] == []

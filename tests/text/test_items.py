"""Positions: inside one document, apart from each other, chosen from what is visible at each of them alone."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from material import Prepare, document, text_settings, write_jsonl
from pydantic import ValidationError

from tfive.errors import UserError
from tfive.text.items import (
    ENTROPY_QUANTILE,
    PositionChooser,
    after_pattern,
    choose,
    eligible,
    every_step,
    kind_counts,
    segments,
)
from tfive.text.prepared import PreparedCorpus
from tfive.text.settings import KINDS, Positions
from tfive.text.tokens import TextTokenizer

lengths = st.lists(st.integers(1, 20), min_size=1, max_size=6)


def owners(sizes: list[int]) -> np.ndarray:
    return np.repeat(np.arange(5, 5 + len(sizes)), sizes)


@given(lengths, st.integers(1, 8))
def test_eligible_positions_have_a_continuation_in_their_document(sizes: list[int], horizon: int) -> None:
    document_S = owners(sizes)
    expected = [
        p + horizon < len(document_S) and document_S[p + horizon] == document_S[p] for p in range(len(document_S))
    ]
    assert eligible(document_S, horizon).tolist() == expected


@given(lengths, st.integers(1, 7))
def test_every_step_counts_from_each_document(sizes: list[int], step: int) -> None:
    expected = [(i + 1) % step == 0 for size in sizes for i in range(size)]
    assert every_step(owners(sizes), step).tolist() == expected


@given(st.integers(0, 1000), lengths, st.integers(1, 8), st.integers(0, 9))
def test_chosen_positions_keep_their_distance(seed: int, sizes: list[int], gap: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    size = sum(sizes)
    masks = {kind: rng.random(size) < 0.5 for kind in ("match", "every", "uniform")}
    counts = [count, 0, count // 2, 1]
    found = choose(masks, counts, rng.random(size), gap)
    places = [p for p, _ in found]
    assert len(found) <= sum(counts)
    assert all(b - a >= gap for a, b in pairwise(places))
    assert all(masks[KINDS[kind]][p] for p, kind in found)
    # Nothing more could have been chosen: every further candidate of the last kind stands too near.
    if len(found) < sum(counts):
        assert all(min(abs(p - q) for q in places) < gap for p in np.flatnonzero(masks["uniform"]))


def test_what_a_kind_cannot_fill_goes_to_the_next() -> None:
    everywhere, nowhere = np.ones(50, dtype=bool), np.zeros(50, dtype=bool)
    draws = np.random.default_rng(0).random(50)
    found = choose({"match": nowhere, "uniform": everywhere}, [3, 0, 0, 2], draws, 2)
    assert [KINDS[kind] for _, kind in found] == ["uniform"] * 5
    assert choose({"match": nowhere}, [3, 0, 0, 0], draws, 2) == []


def test_kind_counts_hold_on_average() -> None:
    shares = [0.5, 0.3, 0.0, 0.2]
    draws = (np.arange(1000) + 0.5) / 1000
    counts = np.array([kind_counts(shares, 3, draw) for draw in draws])
    assert (counts.sum(axis=1) == 3).all()
    assert counts.mean(axis=0) == pytest.approx([1.5, 0.9, 0.0, 0.6], abs=1e-3)


def matched(tokenizer: TextTokenizer, text: str, pattern: str, reach: int = 256) -> list[str]:
    """The text up to each selected position."""
    ids = tokenizer.encode([text])[0][:-1]
    found = after_pattern(ids, np.zeros(len(ids), dtype=int), tokenizer, pattern, reach)
    return [tokenizer.decode(ids[: p + 1]) for p in np.flatnonzero(found)]


def test_match_stands_right_after_the_pattern(tokenizer: TextTokenizer) -> None:
    text = "boats carry grain and 12 boats carry salt"
    assert matched(tokenizer, text, r"\bboats carry") == ["boats carry", "boats carry grain and 12 boats carry"]
    # The start of the text is its own start, not that of a window of characters before the position.
    assert matched(tokenizer, text, r"^boats") == ["boats"]
    assert matched(tokenizer, text, r"boats.*salt", reach=10) == []
    assert len(matched(tokenizer, text, r"boats.*salt")) == 1


def test_match_cannot_look_ahead(tokenizer: TextTokenizer) -> None:
    text = "boats carry grain"
    assert matched(tokenizer, text, r"boats(?= carry)") == []
    assert matched(tokenizer, text, r"boats(?! carry)") == ["boats"]
    assert matched(tokenizer, text, r"boats$") == ["boats"]


def test_match_never_ends_inside_a_character(tokenizer: TextTokenizer) -> None:
    # A character the tokenizer has never met is spelled in bytes; only after the last of them it is there.
    ids = tokenizer.encode(["x\u0f3ay"])[0][:-1]
    found = after_pattern(ids, np.zeros(len(ids), dtype=int), tokenizer, "\u0f3a|\ufffd", 9)
    assert [tokenizer.decode(ids[: p + 1]) for p in np.flatnonzero(found)] == ["x\u0f3a"]


@given(st.data())
def test_candidates_depend_on_the_visible_prefix_alone(tokenizer: TextTokenizer, data: st.DataObject) -> None:
    ids = np.concatenate(tokenizer.encode([document(data.draw(st.integers(0, 50)), 12) for _ in range(2)]))
    ends = np.flatnonzero(ids == tokenizer.end_id)
    owner = np.repeat([0, 1], [ends[0] + 1, len(ids) - ends[0] - 1])
    p = data.draw(st.integers(0, len(ids) - 1))
    other = ids.copy()
    other[p + 1 :] = data.draw(st.lists(st.integers(1, 399), min_size=len(ids) - p - 1, max_size=len(ids) - p - 1))
    pattern = r"\w+ (?:and|boats|\w*)(?!\w)|\.$"
    before, after = (after_pattern(x, owner, tokenizer, pattern, 64) for x in (ids, other))
    assert (before[: p + 1] == after[: p + 1]).all()


def test_documents_of_a_row_do_not_see_each_other(tokenizer: TextTokenizer) -> None:
    ids = np.concatenate(tokenizer.encode(["boats", "carry"]))
    owner = np.repeat([0, 1], [len(part) for part in tokenizer.encode(["boats", "carry"])])
    assert not after_pattern(ids, owner, tokenizer, r"boats.*carry", 256).any()
    assert after_pattern(ids, 0 * owner, tokenizer, r"boats.*carry", 256).any()


def test_positions_of_a_corpus(tmp_path: Path, prepared: Prepare) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [document(n) for n in range(200)])
    positions = {
        "per_text": 4,
        "uniform": 0.25,
        "match": 0.5,
        "every": 0.25,
        "pattern": " and",
        "step": 3,
    }
    corpus: PreparedCorpus = prepared(text_settings([{"name": "s", "path": str(path)}], positions=positions), horizon=5)
    kinds = dict.fromkeys(KINDS, 0)
    for row in range(len(corpus)):
        places = [p for p in corpus.positions[row].tolist() if p >= 0]
        assert places == sorted(places)
        assert corpus.positions[row].tolist() == places + [-1] * (4 - len(places))
        assert all(b - a >= 5 for a, b in pairwise(places))
        allowed = eligible(corpus.document[row], 5)
        assert allowed[places].all()
        for p, kind in zip(places, corpus.kinds[row].tolist()):
            kinds[KINDS[kind]] += 1
            start = next(a for a, b in segments(corpus.document[row]) if a <= p < b)
            if KINDS[kind] == "match":
                assert corpus.tokenizer.decode(corpus.tokens[row, start : p + 1]).endswith(" and")
            if KINDS[kind] == "every":
                assert (p - start + 1) % 3 == 0
    assert kinds["match"] > 0
    assert kinds["every"] > 0
    assert kinds["uniform"] > 0
    assert kinds["entropy"] == 0


def entropies(tokens_BS: np.ndarray, document_BS: np.ndarray) -> np.ndarray:
    """A stand-in for a base model: uncertain after even tokens."""
    assert tokens_BS.shape == document_BS.shape
    return np.where(tokens_BS % 2 == 0, 3.0, 1.0) + tokens_BS * 1e-4


def test_entropy_chooses_uncertain_positions(tmp_path: Path, prepared: Prepare) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [document(n) for n in range(200)])
    settings = text_settings(
        [{"name": "s", "path": str(path)}],
        positions={"per_text": 3, "uniform": 0, "entropy": 1},
    )
    with pytest.raises(UserError, match=r"text\.positions\.entropy needs a base model"):
        prepared(settings)
    corpus: PreparedCorpus = prepared(settings, entropies=entropies, base_model="stand-in")
    threshold = corpus.manifest["entropy_threshold"]
    everywhere = np.concatenate([entropies(t, t)[eligible(d, 4)] for t, d in zip(corpus.tokens, corpus.document)])
    assert threshold == pytest.approx(np.quantile(everywhere.astype(np.float32), ENTROPY_QUANTILE), rel=1e-6)
    for row in range(len(corpus)):
        for p in corpus.positions[row][corpus.positions[row] >= 0]:
            assert entropies(corpus.tokens[row], corpus.tokens[row])[p] >= threshold - 1e-6
    assert (corpus.positions >= 0).sum() > len(corpus)
    assert prepared(settings, entropies=entropies, base_model="other").folder != corpus.folder


def test_entropies_must_be_numbers(tmp_path: Path, prepared: Prepare) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [document(n) for n in range(200)])
    settings = text_settings([{"name": "s", "path": str(path)}], positions={"per_text": 2, "uniform": 0, "entropy": 1})
    with pytest.raises(UserError, match="not finite"):
        prepared(settings, entropies=lambda tokens, _: np.full(tokens.shape, np.nan), base_model="broken")
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize(
    "options",
    [
        {"per_text": 0},
        {"uniform": 0},
        {"uniform": -1},
        {"match": 0.5},
        {"match": 0.5, "pattern": "("},
        {"match": 0.5, "pattern": "(?i)x"},
        {"min_gap": 0},
        {"step": 0},
    ],
)
def test_position_settings_must_make_sense(options: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Positions.model_validate(options)


def test_the_gap_is_the_horizon_unless_given(tokenizer: TextTokenizer) -> None:
    assert PositionChooser(Positions(), 7, 0, tokenizer).gap == 7
    assert PositionChooser(Positions(min_gap=3), 7, 0, tokenizer).gap == 3

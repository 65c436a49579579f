"""The first pass: split, role and order come from a document's content alone, and pools keep exact prefixes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from material import ROLES, document, write_jsonl

from tfive.errors import UserError
from tfive.telemetry import Silent
from tfive.text.candidates import CANDIDATE, Groups, Pool, apportion, batches, digest_words, scan
from tfive.text.settings import Sequences
from tfive.text.sources import Reader, SourceFile


@given(st.integers(0, 10_000), st.lists(st.floats(0.01, 100), min_size=1, max_size=9))
def test_apportioned_numbers_add_up_and_are_close(total: int, shares: list[float]) -> None:
    counts = apportion(total, shares)
    assert sum(counts) == total
    exact = [share / sum(shares) * total for share in shares]
    assert all(abs(count - want) < 1 for count, want in zip(counts, exact))


def groups(seed: int = 0, train: int = 700, roles: dict[str, dict[str, float]] = ROLES) -> Groups:
    return Groups(Sequences(train=train, calibration=200, development=60, test=40), roles, seed)


def test_documents_fall_into_groups_in_proportion() -> None:
    rule = groups()
    found = np.bincount(rule.of(digest_words(document(n, 8) for n in range(6000))), minlength=6) / 6000
    assert [(one.split, one.role) for one in rule.all] == [
        ("train", "actor"),
        ("train", "critic_fit"),
        ("train", "pilot"),
        ("calibration", "qualify"),
        ("development", "develop"),
        ("test", "test"),
    ]
    # Four standard errors of a share of 6000 documents are at most 0.026.
    assert found == pytest.approx([0.35, 0.175, 0.175, 0.2, 0.06, 0.04], abs=0.026)


def test_role_shares_never_move_a_document_between_splits() -> None:
    other = {**ROLES, "train": {"actor": 1.0, "scale": 5.0}}
    words = digest_words(document(n, 8) for n in range(500))
    before, after = groups(), groups(roles=other)
    splits = [[rule.all[g].split for g in rule.of(words)] for rule in (before, after)]
    assert splits[0] == splits[1]


def test_another_seed_is_another_partition() -> None:
    words = digest_words(document(n, 8) for n in range(200))
    assert (groups(0).of(words) != groups(1).of(words)).any()


def test_a_role_too_small_for_one_sequence_is_refused() -> None:
    tiny = {**ROLES, "train": {"actor": 1.0, "pilot": 0.001}}
    with pytest.raises(UserError, match=r"text.sequences.train = 100 leaves no sequence for the role pilot"):
        groups(train=100, roles=tiny)


def made_up(seed: int, count: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    found = np.zeros(count, dtype=CANDIDATE)
    # Few different digests, so that duplicates are common; equal digests have equal order, as in reality.
    found["high"] = rng.integers(0, count, count)
    found["low"] = 7 * found["high"]
    found["order"] = (found["high"] * np.uint64(2654435761)) % np.uint64(1 << 32)
    found["record"] = np.arange(count)
    found["bytes"] = 1 + found["high"] % np.uint64(20)
    return found


@given(st.integers(0, 100), st.integers(1, 200), st.integers(1, 60), st.integers(1, 400))
def test_a_pool_keeps_the_first_documents_however_they_arrive(seed: int, count: int, step: int, limit: int) -> None:
    found = made_up(seed, count)
    ordered = np.sort(found, order=["order", "record"])
    unique = ordered[np.unique(ordered["order"], return_index=True)[1]]
    enough = int((np.cumsum(unique["bytes"]) < limit).sum()) + 1
    for arrival in (found, found[::-1]):
        pool = Pool(limit)
        for start in range(0, count, step):
            pool.add(arrival[start : start + step])
        kept = pool.kept()
        assert kept["high"].tolist() == unique["high"][:enough].tolist()
        assert pool.pruned == (enough < len(unique))
    assert pool.duplicates <= count - len(np.unique(found["high"]))


def test_pools_stay_small_and_agree_with_wide_ones(tmp_path: Path) -> None:
    texts = [document(n, 30) for n in range(400)]
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    files = [SourceFile("s", path, "a.jsonl")]
    rule = groups()
    quotas = [[50]] * 6
    narrow = scan(files, ["s"], rule, quotas, Reader(), Silent(), bytes_per_token=8)
    wide = scan(files, ["s"], rule, quotas, Reader(), Silent(), bytes_per_token=10**6)
    for few, all_ in zip(narrow.pools, wide.pools):
        assert 0 < len(few[0]) < len(all_[0])
        assert (few[0] == all_[0][: len(few[0])]).all()
    assert all(row[0] for row in narrow.pruned)
    assert not any(row[0] for row in wide.pruned)
    assert sum(len(row[0]) for row in wide.pools) == 400


def test_equal_documents_are_kept_once_within_and_across_sources(tmp_path: Path) -> None:
    a = write_jsonl(tmp_path / "a.jsonl", [document(n) for n in (1, 2, 2, 3, 1)])
    b = write_jsonl(tmp_path / "b.jsonl.gz", [document(n) + " \r\n" for n in (3, 4, 5, 4)])
    files = [SourceFile("a", a, "a.jsonl"), SourceFile("b", b, "b.jsonl.gz")]
    found = scan(files, ["a", "b"], groups(), [[10**6, 10**6]] * 6, Reader(), Silent())
    assert [sum(len(row[source]) for row in found.pools) for source in (0, 1)] == [3, 2]
    assert found.duplicates == 4
    rows = sorted((int(c["file"]), int(c["record"])) for row in found.pools for pool in row for c in pool)
    assert rows == [(0, 0), (0, 1), (0, 3), (1, 1), (1, 2)]


@given(st.lists(st.integers(0, 3_000_000), max_size=30), st.integers(1, 7))
def test_batches_lose_nothing_and_stay_bounded(sizes: list[int], most: int) -> None:
    documents = [(number, "x" * (size // 1000)) for number, size in enumerate(sizes)]
    found = list(batches(iter(documents), most))
    assert [pair for records, texts in found for pair in zip(records, texts)] == documents
    assert all(1 <= len(records) <= most for records, _ in found)

"""Preparing a corpus: what it promises about documents, splits, roles and bytes."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from material import ROLES, Prepare, document, text_settings, write_jsonl
from tokenizers import Tokenizer

from tfive.errors import UserError
from tfive.text import corpus as corpus_module
from tfive.text import sequences
from tfive.text.corpus import prepare
from tfive.text.items import segments
from tfive.text.prepared import PreparedCorpus
from tfive.text.settings import TextSettings
from tfive.text.tokens import TextTokenizer

SIZES = {"train": 16, "calibration": 4, "development": 4, "test": 4}


def two_sources(folder: Path, count: int = 200) -> list[dict[str, Any]]:
    web = write_jsonl(folder / "web.jsonl.gz", [document(n) for n in range(count)])
    math = write_jsonl(folder / "math" / "a.jsonl", [document(n, 25) for n in range(count, 2 * count)])
    return [{"name": "web", "path": str(web), "share": 85}, {"name": "math", "path": str(math.parent), "share": 15}]


def bytes_of(corpus: PreparedCorpus) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(corpus.folder.iterdir())}


def texts_of(corpus: PreparedCorpus) -> dict[int, np.ndarray]:
    """All tokens of each document, joined over the sequences it crosses."""
    flat, owner = np.asarray(corpus.tokens).reshape(-1), np.asarray(corpus.document).reshape(-1)
    return {int(number): flat[owner == number] for number in np.unique(owner)}


def test_splits_have_their_sequences_and_sources_their_shares(tmp_path: Path, prepared: Prepare) -> None:
    corpus = prepared(text_settings(two_sources(tmp_path)))
    assert {split: len(corpus.sequences(split)) for split in SIZES} == SIZES
    assert [len(corpus.sequences("train", role)) for role in ("actor", "critic_fit", "pilot")] == [8, 4, 4]
    assert corpus.tokens.shape == (28, 32)
    for stretch in corpus.ranges:
        owners = corpus.document[stretch.numbers]
        web = (corpus.documents["source"][owners] == corpus.sources.index("web")).sum()
        assert web == round(0.85 * stretch.sequences * 32)


def test_documents_are_whole_and_only_the_last_of_a_source_is_cut(
    tmp_path: Path, prepared: Prepare, tokenizer: TextTokenizer
) -> None:
    corpus = prepared(text_settings(two_sources(tmp_path)))
    encoded = {tuple(ids.tolist()) for ids in tokenizer.encode([document(n) for n in range(200)])}
    encoded |= {tuple(ids.tolist()) for ids in tokenizer.encode([document(n, 25) for n in range(200, 400)])}
    cut = Counter[tuple[int, int]]()
    for number, ids in texts_of(corpus).items():
        record = corpus.documents[number]
        assert record["tokens"] == len(ids)
        if tuple(ids.tolist()) not in encoded:
            assert any(whole[: len(ids)] == tuple(ids.tolist()) for whole in encoded)
            cut[int(record["group"]), int(record["source"])] += 1
    assert max(cut.values()) == 1


def test_a_document_serves_one_role_and_a_sequence_too(tmp_path: Path, prepared: Prepare) -> None:
    corpus = prepared(text_settings(two_sources(tmp_path)))
    groups = np.repeat(np.arange(len(corpus.ranges)), [one.sequences for one in corpus.ranges])
    for row, group in enumerate(groups):
        assert set(corpus.documents["group"][corpus.document[row]]) == {group}
    digests = corpus.documents[["high", "low"]]
    assert len(np.unique(digests)) == len(digests)
    spans = corpus.document_spans()
    assert (spans[:, 0] == corpus.document.min(axis=1)).all()
    assert (spans[:, 1] == corpus.document.max(axis=1)).all()
    assert len(set(corpus.role_of[:16])) == 3


def test_batches_are_what_the_engine_takes(tmp_path: Path, prepared: Prepare) -> None:
    corpus = prepared(text_settings(two_sources(tmp_path)))
    batch = corpus.batch([5, 2, 5])
    assert batch.tokens_BS.tolist() == corpus.tokens[[5, 2, 5]].tolist()
    for row, number in enumerate((5, 2, 5)):
        sizes = [end - start for start, end in segments(corpus.document[number])]
        assert batch.document_BS[row].tolist() == [n for n, size in enumerate(sizes) for _ in range(size)]
        for slot, p in enumerate(corpus.positions[number].tolist()):
            assert batch.positions_BP[row, slot] == p
            assert batch.items_BP[row, slot] == (number * 3 + slot if p >= 0 else -1)
    items = [int(item) for item in batch.items_BP.flatten() if item >= 0]
    assert set(corpus.kind_of(items)) == {"uniform"}
    owner = corpus.document[5, corpus.positions[5, 0]]
    assert corpus.source_of([15]) == [corpus.sources[corpus.documents["source"][owner]]]
    with pytest.raises(IndexError):
        corpus.batch([28])


def test_the_order_of_sources_and_the_number_of_processes_change_no_byte(tmp_path: Path, prepared: Prepare) -> None:
    sources = two_sources(tmp_path)
    first = prepared(text_settings(sources), cache=tmp_path / "a")
    second = prepared(text_settings(sources[::-1]), cache=tmp_path / "b")
    third = prepared(text_settings(sources, workers=2), cache=tmp_path / "c")
    assert bytes_of(first) == bytes_of(second) == bytes_of(third)
    assert first.folder.name == second.folder.name == third.folder.name


def test_another_seed_is_another_corpus(tmp_path: Path, prepared: Prepare, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = two_sources(tmp_path)
    first = prepared(text_settings(sources))
    monkeypatch.setattr(corpus_module, "SEED", 1)
    second = prepared(text_settings(sources))
    assert first.fingerprint != second.fingerprint
    assert (first.tokens != second.tokens).any()


def test_a_prepared_corpus_is_not_prepared_again(
    tmp_path: Path, prepared: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = two_sources(tmp_path)
    first = prepared(text_settings(sources))
    monkeypatch.setattr(corpus_module, "_build", None)
    assert prepared(text_settings(sources)).folder == first.folder
    # The same content under another path is the same corpus.
    (tmp_path / "elsewhere").mkdir()
    sources[0]["path"] = str(shutil.move(sources[0]["path"], tmp_path / "elsewhere" / "web.jsonl.gz"))
    assert prepared(text_settings(sources)).folder == first.folder


def where_documents_went(corpus: PreparedCorpus) -> dict[tuple[int, int], tuple[str, str]]:
    return {
        (int(record["high"]), int(record["low"])): (
            corpus.ranges[record["group"]].split,
            corpus.ranges[record["group"]].role,
        )
        for record in corpus.documents
    }


@settings(max_examples=25)
@given(st.data())
def test_adding_text_never_moves_a_document(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: TextTokenizer, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("grow")
    numbers = list(range(240))
    first = numbers[: data.draw(st.integers(160, 200))]
    more = data.draw(st.lists(st.sampled_from(numbers), max_size=60))
    shuffled = first + more
    random.Random(data.draw(st.integers(0, 9))).shuffle(shuffled)
    options: dict[str, Any] = {"horizon": 4, "roles": ROLES, "tokenizer": tokenizer, "cache": folder / "cache"}
    corpora = []
    for name, chosen in (("small", first), ("large", shuffled)):
        path = write_jsonl(folder / f"{name}.jsonl", [document(n, 30) for n in chosen])
        corpora.append(prepare(text_settings([{"name": "s", "path": str(path)}]), **options))
    before, after = (where_documents_went(corpus) for corpus in corpora)
    shared = before.keys() & after.keys()
    assert len(shared) > 10
    assert all(before[one] == after[one] for one in shared)
    texts = [{tuple(ids.tolist()) for ids in texts_of(corpus).values()} for corpus in corpora]
    assert all(len(found) == len(corpus.documents) for found, corpus in zip(texts, corpora))


def test_pools_that_were_too_small_are_scanned_again(
    tmp_path: Path, prepared: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = two_sources(tmp_path)
    expected = prepared(text_settings(sources), cache=tmp_path / "a")
    monkeypatch.setattr(corpus_module, "BYTES_PER_TOKEN_KEPT", 1)
    monkeypatch.setattr(sequences, "FIRST_BYTES_PER_TOKEN", 0.5)
    assert bytes_of(prepared(text_settings(sources), cache=tmp_path / "b")) == bytes_of(expected)


def test_duplicates_are_used_once(tmp_path: Path, prepared: Prepare) -> None:
    texts = [document(n) for n in range(150)]
    a = write_jsonl(tmp_path / "a.jsonl", texts + texts[:40])
    b = write_jsonl(tmp_path / "b.jsonl", [document(n) for n in range(1000, 1200)] + texts[100:])
    corpus = prepared(text_settings([{"name": "a", "path": str(a)}, {"name": "b", "path": str(b)}]))
    found = list(map(tuple, (ids.tolist() for ids in texts_of(corpus).values())))
    assert len(set(found)) == len(found)
    assert corpus.manifest["duplicates"] > 0


def test_the_manifest_tells_where_it_came_from(tmp_path: Path, prepared: Prepare, tokenizer: TextTokenizer) -> None:
    sources = two_sources(tmp_path)
    corpus = prepared(text_settings(sources))
    manifest = json.loads((corpus.folder / "manifest.json").read_text("utf-8"))
    assert manifest == corpus.manifest
    assert manifest["tokenizer"]["fingerprint"] == tokenizer.fingerprint == corpus.tokenizer.fingerprint
    assert [source["name"] for source in manifest["sources"]] == ["math", "web"]
    assert manifest["sources"][1]["files"][0]["name"] == "web.jsonl.gz"
    assert manifest["read"]["web"]["documents"] == 200
    assert manifest["counts"] == {"sequences": 28, "tokens": 896, "documents": len(corpus.documents)}
    assert manifest["roles"]["train"] == ROLES["train"]
    assert set(manifest["files"]) == {path.name for path in corpus.folder.iterdir()} - {"manifest.json"}


def test_damage_is_noticed(tmp_path: Path, prepared: Prepare) -> None:
    corpus = prepared(text_settings(two_sources(tmp_path)))
    path = corpus.folder / "positions.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(UserError, match=r"positions\.npy: damaged"):
        PreparedCorpus(corpus.folder)
    PreparedCorpus(corpus.folder, verify=False)
    path.write_bytes(bytes(content[:-1]))
    with pytest.raises(UserError, match=r"positions\.npy: damaged"):
        PreparedCorpus(corpus.folder, verify=False)
    path.unlink()
    with pytest.raises(UserError, match=r"positions\.npy: cannot be read"):
        PreparedCorpus(corpus.folder)
    with pytest.raises(UserError, match="no prepared corpus here"):
        PreparedCorpus(tmp_path)


def test_a_role_that_is_not_there_is_named(tmp_path: Path, prepared: Prepare) -> None:
    corpus = prepared(text_settings(two_sources(tmp_path)))
    with pytest.raises(UserError, match="train/actor"):
        corpus.sequences(role="nobody")


def short_of_text(folder: Path) -> TextSettings:
    path = write_jsonl(folder / "a.jsonl", [document(n, 30) for n in range(60)])
    return text_settings([{"name": "s", "path": str(path)}], sequences={**SIZES, "train": 4000})


def test_too_little_text_is_refused_or_used_up(tmp_path: Path, prepared: Prepare) -> None:
    settings = short_of_text(tmp_path)
    with pytest.raises(UserError, match=r"source s has [\d,]+ tokens for train/actor, which needs 64,000"):
        prepared(settings)
    assert list((tmp_path / "cache").iterdir()) == []
    # With 4000 of 4008 sequences for training, hardly a document falls to the other splits.
    with pytest.raises(UserError, match="no text fills a sequence"):
        prepared(settings.model_copy(update={"allow_fewer": True}))
    fair = text_settings(
        [s.model_dump() for s in settings.sources], sequences=dict.fromkeys(SIZES, 400), allow_fewer=True
    )
    corpus = prepared(fair)
    assert 3 <= len(corpus.sequences("train")) < 400
    assert corpus.manifest["counts"]["tokens"] == corpus.tokens.size


BAD: dict[str, Callable[[Path], object]] = {
    "missing file": lambda folder: None,
    "empty file": lambda folder: (folder / "a.jsonl").write_bytes(b""),
    "only blank rows": lambda folder: (folder / "a.jsonl").write_bytes(b'{"text": " "}\n' * 9),
    "binary junk": lambda folder: (folder / "a.jsonl").write_bytes(bytes(range(256)) * 9),
    "invalid utf-8": lambda folder: (folder / "a.jsonl").write_bytes(b'{"text": "\xc3("}\n'),
    "no text": lambda folder: (folder / "a.jsonl").write_bytes(b'{"txet": "a"}\n'),
    "one short text": lambda folder: (folder / "a.jsonl").write_bytes(b'{"text": "a b"}\n'),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_input_is_one_line_and_leaves_nothing(tmp_path: Path, prepared: Prepare, kind: str) -> None:
    BAD[kind](tmp_path)
    with pytest.raises(UserError) as error:
        prepared(text_settings([{"name": "s", "path": str(tmp_path / "a.jsonl")}]))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "cache").exists() or list((tmp_path / "cache").iterdir()) == []


@settings(max_examples=40)
@given(
    st.sampled_from(["a.jsonl", "a.jsonl.gz", "a.txt", "a.parquet", "a.jsonl.zst"]),
    st.one_of(st.binary(max_size=400), st.text(max_size=200).map(str.encode)),
    st.booleans(),
)
def test_no_bytes_at_all_leave_something_half_written(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: TextTokenizer, name: str, content: bytes, skip: bool
) -> None:
    folder = tmp_path_factory.mktemp("any")
    (folder / name).write_bytes(content)
    options: dict[str, Any] = {"horizon": 4, "roles": ROLES, "tokenizer": tokenizer, "cache": folder / "cache"}
    wanted = text_settings([{"name": "s", "path": str(folder / name)}], bad_rows="skip" if skip else "fail")
    with pytest.raises(UserError) as error:
        prepare(wanted, **options)
    assert "\n" not in str(error.value)
    assert not (folder / "cache").exists() or list((folder / "cache").iterdir()) == []


def test_contradictory_requests_are_refused(tmp_path: Path, prepared: Prepare) -> None:
    sources = two_sources(tmp_path)
    with pytest.raises(UserError, match=r"text\.sources is empty"):
        prepared(text_settings([]))
    with pytest.raises(UserError, match=r"thought\.horizon = 32 must be smaller"):
        prepared(text_settings(sources), horizon=32)
    with pytest.raises(UserError, match="roles of split train"):
        prepared(text_settings(sources), roles={**ROLES, "train": {}})
    with pytest.raises(UserError, match="roles of split train"):
        prepared(text_settings(sources), roles={**ROLES, "train": {"actor": 1, "pilot": -1}})
    with pytest.raises(UserError, match="more than a corpus can number"):
        prepared(text_settings(sources, sequences={**SIZES, "train": 2**32}))
    with pytest.raises(UserError, match="no position can be chosen"):
        prepared(text_settings(sources, positions={"uniform": 0, "match": 1, "pattern": "never there"}))
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_source_that_changes_meanwhile_is_noticed(
    tmp_path: Path, prepared: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = two_sources(tmp_path)
    scan = corpus_module.scan

    def meddling(*arguments: Any, **options: Any) -> Any:
        found = scan(*arguments, **options)
        write_jsonl(Path(sources[0]["path"]), [document(n) for n in range(500, 700)])
        return found

    monkeypatch.setattr(corpus_module, "scan", meddling)
    with pytest.raises(UserError, match="changed while it was being read"):
        prepared(text_settings(sources))
    assert list((tmp_path / "cache").iterdir()) == []


def test_an_unwritable_cache_is_named(tmp_path: Path, prepared: Prepare) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match=r"cannot write here .* set text\.cache"):
        prepared(text_settings(two_sources(tmp_path)), cache=tmp_path / "file" / "cache")


def test_reading_needs_no_more_than_the_file_says(tmp_path: Path, prepared: Prepare) -> None:
    corpus = prepared(text_settings(two_sources(tmp_path)))
    for array in (corpus.tokens, corpus.document, corpus.positions, corpus.kinds, corpus.documents):
        assert isinstance(array, np.memmap)
        assert not array.flags.writeable
    assert os.access(corpus.folder / "tokenizer.json", os.R_OK)


def test_a_source_that_states_its_content_takes_no_other(tmp_path: Path, prepared: Prepare) -> None:
    path = write_jsonl(tmp_path / "a.jsonl.gz", (document(number) for number in range(60)))
    right = hashlib.sha256(path.read_bytes()).hexdigest()
    plain = prepared(text_settings([{"name": "a", "path": str(path)}]))
    stated = prepared(text_settings([{"name": "a", "path": str(path), "sha256": right}]))
    assert stated.fingerprint == plain.fingerprint
    with pytest.raises(UserError, match=rf"sha256 is {right}, the source a asks for one file with {'0' * 64}; get"):
        prepared(text_settings([{"name": "a", "path": str(path), "sha256": "0" * 64}]))
    folder = tmp_path / "several"
    for name in ("b.jsonl", "c.jsonl"):
        write_jsonl(folder / name, (document(number) for number in range(60)))
    with pytest.raises(UserError, match="a folder of 2 files, the source a asks for one file"):
        prepared(text_settings([{"name": "a", "path": str(folder), "sha256": right}]))


def test_versions_of_one_problem_stay_in_one_split_and_role(
    tmp_path: Path, prepared: Prepare, tokenizer: TextTokenizer
) -> None:
    versions = [f"Problem {n}? {document(10 * n + v, 20)}" for n in range(60) for v in range(4)]
    source = [{"name": "s", "path": str(write_jsonl(tmp_path / "a.jsonl", versions))}]

    def places(**changes: Any) -> dict[str, set[str]]:
        """Split and role of every document of each problem."""
        corpus = prepared(text_settings([source[0] | changes], allow_fewer=True))
        found: dict[str, set[str]] = {}
        for stretch in corpus.ranges:
            for number in np.unique(np.asarray(corpus.document[stretch.numbers])):
                ids = texts_of(corpus)[int(number)].tolist()
                problem = Tokenizer.from_str(tokenizer.serialized).decode(ids).split("?")[0]
                found.setdefault(problem, set()).add(f"{stretch.split}/{stretch.role}")
        return found

    together = places(split_by=r"(Problem \d+)\?")
    assert len(together) > 20
    assert all(len(where) == 1 for where in together.values())
    assert len({next(iter(where)) for where in together.values()}) == 6, "all splits and roles have some"
    assert any(len(where) > 1 for where in places().values())


def test_a_document_without_a_match_goes_by_its_text(tmp_path: Path, prepared: Prepare) -> None:
    texts = [document(n) for n in range(200)]
    source = [{"name": "s", "path": str(write_jsonl(tmp_path / "a.jsonl", [*texts, "one of a (kind) only"]))}]
    plain, split = (prepared(text_settings([source[0] | {"split_by": key}])) for key in (None, r"\((kind)\)"))
    assert np.array_equal(plain.tokens, split.tokens)
    assert plain.folder != split.folder


def test_a_pattern_that_splits_nothing_is_refused(tmp_path: Path, prepared: Prepare) -> None:
    source = [{"name": "s", "path": str(write_jsonl(tmp_path / "a.jsonl", [document(n) for n in range(50)]))}]
    with pytest.raises(UserError, match=r"source s: split_by = 'Problem \(x\)' is found in no document; correct"):
        prepared(text_settings([source[0] | {"split_by": "Problem (x)"}]))
    for pattern, part in (("Problem", "has 0 groups"), ("(a)(b)", "has 2 groups"), ("(a", "not a regular expression")):
        with pytest.raises(ValueError, match=part):
            text_settings([source[0] | {"split_by": pattern}])

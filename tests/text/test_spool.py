"""Hub datasets and callers' own texts: fetched once, written down whole, identified by commit and content."""

from __future__ import annotations

import gzip
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from material import Prepare, document, text_settings

from tfive.errors import UserError
from tfive.telemetry import Silent
from tfive.text.settings import TextSource
from tfive.text.spool import hub_files, spool, spooled

COMMIT = "c0ffee" * 6


class FakeStream:
    """A streamed dataset of several files, as `datasets.IterableDataset` divides and shuffles it."""

    def __init__(self, hub: FakeHub, files: list[list[dict[str, Any]]]) -> None:
        self.hub, self.files = hub, files

    @property
    def num_shards(self) -> int:
        return len(self.files)

    def shard(self, num_shards: int, index: int) -> FakeStream:
        assert num_shards == self.num_shards
        return FakeStream(self.hub, [self.files[index]])

    def shuffle(self, seed: int, buffer_size: int) -> FakeStream:
        assert buffer_size > 1
        return FakeStream(self.hub, [random.Random(seed).sample(rows, len(rows)) for rows in self.files])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for row in (row for rows in self.files for row in rows):
            self.hub.read += 1
            yield row
            if self.hub.fail is not None:
                raise self.hub.fail


class FakeHub:
    """Answers like `datasets` and `huggingface_hub` for one dataset, and counts what it is asked for."""

    def __init__(self) -> None:
        self.rows: dict[str | None, list[dict[str, Any]]] = {}
        self.calls: list[dict[str, Any]] = []
        self.files = 1
        """Over how many files the rows of a configuration are divided."""
        self.read = 0
        self.fail: Exception | None = None

    def load_dataset(self, path: str, **options: Any) -> FakeStream:
        self.calls.append({"path": path, **options})
        if options["name"] not in self.rows:
            raise ValueError(f"BuilderConfig {options['name']!r} not found.\nAvailable: {list(self.rows)}")
        rows = self.rows[options["name"]]
        each = -(-len(rows) // self.files)
        return FakeStream(self, [rows[start : start + each] for start in range(0, len(rows), each)])

    def dataset_info(self, name: str, revision: str | None = None) -> SimpleNamespace:
        if name != "who/texts":
            raise OSError(f"404: {name}\nnot found")
        return SimpleNamespace(sha=revision or COMMIT)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub()
    module = ModuleType("datasets")
    module.load_dataset = fake.load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: fake)
    return fake


def texts_in(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in gzip.decompress(path.read_bytes()).decode().splitlines()]


def test_a_hub_dataset_is_fetched_once_per_configuration(hub: FakeHub, tmp_path: Path) -> None:
    hub.rows = {"a": [{"text": f"a{n}"} for n in range(9)], "b": [{"text": f"b{n}"} for n in range(2)]}
    source = TextSource(name="web", hub="who/texts", configs=("a", "b"), limit=3)
    files, commit = hub_files(source, tmp_path, Silent())
    assert commit == COMMIT
    of_a, of_b = (texts_in(file.path) for file in files)
    assert len(set(of_a)) == 3
    assert set(of_a) < {f"a{n}" for n in range(9)}
    assert sorted(of_b) == ["b0", "b1"]
    assert [file.name for file in files] == ["a.jsonl.gz", "b.jsonl.gz"]
    assert hub.read == 5
    assert [call["name"] for call in hub.calls] == ["a", "b"]
    assert hub.calls[0] == {
        "path": "who/texts",
        "name": "a",
        "split": "train",
        "revision": COMMIT,
        "data_files": None,
        "streaming": True,
    }
    again, _ = hub_files(source, tmp_path, Silent())
    assert [file.path for file in again] == [file.path for file in files]
    assert len(hub.calls) == 2
    pinned = source.model_copy(update={"revision": "v2"})
    assert hub_files(pinned, tmp_path, Silent())[0][0].path != files[0].path
    assert hub.calls[-1]["revision"] == "v2"


def test_a_limited_crawl_is_a_sample_over_its_files_and_the_same_every_time(hub: FakeHub, tmp_path: Path) -> None:
    hub.files, hub.rows = 10, {None: [{"text": f"{n:03d}"} for n in range(200)]}
    source = TextSource(name="web", hub="who/texts", limit=40)
    texts = texts_in(hub_files(source, tmp_path, Silent())[0][0].path)
    assert len(set(texts)) == 40
    numbers = [int(text) for text in texts]
    # Four of every file, not the first four of it, and not the first forty of all.
    assert [sum(number // 20 == file for number in numbers) for file in range(10)] == [4] * 10
    assert any(number % 20 >= 4 for number in numbers)
    assert texts_in(hub_files(source, tmp_path / "again", Silent())[0][0].path) == texts
    # Where files hold too little, the others give more; where all do, everything is taken.
    everything = hub_files(source.model_copy(update={"limit": 500}), tmp_path, Silent())[0][0].path
    assert sorted(texts_in(everything)) == [f"{n:03d}" for n in range(200)]


def test_fields_filter_and_file_patterns_reach_the_hub(hub: FakeHub, tmp_path: Path) -> None:
    hub.rows = {
        None: [
            {"id": "2412.1", "title": "Old", "abstract": "x"},
            {"id": "2501.1", "title": "New", "abstract": "y"},
            {"id": "2612.1", "title": "Newer", "abstract": "z"},
            {"id": "2512.9", "title": " ", "abstract": ""},
        ]
    }
    source = TextSource.model_validate(
        {
            "name": "arxiv",
            "hub": "who/texts",
            "files": ["data/2025/*.parquet"],
            "fields": ["title", "abstract"],
            "where": {"field": "id", "at_least": "25", "below": "27"},
        }
    )
    files, _ = hub_files(source, tmp_path, Silent())
    assert texts_in(files[0].path) == ["New\n\ny", "Newer\n\nz"]
    assert hub.calls[0]["data_files"] == ["data/2025/*.parquet"]


def test_what_the_hub_refuses_is_one_line_and_nothing_is_kept(hub: FakeHub, tmp_path: Path) -> None:
    hub.rows = {None: [{"text": "fine"}, {"body": "no text"}]}
    source = TextSource(name="web", hub="who/texts")
    for broken, reason in [
        (TextSource(name="web", hub="who/else"), "cannot read who/else"),
        (TextSource(name="web", hub="who/texts", configs=("nope",)), "BuilderConfig 'nope' not found"),
        (source, "row 2 of who/texts has no field 'text'"),
    ]:
        with pytest.raises(UserError, match=reason) as error:
            hub_files(broken, tmp_path, Silent())
        assert "\n" not in str(error.value)
    for lost in (ConnectionError("connection lost"), Exception("connection\nlost")):
        hub.fail = lost
        with pytest.raises(UserError, match="connection lost"):
            hub_files(source, tmp_path, Silent())
    assert list((tmp_path / "spool").iterdir()) == []
    hub.fail = None
    files, _ = hub_files(source, tmp_path, Silent(), skip_bad=True)
    assert texts_in(files[0].path) == ["fine"]


def test_without_the_datasets_package_the_extra_is_named(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match="pip install 'datasets"):
        hub_files(TextSource(name="web", hub="who/texts"), tmp_path, Silent())


def test_a_hub_source_is_prepared_like_a_file(hub: FakeHub, tmp_path: Path, prepared: Prepare) -> None:
    hub.rows = {None: [{"text": document(n)} for n in range(200)]}
    corpus = prepared(text_settings([{"name": "web", "hub": "who/texts"}]))
    assert corpus.manifest["sources"][0]["commit"] == COMMIT
    assert corpus.manifest["sources"][0]["hub"] == "who/texts"
    assert corpus.manifest["paths"] == {"web": "who/texts"}
    calls = len(hub.calls)
    assert prepared(text_settings([{"name": "web", "hub": "who/texts"}])).fingerprint == corpus.fingerprint
    assert len(hub.calls) == calls


def test_own_texts_are_kept_by_their_content(tmp_path: Path) -> None:
    first = spooled((f"text {n} ä" for n in range(3)), tmp_path)
    assert texts_in(Path(str(first.path))) == ["text 0 ä", "text 1 ä", "text 2 ä"]
    assert spooled([f"text {n} ä" for n in range(3)], tmp_path) == first
    assert spooled(["other"], tmp_path) != first
    assert len(list((tmp_path / "spool").iterdir())) == 2


def test_a_spool_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def texts() -> Iterator[str]:
        yield "one"
        raise KeyError("broken")

    with pytest.raises(KeyError):
        spool(texts(), tmp_path / "a.jsonl.gz")
    with pytest.raises(KeyError):
        spooled(texts(), tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []

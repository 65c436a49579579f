"""Text that is not in local files (a hub dataset, a caller's iterator), stored once as JSON lines.

Preparing a corpus reads its sources twice; a spooled source is streamed over the network once, and both passes, and
every later preparation from the same revision, see the same rows.
"""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tfive.errors import UserError
from tfive.extras import install_hint
from tfive.rng import permutation
from tfive.telemetry import Telemetry
from tfive.text.files import Staging, sha256, sync
from tfive.text.settings import TextSource
from tfive.text.sources import BadRow, SourceFile, text_of

_PROXY = Path("row.jsonl")
"""Stands for the format of rows that arrive as dictionaries."""
_FILES = 64
"""Files of a hub dataset over which a limited sample is spread."""
_BUFFER = 1000
"""Rows of a file among which the next one is drawn."""
_SEED = 0
"""A sample is the same for every run, so that all seeds of a study read one corpus."""
_SAMPLE = f"{_FILES} files, buffer {_BUFFER}, seed {_SEED}"
"""How rows are drawn, part of a spooled file's name: another way gives another file."""


def hub_files(
    source: TextSource, cache: Path, telemetry: Telemetry, *, skip_bad: bool = False
) -> tuple[list[SourceFile], str]:
    """The spooled files of a hub dataset, one per configuration, and the commit they came from."""
    commit = _commit(source)
    files = []
    for config in source.configs or (None,):
        wanted = source.model_dump(mode="json", include={"hub", "split", "files", "limit", "fields", "where"})
        key = _key({**wanted, "config": config, "commit": commit, "skip_bad": skip_bad, "sample": _SAMPLE})
        path = cache / "spool" / f"{source.name}-{key}.jsonl.gz"
        if not path.exists():
            label = f"fetching {source.hub}" + (f" {config}" if config else "")
            rows = telemetry.progress(_hub_rows(source, config, commit), label, source.limit)
            spool(_texts(source, rows, skip_bad=skip_bad), path)
        files.append(SourceFile(source.name, path, f"{config or 'default'}.jsonl.gz"))
    return files, commit


def spool(texts: Iterable[str], path: Path) -> None:
    """Write documents as gzip'd JSON lines; the file appears under its name only when it is complete."""
    with Staging(path) as staging:
        if not path.exists():
            _write(texts, staging.path / "rows")
            staging.publish("rows")


def spooled(texts: Iterable[str], cache: Path, name: str = "texts") -> TextSource:
    """A source made of a caller's own texts, stored under a digest of their content."""
    folder = cache / "spool"
    with Staging(folder / f"{name}-{os.getpid()}") as staging:
        rows = staging.path / "rows"
        _write(texts, rows)
        target = folder / f"{name}-{sha256(rows)[:20]}.jsonl.gz"
        if not target.exists():
            sync(rows)
            os.replace(rows, target)
    return TextSource(name=name, path=str(target))


def _write(texts: Iterable[str], path: Path) -> None:
    # No name and no time in the header: the same texts give the same bytes.
    with path.open("wb") as raw, gzip.GzipFile("", "wb", compresslevel=3, fileobj=raw, mtime=0) as packed:
        for text in texts:
            packed.write(json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n")


def _key(wanted: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(wanted, sort_keys=True).encode()).hexdigest()[:20]


def _commit(source: TextSource) -> str:
    from huggingface_hub import HfApi

    try:
        commit = HfApi().dataset_info(str(source.hub), revision=source.revision).sha
    except Exception as error:
        # The hub's client lets the errors of its HTTP library through, and changes that library now and then.
        raise _unreachable(source, error) from error
    if not commit:
        raise UserError(f"source {source.name}: the hub names no commit for {source.hub}; set its revision")
    return commit


def _hub_rows(source: TextSource, config: str | None, commit: str) -> Iterator[dict[str, Any]]:
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"source {source.name}: reading {source.hub} from the hub needs a package: {install_hint('hub')}"
        ) from error
    try:
        stream = datasets.load_dataset(
            source.hub,
            name=config,
            split=source.split,
            revision=commit,
            data_files=list(source.files) or None,
            streaming=True,
        )
        yield from stream if source.limit is None else _sampled(stream, source.limit)
    except Exception as error:
        raise _unreachable(source, error) from error


def _sampled(stream: Any, limit: int) -> Iterator[dict[str, Any]]:
    """`limit` rows of a streamed dataset: an equal number of each of up to `_FILES` of its files, drawn in a random
    order, each through a shuffle buffer; files beyond them only where those hold too little.

    The first rows of a crawl are those of its first file, which come from few sites and few days.
    """
    shards = int(stream.num_shards)
    order = permutation(_SEED, "text/files", 0, shards).tolist()
    left = limit
    for number, shard in enumerate(order):
        if not left:
            return
        rows = stream.shard(num_shards=shards, index=shard).shuffle(seed=_SEED, buffer_size=_BUFFER)
        share = -(-left // max(1, min(shards, _FILES) - number))
        for row in itertools.islice(rows, share):
            left -= 1
            yield row


def _texts(source: TextSource, rows: Iterable[dict[str, Any]], *, skip_bad: bool) -> Iterator[str]:
    proxy = SourceFile(source.name, _PROXY, _PROXY.name, source.fields, source.where)
    for number, row in enumerate(rows):
        try:
            text = text_of(row, proxy)
        except BadRow as error:
            if skip_bad:
                continue
            raise UserError(
                f"source {source.name}: row {number + 1} of {source.hub} {error}; check its fields, or set "
                'text.bad_rows = "skip"'
            ) from error
        if text:
            yield text


def _unreachable(source: TextSource, error: Exception) -> UserError:
    reason = " ".join(str(error).split())[:200]
    return UserError(
        f"source {source.name}: cannot read {source.hub} from the hub ({reason}); check the id, its configs and the "
        "network, or download the files and set path"
    )

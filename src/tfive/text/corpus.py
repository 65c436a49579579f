"""Preparing a corpus: sources → documents by split and role → sequences → positions, cached under a key of its inputs.

Two runs with the same settings, sources and tokenizer get the same bytes, whatever the order of the sources or the
number of processes; nothing is visible in the cache before it is complete.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tfive.errors import UserError
from tfive.telemetry import Silent, Telemetry
from tfive.text.candidates import BYTES_PER_TOKEN_KEPT, Groups, Shares, apportion, scan
from tfive.text.cutting import VERSION as CUTTING
from tfive.text.files import Staging, sha256
from tfive.text.items import ENTROPY_QUANTILE, PATTERN_REACH, Entropies, PositionChooser
from tfive.text.prepared import ARRAYS, FORMAT, MANIFEST, TOKENIZER, PreparedCorpus, SequenceRange
from tfive.text.sequences import Share, TokenStore, check_filled, fill, pack
from tfive.text.settings import AUTO, SPLITS, WHOLE, TextSettings, TextSource
from tfive.text.sources import Exclusion, Reader, SourceFile, local_files, shares_of, source_root
from tfive.text.spool import hub_files
from tfive.text.tokens import Encoder, TextTokenizer, encoder

MOST_SEQUENCES = 2**32 - 1
"""Items are numbered by 32-bit counters of the random-number generator."""

SEED = 0
"""Seed of splits, roles, selection and positions; apart from the run's seed, so that runs share one corpus."""


@dataclass(frozen=True)
class OpenedSources:
    """The files of all sources, their digests, and the commits of hub sources."""

    files: list[SourceFile]
    digests: list[str]
    commits: dict[str, str]
    """Commit of each hub source, by its name."""


def prepare(
    settings: TextSettings,
    *,
    horizon: int,
    roles: Shares,
    tokenizer: Any,
    cache: Path,
    entropies: Entropies | None = None,
    base_model: str | None = None,
    exclusion: Exclusion | None = None,
    telemetry: Telemetry | None = None,
) -> PreparedCorpus:
    """The prepared corpus of these settings, from the cache or made now.

    `roles` gives each split's roles with their shares; `tokenizer` is a transformers tokenizer or a `TextTokenizer`;
    `entropies` and the name of its `base_model` are needed for positions by entropy; documents that the `exclusion`
    names are left out and counted.
    """
    telemetry = telemetry or Silent()
    _check(settings, horizon, roles)
    text_tokenizer = (
        tokenizer if isinstance(tokenizer, TextTokenizer) else TextTokenizer.of(tokenizer, settings.end_of_document)
    )
    chooser = PositionChooser(settings.positions, horizon, SEED, text_tokenizer, entropies)
    opened = _open(settings, cache, telemetry)
    identity = _identity(settings, horizon, roles, text_tokenizer, opened, base_model)
    if exclusion is not None:
        identity["exclusion"] = {"tasks": settings.decontaminate.tasks, "fingerprint": exclusion.fingerprint}
    key = hashlib.sha256(_canonical(identity).encode()).hexdigest()[:24]
    target = cache / key
    if not target.exists():
        with encoder(text_tokenizer, settings.workers) as encode, Staging(target) as staging:
            if not target.exists():
                reader = Reader(settings.bad_rows == "skip", exclusion)
                manifest = _build(staging.path, settings, roles, chooser, opened, reader, encode, telemetry)
                (staging.path / MANIFEST).write_text(_canonical({**identity, "key": key, **manifest}, indent=1))
                staging.publish()
    return PreparedCorpus(target)


def _check(settings: TextSettings, horizon: int, roles: Shares) -> None:
    if not settings.sources:
        raise UserError("text.sources is empty; name at least one file, folder or hub dataset")
    if not 0 < horizon < settings.sequence_length:
        raise UserError(
            f"thought.horizon = {horizon} must be smaller than text.sequence_length = {settings.sequence_length}"
        )
    total = sum(getattr(settings.sequences, split) for split in SPLITS)
    if total * settings.positions.per_text > MOST_SEQUENCES or total * settings.sequence_length >= 2**40:
        raise UserError(f"text.sequences asks for {total} sequences, more than a corpus can number; lower it")
    for split in SPLITS:
        shares = roles.get(split, {})
        if sum(shares.values()) <= 0 or min(shares.values()) < 0:
            raise UserError(
                f"the roles of split {split} need shares of at least 0, one of them above 0 (got {dict(shares)})"
            )


def source_files(
    source: TextSource, cache: Path, telemetry: Telemetry, *, skip_bad: bool
) -> tuple[list[SourceFile], str | None]:
    """The files of a source in a fixed order, fetched first when it lies on the hub, and then their commit."""
    if source.hub is None:
        return local_files(source), None
    return hub_files(source, cache, telemetry, skip_bad=skip_bad)


def _open(settings: TextSettings, cache: Path, telemetry: Telemetry) -> OpenedSources:
    """Files in an order that does not depend on how the sources were listed."""
    opened = OpenedSources([], [], {})
    absent = [one for one in settings.sources if one.hub is None and not source_root(one).exists()]
    if len(absent) > 1:
        named = ", ".join(f"{source_root(one)} (source {one.name})" for one in absent)
        raise UserError(f"{len(absent)} sources are missing: {named}; check text.sources")
    for source in sorted(settings.sources, key=lambda one: one.name):
        files, commit = source_files(source, cache, telemetry, skip_bad=settings.bad_rows == "skip")
        if commit is not None:
            opened.commits[source.name] = commit
        opened.files.extend(files)
    opened.digests.extend(file.digest() for file in telemetry.progress(opened.files, "hashing sources"))
    for source in settings.sources:
        if source.sha256 is not None:
            _require_content(source, opened)
    return opened


def _require_content(source: TextSource, opened: OpenedSources) -> None:
    """Refuse a source with `sha256` that is not exactly that one file."""
    found = [digest for file, digest in zip(opened.files, opened.digests) if file.source == source.name]
    if found != [source.sha256]:
        what = f"sha256 is {found[0]}" if len(found) == 1 else f"a folder of {len(found)} files"
        raise UserError(
            f"{source.path}: {what}, the source {source.name} asks for one file with {source.sha256}; get that file, "
            "or drop sha256 from the source"
        )


def _identity(
    settings: TextSettings,
    horizon: int,
    roles: Shares,
    tokenizer: TextTokenizer,
    opened: OpenedSources,
    base: str | None,
) -> dict[str, Any]:
    """Everything the prepared bytes depend on: contents of files, never their paths."""
    plain = settings.model_dump(mode="json", exclude={"sources", "cache", "workers", "decontaminate"})
    plain["seed"] = SEED
    # What a run moves is prepared as any other random position.
    plain["positions"] |= {"uniform": settings.positions.shares()["uniform"]}
    del plain["positions"]["variance"], plain["positions"]["pilot"]
    plain["positions"] |= {"entropy_quantile": ENTROPY_QUANTILE, "pattern_reach": PATTERN_REACH, "min_context": 1}
    sources = []
    for source in sorted(settings.sources, key=lambda one: one.name):
        described = source.model_dump(mode="json", exclude={"path", "revision", "sha256"}, exclude_none=True)
        if source.separator in (AUTO, WHOLE):
            del described["separator"]  # only plain text depends on it
        if source.separator == AUTO and any(one.is_plain for one in opened.files if one.source == source.name):
            described["cut"] = CUTTING
        described["files"] = [
            {"name": file.name, "sha256": digest}
            for file, digest in zip(opened.files, opened.digests)
            if file.source == source.name
        ]
        sources.append({**described, "commit": opened.commits.get(source.name)})
    return {
        "format": FORMAT,
        "settings": plain,
        "sources": sources,
        "horizon": horizon,
        "roles": {split: dict(roles[split]) for split in SPLITS},
        "tokenizer": {
            "fingerprint": tokenizer.fingerprint,
            "vocabulary": tokenizer.vocabulary,
            "end_id": tokenizer.end_id,
        },
        "base_model": base if settings.positions.entropy > 0 else None,
    }


def _canonical(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, indent=indent)


def _build(
    folder: Path,
    settings: TextSettings,
    roles: Shares,
    chooser: PositionChooser,
    opened: OpenedSources,
    reader: Reader,
    encode: Encoder,
    telemetry: Telemetry,
) -> dict[str, Any]:
    """Write all arrays into `folder`; returns what the manifest says beside the identity."""
    scratch = folder / "scratch"
    scratch.mkdir()
    groups = Groups(
        settings.sequences, roles, SEED, {one.name: one.split_by for one in settings.sources if one.split_by}
    )
    shares = shares_of(sorted(settings.sources, key=lambda one: one.name))
    names = list(shares)
    quotas = [apportion(group.sequences * settings.sequence_length, list(shares.values())) for group in groups.all]
    tokens, filled, duplicates = _fill_quotas(groups, names, quotas, opened.files, reader, encode, scratch, telemetry)
    if not settings.allow_fewer:
        check_filled(groups.all, names, filled, settings.sequence_length)
    counts, documents = pack(folder, groups.all, filled, tokens, settings.sequence_length)
    np.save(folder / "documents.npy", documents, allow_pickle=False)
    sequences, document = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("tokens", "document"))
    threshold = chooser.write(folder, sequences, document, scratch, telemetry)
    (folder / TOKENIZER).write_text(chooser.tokenizer.serialized, encoding="utf-8")
    shutil.rmtree(scratch)
    firsts = np.cumsum([0, *counts[:-1]]).tolist()
    ranges = [
        SequenceRange(group.split, group.role, first, count) for group, first, count in zip(groups.all, firsts, counts)
    ]
    _check_items(np.load(folder / "positions.npy", mmap_mode="r"), ranges)
    return {
        "groups": [asdict(one) for one in ranges],
        "read": {name: asdict(reader.tallies[name]) for name in sorted(reader.tallies)},
        "paths": {source.name: source.path or source.hub for source in settings.sources},
        "duplicates": duplicates,
        "entropy_threshold": threshold,
        "counts": {"sequences": len(sequences), "tokens": sequences.size, "documents": len(documents)},
        "files": {name: _described(folder / name) for name in (*ARRAYS, TOKENIZER)},
    }


def _described(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}


def _fill_quotas(
    groups: Groups,
    names: Sequence[str],
    quotas: Sequence[Sequence[int]],
    files: Sequence[SourceFile],
    reader: Reader,
    encode: Encoder,
    scratch: Path,
    telemetry: Telemetry,
) -> tuple[npt.NDArray[np.int32], list[list[Share]], int]:
    """Token ids of the tokenized documents, what each source gives to each group, and the duplicates left out.

    Both passes run again with larger pools when a pool dropped documents that turned out to be needed.
    """
    bytes_per_token = BYTES_PER_TOKEN_KEPT
    while True:
        reader.tallies.clear()
        scanned = scan(files, names, groups, quotas, reader, telemetry, bytes_per_token)
        if not any(tally.documents for tally in reader.tallies.values()):
            raise UserError(f"text.sources: no text in {', '.join(str(file.path) for file in files[:3])}")
        for source in groups.split_by.keys() - groups.matched:
            raise UserError(
                f"source {source}: split_by = {groups.split_by[source].pattern!r} is found in no document; correct it, "
                "or drop the key"
            )
        store = TokenStore(scratch / "tokens.bin")
        shares = fill(scanned, quotas, files, reader, encode, store, telemetry)
        tokens = store.finished()
        pools = [pair for row, pruned in zip(shares, scanned.pruned) for pair in zip(row, pruned)]
        if not any(pruned and share.tokens < share.quota for share, pruned in pools):
            return tokens, shares, scanned.duplicates
        bytes_per_token *= 4


def _check_items(positions: npt.NDArray[np.int32], ranges: Sequence[SequenceRange]) -> None:
    for one in ranges:
        if not (positions[one.first : one.first + one.sequences] >= 0).any():
            raise UserError(
                f"no position can be chosen in {one.split}/{one.role}: its documents are shorter than "
                "thought.horizon, or no text fits text.positions.pattern"
            )

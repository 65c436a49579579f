"""The first pass over the sources: every document gets its split and role from its content, and each pool keeps few.

A document's 128-bit digest is the counter of Philox, so split, role and order are functions of its text and the corpus
seed alone: adding, removing or reordering other text never moves it. A *pool* is one group (split and role) of one
source. Only the documents that come first in the pool's order can ever be selected, so a pool holds a prefix of that
order, a little longer than its quota, and memory does not grow with the sources.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from tfive.errors import UserError
from tfive.rng import philox, uniforms
from tfive.telemetry import Telemetry
from tfive.text.settings import SPLITS, Sequences
from tfive.text.sources import Reader, SourceFile

BYTES_PER_TOKEN_KEPT = 8
"""Bytes of text kept per token of a pool's quota; with about four bytes a token, twice what is needed."""

CANDIDATE = np.dtype(
    [
        ("order", "<u8"),  # selection goes by this
        ("place", "<u8"),  # packing goes by this, so that sources mix
        ("high", "<u8"),  # digest
        ("low", "<u8"),
        ("file", "<i4"),
        ("record", "<i8"),
        ("bytes", "<i8"),
    ]
)
Candidates = npt.NDArray[np.void]
Shares = Mapping[str, Mapping[str, float]]
"""Split → role → share of the split."""


@dataclass(frozen=True)
class Group:
    """The texts of one role of one split, and how many sequences they fill."""

    split: str
    role: str
    sequences: int


def apportion(total: int, shares: Sequence[float]) -> list[int]:
    """Whole numbers in proportion to `shares` that add up to `total` (largest remainders, the first of equals)."""
    exact = np.asarray(shares, dtype=np.float64) / sum(shares) * total
    counts = np.floor(exact).astype(np.int64)
    for index in np.argsort(counts - exact, kind="stable")[: total - int(counts.sum())]:
        counts[index] += 1
    return [int(count) for count in counts]


class Groups:
    """All groups in a fixed order, and the rule that sends a document to one of them."""

    def __init__(
        self, sequences: Sequences, shares: Shares, seed: int, split_by: Mapping[str, str] | None = None
    ) -> None:
        """`split_by` is the pattern of each source that has one."""
        self.seed = seed
        self.split_by = {source: re.compile(pattern) for source, pattern in (split_by or {}).items()}
        self.matched: set[str] = set()
        """Sources in which their pattern was found."""
        self.all: list[Group] = []
        self._split_bounds = _upper_bounds([getattr(sequences, split) for split in SPLITS])
        self._role_bounds: list[npt.NDArray[np.float64]] = []
        self._first: list[int] = []
        for split in SPLITS:
            roles = {role: share for role, share in shares[split].items() if share > 0}
            counts = apportion(getattr(sequences, split), list(roles.values()))
            if 0 in counts:
                role = list(roles)[counts.index(0)]
                asked = getattr(sequences, split)
                raise UserError(f"text.sequences.{split} = {asked} leaves no sequence for the role {role}; raise it")
            self._first.append(len(self.all))
            self._role_bounds.append(_upper_bounds(list(roles.values())))
            self.all += [Group(split, role, count) for role, count in zip(roles, counts)]

    def of(self, words: npt.NDArray[np.uint32]) -> npt.NDArray[np.int64]:
        """Group numbers of documents by the four words of their digests."""
        counter = [words[:, i].astype(np.int64) for i in range(4)]
        splits = np.searchsorted(self._split_bounds, uniforms(self.seed, "text/split", *counter), side="right")
        points = uniforms(self.seed, "text/role", *counter)
        groups = np.empty(len(words), dtype=np.int64)
        for split, (first, bounds) in enumerate(zip(self._first, self._role_bounds)):
            here = splits == split
            groups[here] = first + np.searchsorted(bounds, points[here], side="right")
        return groups

    def of_texts(self, source: str, texts: Sequence[str], words: npt.NDArray[np.uint32]) -> npt.NDArray[np.int64]:
        """The same, but a document in which its source's pattern is found goes by what the group of that holds."""
        pattern = self.split_by.get(source)
        if pattern is None:
            return self.of(words)
        matches = [pattern.search(text) for text in texts]
        if any(matches):
            self.matched.add(source)
        return self.of(digest_words(text if match is None else match[1] for text, match in zip(texts, matches)))


def _upper_bounds(weights: Sequence[float]) -> npt.NDArray[np.float64]:
    """Upper bounds, all but the last, of intervals that divide [0, 1) in proportion to `weights`."""
    return np.cumsum(np.asarray(weights, dtype=np.float64))[:-1] / sum(weights)


def digest_words(texts: Iterable[str]) -> npt.NDArray[np.uint32]:
    """The 128-bit digests of documents as four words each."""
    joined = b"".join(hashlib.blake2b(text.encode(), digest_size=16).digest() for text in texts)
    return np.frombuffer(joined, dtype="<u4").reshape(-1, 4)


class Pool:
    """The first documents of one group and source, as many as `limit` bytes of text hold."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.pruned = False
        self.duplicates = 0
        self._parts: list[Candidates] = []
        self._bytes = 0

    def add(self, candidates: Candidates) -> None:
        """Add documents; once they exceed twice the limit, only the first ones up to the limit are kept."""
        self._parts.append(candidates)
        self._bytes += int(candidates["bytes"].sum())
        if self._bytes > 2 * self.limit or len(self._parts) > 4096:
            self._parts = [self.kept()]
            self._bytes = int(self._parts[0]["bytes"].sum())

    def kept(self) -> Candidates:
        """The documents held, in the pool's order and without duplicates, cut at the limit."""
        if not self._parts:
            return np.empty(0, dtype=CANDIDATE)
        found = np.concatenate(self._parts)
        found = found[np.lexsort((found["record"], found["file"], found["low"], found["high"], found["order"]))]
        first = np.ones(len(found), dtype=bool)
        first[1:] = (found["high"][1:] != found["high"][:-1]) | (found["low"][1:] != found["low"][:-1])
        self.duplicates += int((~first).sum())
        found = found[first]
        keep = int(np.searchsorted(np.cumsum(found["bytes"]), self.limit)) + 1
        self.pruned |= keep < len(found)
        self._parts = [found[:keep]]
        return self._parts[0]


@dataclass
class Scan:
    """What the first pass found: for each group and source its candidates, no document twice."""

    pools: list[list[Candidates]]
    """[group][source]"""
    pruned: list[list[bool]]
    """Whether a pool dropped documents, so that a scan with larger pools would find more."""
    duplicates: int


def scan(
    files: Sequence[SourceFile],
    sources: Sequence[str],
    groups: Groups,
    quotas: Sequence[Sequence[int]],
    reader: Reader,
    telemetry: Telemetry,
    bytes_per_token: int = BYTES_PER_TOKEN_KEPT,
) -> Scan:
    """Read every document once and keep each pool's candidates. `quotas[group][source]` are tokens."""
    pools = [[Pool(quota * bytes_per_token) for quota in row] for row in quotas]
    number_of = {name: number for number, name in enumerate(sources)}
    for number, file in enumerate(files):
        source = number_of[file.source]
        documents = telemetry.progress(reader.documents(file), f"reading {file.source}: {file.name}")
        for records, texts in batches(documents, 1024):
            candidates, group = _candidates(groups, file.source, number, records, texts)
            for one in np.unique(group):
                pools[one][source].add(candidates[group == one])
    kept = [[pool.kept() for pool in row] for row in pools]
    across = _drop_across_sources(kept)
    within = sum(pool.duplicates for row in pools for pool in row)
    return Scan(kept, [[pool.pruned for pool in row] for row in pools], within + across)


def batches(
    documents: Iterator[tuple[int, str]], max_documents: int, max_characters: int = 1 << 22
) -> Iterator[tuple[list[int], list[str]]]:
    """Row numbers and texts in batches of at most `max_documents`; a batch ends once it exceeds `max_characters`."""
    while True:
        records: list[int] = []
        texts: list[str] = []
        size = 0
        for record, text in islice(documents, max_documents):
            records.append(record)
            texts.append(text)
            size += len(text)
            if size > max_characters:
                break
        if not records:
            return
        yield records, texts


def _candidates(
    groups: Groups, source: str, file: int, records: list[int], texts: list[str]
) -> tuple[Candidates, npt.NDArray[np.int64]]:
    words = digest_words(texts)
    drawn = philox(groups.seed, "text/order", *(words[:, i].astype(np.int64) for i in range(4)))
    halves = words.view("<u8")
    found = np.empty(len(texts), dtype=CANDIDATE)
    found["order"] = (drawn[:, 0] << np.uint64(32)) | drawn[:, 1]
    found["place"] = (drawn[:, 2] << np.uint64(32)) | drawn[:, 3]
    found["high"], found["low"] = halves[:, 0], halves[:, 1]
    found["file"], found["record"] = file, records
    found["bytes"] = [len(text.encode()) for text in texts]
    return found, groups.of_texts(source, texts, words)


def _drop_across_sources(pools: list[list[Candidates]]) -> int:
    """Keep a document that several sources hold in the first of them only; returns how many copies were dropped.

    Equal documents have equal digests and so lie in the same group: only its pools need to be compared.
    """
    dropped = 0
    for row in pools:
        merged = np.concatenate(row)
        owner = np.repeat(np.arange(len(row)), [len(pool) for pool in row])
        order = np.lexsort((owner, merged["low"], merged["high"]))
        same = np.zeros(len(merged), dtype=bool)
        a, b = merged[order[1:]], merged[order[:-1]]
        same[order[1:]] = (a["high"] == b["high"]) & (a["low"] == b["low"])
        dropped += int(same.sum())
        for source in range(len(row)):
            row[source] = row[source][~same[owner == source]]
    return dropped

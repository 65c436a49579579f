"""Contamination: which benchmark items a corpus holds, by runs of words.

A document overlaps an item when both hold the same 13 consecutive words, or when it holds all words of a question of 8
to 12 in a row. Words are letters and digits in lower case; punctuation and LaTeX signs only separate them. A question
of fewer than 8 words is too short to be recognised; if its item has options, the same rule is applied to each option
instead. Items that are still too short are not checked, and the report counts them.

Only the benchmarks are held in memory. Documents stream through: their words become numbers of the benchmarks'
vocabulary, rolling 64-bit hashes of every window are looked up at once, and each hit is compared word by word.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tfive.evaluate.tasks import Item, Items

RUN = 13
"""Words in a row that make an overlap."""
SHORTEST = 8
"""Words of the shortest question that is looked for as a whole."""
RULE = f"{RUN} words in a row, whole questions of {SHORTEST} to {RUN - 1} words; version 1"

MOST_LISTED = 1000
"""Matches the report lists; all are counted."""

_BLOCK = 1 << 20
_WORD = re.compile(r"[^\W_]+")
_FACTOR = 0x9E3779B97F4A7C15
"""Multiplier of the rolling hash: odd, with well-mixed bits."""

Numbers = npt.NDArray[np.int64]


def words_of(text: str) -> list[str]:
    """The words two texts are compared by."""
    return _WORD.findall((text if text.isascii() else unicodedata.normalize("NFKC", text)).casefold())


@dataclass(frozen=True)
class Match:
    """One item a document holds: how many of the item's runs, out of how many."""

    task: str
    item: str
    runs: int
    of: int


@dataclass
class TaskOverlap:
    """What was found of one task."""

    items: int
    unchecked: int
    """Items too short to be recognised."""
    found: int = 0
    """Items that some document holds a run of."""
    documents: int = 0
    """Documents that hold a run of some item."""


@dataclass
class OverlapReport:
    """Overlap of a corpus with benchmarks."""

    rule: str
    tasks: dict[str, TaskOverlap]
    documents: dict[str, int] = field(default_factory=dict)
    """Documents read, by source."""
    overlapping: dict[str, int] = field(default_factory=dict)
    """Documents with an overlap, by source."""
    matches: list[dict[str, Any]] = field(default_factory=list)
    """Where: source, row, task, item, runs shared out of how many. At most `MOST_LISTED` of them."""
    more: int = 0
    """Matches beyond those listed."""

    def plain(self) -> dict[str, Any]:
        """The report for JSON."""
        return asdict(self)


class OverlapIndex:
    """The runs of words of some benchmarks, to look documents up in."""

    def __init__(self, benchmarks: Iterable[Items]) -> None:
        self._vocabulary: dict[str, int] = {}
        self._items: list[tuple[str, str]] = []
        self.tasks: dict[str, TaskOverlap] = {}
        sha = hashlib.sha256(RULE.encode())
        runs: dict[int, dict[tuple[int, ...], list[int]]] = {size: {} for size in range(SHORTEST, RUN + 1)}
        for items in benchmarks:
            sha.update(f"{items.task.name} {items.sha256}".encode())
            unchecked = sum(not self._add(items.task.name, item, runs) for item in items)
            self.tasks[items.task.name] = TaskOverlap(len(items), unchecked)
        self.fingerprint = sha.hexdigest()
        self._of = Counter(number for table in runs.values() for owners in table.values() for number in owners)
        self._tables = {size: _Table(table) for size, table in runs.items() if table}

    def _add(self, task: str, item: Item, runs: dict[int, dict[tuple[int, ...], list[int]]]) -> bool:
        """Add an item; False when it is too short to be recognised."""
        texts = [words_of(item.question)]
        if len(texts[0]) < SHORTEST:
            texts = [words for words in map(words_of, item.choices) if len(words) >= SHORTEST]
        if not texts:
            return False
        number = len(self._items)
        self._items.append((task, item.id))
        for words in texts:
            ids = [self._vocabulary.setdefault(word, len(self._vocabulary) + 1) for word in words]
            size = min(RUN, len(ids))
            for start in range(len(ids) - size + 1):
                owners = runs[size].setdefault(tuple(ids[start : start + size]), [])
                if number not in owners[-1:]:
                    owners.append(number)
        return True

    def matches(self, text: str) -> list[Match]:
        """Every item the document holds a run of."""
        shared: dict[int, set[tuple[int, int]]] = {}
        for ids in self._blocks(text):
            for size, run, owners in self._hits(ids):
                for number in owners:
                    shared.setdefault(number, set()).add((size, run))
        return [Match(*self._items[number], len(runs), self._of[number]) for number, runs in sorted(shared.items())]

    def overlaps(self, text: str) -> bool:
        """Whether the document holds a run of any item."""
        return any(True for ids in self._blocks(text) for _ in self._hits(ids))

    def _blocks(self, text: str) -> Iterator[Numbers]:
        """Numbers of the document's words, 0 for words no benchmark has, block by block with the run-up repeated."""
        get, carried = self._vocabulary.get, np.zeros(0, np.int64)
        start = 0
        while start < len(text):
            end = start + _BLOCK
            # A block ends at white space, so that no word is cut.
            while end < len(text) and not text[end].isspace():
                end += 1
            fresh = np.fromiter((get(word, 0) for word in words_of(text[start:end])), np.int64)
            ids = np.concatenate([carried, fresh])
            yield ids
            carried, start = ids[-(RUN - 1) :], end

    def _hits(self, ids: Numbers) -> Iterator[tuple[int, int, list[int]]]:
        """Size, number and owners of every run in a block."""
        hashes, known = np.zeros(len(ids), np.uint64), ids > 0
        power = 1
        for size in range(1, RUN + 1):
            last = len(ids) - size + 1
            if last < 1:
                return
            hashes = hashes[:last] + ids[size - 1 :].astype(np.uint64) * np.uint64(power)
            known = known[:last] & (ids[size - 1 :] > 0)
            power = power * _FACTOR % 2**64
            if size in self._tables and known.any():
                places = np.flatnonzero(known)
                yield from ((size, *hit) for hit in self._tables[size].look_up(hashes[places], places, ids))


class _Table:
    """Runs of one size, sorted by hash."""

    def __init__(self, runs: dict[tuple[int, ...], list[int]]) -> None:
        self.runs = np.array(list(runs), np.int64)
        self.owners = list(runs.values())
        size = self.runs.shape[1]
        powers = np.array([pow(_FACTOR, place, 2**64) for place in range(size)], np.uint64)
        hashes = (self.runs.astype(np.uint64) * powers).sum(axis=1, dtype=np.uint64)
        self.order = np.argsort(hashes, kind="stable")
        self.hashes = hashes[self.order]

    def look_up(self, hashes: npt.NDArray[np.uint64], places: Numbers, ids: Numbers) -> Iterator[tuple[int, list[int]]]:
        """Number and owners of the runs that stand at `places`; equal hashes are confirmed by the words."""
        first = np.searchsorted(self.hashes, hashes)
        near = np.flatnonzero(self.hashes[np.minimum(first, len(self.hashes) - 1)] == hashes)
        size = self.runs.shape[1]
        for one in near:
            window = ids[places[one] : places[one] + size]
            rank = int(first[one])
            while rank < len(self.hashes) and self.hashes[rank] == hashes[one]:
                number = int(self.order[rank])
                if (self.runs[number] == window).all():
                    yield number, self.owners[number]
                rank += 1


def find_overlaps(index: OverlapIndex, documents: Iterable[tuple[str, int, str]]) -> OverlapReport:
    """The overlap of documents (source, row, text) with the benchmarks of an index."""
    report = OverlapReport(RULE, {name: TaskOverlap(task.items, task.unchecked) for name, task in index.tasks.items()})
    found: set[tuple[str, str]] = set()
    for source, row, text in documents:
        report.documents[source] = report.documents.get(source, 0) + 1
        matches = index.matches(text)
        report.overlapping[source] = report.overlapping.get(source, 0) + bool(matches)
        for task in {match.task for match in matches}:
            report.tasks[task].documents += 1
        for match in matches:
            found.add((match.task, match.item))
            if len(report.matches) < MOST_LISTED:
                report.matches.append({"source": source, "row": row, **asdict(match)})
            else:
                report.more += 1
    for task, _ in found:
        report.tasks[task].found += 1
    return report

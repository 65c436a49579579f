"""The second pass: selected documents become tokens, and tokens become sequences of one role each.

Each source gives its documents in the pool's order until its share of the group is filled; the last one may be cut
short. Then the documents of all sources mix and are packed end to end. A sequence holds documents of one role only; a
document that crosses the end of a sequence continues in the next one of the same role, where the model sees nothing of
its first part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tfive.errors import UserError
from tfive.telemetry import Telemetry
from tfive.text.candidates import Candidates, Group, Scan, batches, digest_words
from tfive.text.files import ArrayWriter
from tfive.text.sources import Reader, SourceFile
from tfive.text.tokens import BATCH, Encoder, Ids

FIRST_BYTES_PER_TOKEN = 4.0
"""Bytes of text per token assumed before anything was tokenized; a wrong value costs time, never changes the result."""
MARGIN = 1.25
"""How much more text is tokenized at a time than the missing tokens are estimated to need."""

DOCUMENT = np.dtype(
    [
        ("high", "<u8"),
        ("low", "<u8"),
        ("source", "<i4"),
        ("group", "<i4"),
        ("file", "<i4"),
        ("record", "<i8"),
        ("tokens", "<i8"),
    ]
)
"""One packed document: its digest, where it came from, and how many of its tokens the corpus holds."""


@dataclass
class Share:
    """What one source gives to one group: candidates in order, of which the first `read` are tokenized."""

    candidates: Candidates
    quota: int
    read: int = 0
    counts: npt.NDArray[np.int64] = field(init=False)
    starts: npt.NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        self.counts = np.zeros(len(self.candidates), dtype=np.int64)
        self.starts = np.zeros(len(self.candidates), dtype=np.int64)

    @property
    def tokens(self) -> int:
        return int(self.counts[: self.read].sum())

    def next(self) -> range:
        """The candidates to tokenize now: about as many as the quota still asks for, none when it is filled."""
        missing = self.quota - self.tokens
        if missing <= 0:
            return range(0)
        sizes = self.candidates["bytes"]
        ratio = sizes[: self.read].sum() / max(self.tokens, 1) if self.read else FIRST_BYTES_PER_TOKEN
        ahead = np.cumsum(sizes[self.read :])
        stop = self.read + int(np.searchsorted(ahead, missing * ratio * MARGIN)) + 1
        return range(self.read, min(stop, len(self.candidates)))

    def selected(self) -> npt.NDArray[np.int64]:
        """Tokens used of each candidate: whole documents up to the quota, the last one cut, nothing after it."""
        before = np.cumsum(self.counts) - self.counts
        return np.clip(self.quota - before, 0, self.counts)


class TokenStore:
    """Token ids of the tokenized documents, one after the other in a scratch file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("wb")
        self._length = 0

    def append(self, ids: Ids) -> int:
        """Write a document; returns where it starts."""
        start = self._length
        self._file.write(ids.tobytes())
        self._length += len(ids)
        return start

    def finished(self) -> npt.NDArray[np.int32]:
        """Everything written, memory-mapped."""
        self._file.close()
        if not self._length:
            return np.empty(0, dtype=np.int32)
        return np.memmap(self.path, dtype=np.int32, mode="r")


def fill(
    scanned: Scan,
    quotas: Sequence[Sequence[int]],
    files: Sequence[SourceFile],
    reader: Reader,
    encode: Encoder,
    store: TokenStore,
    telemetry: Telemetry,
) -> list[list[Share]]:
    """Tokenize candidates until every share is filled or used up. `[group][source]`"""
    shares = [[Share(pool, quota) for pool, quota in zip(*row)] for row in zip(scanned.pools, quotas)]
    flat = [share for row in shares for share in row]
    while True:
        ahead = [share.next() for share in flat]
        owners = np.repeat(np.arange(len(flat)), [len(indices) for indices in ahead])
        if not len(owners):
            return shares
        indices = np.concatenate([np.asarray(part, dtype=np.int64) for part in ahead])
        wanted = np.concatenate([share.candidates[part.start : part.stop] for share, part in zip(flat, ahead)])
        by_place = np.lexsort((wanted["record"], wanted["file"]))
        texts = telemetry.progress(_texts(wanted[by_place], files, reader), "tokenizing", len(wanted))
        text_batches = (some for _, some in batches(enumerate(texts), 512, BATCH))
        encoded = (ids for batch in encode(text_batches) for ids in batch)
        for owner, index, ids in zip(owners[by_place], indices[by_place], encoded, strict=True):
            flat[owner].starts[index] = store.append(ids)
            flat[owner].counts[index] = len(ids)
        for share, part in zip(flat, ahead):
            share.read = max(share.read, part.stop)


def _texts(wanted: Candidates, files: Sequence[SourceFile], reader: Reader) -> Iterator[str]:
    """Texts of documents given in the order of file and row."""
    for number in np.unique(wanted["file"]):
        here = wanted[wanted["file"] == number]
        found = reader.documents(files[number], here["record"])
        for row in here:
            record, text = next(found, (-1, ""))
            digest = digest_words([text]).view("<u8")[0]
            if record != row["record"] or digest[0] != row["high"] or digest[1] != row["low"]:
                raise UserError(
                    f"{files[number].path}: changed while it was being read; try again when nothing writes to it"
                )
            yield text


def check_filled(groups: Sequence[Group], sources: Sequence[str], shares: list[list[Share]], length: int) -> None:
    """Refuse a corpus whose sources cannot fill their shares."""
    for group, row in zip(groups, shares):
        for source, share in zip(sources, row):
            if share.tokens < share.quota:
                raise UserError(
                    f"source {source} has {share.tokens:,} tokens for {group.split}/{group.role}, which needs "
                    f"{share.quota:,} ({group.sequences} sequences of {length}): add text, lower "
                    f"text.sequences.{group.split}, change its share, or set text.allow_fewer = true"
                )


class _Rows:
    """Fills rows of `length` tokens and writes them a block at a time."""

    def __init__(self, tokens: ArrayWriter, documents: ArrayWriter, length: int) -> None:
        self._writers = (tokens, documents)
        self._length = length
        self._block = np.empty((2, 256 * length), dtype=np.int32)
        self._used = 0

    def append(self, ids: npt.NDArray[np.int32], document: int) -> None:
        while len(ids):
            take = min(len(ids), self._block.shape[1] - self._used)
            self._block[0, self._used : self._used + take] = ids[:take]
            self._block[1, self._used : self._used + take] = document
            self._used += take
            ids = ids[take:]
            if self._used == self._block.shape[1]:
                self.flush()

    def flush(self) -> None:
        """Write whole rows; a group always ends with one."""
        for writer, values in zip(self._writers, self._block):
            writer.write(values[: self._used].reshape(-1, self._length))
        self._used = 0


def pack(
    folder: Path,
    groups: Sequence[Group],
    shares: list[list[Share]],
    store: npt.NDArray[np.int32],
    length: int,
) -> tuple[list[int], npt.NDArray[np.void]]:
    """Write `tokens.npy` and `document.npy`; returns the sequences of each group and the table of documents."""
    tables = [_group_table(number, row) for number, row in enumerate(shares)]
    counts = [int(table["tokens"].sum()) // length for table in tables]
    for group, count in zip(groups, counts):
        if count == 0:
            raise UserError(
                f"no text fills a sequence of {length} tokens for {group.split}/{group.role}: the roles "
                "share the documents out, and these are too few; add text, cut it into more documents (the source's "
                "separator, for .txt files), or lower text.sequence_length"
            )
    shape = (sum(counts), length)
    packed: list[npt.NDArray[np.void]] = []
    first = 0
    with (
        ArrayWriter(folder / "tokens.npy", shape, "<i4") as tokens,
        ArrayWriter(folder / "document.npy", shape, "<i4") as owner,
    ):
        rows = _Rows(tokens, owner, length)
        for table, count in zip(tables, counts):
            left = count * length
            before = np.cumsum(table["tokens"]) - table["tokens"]
            table = table[before < left]
            table["tokens"] = np.minimum(table["tokens"], left - before[: len(table)])
            for number, (start, used) in enumerate(zip(table["start"].tolist(), table["tokens"].tolist()), start=first):
                rows.append(store[start : start + used], number)
            rows.flush()
            first += len(table)
            packed.append(table)
    documents = np.empty(first, dtype=DOCUMENT)
    for name in DOCUMENT.names or ():
        documents[name] = np.concatenate([table[name] for table in packed])
    return counts, documents


_PACKED = np.dtype([*DOCUMENT.descr, ("start", "<i8"), ("place", "<u8")])


def _group_table(group: int, row: list[Share]) -> npt.NDArray[np.void]:
    """The selected documents of a group in the order in which they are packed."""
    parts = []
    for source, share in enumerate(row):
        used = share.selected()
        chosen = share.candidates[used > 0]
        part = np.empty(len(chosen), dtype=_PACKED)
        for name in ("high", "low", "file", "record", "place"):
            part[name] = chosen[name]
        part["source"], part["group"] = source, group
        part["tokens"], part["start"] = used[used > 0], share.starts[used > 0]
        parts.append(part)
    table = np.concatenate(parts)
    return table[np.lexsort((table["low"], table["high"], table["place"]))]

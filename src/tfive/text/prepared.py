"""A prepared corpus on disk: memory-mapped sequences, positions and roles, and a manifest with their checksums."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tfive.errors import UserError
from tfive.text.files import sha256
from tfive.text.settings import KINDS
from tfive.text.tokens import TextTokenizer

if TYPE_CHECKING:
    from tfive.tree.layout import TextBatch

FORMAT = 1
MANIFEST = "manifest.json"
ARRAYS = ("tokens.npy", "document.npy", "positions.npy", "kinds.npy", "documents.npy")
TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class SequenceRange:
    """The sequences of one role: numbers `first … first + sequences − 1`."""

    split: str
    role: str
    first: int
    sequences: int

    @property
    def numbers(self) -> npt.NDArray[np.int64]:
        return np.arange(self.first, self.first + self.sequences)


_RANGE = {field.name for field in fields(SequenceRange)}


class PreparedCorpus:
    """Reads a prepared corpus. Sequence, item and document numbers are global and fixed."""

    def __init__(self, folder: Path, *, verify: bool = True) -> None:
        self.folder = folder
        self.manifest = _manifest(folder)
        for name, recorded in self.manifest["files"].items():
            _check(folder / name, recorded, whole=verify)
        self.tokens: npt.NDArray[np.int32] = self._array("tokens")
        """[sequence, S] token ids."""
        self.document: npt.NDArray[np.int32] = self._array("document")
        """[sequence, S] global number of the document each token belongs to."""
        self.positions: npt.NDArray[np.int32] = self._array("positions")
        """[sequence, P] trunk index of each item, −1 where there is none."""
        self.kinds: npt.NDArray[np.int8] = self._array("kinds")
        """[sequence, P] number of each item's kind in `tfive.text.settings.KINDS`, −1 where there is none."""
        self.documents: npt.NDArray[np.void] = self._array("documents")
        """One record per document: digest, source, group, file, row, tokens."""
        self.ranges = [SequenceRange(**group) for group in self.manifest["groups"]]

    def _array(self, name: str) -> Any:
        return np.load(self.folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def fingerprint(self) -> str:
        """Digest of everything the corpus holds: the same for the same text, positions and roles."""
        return hashlib.sha256(json.dumps(self.manifest["files"], sort_keys=True).encode()).hexdigest()

    @property
    def sequence_length(self) -> int:
        return int(self.tokens.shape[1])

    @property
    def per_text(self) -> int:
        """P: most items of one sequence."""
        return int(self.positions.shape[1])

    @property
    def horizon(self) -> int:
        return int(self.manifest["horizon"])

    @property
    def sources(self) -> list[str]:
        """Names of the sources, in the order of their numbers in `documents`."""
        return [source["name"] for source in self.manifest["sources"]]

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer the corpus was made with."""
        serialized = (self.folder / TOKENIZER).read_text(encoding="utf-8")
        return TextTokenizer(serialized, self.manifest["tokenizer"]["end_id"])

    def sequences(self, split: str | None = None, role: str | None = None) -> npt.NDArray[np.int64]:
        """Numbers of the sequences of a split, a role, or both."""
        found = [one.numbers for one in self.ranges if split in (None, one.split) and role in (None, one.role)]
        if not found:
            known = ", ".join(f"{one.split}/{one.role}" for one in self.ranges)
            raise UserError(
                f"{self.folder}: no sequences of {split or 'any split'}/{role or 'any role'}; there are {known}"
            )
        return np.concatenate(found)

    @cached_property
    def role_of(self) -> npt.NDArray[np.str_]:
        """Role of each sequence."""
        return np.repeat([one.role for one in self.ranges], [one.sequences for one in self.ranges])

    @cached_property
    def items_in(self) -> npt.NDArray[np.int64]:
        """Number of items of each sequence."""
        return (np.asarray(self.positions) >= 0).sum(axis=1)

    def with_positions(self, positions: npt.NDArray[np.int32], kinds: npt.NDArray[np.int8]) -> PreparedCorpus:
        """The same texts with other positions in them, as many in every text."""
        if positions.shape != self.positions.shape or kinds.shape != self.kinds.shape:
            raise ValueError(f"positions {positions.shape} and kinds {kinds.shape} are not {self.positions.shape}")
        if ((positions >= 0).sum(axis=1) != self.items_in).any() or positions.max() >= self.sequence_length:
            raise ValueError("the texts have other numbers of positions, or positions beyond their ends")
        placed = copy.copy(self)
        placed.positions, placed.kinds = positions, kinds
        return placed

    def document_spans(self) -> npt.NDArray[np.int64]:
        """First and last document of each sequence; the documents between them are all of it. [sequence, 2]"""
        return np.stack([self.document[:, 0], self.document[:, -1]], axis=1).astype(np.int64)

    def batch(self, numbers: Sequence[int] | npt.NDArray[np.integer]) -> TextBatch:
        """The named sequences as the tree engine takes them; item number = sequence · P + slot."""
        import torch

        from tfive.tree.layout import TextBatch

        rows = np.asarray(numbers, dtype=np.int64)
        if rows.ndim != 1 or (len(rows) and not 0 <= rows.min() <= rows.max() < len(self)):
            raise IndexError(f"sequence numbers must lie in 0 … {len(self) - 1}")
        document = self.document[rows].astype(np.int64)
        inside = np.zeros_like(document)
        inside[:, 1:] = np.cumsum(np.diff(document, axis=1) != 0, axis=1)
        positions = self.positions[rows].astype(np.int64)
        items = rows[:, None] * self.per_text + np.arange(self.per_text)
        return TextBatch(
            tokens_BS=torch.from_numpy(self.tokens[rows].astype(np.int64)),
            document_BS=torch.from_numpy(inside),
            positions_BP=torch.from_numpy(positions),
            items_BP=torch.from_numpy(np.where(positions >= 0, items, -1)),
        )

    def kind_of(self, items: Iterable[int]) -> list[str]:
        """Kind of each item by its global number."""
        flat = self.kinds.reshape(-1)
        return [KINDS[flat[item]] for item in items]

    def source_of(self, items: Iterable[int]) -> list[str]:
        """Name of the source of each item's document."""
        numbers = np.asarray(list(items), dtype=np.int64)
        rows, slots = numbers // self.per_text, numbers % self.per_text
        owners = self.document[rows, self.positions[rows, slots]]
        return [self.sources[source] for source in self.documents["source"][owners]]


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{folder}: no prepared corpus here; run tfive data prepare") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise UserError(f"{folder}: prepared by another version of tfive; delete the folder and prepare again")
    files, groups = manifest.get("files"), manifest.get("groups")
    whole = isinstance(files, dict) and set(files) == {*ARRAYS, TOKENIZER} and isinstance(groups, list)
    if not whole or not all(isinstance(one, dict) and one.keys() == _RANGE for one in groups or ()):
        raise UserError(f"{folder / MANIFEST}: damaged since it was prepared; delete {folder} and prepare again")
    return manifest


def _check(path: Path, recorded: dict[str, Any], *, whole: bool) -> None:
    """Refuse a file that is not the one in the manifest: by its size, and by its digest when `whole`."""
    try:
        same = isinstance(recorded, dict) and path.stat().st_size == recorded.get("bytes")
        same = same and (not whole or sha256(path) == recorded.get("sha256"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); delete {path.parent} and prepare again") from error
    if not same:
        raise UserError(f"{path}: damaged since it was prepared; delete {path.parent} and prepare again")

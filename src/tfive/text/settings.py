"""Settings of the corpus: where text comes from, how it is split into sequences, where thoughts may start."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator, model_validator

from tfive.section import Section

SPLITS = ("train", "calibration", "development", "test")
KINDS = ("match", "entropy", "every", "uniform")
"""Kinds of position, in the order in which they choose; what one kind cannot fill goes to those after it."""

AUTO, WHOLE = "auto", "none"
"""Values of a source's `separator` that are no text to look for: cut where the text falls apart, or not at all."""


class Where(Section):
    """Keep only rows whose field lies in a half-open range; text compares as text, so ISO dates and arXiv ids work."""

    field: str = Field(min_length=1)
    """The field that is compared (dates compare in ISO form, `2025-01-31`)."""
    at_least: str | int | float | None = None
    """The smallest value kept."""
    below: str | int | float | None = None
    """The first value no longer kept."""

    @model_validator(mode="after")
    def _one_kind(self) -> Where:
        bounds = [bound for bound in (self.at_least, self.below) if bound is not None]
        if not bounds:
            raise ValueError("give at_least or below")
        if len({isinstance(bound, str) for bound in bounds}) > 1:
            raise ValueError("at_least and below must both be text or both be numbers")
        return self


class TextSource(Section):
    """One body of text with its share of every split."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """What the source is called in manifests and statistics; unique in a corpus."""
    path: str | None = None
    """A .jsonl, .parquet or .txt file (.jsonl and .txt also as .gz or .zst), a folder of them, or `tfive:…` for a file
    of the package."""
    sha256: str | None = Field(None, pattern=r"^[0-9a-f]{64}$")
    """What the one file at `path` must be, byte for byte: another file of that name is refused."""
    hub: str | None = None
    """A dataset id on the Hugging Face hub, instead of `path` (needs the `hub` extra)."""
    configs: tuple[str, ...] = ()
    """Configurations of the hub dataset; none means its default."""
    revision: str | None = None
    """Commit, tag or branch of the hub dataset; the commit it stood for is recorded."""
    split: str = "train"
    """Split of the hub dataset."""
    files: tuple[str, ...] = ()
    """Patterns of files inside the hub dataset; none means all of the configuration."""
    limit: int | None = Field(None, ge=1, le=10**12)
    """Most documents read from each configuration of the hub dataset: a random sample that is spread over its files."""
    fields: tuple[str, ...] = Field(("text",), min_length=1)
    """Fields of a row that make up the document, joined by a blank line."""
    where: Where | None = None
    """Which rows are kept; none means all."""
    separator: str = Field(AUTO, min_length=1)
    """What stands between two documents of a .txt file, such as `"<|end|>"`. `auto` cuts at form feeds and blank lines
    into documents of about 2,000 bytes (8,000 at most); `none` takes every file as one document."""
    share: float = Field(1.0, ge=1e-9, le=1e9)
    """Share of the tokens of every split, relative to the other sources."""
    split_by: str | None = None
    """Regular expression with one group: documents whose first match has the same text in it stay in one split and
    role, as several versions of one problem must. A document without a match goes by its whole text, as all do with
    `none`."""

    @field_validator("split_by")
    @classmethod
    def _one_group(cls, pattern: str | None) -> str | None:
        if pattern is not None:
            try:
                groups = re.compile(pattern).groups
            except (re.error, OverflowError, RecursionError) as error:
                raise ValueError(f"{pattern!r} is not a regular expression ({error})") from error
            if groups != 1:
                raise ValueError(f"{pattern!r} has {groups} groups; mark the part that versions share with one (…)")
        return pattern

    @model_validator(mode="after")
    def _one_origin(self) -> TextSource:
        if (self.path is None) == (self.hub is None):
            raise ValueError(f"source {self.name}: give either path or hub")
        if self.path is not None and (self.configs or self.revision or self.files or self.limit):
            raise ValueError(f"source {self.name}: configs, revision, files and limit belong to a hub dataset")
        if self.hub is not None and self.sha256:
            raise ValueError(f"source {self.name}: sha256 belongs to a path; a hub dataset has revision")
        return self


class Sequences(Section):
    """How many sequences each split holds; documents are split in this proportion, by a stable hash of their text."""

    train: int = Field(12_800, ge=1, le=2**32)
    """Sequences of the training split."""
    calibration: int = Field(1_024, ge=1, le=2**32)
    """Sequences of the calibration split (critic qualification)."""
    development: int = Field(1_024, ge=1, le=2**32)
    """Sequences of the development split (progress and selection)."""
    test: int = Field(128, ge=2, le=2**32)
    """Sequences of the test split, all measured once when training is over (results; they choose nothing)."""


class Positions(Section):
    """Where thoughts may stand; chosen from the visible prefix of each position, once, when the corpus is prepared."""

    per_text: int = Field(16, ge=1, le=65_536)
    """P: most positions in one sequence."""
    uniform: float = Field(1.0, ge=0, le=1e9)
    """Share of positions chosen at random."""
    variance: float = Field(0.0, ge=0, le=1e9)
    """Share of positions drawn by how much thoughts differ in use there. They are chosen at random like `uniform` ones,
    and before its first window a run moves those of its training and calibration texts to where the variance of the
    gain between thoughts is foreseen to be high, by a pilot on training texts. Measured texts keep theirs."""
    pilot: int = Field(256, ge=16, le=10_000_000)
    """Positions of that pilot, with 8 thoughts each."""
    entropy: float = Field(0.0, ge=0, le=1e9)
    """Share of positions chosen at random among those where the base model is most uncertain about the next token."""
    every: float = Field(0.0, ge=0, le=1e9)
    """Share of positions chosen among every `step`-th token of a document."""
    match: float = Field(0.0, ge=0, le=1e9)
    """Share of positions chosen right after `pattern`."""
    step: int = Field(16, ge=1, le=2**20)
    """Distance of the `every` kind, counted from the start of the document in the sequence."""
    pattern: str = ""
    """Regular expression of the `match` kind. It is matched against the decoded text up to and including the position's
    token and must end where that token ends; it can see nothing later. A match may be 256 characters long."""
    min_gap: int | None = Field(None, ge=1, le=2**20)
    """Least distance of two positions of one sequence in tokens; none means the horizon H."""

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(rf"(?:{pattern})\Z")
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(
                f"{pattern!r} is not a regular expression ({error}); flags are written as (?i:…)"
            ) from error
        return pattern

    @model_validator(mode="after")
    def _consistent(self) -> Positions:
        if sum(self.shares().values()) <= 0:
            raise ValueError(f"one of {', '.join(KINDS)} needs a share above 0")
        if self.match > 0 and not self.pattern:
            raise ValueError("a share of match needs a pattern")
        return self

    def shares(self) -> dict[str, float]:
        """Relative share of each kind, in the order in which kinds choose; what a run moves is random at first."""
        return {kind: getattr(self, kind) for kind in KINDS} | {"uniform": self.uniform + self.variance}


class Decontaminate(Section):
    """Leave out documents that share runs of words with benchmark items (see docs/howto/evaluate.md)."""

    tasks: tuple[str, ...] = ()
    """Tasks and suites, e.g. `["primary"]`; none means that nothing is left out."""
    data: str | None = None
    """Folder of the tasks' files; none means that they come from the hub."""


class TextSettings(Section):
    """The corpus: sources, mixture, sequences, splits, positions."""

    sources: tuple[TextSource, ...] = ()
    """Where the text comes from."""
    sequence_length: int = Field(512, ge=2, le=2**20)
    """S: tokens of one sequence."""
    sequences: Sequences = Sequences()
    """Sequences of each split."""
    positions: Positions = Positions()
    """Where thoughts may stand."""
    end_of_document: str = "auto"
    """Token put after every document: a token of the vocabulary, `none`, or `auto` (`<|endoftext|>` where the tokenizer
    knows it, else its end-of-sequence token, else none)."""
    allow_fewer: bool = False
    """Accept fewer sequences, and shares that differ, when the sources hold too little text."""
    bad_rows: Literal["fail", "skip"] = "fail"
    """At a row that is no JSON, not UTF-8, or lacks its text: stop and name it, or leave it out and count it."""
    decontaminate: Decontaminate = Decontaminate()
    """Which benchmarks' items no document may hold."""
    cache: str | None = None
    """Folder of prepared corpora; none means the user's cache folder."""
    workers: int = Field(1, ge=1, le=1024)
    """Processes that tokenize; the result does not depend on it."""

    @field_validator("sources")
    @classmethod
    def _names_differ(cls, sources: tuple[TextSource, ...]) -> tuple[TextSource, ...]:
        names = [source.name for source in sources]
        if len(set(names)) < len(names):
            raise ValueError(f"source names {names} must differ")
        return sources

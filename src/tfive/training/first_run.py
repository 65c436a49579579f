"""A first configuration for a text of one's own: settings by the size of the model, as many windows as the minutes
allow, written as a commented TOML file that stands by itself."""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfive.config.config import Config, resolve
from tfive.config.layers import toml_item
from tfive.config.rules import problems
from tfive.errors import UserError
from tfive.models.load import EMBEDDED, load_tokenizer
from tfive.models.shape import ModelShape
from tfive.text.cutting import RULE
from tfive.text.settings import TextSource
from tfive.text.sources import Reader, local_files
from tfive.text.tokens import TextTokenizer
from tfive.training.duration import Duration, expected, readable
from tfive.training.text_held import lacking

SMALL = 50_000_000
"""Parameters up to which the settings of `nano` hold; above it those of the 135M study."""

BYTES_PER_TOKEN = 4.0
"""Where the tokenizer is not at hand."""

SAMPLED_BYTES = 200_000
SCANNED_BYTES = 256_000_000
ITEMS = (256, 192, 128, 96, 64, 48, 32)
"""Thoughts of the actor in a window, the most first."""

FEWEST_WINDOWS, MOST_WINDOWS = 6, 40
SPARE = 0.85
"""Part of the minutes that is planned for; the rest is for loading, preparing, and a round of fitting that fails."""

AGAIN = 2
"""Times that a run may draw as many thoughts as the whole text has places; a model that meets its texts much more often
learns them by heart, and predicts others worse."""

LEAST_BYTES = 100_000
"""Text of which less has not taught anything."""

FEW_TESTED = 6
"""Texts on which a test of critics should stand at least."""

FEW_SEQUENCES = 600
"""Below so many, the smallest role (probes, a hundredth of the texts) would come out empty."""


@dataclass(frozen=True)
class TextFacts:
    """What a first look at the sources tells."""

    sources: tuple[TextSource, ...]
    documents: int
    size: int
    """Bytes read; all of them, unless there are more than `SCANNED_BYTES`."""
    tokens: int
    cut: bool
    """Whether plain text was cut into documents."""
    bad: int = 0
    """Rows without text, or that are no rows."""

    def shown(self) -> str:
        """`1,269 documents, 3.0 MB, about 800,000 tokens`."""
        more = " or more" if self.size >= SCANNED_BYTES else ""
        how = f" (.txt cut {RULE})" if self.cut else ""
        bad = f"; left out: {self.bad:,} {'rows' if self.bad > 1 else 'row'} without text" * bool(self.bad)
        return f"{self.documents:,} documents{more}, {self.size / 1e6:.2g} MB, about {self.tokens:,} tokens{how}{bad}"


@dataclass(frozen=True)
class Plan:
    """The run that was chosen."""

    toml: str
    config: Config
    duration: Duration | None
    warnings: tuple[str, ...]


def look_at(paths: Sequence[str], model: str) -> TextFacts:
    """Read the sources once: how much text they hold, in documents and in the model's tokens."""
    absent = next(
        (path for path in paths if not path.startswith("tfive:") and not Path(path).expanduser().exists()), ""
    )
    if absent:
        raise UserError(f"--text {absent}: no such file or folder; check the path")
    sources = tuple(TextSource(name=name, path=path) for name, path in zip(_names(paths), paths))
    reader, cut, sampled = Reader(skip_bad=True), False, list[str]()
    for source in sources:
        for file in local_files(source):
            cut = cut or file.is_plain
            for _, text in reader.documents(file):
                if sum(map(len, sampled)) < SAMPLED_BYTES:
                    sampled.append(text)
                if sum(tally.bytes for tally in reader.tallies.values()) >= SCANNED_BYTES:
                    break
    documents, size, bad = (
        sum(getattr(tally, what) for tally in reader.tallies.values()) for what in ("documents", "bytes", "bad")
    )
    if not documents:
        raise UserError(
            f"--text {paths[0]}: no text in it; rows of .jsonl and .parquet need a field text (other fields: "
            "docs/howto/train.md), .txt files text in UTF-8"
        )
    ratio = BYTES_PER_TOKEN
    if model in EMBEDDED or Path(model).expanduser().exists():
        tokens = TextTokenizer.of(load_tokenizer(model)).encode(sampled)
        ratio = sum(len(text.encode()) for text in sampled) / max(1, sum(map(len, tokens)))
    return TextFacts(sources, documents, size, int(size / ratio), cut, bad)


def _names(paths: Sequence[str]) -> list[str]:
    names: list[str] = []
    for path in paths:
        plain = re.sub(r"\.(jsonl|txt|parquet)(\.gz|\.zst)?$", "", Path(path).expanduser().resolve().name)
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", plain).lstrip("._-") or "text"
        names.append(name if name not in names else f"{name}-{len(names) + 1}")
    return names


def plan(
    facts: TextFacts, model: str, shape: ModelShape | None, device: str, kind: str, minutes: float, speed: float,
    pattern: str = "",
) -> Plan:  # fmt: skip
    """The largest windows of which at least six fit into the minutes, and as many of them as fit."""
    small = shape is None or shape.parameters < SMALL
    warnings = [] if shape else [f"the shape of {model} is not known here, so the time is not estimated"]
    if facts.size < LEAST_BYTES:
        warnings.append(f"{facts.size / 1e3:.0f} kB of text are little; some megabytes are good, 100 kB the least")
    with tempfile.TemporaryDirectory() as cache:
        lacks = ""
        for items in ITEMS:
            chosen = _settings(facts, model, shape, device, items, FEWEST_WINDOWS, pattern)
            config = _checked(chosen)
            if config is None:
                continue
            took = None if shape is None else expected(config, shape, kind, speed)
            in_time = took is None or took.seconds <= 60 * minutes * SPARE
            if in_time or items == ITEMS[-1]:
                lacks = lacking(config, facts.size, cache) or ""
                if not lacks:
                    break
        else:
            raise UserError(
                f"--text: {facts.tokens:,} tokens in {facts.documents:,} documents are too little for a window of "
                f"{ITEMS[-1]} thoughts; give more text" + f" ({lacks})" * bool(lacks)
            )
        if shape is None or took is None:
            return Plan(_toml(chosen, facts, minutes, small), config, None, tuple(warnings))
        spare = 60 * minutes * SPARE - took.seconds
        windows = min(max(FEWEST_WINDOWS + int(spare / took.window), FEWEST_WINDOWS), MOST_WINDOWS)
        sequences = facts.tokens // config.text.sequence_length
        enough = max(FEWEST_WINDOWS, AGAIN * sequences * config.text.positions.per_text // items)
        if enough < windows:
            windows = enough
            warnings.append(
                "the text is too small for all these minutes: a longer run would learn it by heart; give more text"
            )
        longer = _settings(facts, model, shape, device, items, windows, pattern)
        found = _checked(longer)
        if found is not None and not lacking(found, facts.size, cache):
            chosen, config = longer, found
    took = expected(config, shape, kind, speed)
    if took.seconds > 60 * minutes:
        warnings.append(
            f"{minutes:g} minutes are too few for this model on this device: about {readable(took.seconds)} "
            f"are needed; give --minutes {math.ceil(took.seconds / 60)}, or a faster device"
            + ("" if model in EMBEDDED else ", or a smaller model")
        )
    tested = math.ceil(config.window.count("qualify") / config.text.positions.per_text)
    if tested < FEW_TESTED:
        warnings.append(
            f"critics will be tested on about {tested} texts, which tells little; give more --minutes, or raise "
            "window.items"
        )
    return Plan(_toml(chosen, facts, minutes, small), config, took, tuple(warnings))


def _checked(chosen: dict[str, dict[str, Any]]) -> Config | None:
    """The configuration, None if a rule refuses it (a corpus too small for so many thoughts)."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "chosen.toml"
        path.write_text(_plain_toml(chosen), "utf-8")
        config = resolve([path]).config
    return None if problems(config) else config


def _settings(
    facts: TextFacts, model: str, shape: ModelShape | None, device: str, items: int, windows: int, pattern: str
) -> dict[str, dict[str, Any]]:
    """Section → key → value: everything that differs from a default."""
    small = shape is None or shape.parameters < SMALL
    length, per_text = (128, 6) if small else (256, 8)
    # More text than the windows draw twice would only take longer to prepare.
    sequences = min(max(facts.tokens // length, 1), max(3_000, 8 * windows * items // per_text))
    held_out = min(max(sequences // 12, 8), 400)
    tested = min(held_out, 128)
    matched: dict[str, Any] = {"match": 0.7, "uniform": 0.3, "pattern": pattern} if pattern else {"uniform": 1.0}
    blocks = 1 if shape is None else max(1, shape.layers // (6 if small else 4))
    rate = 8e-5 if small else 1e-4 if shape is not None and shape.parameters < 1_000_000_000 else 2e-5
    calibration: dict[str, Any] = {"steps": 30, "warm_steps": 40, "mean_steps": 2, "evaluate_every": 10, "width": 32}
    if not small:
        calibration = {"cross_fit": False, "steps": 100, "warm_steps": 100, "batch": 512}
    window: dict[str, Any] = {"items": items, "windows": windows, "reading": 1, "qualify": 0.5}
    if sequences < FEW_SEQUENCES:
        window["probe"] = 0.0
    return {
        "": {"method": "t5"},
        "model": {"name": model, "device": device},
        "text": {"sequence_length": length, "allow_fewer": True, "bad_rows": "skip"},
        "text.sequences": {
            "train": max(sequences - 2 * held_out - tested, 1), "calibration": held_out, "development": held_out,
            "test": tested,
        },
        "text.sources": {"": facts.sources},
        "text.positions": {"per_text": per_text, **matched},
        "thought": {
            "length": 12, "checkpoints": (4, 8, 12), "horizon": 5 if small else 16, "variable_length": small,
        },
        "window": window,
        "critic": {"adapt": "top", "blocks": blocks, "width": 64 if small else 256, "lr": 2e-4, "loss": "squared"},
        "qualify": {"eta": 0.05, "consecutive": 1, "attempts": 3},
        "calibration": calibration,
        "anchor": {"next_token": 1.0, "conditioned": 1.0},
        "optimizer": {"lr": rate},
        "run": {
            "texts_per_pass": 32 if small else 8,
            "develop_items": min(240, held_out * per_text),
            "develop_every": max(windows // 2, 1),
        },
    }  # fmt: skip


COMMENTS = {
    "model": "nano (embedded), a folder, a hub id, or a .gguf file; device: auto, cpu, cuda or cuda:N",
    "text": "Documents are packed into sequences of so many tokens; rows that hold no text are left out and counted",
    "text.sequences": "Sequences to train on, to test the critics on, to measure progress on, and to judge the end by",
    "text.positions": "Where thoughts stand: at most so many places a sequence",
    "thought": "Hidden tokens of a thought, where it is scored on the way, and how many tokens of text judge it",
    "window": "A window is one round: fresh thoughts, critics that learn to predict their gains, steps of the model.\n"
    "# In the first `reading` windows the model only learns to read its thoughts",
    "critic": "The critics train the last blocks of a copy of the model",
    "qualify": "Before the model is rewarded, its critics must predict unseen returns at least this well (R²)",
    "calibration": "How the two critics' opinions are weighed: small heads, in proportion to the windows",
    "anchor": "The model keeps learning the text itself, and to read thoughts",
    "optimizer": "Learning rate of the model",
    "run": "Texts in one pass (memory and speed only), and how often progress is measured on how many places",
}
"""Section → what stands above it."""

PATTERN_HINT = (
    "# If a short aside could work out what comes next at certain places, name them, for example:\n"
    "#   match = 0.7\n#   uniform = 0.3\n#   pattern = ', which makes'\n"
)
SEPARATOR_HINT = '# separator = "auto" # .txt files: the text between two documents; "none" takes every file whole\n'


def _toml(chosen: dict[str, dict[str, Any]], facts: TextFacts, minutes: float, small: bool) -> str:
    """The file a person reads and edits."""
    origin = "the embedded model's" if small else "the 135M study's"
    head = (
        f"# Written by tfive init for a run of about {minutes:g} minute{'s' * (minutes != 1)} on this machine; "
        f"settings are {origin}.\n"
        f"# The text: {facts.shown()}.\n"
        "# All keys with their meaning: tfive config show THIS.toml --explain. Paths start where tfive is started.\n"
    )
    return head + _plain_toml(chosen, commented=True)


def _plain_toml(chosen: dict[str, dict[str, Any]], *, commented: bool = False) -> str:
    parts: list[str] = []
    for section, values in chosen.items():
        if section == "text.sources":
            for source in values[""]:
                parts.append(
                    f"[[text.sources]]\nname = {_value(source.name)}\npath = {_value(source.path)}\n"
                    + (
                        '# separator = "auto" # .txt: what stands between documents; "none" takes a file whole\n'
                        if commented
                        else ""
                    )
                )
            continue
        note = f"# {COMMENTS[section]}.\n" if commented and section in COMMENTS else ""
        heading = f"[{section}]\n" if section else ""
        body = "".join(f"{key} = {_value(value)}\n" for key, value in values.items())
        hint = PATTERN_HINT if commented and section == "text.positions" and "pattern" not in values else ""
        parts.append(note + heading + body + hint)
    return "\n".join(parts)


def _value(value: Any) -> str:
    return toml_item(value).as_string()

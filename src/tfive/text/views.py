"""A prepared corpus in readable form: counts as a table, sequences as text with the selected positions marked."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tfive.printable import printable
from tfive.text.cutting import RULE
from tfive.text.items import segments
from tfive.text.prepared import PreparedCorpus, SequenceRange
from tfive.text.settings import KINDS, Positions

STYLES = {"match": "bold black on yellow", "entropy": "bold black on cyan", "every": "bold black on green"}
UNIFORM = "bold black on white"

RARE = 0.1
"""A pattern that gives less than this part of the positions it was asked for is worth a warning."""


def corpus_counts(corpus: PreparedCorpus) -> dict[str, Any]:
    """Sequences, documents, tokens and positions: in total, and for each split and role by source and kind."""
    rows = [_counts(corpus, number, stretch) for number, stretch in enumerate(corpus.ranges)]
    names = ("sequences", "documents", "tokens", "items")
    return {
        "folder": str(corpus.folder),
        "fingerprint": corpus.fingerprint,
        "total": {name: sum(row[name] for row in rows) for name in names},
        "roles": rows,
        "read": corpus.manifest["read"],
        "duplicates": corpus.manifest["duplicates"],
        "notes": corpus_notes(corpus),
    }


def corpus_notes(corpus: PreparedCorpus) -> list[str]:
    """What a person should know before training on it: how plain text was cut, and a pattern that found (almost)
    nothing."""
    read, kept = corpus.manifest["read"], corpus.manifest["settings"]["positions"]
    positions = Positions(**{key: kept[key] for key in Positions.model_fields if key in kept})
    notes = [
        f"source {source['name']}: .txt cut {RULE}, {read[source['name']]['documents']:,} in all; "
        "another cut: the source's separator"
        for source in corpus.manifest["sources"]
        if "cut" in source
    ]
    matched, items = int((corpus.kinds == KINDS.index("match")).sum()), int((corpus.positions >= 0).sum())
    rare = rare_pattern(positions, matched, items)
    return [*notes, rare] if rare else notes


def rare_pattern(positions: Positions, matched: int, items: int) -> str | None:
    """A warning where the pattern stands behind less than a tenth of the positions it was asked for, else None."""
    shares = positions.shares()
    asked = shares["match"] / sum(shares.values())
    if matched >= RARE * asked * items:
        return None
    return (
        f"warning: text.positions.pattern {positions.pattern!r} fits {matched:,} of {items:,} positions, "
        f"{asked:.0%} were asked for; the others stand elsewhere. Write a pattern that occurs in this text, "
        "or set text.positions.match = 0"
    )


def _counts(corpus: PreparedCorpus, group: int, stretch: SequenceRange) -> dict[str, Any]:
    documents = corpus.documents[corpus.documents["group"] == group]
    rows = slice(stretch.first, stretch.first + stretch.sequences)
    positions, kinds = corpus.positions[rows], corpus.kinds[rows]
    owner = np.take_along_axis(corpus.document[rows], np.maximum(positions, 0), axis=1)[positions >= 0]
    size = len(corpus.sources)
    tokens = np.bincount(documents["source"], weights=documents["tokens"], minlength=size).astype(np.int64)
    whole = np.bincount(documents["source"], minlength=size)
    items = np.bincount(corpus.documents["source"][owner], minlength=size)
    return {
        "split": stretch.split,
        "role": stretch.role,
        "sequences": stretch.sequences,
        "documents": len(documents),
        "tokens": int(tokens.sum()),
        "items": int((positions >= 0).sum()),
        "kinds": {kind: int((kinds == number).sum()) for number, kind in enumerate(KINDS)},
        "sources": {
            name: {"documents": int(whole[i]), "tokens": int(tokens[i]), "items": int(items[i])}
            for i, name in enumerate(corpus.sources)
        },
    }


def counts_table(corpus: PreparedCorpus, counts: dict[str, Any]) -> str:
    """The counts as a table, then what was read to get them."""
    used = [kind for kind in KINDS if any(row["kinds"][kind] for row in counts["roles"])]
    table = Table(box=None, pad_edge=False)
    for title in ("split", "role"):
        table.add_column(title, no_wrap=True)
    for title in ("sequences", "documents", "tokens", *corpus.sources, "positions", *used):
        table.add_column(title, justify="right", no_wrap=True)
    for row in counts["roles"]:
        shares = [f"{row['sources'][name]['tokens'] / row['tokens']:.1%}" for name in corpus.sources]
        numbers = [f"{row[name]:,}" for name in ("sequences", "documents", "tokens")]
        kinds = [f"{row['kinds'][kind]:,}" for kind in used]
        table.add_row(row["split"], row["role"], *numbers, *shares, f"{row['items']:,}", *kinds)
    read = [
        f"{name}: read {tally['documents']:,} documents, {tally['bytes']:,} bytes"
        + "".join(
            f", {tally[kind]:,} {kind}" for kind in ("empty", "filtered", "bad", "overlapping") if tally.get(kind)
        )
        for name, tally in counts["read"].items()
    ]
    duplicates = f"duplicates left out: {counts['duplicates']:,}"
    return "\n".join([_rendered(table), "", *read, duplicates, *counts["notes"], str(corpus.folder)])


def sequence_view(corpus: PreparedCorpus, number: int) -> dict[str, Any]:
    """One sequence as plain data: its documents, its text, and each position with the text around it."""
    text, cuts = _decoded(corpus, number)
    stretch = next(one for one in corpus.ranges if one.first <= number < one.first + one.sequences)
    positions = []
    for slot, p in enumerate(corpus.positions[number].tolist()):
        if p < 0:
            continue
        item = number * corpus.per_text + slot
        at, end = cuts[p], cuts[p + corpus.horizon]
        positions.append(
            {
                "item": item,
                "position": p,
                "kind": corpus.kind_of([item])[0],
                "source": corpus.source_of([item])[0],
                "character": at,
                "before": text[max(0, at - 80) : at],
                "continuation": text[at:end],
            }
        )
    return {
        "sequence": number,
        "split": stretch.split,
        "role": stretch.role,
        "documents": [
            {
                "document": int(corpus.document[number, start]),
                "source": corpus.sources[corpus.documents["source"][corpus.document[number, start]]],
                "first_token": start,
                "tokens": end - start,
            }
            for start, end in segments(corpus.document[number])
        ],
        "text": text,
        "positions": positions,
    }


def marked_text(corpus: PreparedCorpus, number: int, *, colour: bool) -> str:
    """One sequence with a mark after each selected position and a line where a new document begins."""
    view = sequence_view(corpus, number)
    _, cuts = _decoded(corpus, number)
    notes: list[tuple[int, int, Text]] = [
        (mark["character"], 1, Text(f"⟦{mark['kind']}⟧", style=STYLES.get(mark["kind"], UNIFORM)))
        for mark in view["positions"]
    ]
    for document in view["documents"]:
        at = cuts[document["first_token"] - 1] if document["first_token"] else 0
        line = f"── document {document['document']} ({document['source']}) ──\n"
        notes.append((at, 0, Text(("\n" if at else "") + line, style="dim")))
    shown = Text(f"sequence {number} · {view['split']}/{view['role']} · {len(view['positions'])} positions\n", "bold")
    done = 0
    for at, _, note in sorted(notes, key=lambda note: note[:2]):
        shown.append(printable(view["text"][done:at]), style="not bold")
        shown.append_text(note)
        done = at
    shown.append(printable(view["text"][done:]), style="not bold")
    return _rendered(shown, colour=colour)


def _decoded(corpus: PreparedCorpus, number: int) -> tuple[str, list[int]]:
    """A sequence's text, and its length after each token (a token that ends inside a character includes all of it)."""
    text, lengths = corpus.tokenizer.growing_text(corpus.tokens[number].tolist())
    ends = [*lengths[:-1].tolist(), len(text)]
    for index in range(len(ends) - 2, -1, -1):
        if ends[index] < 0:
            ends[index] = ends[index + 1]
    return text, ends


def _rendered(shown: Table | Text, *, colour: bool = False) -> str:
    stream = io.StringIO()
    # Wide enough that nothing is wrapped: what is piped onwards keeps its lines.
    Console(file=stream, force_terminal=colour, no_color=not colour, width=100_000, soft_wrap=True).print(shown)
    return "\n".join(line.rstrip() for line in stream.getvalue().rstrip("\n").split("\n"))

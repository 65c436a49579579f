"""Choose the real text, split it into pre-training and mid-training documents, and write the corpus sample that ships.

    python recipes/nano/make_text.py --real FOLDER --out WORK

FOLDER holds `web_curated.jsonl.gz` and `arxiv.jsonl.gz` (rows: id, text, source). Only sources under a licence that
allows redistribution are read; a row of any other source is left out. WORK receives

    pretrain_real.jsonl.gz   whole documents the model is trained on
    corpus/real.jsonl.gz     short passages of *other* documents, for mid-training
    corpus/worked.jsonl.gz   worked prose without any working, for mid-training; pre-training never multiplied its pairs
    inputs.json              sha256 of what was read and written, counts per source
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import worked_prose

LICENCES = {
    "wikinews": "CC BY 2.5",
    "wikinews_interview": "CC BY 2.5",
    "wikivoyage": "CC BY-SA 3.0",
    "wikipedia": "CC BY-SA 3.0",
    "wikipedia_bio": "CC BY-SA 3.0",
    "mdpi_academic": "CC BY 4.0",
    "gutenberg_fiction": "public domain (USA)",
    "arxiv": "CC0 1.0",
    "nano-worked-prose": "CC0 1.0",
}
FILES = ("web_curated.jsonl.gz", "arxiv.jsonl.gz")
MIDTRAIN_SHARE = 0.2
PASSAGES_PER_SOURCE, WORKED_DOCUMENTS = 200, 6000
PASSAGE_CHARACTERS = (260, 520)
UNTIDY = re.compile(r"[\[\]{}\\$@|*<>_☏✉]|\(\(|https?:|www\.|\.{4,}|^\W|\d{5,}")

Row = dict[str, str]


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def family(source: str) -> str:
    return source.split("/")[0]


def read_rows(folder: Path) -> Iterator[Row]:
    """Rows of admissible sources, spaces tidied, in the order of the files."""
    for name in FILES:
        with gzip.open(folder / name, "rt", encoding="utf-8") as lines:
            for line in lines:
                row = json.loads(line)
                if family(row["source"]) in LICENCES and "Gutenberg" not in row["text"]:
                    text = re.sub(r"[ \t\u00a0]+", " ", row["text"].replace("\r", ""))
                    yield {"id": row["id"], "text": re.sub(r"\n{3,}", "\n\n", text).strip(), "source": row["source"]}


def share_of(identifier: str) -> float:
    """A number in [0, 1) that belongs to a document for good, whatever else is in the folder."""
    return int.from_bytes(hashlib.sha256(identifier.encode()).digest()[:6], "big") / 2**48


def passages(row: Row) -> Iterator[Row]:
    """Tidy passages of whole sentences out of one document."""
    paragraphs = [p.strip() for p in row["text"].split("\n\n")]
    heading = paragraphs[0] if len(paragraphs[0]) < 120 and len(paragraphs) > 1 else ""
    low, high = PASSAGE_CHARACTERS
    for number, paragraph in enumerate(paragraphs):
        paragraph = " ".join(paragraph.split())
        if UNTIDY.search(paragraph) or not paragraph[:1].isupper() or not paragraph.isascii():
            continue
        text = ""
        for sentence in re.split(r"(?<=[a-z][.!?]) (?=[A-Z])", paragraph):
            if len(text) + len(sentence) > high:
                break
            text = f"{text} {sentence}".strip()
        if len(text) >= low and text[-1] in ".!?":
            licence = LICENCES[family(row["source"])]
            yield {
                "id": f"{row['id']}-{number}",
                "text": text,
                "source": row["source"],
                "heading": heading,
                "licence": licence,
            }


def splittable(number: int, figures: list[worked_prose.Figure]) -> bool:
    """Whether a document holds at most one product, so that all documents with one product can stay in one split.

    Every second document of two sums is left out as well: products stay a third of all figures.
    """
    products = sum(figure.kind == "product" for figure in figures)
    return len(figures) < 2 or products == 1 or (products == 0 and number % 2 == 0)


def worked_rows(seed: int, count: int) -> Iterator[Row]:
    """The first `count` documents of the seed that can be split by their facts."""
    taken = 0
    for number in itertools.count():
        if taken == count:
            return
        pieces = worked_prose.draw_document(
            seed, "midtrain", number, reckoned=0.0, held_out=True, kinds=worked_prose.MIDTRAINED
        )
        text, figures = worked_prose.document_text(pieces), [piece.figure for piece in pieces if piece.figure]
        worked_prose.check_document(text, figures)
        if not splittable(number, figures):
            continue
        taken += 1
        licence = LICENCES["nano-worked-prose"]
        yield {
            "id": f"worked-{seed}-{number}",
            "text": text,
            "source": "nano-worked-prose",
            "heading": "",
            "licence": licence,
        }


def write_rows(path: Path, rows: list[Row]) -> None:
    """Gzip without a clock in its header, so that the same rows give the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    body = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    with path.open("wb") as raw, gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as packed:
        packed.write(body)


def beginnings(rows: list[Row]) -> set[str]:
    """How every paragraph begins, to tell a passage that also stands in another document."""
    return {" ".join(paragraph.split())[:80] for row in rows for paragraph in row["text"].split("\n\n")}


def select_real(rows: list[Row], known: set[str], per_source: int) -> list[Row]:
    """Mid-training passages: one a document, at most `per_source` of a source, in an order fixed by their
    identifiers.
    """
    taken: Counter[str] = Counter()
    chosen: list[Row] = []
    for row in sorted(rows, key=lambda row: share_of("order/" + row["id"])):
        fresh = (passage for passage in passages(row) if passage["text"][:80] not in known)
        if taken[family(row["source"])] < per_source:
            found = list(itertools.islice(fresh, 1))
            taken[family(row["source"])] += len(found)
            known |= {passage["text"][:80] for passage in found}
            chosen += found
    return chosen


def make(real: Path, out: Path, seed: int, per_source: int, worked_documents: int) -> dict[str, Any]:
    """Write everything the docstring above names; returns the content of `inputs.json`."""
    pretrain: list[dict[str, str]] = []
    midtrain: list[dict[str, str]] = []
    for row in read_rows(real):
        (midtrain if share_of(row["id"]) < MIDTRAIN_SHARE else pretrain).append(row)
    chosen = select_real(midtrain, beginnings(pretrain), per_source)
    write_rows(out / "pretrain_real.jsonl.gz", pretrain)
    write_rows(out / "corpus" / "real.jsonl.gz", chosen)
    write_rows(out / "corpus" / "worked.jsonl.gz", list(worked_rows(seed, worked_documents)))
    written = ("pretrain_real.jsonl.gz", "corpus/real.jsonl.gz", "corpus/worked.jsonl.gz")
    record: dict[str, Any] = {
        "seed": seed,
        "read": {name: sha256(real / name) for name in FILES},
        "written": {name: sha256(out / name) for name in written},
        "pretrain_documents": dict(Counter(family(row["source"]) for row in pretrain)),
        "pretrain_characters": sum(len(row["text"]) for row in pretrain),
        "midtrain_passages": dict(Counter(family(row["source"]) for row in chosen)),
        "midtrain_worked": worked_documents,
        "licences": LICENCES,
    }
    (out / "inputs.json").write_text(json.dumps(record, indent=1) + "\n")
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--real", type=Path, required=True, help="folder with web_curated.jsonl.gz and arxiv.jsonl.gz")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--passages-per-source", type=int, default=PASSAGES_PER_SOURCE)
    parser.add_argument("--worked-documents", type=int, default=WORKED_DOCUMENTS)
    args = parser.parse_args()
    print(json.dumps(make(args.real, args.out, args.seed, args.passages_per_source, args.worked_documents), indent=1))


if __name__ == "__main__":
    main()

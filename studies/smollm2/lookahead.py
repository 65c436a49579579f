"""Texts for thoughts that guess what comes next: at ends of sentences, words of the sentence that follows.

    python studies/smollm2/lookahead.py models/smollm2-135m corpora lookahead

`corpora` holds the four files of the study. Documents go by a hash of their text into `runs.jsonl.gz` (for runs),
`warm.jsonl.gz` (for the warm start: texts of one sequence with `workings`, as `warmstart.source = given` reads them) or
`held.jsonl.gz` (the same for `lookahead_gains.py`, with `before.jsonl.gz`: what a program would write that repeats the
words before the place). Places, a thought's length and a text's are those of `lookahead.toml`.
A working holds the rarest content words among the first twelve words of the next sentence, in the order of the text: as
many as fit a thought with its close, five at most.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfive.cli.options import script
from tfive.config.config import Config
from tfive.errors import UserError
from tfive.models.load import load_tokenizer
from tfive.text.workings import enough_for

PRESET = Path(__file__).with_name("lookahead.toml")
SHARES = {"web_curated": 0.68, "web_crawl": 0.17, "arxiv": 0.10, "math": 0.05}
"""Of the tokens, file by file."""
WARM, HELD = 0.4, 0.05
"""Of the documents, those of the warm start and those that are measured afterwards."""
WORD = re.compile(r"(?<![\\\w])[A-Za-z][A-Za-z'-]*[a-z](?!\w)")
END = re.compile(r"""[.!?]["”')\]]*(?:\s|$)""")
BEGIN = re.compile(r"""\s+["“'(]?[A-Z]""")
AHEAD = 12
"""Words that are looked at: about as many as the sixteen tokens that score a thought hold."""
MOST, FEWEST = 5, 2
"""Words of a working."""
COMMON, LEAST, SHORTEST = 300, 5, 4
"""No content words are the so many most frequent ones, those seen more seldom, and those with fewer letters."""
REACH = 300
"""Characters that hold the words looked at."""


@dataclass(frozen=True)
class Chooser:
    """Chooses content words by how often they stand in the corpora."""

    count: Counter[str]
    common: frozenset[str]
    encode: Any
    room: int
    """Tokens that a working may have."""

    def listed(self, words: Sequence[str]) -> list[str]:
        """The rarest content words of some, each once, in their order."""
        first = {word.lower(): word for word in reversed(words)}
        rare = [word for word in first if self._tells(word)]
        kept = set(sorted(rare, key=lambda word: (self.count[word], word))[:MOST])
        return [first[word] for word in dict.fromkeys(word.lower() for word in words) if word in kept]

    def working(self, words: Sequence[str]) -> str | None:
        """As many of the rarest content words as fit, as they stand between the delimiters; None with too few."""
        kept = self.listed(words)
        while len(kept) >= FEWEST and len(self.encode(written(kept))) > self.room:
            kept.remove(max(kept, key=lambda word: (self.count[word.lower()], word)))
        return written(kept) if len(kept) >= FEWEST else None

    def _tells(self, word: str) -> bool:
        return len(word) >= SHORTEST and self.count[word] >= LEAST and word not in self.common


@dataclass(frozen=True)
class Place:
    """The end of a sentence: the words after it, those before it, and the working of either."""

    at: int
    ahead: tuple[str, ...]
    after: str | None
    before: str | None


def written(words: Sequence[str]) -> str:
    """Words as a thought holds them."""
    return f" {', '.join(words)}"


def words_after(text: str, place: int) -> list[str]:
    """The first words of the sentence that begins behind a place; none where no sentence begins there."""
    if BEGIN.match(text, place) is None:
        return []
    end = END.search(text, place + 1, place + REACH)
    return WORD.findall(text[place : end.start() + 1 if end else place + REACH])[:AHEAD]


def words_before(text: str, place: int) -> list[str]:
    """The last words before a place."""
    return WORD.findall(text[max(0, place - REACH) : place])[-AHEAD:]


def places(text: str, pattern: re.Pattern[str], chooser: Chooser) -> Iterator[Place]:
    """Every match of the pattern, with what could be written there."""
    for match in pattern.finditer(text):
        at = match.end()
        ahead = words_after(text, at)
        yield Place(at, tuple(ahead), chooser.working(ahead), chooser.working(words_before(text, at)))


def pieces(text: str, tokenizer: Any, pattern: re.Pattern[str], length: int) -> Iterator[tuple[str, int]]:
    """A document in texts of at most so many tokens that end where sentences do, with their tokens."""
    while text := text.lstrip():
        offsets = tokenizer(text[: 16 * length], add_special_tokens=False, return_offsets_mapping=True)
        ends = [end for _, end in offsets["offset_mapping"]]
        if len(ends) > length:
            limit = ends[length - 1]
            cuts = [match.end() for match in pattern.finditer(text, 0, limit)]
            text, rest = text[: cuts[-1] if cuts else limit], text[cuts[-1] if cuts else limit :]
        else:
            text, rest = text[: 16 * length], text[16 * length :]
        yield text, len(tokenizer.encode(text, add_special_tokens=False))
        text = rest


def documents(folder: Path, name: str) -> list[tuple[bytes, str]]:
    """The documents of one file with the hash of each, in the order of the hashes."""
    path = folder / f"{name}.jsonl.gz"
    if not path.is_file():
        raise UserError(f"{path}: not there; give the folder with {', '.join(SHARES)} (.jsonl.gz)")
    with gzip.open(path, "rt", encoding="utf-8") as rows:
        texts = {json.loads(row)["text"] for row in rows}
    return sorted((hashlib.sha256(text.encode()).digest(), text) for text in texts)


def role(digest: bytes) -> str:
    """Where a document goes."""
    share = int.from_bytes(digest[-4:], "big") / 2**32
    return "held" if share < HELD else "warm" if share < HELD + WARM else "runs"


def chooser_of(found: dict[str, list[tuple[bytes, str]]], tokenizer: Any, room: int) -> Chooser:
    """Word counts of all documents."""
    texts = (text for some in found.values() for _, text in some)
    count = Counter(word.lower() for text in texts for word in WORD.findall(text))
    common = frozenset(word for word, _ in count.most_common(COMMON))
    return Chooser(count, common, lambda text: tokenizer.encode(text, add_special_tokens=False), room)


def worked(
    some: Sequence[tuple[bytes, str]],
    tokenizer: Any,
    config: Config,
    chooser: Chooser,
    texts: int,
    ahead: list[tuple[str, ...]],
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows with workings of what follows, and the same rows with workings of what stands before; `per_text` places of
    each text have one, drawn at random. All words after these places are added to `ahead`."""
    pattern, length = re.compile(config.text.positions.pattern), config.text.sequence_length
    after, before = list[dict[str, Any]](), list[dict[str, Any]]()
    for digest, document in some:
        for text, tokens in pieces(document, tokenizer, pattern, length):
            if len(after) == texts:
                return after, before
            found = list(places(text, pattern, chooser))
            good = [number for number, place in enumerate(found) if place.after and place.before]
            drawn = random.Random(digest + text[:64].encode())
            kept = set(drawn.sample(good, min(len(good), config.text.positions.per_text)))
            if not kept or tokens > length:
                continue
            ahead.extend(found[number].ahead for number in sorted(kept))
            for rows, name in ((after, "after"), (before, "before")):
                workings = [getattr(place, name) if number in kept else None for number, place in enumerate(found)]
                rows.append({"text": text, "workings": workings, "tokens": tokens})
    return after, before


def for_runs(some: Sequence[tuple[bytes, str]], tokenizer: Any, tokens: float) -> list[dict[str, Any]]:
    """Whole documents that hold about so many tokens."""
    rows, held = list[dict[str, Any]](), 0
    for _, text in some:
        if held >= tokens:
            break
        held += len(tokenizer.encode(text, add_special_tokens=False))
        rows.append({"text": text})
    return rows


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Rows in a fixed random order."""
    random.Random(0).shuffle(rows)
    with path.open("wb") as raw, gzip.GzipFile(fileobj=raw, mode="wb", mtime=0) as file:
        file.writelines(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)


def make(asked: argparse.Namespace) -> dict[str, Any]:
    """Write the four files; returns what they hold."""
    config = Config.load(str(PRESET))
    tokenizer: Any = load_tokenizer(asked.model)
    found = {name: documents(asked.corpora, name) for name in SHARES}
    chooser = chooser_of(found, tokenizer, config.thought.length - 1)
    rows: dict[str, list[dict[str, Any]]] = {"runs": [], "warm": [], "held": [], "before": []}
    ahead = list[tuple[str, ...]]()
    for name, share in SHARES.items():
        parts: dict[str, list[tuple[bytes, str]]] = {"runs": [], "warm": [], "held": []}
        for digest, text in found[name]:
            parts[role(digest)].append((digest, text))
        given = tokenizer, config, chooser
        rows["warm"] += worked(parts["warm"], *given, round(share * asked.warm), ahead)[0]
        held, before = worked(parts["held"], *given, round(share * asked.held), ahead)
        rows["held"] += held
        rows["before"] += before
        rows["runs"] += for_runs(parts["runs"], tokenizer, share * asked.runs * config.text.sequence_length)
    asked.out.mkdir(parents=True)
    for name, some in rows.items():
        write(asked.out / f"{name}.jsonl.gz", some)
    return {name: len(some) for name, some in rows.items()} | told(rows["warm"], ahead, chooser)


def told(rows: Sequence[dict[str, Any]], ahead: Sequence[Sequence[str]], chooser: Chooser) -> dict[str, Any]:
    """Workings a text, tokens that hold nine of ten, and what share of lists of so many words fits without leaving
    words out."""
    workings = [one for row in rows for one in row["workings"] if one]
    sizes = [len(chooser.encode(one)) + 1 for one in workings]
    lists = [chooser.listed(words) for words in ahead]
    fits = {
        str(most): sum(len(chooser.encode(written(one[:most]))) <= chooser.room for one in lists) / max(1, len(lists))
        for most in range(FEWEST, MOST + 1)
    }
    kept = Counter(one.count(",") + 1 for one in workings)
    return {
        "workings": len(workings),
        "a_text": round(len(workings) / max(1, len(rows)), 2),
        "nine_of_ten_hold": enough_for(sizes),
        "words": {str(words): round(kept[words] / max(1, len(workings)), 3) for words in sorted(kept)},
        "fits_whole": {words: round(share, 3) for words, share in fits.items()},
    }


def main(given: list[str] | None = None) -> int:
    """Make the folder and say what it holds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", help="the model whose tokens count")
    parser.add_argument("corpora", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--warm", type=int, default=6000, help="texts with workings")
    parser.add_argument("--held", type=int, default=384, help="texts that are measured afterwards")
    parser.add_argument("--runs", type=int, default=6000, help="sequences that documents for the runs fill")
    asked = parser.parse_args(given)
    if asked.out.exists():
        raise UserError(f"{asked.out} already exists; choose another folder, or remove it")
    print(json.dumps(make(asked)))
    return 0


if __name__ == "__main__":
    script(main)

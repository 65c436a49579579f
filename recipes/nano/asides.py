"""Token streams for pre-training: real text, worked prose and notebooks, with asides strewn through all of them.

An aside is ` (` … `)` between two tokens of a text, after which the text goes on as if nothing had been said: the shape
of a hidden thought. What the model learns to *read* over is wider than what it learns to *write*: a token with the
`SILENT` bit is input but never a target. The opening is always silent, since tfive opens thoughts itself; so the
model's prediction of plain text is not spent on openings, and asides can be frequent. Unhelpful contents (foreign
fragments, random tokens, slips, cut-off workings) are silent too.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer
from worked_prose import GUESS_WORDS, KINDS, Figure, draw_document, draw_figure, draw_notebook, stream

SILENT = 0x8000
LONGEST = 11
DENSITIES = (0.0, 0.03, 0.06, 0.10)  # asides per token; one is drawn for each document
NEAR = 48  # how far back an aside may copy from

# What stands between the parentheses, anywhere in a text.
ANYWHERE = {"copy": 0.66, "empty": 0.14, "foreign": 0.08, "random": 0.05, "figures": 0.07}
# What stands between them right before a result, where half of the figures have an aside.
AT_RESULTS = {
    "working": 0.11,  # written: the model learns to choose it
    "practice": 0.30,  # the first token is silent: the model learns to go on with a working, not to begin one
    "cut": 0.07,  # a working broken off
    "slip": 0.025,  # a working with a wrong digit; the result that follows is right all the same
    "guess": 0.15,  # the result named at once, after a word such as "say"
    "wrong guess": 0.05,
    "copy": 0.215,
    "empty": 0.06,
    "foreign": 0.02,
}
ASIDES_AT_RESULTS = 0.5
RECKONED = 0.25
SHARES = {"real": 0.38, "worked": 0.46, "notebook": 0.16}  # of tokens, roughly
PIECE_LENGTHS = {"real": 230, "worked": 110, "notebook": 90}

Tokens = npt.NDArray[np.uint16]


@dataclass
class Book:
    """What asides and streams are made from: the tokenizer's few needed ids and the tokenised real documents."""

    tokenizer: Tokenizer
    documents: list[Tokens]

    def __post_init__(self) -> None:
        end = self.tokenizer.token_to_id("<|endoftext|>")
        if end is None:
            raise ValueError("the tokenizer has no token <|endoftext|>; make it with train_tokenizer.py")
        self.end = end
        (self.open,) = self.tokenizer.encode(" (").ids
        (self.close,) = self.tokenizer.encode(")").ids
        self.size = self.tokenizer.get_vocab_size()
        self.weights = np.cumsum([len(document) for document in self.documents])

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).ids

    def window(self, rng: random.Random, length: int) -> list[int]:
        """A stretch of a real document, documents drawn by their length."""
        index = int(np.searchsorted(self.weights, rng.randrange(int(self.weights[-1])), side="right"))
        document = self.documents[index]
        start = rng.randrange(max(1, len(document) - length + 1))
        return document[start : start + length].tolist()


def pick(rng: random.Random, shares: dict[str, float]) -> str:
    return rng.choices(list(shares), weights=list(shares.values()))[0]


def silent(tokens: list[int]) -> list[int]:
    return [token | SILENT for token in tokens]


def _copy(rng: random.Random, before: list[int]) -> list[int]:
    """A fragment of the text just before; the fragment lies within it as a whole."""
    near = before[-NEAR:]
    length = min(rng.randint(1, LONGEST), len(near))
    start = rng.randrange(len(near) - length + 1)
    return near[start : start + length]


def aside_anywhere(rng: random.Random, book: Book, before: list[int]) -> list[int]:
    """An aside with its delimiters, for a place with nothing to work out. `before` is the plain text up to it."""
    kind = pick(rng, ANYWHERE) if before else "empty"
    opening = book.open | SILENT
    if kind == "empty":
        return [opening, book.close]
    if kind == "copy":
        return [opening, *_copy(rng, before), book.close]
    length = rng.randint(1, LONGEST)
    if kind == "foreign":
        inner = [token for token in book.window(rng, length) if token not in (book.open, book.close)]
    elif kind == "random":
        inner = [rng.randrange(1, book.size) for _ in range(length)]
        inner = [token for token in inner if token not in (book.open, book.close)]
    else:
        figure = draw_figure(rng, rng.choice(KINDS), held_out=False)
        inner = book.encode(figure.working)[:length]
    return [opening, *silent(inner), book.close | SILENT]


def _slip(rng: random.Random, digits: str) -> str:
    """The same text with one digit replaced by another one."""
    places = [place for place, letter in enumerate(digits) if letter.isdigit()]
    place = rng.choice(places)
    other = rng.choice([d for d in "0123456789" if d != digits[place] and not (place == 0 and d == "0")])
    return digits[:place] + other + digits[place + 1 :]


def aside_at_result(rng: random.Random, book: Book, before: list[int], figure: Figure) -> list[int]:
    """An aside with its delimiters, for the place right before a result."""
    kind = pick(rng, AT_RESULTS)
    opening, ending = book.open | SILENT, book.close
    working = book.encode(figure.working)
    if kind == "working":
        return [opening, *working, ending]
    if kind == "practice":
        return [opening, working[0] | SILENT, *working[1:], ending]
    if kind == "cut":
        return [opening, *silent(working[: rng.randrange(1, len(working))]), ending | SILENT]
    if kind == "slip":
        return [opening, *silent(book.encode(_slip(rng, figure.working))), ending | SILENT]
    if kind == "guess":
        return [opening, *book.encode(f"{rng.choice(GUESS_WORDS)} {figure.result}"), ending]
    if kind == "wrong guess":
        wrong = str(figure.result)
        for _ in range(rng.randint(1, 3)):
            wrong = _slip(rng, wrong)
        return [opening, *silent(book.encode(f"{rng.choice(GUESS_WORDS)} {wrong}")), ending | SILENT]
    if kind == "copy":
        return [opening, *_copy(rng, before), ending]
    if kind == "empty":
        return [opening, ending]
    inner = book.encode(draw_figure(rng, figure.kind, held_out=False).working)
    return [opening, *silent(inner), ending | SILENT]


def _places(rng: random.Random, length: int, density: float) -> list[int]:
    """Every place below `length` with probability `density`, drawn by the gaps between them."""
    places: list[int] = []
    if density == 0.0:
        return places
    place = -1
    while True:
        place += 1 + int(math.log(1.0 - rng.random()) / math.log(1.0 - density))
        if place >= length:
            return places
        places.append(place)


def strew(rng: random.Random, book: Book, plain: list[int], figures: dict[int, Figure], density: float) -> list[int]:
    """`plain` with asides: at `density` anywhere, and before half of the results (`figures`: token index of a
    result).
    """
    anywhere = [place for place in _places(rng, len(plain), density) if place not in figures]
    chosen = [place for place in figures if rng.random() < ASIDES_AT_RESULTS]
    out: list[int] = []
    done = 0
    for place in sorted(anywhere + chosen):
        out += plain[done:place]
        before = plain[max(0, place - NEAR) : place]
        out += (
            aside_at_result(rng, book, before, figures[place])
            if place in figures
            else aside_anywhere(rng, book, before)
        )
        done = place
    return out + plain[done:]


def draw_piece(seed: int, role: str, number: int, book: Book) -> list[int]:
    """One document of the stream, asides and closing end token included."""
    rng = stream(seed, role, number)
    per_piece = {name: share / PIECE_LENGTHS[name] for name, share in SHARES.items()}
    kind, density = pick(rng, per_piece), rng.choice(DENSITIES)
    figures: dict[int, Figure] = {}
    if kind == "real":
        plain = book.window(rng, rng.randint(60, 300))
    elif kind == "notebook":
        return [*book.encode(draw_notebook(seed, role + "/notebook", number)), book.end]
    else:
        plain = []
        for piece in draw_document(seed, role + "/worked", number, reckoned=RECKONED, held_out=False):
            if piece.figure:
                figures[len(plain)] = piece.figure
            plain += book.encode(piece.text)
    return [*strew(rng, book, plain, figures, density), book.end]


def make_shard(seed: int, shard: int, tokens: int, book: Book) -> Tokens:
    """Exactly `tokens` tokens of the stream; shard k is the same whoever makes it and whenever."""
    out: list[int] = []
    number = 0
    while len(out) < tokens:
        out += draw_piece(seed, f"pretrain/{shard}", number, book)
        number += 1
    return np.array(out[:tokens], dtype=np.uint16)

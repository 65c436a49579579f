"""Worked prose: short everyday passages with a computed figure, whose working may be shown or left out.

A document is a function of (seed, role, number) alone, so any number of processes produce the same text.
Three kinds of figure: `product` (two two-digit numbers), `sum` (four three-digit numbers), `load` (a few full
containers and some loose things). Every kind has a short working `X + Y`: partial products, pairwise sums, product and
rest.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from phrases import (
    CUES,
    DAYS,
    FILLERS,
    LOAD_FRAMES,
    NAMES,
    PRODUCT_FRAMES,
    SCENES,
    SUM_FRAMES,
    TIMES,
    VERBS,
    Scene,
)

KINDS = ("product", "sum", "load")
# Drawn from evenly. Loads are easy without a thought, so pre-training alone has them.
MIDTRAINED = ("product", "sum", "sum")
HELD_OUT_PAIRS = 0.3
GUESS_WORDS = ("say", "perhaps", "maybe")


@dataclass(frozen=True)
class Figure:
    """One computed figure: what is asked, the working `X + Y`, and the result."""

    kind: str
    operands: tuple[int, ...]
    parts: tuple[int, int]

    @property
    def result(self) -> int:
        return self.parts[0] + self.parts[1]

    @property
    def working(self) -> str:
        return f"{self.parts[0]} + {self.parts[1]}"

    @property
    def question(self) -> str:
        """The figure in symbols, as it stands in a notebook."""
        if self.kind == "product":
            return "{} x {}".format(*self.operands)
        if self.kind == "sum":
            return " + ".join(map(str, self.operands))
        return "{} x {} + {}".format(*self.operands)


@dataclass(frozen=True)
class Piece:
    """A stretch of a document. `figure` is set on the stretch that begins with a result; a thought would stand before
    it.
    """

    text: str
    figure: Figure | None = None


def stream(seed: int, role: str, number: int) -> random.Random:
    """The random numbers of one document."""
    return random.Random(f"nano/{seed}/{role}/{number}")


def pair_is_held_out(a: int, b: int) -> bool:
    """Whether a two-digit pair is kept out of pre-training, so that its product cannot have been learnt by heart."""
    low, high = sorted((a, b))
    return (low * 7919 + high * 104729) % 1000 < 1000 * HELD_OUT_PAIRS


def draw_figure(rng: random.Random, kind: str, held_out: bool) -> Figure:
    """A figure of a kind; products come from the held-out pairs or from the others, never from both."""
    if kind == "product":
        while True:
            a, b = rng.randint(12, 98), rng.randint(12, 98)
            if a % 10 and b % 10 and a * b >= 1000 and pair_is_held_out(a, b) == held_out:
                return Figure("product", (a, b), (a * (b // 10 * 10), a * (b % 10)))
    if kind == "sum":
        w, x, y, z = (rng.randint(101, 989) for _ in range(4))
        return Figure("sum", (w, x, y, z), (w + x, y + z))
    n, b, c = rng.randint(3, 9), rng.randint(12, 98), rng.randint(101, 989)
    return Figure("load", (n, b, c), (n * b, c))


def _slots(rng: random.Random, scene: Scene) -> dict[str, str]:
    names = rng.sample(NAMES, 4)
    first_day = rng.randrange(len(DAYS))
    boxes, items = rng.choice(scene.goods)
    slots = {f"name{i + 1}": name for i, name in enumerate(names)}
    slots |= {f"day{i + 1}": DAYS[(first_day + i) % len(DAYS)] for i in range(4)}
    who = names[0] if rng.random() < 0.6 else rng.choice(scene.people)
    return slots | {
        "who": who,
        "verb": rng.choice(VERBS),
        "boxes": boxes,
        "items": items,
        "place": scene.place,
        "store": scene.store,
        "time": rng.choice(TIMES),
    }


def _capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def _statement(rng: random.Random, figure: Figure, slots: dict[str, str]) -> str:
    frames = {"product": PRODUCT_FRAMES, "sum": SUM_FRAMES, "load": LOAD_FRAMES}[figure.kind]
    keys = {"product": "ab", "sum": "wxyz", "load": "nbc"}[figure.kind]
    numbers = {key: str(value) for key, value in zip(keys, figure.operands, strict=True)}
    return _capital(rng.choice(frames).format(**slots, **numbers))


def draw_document(
    seed: int, role: str, number: int, *, reckoned: float, held_out: bool, kinds: tuple[str, ...] = KINDS
) -> list[Piece]:
    """A document of one or two figures with sentences around them.

    `reckoned` is the share of figures whose working stands openly in the sentence; 0 gives text without any working.
    `kinds` are drawn from with equal chances.
    """
    rng = stream(seed, role, number)
    scene = rng.choice(SCENES)
    pieces: list[Piece] = []
    before = ""
    for index in range(rng.choice((1, 2, 2))):
        slots = _slots(rng, scene)
        if rng.random() < (0.6 if index == 0 else 0.4):
            before += _capital(rng.choice(FILLERS).format(**slots)) + " "
        figure = draw_figure(rng, rng.choice(kinds), held_out)
        before += _statement(rng, figure, slots)
        if rng.random() < reckoned:
            before += f", that is {figure.working}"
        pieces.append(Piece(before + rng.choice(CUES), None))
        pieces.append(Piece(f" {figure.result} {slots['items']}{rng.choice(scene.tails)}.", figure))
        before = " "
    if rng.random() < 0.5:
        pieces.append(Piece(before + _capital(rng.choice(FILLERS).format(**_slots(rng, scene)))))
    return pieces


def draw_notebook(seed: int, role: str, number: int) -> str:
    """A page of plain sums: where the model learns the steps that a working needs, apart from any prose."""
    rng = stream(seed, role, number)
    lines = []
    for _ in range(rng.randint(4, 9)):
        figure = draw_figure(rng, rng.choice(KINDS), held_out=False)
        form = rng.random()
        if form < 0.35:
            lines.append(f"{figure.question} = {figure.working} = {figure.result}")
        elif form < 0.55:
            lines.append(f"{figure.working} = {figure.result}")
        elif form < 0.75:
            x, y = rng.randint(11, 4999), rng.randint(11, 1999)
            lines.append(f"{x} + {y} = {x + y}")
        else:
            a, d = rng.randint(12, 98), rng.choice((rng.randint(2, 9), 10 * rng.randint(2, 9)))
            lines.append(f"{a} x {d} = {a * d}")
    return "\n".join(lines)


def document_text(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


NUMBERS = re.compile(r"\d+")


def check_document(text: str, figures: list[Figure]) -> None:
    """Raise unless every figure's result is right, recomputed from the operands rather than from the working."""
    for figure in figures:
        o = figure.operands
        truth = {"product": lambda o: o[0] * o[1], "sum": sum, "load": lambda o: o[0] * o[1] + o[2]}[figure.kind](o)
        if truth != figure.result or str(truth) not in NUMBERS.findall(text):
            raise ValueError(f"{figure} is wrong or missing in: {text}")

"""Thoughts for the browser tests, in the form that `tfive report` writes, and texts that break careless pages."""

from __future__ import annotations

import random
from typing import Any

Data = dict[str, Any]

HOSTILE = (
    "</script><script>document.title='broken'</script>",
    "<img src=x onerror=\"document.title='broken'\">",
    "\u202eright to left\u202c",
    "\u200f",
    "👩‍🔬🧠",
    "x" * 10_000,
    "<!-- -->",
    "&amp;",
    "\\u003c",
    "`",
)
"""Texts that break pages which take them for markup."""

WORDS = [
    "the",
    "box",
    "holds",
    "12",
    "of",
    "them",
    ",",
    "so",
    "that",
    "makes",
    "in",
    "all",
    "a",
    "day",
    "and",
    "each",
    "one",
    "costs",
    "3",
    "more",
    ".",
]


def snapshot(
    rng: random.Random, items: int, detailed: int, horizon: int, length: int, pieces: int, skill: float, hidden: bool
) -> Data:
    """What was measured at one moment: thoughts, gains, and the token-level detail of the first items."""
    lengths = [rng.randint(1, length) for _ in range(items)]
    gains = [int(1000 * rng.gauss(skill, 0.25)) for _ in range(items)]
    inside, following = sum(lengths[:detailed]), detailed * horizon

    def many(count: int, mean: float, spread: float) -> list[int]:
        return [int(100 * rng.gauss(mean, spread)) for _ in range(count)]

    without = [abs(value) for value in many(following, 2.2, 0.9)]
    return {
        "length": lengths,
        "closed": [rng.randint(0, 1) for _ in range(items)],
        "tokens": [rng.randrange(1, pieces) for _ in range(sum(lengths))],
        "thought_gain": [gain - 80 for gain in gains],
        "content_gain": gains,
        "other_gain": [rng.randint(-90, 20) for _ in range(items)],
        "empty_gain": [rng.randint(-60, 10) for _ in range(items)],
        "gain_vs_base": [gain - 85 for gain in gains],
        "mixed_gain": [max(gain // 3, -9) for gain in gains],
        "gate": [rng.randint(0, 100) for _ in range(items)],
        "detail": {
            "horizon": [horizon] * detailed,
            "without": without,
            "own": [max(0, loss - rng.randint(-40, 120)) for loss in without],
            "other": [loss + rng.randint(-20, 30) for loss in without],
            "empty": [loss + rng.randint(-10, 20) for loss in without],
            "gate": [rng.randint(0, 100) for _ in range(following)],
            "values": None if hidden else [many(inside, 0.4, 0.5), many(inside, 0.5, 0.5)],
            "advantages": None if hidden else [many(inside, 0, 1), many(inside, 0, 1)],
            "weight": None if hidden else [rng.randint(30, 70) for _ in range(inside)],
            "mixed": None if hidden else many(inside, 0, 1),
            "returns": None if hidden else many(inside, 0.5, 0.6),
        },
    }


def explorer(items: int = 120, moments: int = 3, detailed: int | None = None, extra: tuple[str, ...] = ()) -> Data:
    """Texts with thoughts at their positions; `extra` pieces are put into the first text and the first thoughts."""
    rng = random.Random(7)
    pieces = ["", *(f" {word}" for word in WORDS), "\n", *extra]
    first_extra = len(pieces) - len(extra)
    per_text, text_length, horizon, length = 6, 96, 8, 10
    texts = -(-items // per_text)
    tokens = [rng.randrange(1, first_extra) for _ in range(texts * text_length)]
    for place in range(len(extra)):
        tokens[20 + 3 * place] = first_extra + place
    kept = items if detailed is None else detailed
    names = {1: ["end"], 2: ["start", "end"], 3: ["start", "half-way", "end"]}[moments]
    windows = [20] if moments == 1 else [20 * at // (moments - 1) for at in range(moments)]
    shots = [
        snapshot(
            rng,
            items,
            kept,
            horizon,
            length,
            first_extra,
            0.24 * at / max(moments - 1, 1),
            hidden=at == 0 < moments - 1,
        )
        for at in range(moments)
    ]
    for shot in shots:
        for place in range(min(len(extra), len(shot["tokens"]))):
            shot["tokens"][place] = first_extra + place
    return {
        "label": "t5",
        "seed": 0,
        "horizon": horizon,
        "length": length,
        "checkpoints": [4, 8],
        "thinks": True,
        "critics": 2,
        "gate": True,
        "windows": windows,
        "names": names,
        "sources": ["boxes", "letters"],
        "kinds": ["match", "entropy", "uniform"],
        "pieces": pieces,
        "texts": {
            "id": list(range(texts)),
            "source": [text % 2 for text in range(texts)],
            "offsets": [text * text_length for text in range(texts + 1)],
            "tokens": tokens,
            "documents": [[0, text_length]] * texts,
        },
        "items": {
            "id": [1000 + item for item in range(items)],
            "text": [item // per_text for item in range(items)],
            "position": [12 + 13 * (item % per_text) for item in range(items)],
            "kind": [item % 3 for item in range(items)],
            "source": [item // per_text % 2 for item in range(items)],
            "detail": [item if item < kept else -1 for item in range(items)],
        },
        "quantities": {"gain": 0.001, "loss": 0.01, "value": 0.01, "weight": 0.01},
        "snapshots": shots,
    }

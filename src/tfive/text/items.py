"""Positions of every sequence at which thoughts are written, chosen once, each from the text up to it alone.

Each kind says of every position whether it is a candidate, and that depends only on x[≤p] of its own document (and on
p+H lying in the same document). A counter-based draw decides among candidates, so later text has no influence.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tfive.errors import UserError
from tfive.rng import uniforms
from tfive.telemetry import Telemetry
from tfive.text.files import ArrayWriter
from tfive.text.settings import KINDS, Positions
from tfive.text.tokens import TextTokenizer

Ints = npt.NDArray[np.integer]
Mask = npt.NDArray[np.bool_]
Draws = npt.NDArray[np.floating]
Entropies = Callable[[Ints, Ints], npt.NDArray[np.floating]]
"""(tokens_BS, document_BS) → entropy of the next-token distribution after each token, documents apart. [B, S]"""

BLOCK = 64
SAMPLED_ROWS = 4096
"""Most rows that the entropy quantile is taken from."""

ENTROPY_QUANTILE = 0.8
"""Positions whose entropy lies above this quantile of the corpus count as uncertain: the uncertain fifth of a text is
several times what any mixture of kinds asks for, so the draw among them stays random."""

PATTERN_REACH = 256
"""How many characters before a position a match may start: phrases are shorter, and every position is matched anew."""


def segments(document_S: Ints) -> list[tuple[int, int]]:
    """Start and end of each document's part of a row."""
    cuts = np.flatnonzero(np.diff(document_S)) + 1
    edges = [0, *cuts.tolist(), len(document_S)]
    return list(pairwise(edges))


def eligible(document_S: Ints, horizon: int) -> Mask:
    """Positions with p … p+H inside one document."""
    allowed = np.zeros(len(document_S), dtype=bool)
    for start, end in segments(document_S):
        allowed[start : max(end - horizon, start)] = True
    return allowed


def every_step(document_S: Ints, step: int) -> Mask:
    """Every `step`-th token of each document's part of a row."""
    found = np.zeros(len(document_S), dtype=bool)
    for start, end in segments(document_S):
        found[start + step - 1 : end : step] = True
    return found


def after_pattern(tokens_S: Ints, document_S: Ints, tokenizer: TextTokenizer, pattern: str, reach: int) -> Mask:
    """Tokens at whose end a match of `pattern` ends, decided from the decoded text up to that token and no further.

    The search treats that point as the end of the text, so neither look-ahead nor a longer match can use later text. A
    match that ends inside a token does not count, nor one after a token that ends inside a character.
    """
    ending = re.compile(rf"(?:{pattern})\Z")
    found = np.zeros(len(tokens_S), dtype=bool)
    for start, end in segments(document_S):
        text, ends = tokenizer.growing_text(tokens_S[start:end].tolist())
        for offset, stop in enumerate(ends.tolist()):
            if stop > 0 and ending.search(text, max(0, stop - reach), stop):
                found[start + offset] = True
    return found


def kind_counts(shares: Sequence[float], per_text: int, draw: float) -> list[int]:
    """How many of `per_text` positions each kind may choose; `draw` in (0, 1) rounds so that shares hold on average."""
    ends = np.cumsum(shares) / np.sum(shares) * per_text
    ends[-1] = per_text
    return np.diff(np.floor(ends + draw), prepend=0.0).astype(np.int64).tolist()


def choose(candidates: dict[str, Mask], counts: Sequence[int], draws_S: Draws, gap: int) -> list[tuple[int, int]]:
    """Positions of one row, rising, with the number of their kind.

    Kinds choose one after the other, at random among their candidates. A kind with no share has no mask in
    `candidates`; what a kind leaves over goes to the kinds after it.
    """
    free = np.ones(len(draws_S), dtype=bool)
    chosen: list[tuple[int, int]] = []
    left = 0
    for kind, (name, count) in enumerate(zip(KINDS, counts)):
        left += count
        if name not in candidates:
            continue
        places = np.flatnonzero(candidates[name])
        for p in places[np.argsort(draws_S[places], kind="stable")].tolist():
            if left == 0:
                break
            if free[p]:
                free[max(0, p - gap + 1) : p + gap] = False
                chosen.append((p, kind))
                left -= 1
    return sorted(chosen)


@dataclass(frozen=True)
class PositionChooser:
    """Chooses positions; holds everything they depend on beside the packed rows."""

    settings: Positions
    horizon: int
    seed: int
    tokenizer: TextTokenizer
    entropies: Entropies | None = None

    def __post_init__(self) -> None:
        if self.settings.entropy > 0 and self.entropies is None:
            raise UserError("text.positions.entropy needs a base model to measure entropy with; set it to 0")

    @property
    def gap(self) -> int:
        """Least distance of two positions."""
        return self.settings.min_gap or self.horizon

    def row(self, number: int, tokens_S: Ints, document_S: Ints, uncertain_S: Mask | None) -> list[tuple[int, int]]:
        """Positions and kinds of one row."""
        draw, draws_S = (draws[0] for draws in self._draws(number, number + 1, len(tokens_S)))
        return self._chosen(float(draw), draws_S, tokens_S, document_S, uncertain_S)

    def _draws(self, first: int, last: int, width: int) -> tuple[Draws, Draws]:
        """Random numbers of some rows: one for each, and one for each of its tokens."""
        rows = np.arange(first, last)
        draws_BS = uniforms(self.seed, "text/positions", 0, rows[:, None], 0, np.arange(width))
        return uniforms(self.seed, "text/kinds", 0, rows), draws_BS

    def _chosen(
        self, draw: float, draws_S: Draws, tokens_S: Ints, document_S: Ints, uncertain_S: Mask | None
    ) -> list[tuple[int, int]]:
        allowed = eligible(document_S, self.horizon)
        shares = self.settings.shares()
        candidates: dict[str, Mask] = {}
        if shares["match"] > 0:
            matched = after_pattern(tokens_S, document_S, self.tokenizer, self.settings.pattern, PATTERN_REACH)
            candidates["match"] = allowed & matched
        if shares["entropy"] > 0 and uncertain_S is not None:
            candidates["entropy"] = allowed & uncertain_S
        if shares["every"] > 0:
            candidates["every"] = allowed & every_step(document_S, self.settings.step)
        if shares["uniform"] > 0:
            candidates["uniform"] = allowed
        counts = kind_counts(list(shares.values()), self.settings.per_text, draw)
        return choose(candidates, counts, draws_S, self.gap)

    def write(self, folder: Path, tokens: Ints, document: Ints, scratch: Path, telemetry: Telemetry) -> float | None:
        """Write `positions.npy` and `kinds.npy`; returns the entropy above which a position counted as uncertain."""
        entropy = None
        if self.settings.entropy > 0 and self.entropies is not None:
            entropy = _measured(self.entropies, tokens, document, scratch / "entropy.npy", telemetry)
        threshold = self._threshold(entropy, document) if entropy is not None else None
        shape = (len(tokens), self.settings.per_text)
        with (
            ArrayWriter(folder / "positions.npy", shape, "<i4") as positions,
            ArrayWriter(folder / "kinds.npy", shape, "i1") as kinds,
        ):
            for first, last in telemetry.progress(blocks(len(tokens)), "choosing positions", -(-len(tokens) // BLOCK)):
                place = np.full((last - first, shape[1]), -1, dtype=np.int32)
                kind = place.astype(np.int8)
                # All rows of a block at once: a draw for few takes about as long as one for many.
                draws_B, draws_BS = self._draws(first, last, tokens.shape[1])
                for row in range(first, last):
                    draw, draws_S = float(draws_B[row - first]), draws_BS[row - first]
                    uncertain = None if entropy is None else entropy[row] >= threshold
                    found = self._chosen(draw, draws_S, tokens[row], document[row], uncertain)
                    for slot, (p, which) in enumerate(found):
                        place[row - first, slot], kind[row - first, slot] = p, which
                positions.write(place)
                kinds.write(kind)
        return threshold

    def _threshold(self, entropy: npt.NDArray[np.floating], document: Ints) -> float:
        rows = np.linspace(0, len(entropy) - 1, min(len(entropy), SAMPLED_ROWS)).astype(np.int64)
        values = [entropy[row][eligible(document[row], self.horizon)] for row in np.unique(rows)]
        together = np.concatenate(values)
        return float(np.quantile(together, ENTROPY_QUANTILE)) if len(together) else 0.0


def _measured(
    entropies: Entropies, tokens: Ints, document: Ints, path: Path, telemetry: Telemetry
) -> npt.NDArray[np.floating]:
    """Entropies of all rows, written to `path` and memory-mapped from there."""
    with ArrayWriter(path, tokens.shape, "<f4") as writer:
        for first, last in telemetry.progress(blocks(len(tokens)), "measuring entropy", -(-len(tokens) // BLOCK)):
            measured = entropies(tokens[first:last].astype(np.int64), document[first:last].astype(np.int64))
            if measured.shape != tokens[first:last].shape or not np.isfinite(measured).all():
                raise UserError("the base model's entropies are not finite numbers; check the model")
            writer.write(measured)
    return np.load(path, mmap_mode="r")


def blocks(rows: int) -> Iterator[tuple[int, int]]:
    """Row ranges of at most `BLOCK` rows."""
    return ((first, min(first + BLOCK, rows)) for first in range(0, rows, BLOCK))

"""Random positions of a row drawn anew by a weight of every token; whatever chose them before, the others stay."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tfive.text.items import Ints, Mask

Floats = npt.NDArray[np.floating]


def redrawn(
    positions_P: Ints, kinds_P: Ints, moving_P: Mask, weight_S: Floats, draws_S: Floats, gap: int
) -> tuple[Ints, Ints]:
    """Positions and kinds of a row, rising, in which those of `moving_P` are drawn in proportion to `weight_S`.

    Every token has a waiting time that is exponential with its weight as rate (from `draws_S`, uniform numbers), and
    those that come first are taken, at the least distance `gap` from each other and from the positions that stay.
    Tokens of weight 0 are never taken. A row in which not all find room keeps its positions, so that every text has as
    many as before.
    """
    staying = [(int(p), int(k)) for p, k, moves in zip(positions_P, kinds_P, moving_P) if p >= 0 and not moves]
    moved_kinds = [int(k) for p, k, moves in zip(positions_P, kinds_P, moving_P) if p >= 0 and moves]
    free_S = weight_S > 0
    for p, _ in staying:
        free_S[max(0, p - gap + 1) : p + gap] = False
    places = np.flatnonzero(free_S)
    chosen: list[int] = []
    for p in places[np.argsort(-np.log(draws_S[places]) / weight_S[places], kind="stable")].tolist():
        if len(chosen) == len(moved_kinds):
            break
        if free_S[p]:
            free_S[max(0, p - gap + 1) : p + gap] = False
            chosen.append(p)
    if len(chosen) < len(moved_kinds):
        return positions_P, kinds_P
    together = sorted([*staying, *zip(chosen, moved_kinds)])
    positions_P, kinds_P = np.full_like(positions_P, -1), np.full_like(kinds_P, -1)
    for slot, (p, kind) in enumerate(together):
        positions_P[slot], kinds_P[slot] = p, kind
    return positions_P, kinds_P

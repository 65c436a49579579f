"""Two random halves of a set's texts, each of which is judged by what the other taught (`window.crossed`).

Thoughts of different texts are drawn independently given the texts, so a normaliser and a weight that come from one
half are as independent of the other's actions as those of a set of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tfive.rng import permutation


@dataclass(frozen=True)
class Half:
    """Row numbers of the texts that are judged, and of those that teach, the latter in random order."""

    judged: Tensor
    teaching: Tensor

    def split(self, items_B: Tensor, learn: int, validate: int) -> tuple[Tensor, Tensor]:
        """Teaching texts with about `learn` items and, after them, others with about `validate`; of fewer items both
        get their share. Neither is empty where two texts teach. `items_B`: the items of every text, on the host."""
        sum_B, count = items_B[self.teaching].cumsum(0), len(self.teaching)
        share = min(1.0, int(sum_B[-1]) / max(learn + validate, 1))
        ends = torch.tensor([share * learn, share * (learn + validate)], dtype=torch.float64)
        first, second = (int(end) + 1 for end in torch.searchsorted(sum_B.double(), ends))
        first = min(max(first, 1), max(count - 1, 1))
        return self.teaching[:first], self.teaching[first : min(max(second, first + 1), count)]


def halves(texts: int, seed: int, window: int) -> tuple[Half, Half]:
    """The two halves of so many texts, by a counter-based order of this window."""
    order = torch.from_numpy(permutation(seed, "crossed", window, texts))
    first, second = order[: texts // 2], order[texts // 2 :]
    return Half(first.sort().values, second), Half(second.sort().values, first)

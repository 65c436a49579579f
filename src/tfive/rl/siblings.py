"""What the other thoughts at a position came to, where a method with critics draws several (`thought.group`).

Thoughts are drawn independently given the text, so nothing of the others depends on an action of this one: a critic
that sees them (`critic.sees = group`) is a baseline like any other, and so is their mean.
"""

from __future__ import annotations

import torch
from torch import Tensor


def mean_of_others(value_BR: Tensor, valid_BR: Tensor, group: int) -> Tensor:
    """The mean of a value over the other thoughts of the position, 0 where there is none.

    Branch r = p·G + g: the group member is the faster index.
    """
    value_BPG = (value_BR * valid_BR).unflatten(1, (-1, group))
    sum_BPG = value_BPG.sum(-1, keepdim=True) - value_BPG
    return sum_BPG.flatten(1) / number_of_others(valid_BR, group).clamp(min=1)


def number_of_others(valid_BR: Tensor, group: int) -> Tensor:
    """How many other thoughts there are at the position."""
    valid_BPG = valid_BR.long().unflatten(1, (-1, group))
    return (valid_BPG.sum(-1, keepdim=True) - valid_BPG).flatten(1)


def unit_of_others(return_BR: Tensor, valid_BR: Tensor, group: int) -> Tensor:
    """`[B, R]`: how far the whole returns of the n other thoughts at the position lie apart, √((n·var + 1)/(n + 1)).

    The 1 is the second moment of a return in the run's own scale (eq:reward-scale), about zero and over all positions,
    with the weight of one thought: others that came to the same leave a unit of 1/√(n + 1), not of nothing.
    """
    _, deviation_BR = numbers_of_others(return_BR, valid_BR, group).unbind(-1)
    n_BR = number_of_others(valid_BR, group)
    return ((n_BR * deviation_BR.square() + 1) / (n_BR + 1)).sqrt()


def numbers_of_others(return_BR: Tensor, valid_BR: Tensor, group: int) -> Tensor:
    """`[B, R, 2]`: mean and deviation of the whole returns of the other thoughts at the position."""
    mean_BR = mean_of_others(return_BR.double(), valid_BR, group)
    square_BR = mean_of_others(return_BR.double().square(), valid_BR, group)
    deviation_BR = (square_BR - mean_BR.square()).clamp(min=0).sqrt()
    return (torch.stack([mean_BR, deviation_BR], -1) * valid_BR[..., None]).to(return_BR.dtype)

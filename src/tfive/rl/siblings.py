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
    value_BPG, valid_BPG = (tensor.unflatten(1, (-1, group)) for tensor in (value_BR * valid_BR, valid_BR.long()))
    others_BPG = valid_BPG.sum(-1, keepdim=True) - valid_BPG
    mean_BPG = (value_BPG.sum(-1, keepdim=True) - value_BPG) / others_BPG.clamp(min=1)
    return mean_BPG.flatten(1)


def numbers_of_others(return_BR: Tensor, valid_BR: Tensor, group: int) -> Tensor:
    """`[B, R, 2]`: mean and deviation of the whole returns of the other thoughts at the position."""
    mean_BR = mean_of_others(return_BR.double(), valid_BR, group)
    square_BR = mean_of_others(return_BR.double().square(), valid_BR, group)
    deviation_BR = (square_BR - mean_BR.square()).clamp(min=0).sqrt()
    return (torch.stack([mean_BR, deviation_BR], -1) * valid_BR[..., None]).to(return_BR.dtype)

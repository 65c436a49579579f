"""Group-relative credit: the thoughts of one position are each other's baseline."""

from __future__ import annotations

from torch import Tensor

from tfive.learn.policy import Baseline, group_advantages
from tfive.rollout.trajectory import Trajectories


def with_group_advantages(
    acting: Trajectories, reward_BR: Tensor, group: int, baseline: Baseline, epsilon: float = 1e-6
) -> Trajectories:
    """The trajectories with an advantage for every action: its whole thought's, relative to the group at its position.

    Branch r = p·G + g, so that the group is the faster index.
    """
    reward_BPG, valid_BPG = (tensor.unflatten(1, (-1, group)) for tensor in (reward_BR, acting.thoughts.valid_BR))
    advantage_BR = group_advantages(reward_BPG, baseline, valid_BPG, epsilon).flatten(1)
    return acting.having(advantage_BRT=advantage_BR[..., None] * acting.mask_BRT)

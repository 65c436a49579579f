"""Group-relative advantages: the thoughts at one position are each other's baseline (GRPO, RLP, Quiet-STaR)."""

from __future__ import annotations

import torch
from torch import Tensor

from tfive.rl.losses import Baseline, group_advantages
from tfive.rl.trajectory import Trajectories


def with_group_advantages(acting: Trajectories, reward_BR: Tensor, group: int, baseline: Baseline) -> Trajectories:
    """The trajectories with an advantage for every action: that of its whole thought within the group at its position.

    Branch r = p·G + g: the group member is the faster index.
    """
    reward_BPG, valid_BPG = (tensor.unflatten(1, (-1, group)) for tensor in (reward_BR, acting.thoughts.valid_BR))
    if baseline == "std":
        # Dividing by a deviation that is only rounding would give advantages of ±1.
        reward_BPG = _equal_for_equal_thoughts(reward_BPG, acting, group)
    advantage_BR = group_advantages(reward_BPG, baseline, valid_BPG).flatten(1)
    return acting.having(advantage_BRT=advantage_BR[..., None] * acting.mask_BRT)


def _equal_for_equal_thoughts(reward_BPG: Tensor, acting: Trajectories, group: int) -> Tensor:
    """The rewards, averaged over members that wrote the same thought: these differ only by rounding, since they were
    scored at different places in the row."""
    written_BRT = torch.where(acting.mask_BRT, acting.thoughts.tokens_BRT, -1)
    written_BPGT = written_BRT.unflatten(1, (-1, group))
    same_BPGG = (written_BPGT[..., :, None, :] == written_BPGT[..., None, :, :]).all(-1).to(reward_BPG.dtype)
    return (same_BPGG * reward_BPG[..., None, :]).sum(-1) / same_BPGG.sum(-1)

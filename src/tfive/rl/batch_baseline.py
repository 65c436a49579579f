"""Advantages without critics: each thought is held against the other thoughts of its batch, or of its position."""

from __future__ import annotations

import torch
from torch import Tensor

from tfive.rl.gae import PILOT_EPSILON
from tfive.rl.groups import with_group_advantages
from tfive.rl.siblings import unit_of_others
from tfive.rl.trajectory import Trajectories


def with_batch_advantages(acting: Trajectories, group: int = 1, *, by_position: bool = False) -> Trajectories:
    """The trajectories with the advantage (G_t − b_t)/σ of every action, where b_t is the mean return at step t of the
    *other* thoughts that reach it. In a `group` the whole return is held against that of the others at the position,
    and `by_position` in units of how far those lie apart (`gae.unit`).

    Thoughts are drawn independently given their texts, so b_t does not depend on the thought it is subtracted from and
    the policy gradient keeps its expectation. σ is the deviation over all actions, as for critics' advantages
    (app:advantage-snapshots). What has nothing to be compared with, a step that one thought alone reaches, has the
    advantage 0.
    """
    returns_BRT, mask_BRT = acting.need("returns_BRT").double(), acting.mask_BRT
    if group > 1:
        whole_BR = returns_BRT[..., 0]
        raw_BRT = with_group_advantages(acting, whole_BR, group, "leave_one_out").need("advantage_BRT")
        if by_position:
            raw_BRT = raw_BRT / unit_of_others(whole_BR, acting.thoughts.valid_BR, group)[..., None]
        return _scaled(acting, raw_BRT)
    kept_BRT = returns_BRT * mask_BRT
    others_T = mask_BRT.sum((0, 1)) - 1
    mean_BRT = (kept_BRT.sum((0, 1)) - kept_BRT) / others_T.clamp(min=1)
    raw_BRT = torch.where(mask_BRT & (others_T > 0), returns_BRT - mean_BRT, torch.zeros_like(returns_BRT))
    return _scaled(acting, raw_BRT)


def _scaled(acting: Trajectories, raw_BRT: Tensor) -> Trajectories:
    """The trajectories with these advantages in units of their deviation over all actions."""
    deviation = (raw_BRT[acting.mask_BRT].var(unbiased=False) + PILOT_EPSILON).sqrt()
    return acting.having(advantage_BRT=(raw_BRT / deviation).to(acting.need("returns_BRT").dtype))

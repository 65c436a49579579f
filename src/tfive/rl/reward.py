"""From continuation losses to rewards: potentials, checkpoint rewards, returns, and the reward scale across windows.

Checkpoints are [..., K] tensors: `losses`, `checkpoint` (the step τ after which the loss was measured, 1 … T) and
`mask`, since thoughts have different numbers of them. The valid checkpoints of a thought increase strictly; the last
one is the end of the thought.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tfive.tree.running_sum import running_sum

SCALE_EPSILON = 1e-8
"""ε under the root of σ_r (eq:reward-scale): gains of a tenth of a thousandth of a nat are not told from none."""


def gains(no_thought: Tensor, losses_K: Tensor, mask_K: Tensor) -> Tensor:
    """Ψ_τ = ℓ_0 − ℓ_τ at every checkpoint (eq:dense-reward), zero where there is none. `no_thought` has shape [...]."""
    return torch.where(mask_K, no_thought.unsqueeze(-1) - losses_K, torch.zeros_like(losses_K))


def potentials(no_thought: Tensor, losses_K: Tensor, mask_K: Tensor, scale: float, clip: float) -> Tensor:
    """Φ at every checkpoint, ``clip(Ψ/σ_r, ±c_r)`` (eq:dense-reward), zero where there is no checkpoint."""
    if not scale > 0 or not clip > 0:
        raise ValueError(f"reward scale and clip must be positive, got scale={scale}, clip={clip}")
    return (gains(no_thought, losses_K, mask_K) / scale).clamp(-clip, clip)


def final_gain(no_thought: Tensor, losses_K: Tensor, mask_K: Tensor) -> Tensor:
    """Ψ_T, the gain of the whole thought: the last valid checkpoint's, and 0 for an empty thought."""
    gain_K = gains(no_thought, losses_K, mask_K)
    last = torch.zeros_like(no_thought)
    for k in range(mask_K.shape[-1]):
        last = torch.where(mask_K[..., k], gain_K[..., k], last)
    return last


def checkpoint_rewards(potential_K: Tensor, checkpoint_K: Tensor, mask_K: Tensor, steps: int) -> Tensor:
    """Rewards [..., T], nonzero only at checkpoints: the increase of Φ since the previous one
    (eq:checkpoint-reward)."""
    _check_checkpoints(checkpoint_K, mask_K, steps)
    reward_T = potential_K.new_zeros((*potential_K.shape[:-1], steps))
    previous = torch.zeros_like(potential_K[..., 0])
    for k in range(potential_K.shape[-1]):
        valid, now = mask_K[..., k], potential_K[..., k]
        rise = torch.where(valid, now - previous, torch.zeros_like(now))
        index = torch.where(valid, checkpoint_K[..., k] - 1, torch.zeros_like(checkpoint_K[..., k]))
        reward_T = reward_T.scatter_add(-1, index.unsqueeze(-1), rise.unsqueeze(-1))
        previous = torch.where(valid, now, previous)
    return reward_T


def carried_potential(reward_T: Tensor) -> Tensor:
    """Φ known *before* action t, [..., T]: that of the last checkpoint at or before step t−1, with Φ_0 = 0. The rewards
    before t add up to it. Part of the context c that the mean head reads."""
    return running_sum(reward_T) - reward_T


def returns_to_go(reward_T: Tensor, mask_T: Tensor) -> Tensor:
    """``G_t = Σ_{k≥t} r_k`` with γ = 1 (eq:critic-return), zero where masked."""
    reward_T = torch.where(mask_T, reward_T, torch.zeros_like(reward_T))
    return torch.where(mask_T, running_sum(reward_T.flip(-1)).flip(-1), torch.zeros_like(reward_T))


def _check_checkpoints(checkpoint_K: Tensor, mask_K: Tensor, steps: int) -> None:
    outside_K, latest = mask_K & ((checkpoint_K < 1) | (checkpoint_K > steps)), torch.zeros_like(checkpoint_K[..., 0])
    early = torch.zeros_like(latest, dtype=torch.bool)
    for k in range(checkpoint_K.shape[-1]):
        early |= mask_K[..., k] & (checkpoint_K[..., k] <= latest)
        latest = torch.where(mask_K[..., k], checkpoint_K[..., k], latest)
    if not bool(outside_K.any() | early.any()):  # the host waits once
        return
    if bool(outside_K.any()):
        valid = checkpoint_K[mask_K]
        raise ValueError(f"checkpoints must lie in 1 … {steps}, got {int(valid.min())} … {int(valid.max())}")
    raise ValueError("the valid checkpoints of a thought must increase strictly")


class RewardScale:
    """σ_r across windows: an exponential second moment of whole-thought gains, no mean subtracted (eq:reward-scale).

    It takes only gains of earlier or disjoint trajectories, and only `update` changes it, between windows. The first
    batch sets the moment outright.
    """

    def __init__(self, decay: float, epsilon: float = SCALE_EPSILON) -> None:
        if not 0 <= decay < 1 or not epsilon > 0:
            raise ValueError(f"need 0 ≤ decay < 1 and epsilon > 0, got decay={decay}, epsilon={epsilon}")
        self.decay, self.epsilon = decay, epsilon
        self.moment = 0.0
        self.updates = 0

    def update(self, final_gains: Tensor, mask: Tensor | None = None) -> float:
        """Update with Ψ_T of one batch (any shape); returns the new σ_r."""
        gain = final_gains if mask is None else final_gains[mask]
        if gain.numel() == 0:
            raise ValueError("the reward scale needs at least one trajectory")
        batch = float(gain.double().square().mean())
        if not math.isfinite(batch):
            raise ValueError("the reward scale met a gain that is not finite")
        self.moment = batch if self.updates == 0 else self.decay * self.moment + (1 - self.decay) * batch
        self.updates += 1
        return self.value

    @property
    def value(self) -> float:
        """σ_r; an error before the first batch, since a scale of √ε would clip every reward."""
        if self.updates == 0:
            raise ValueError("the reward scale has seen no trajectory yet")
        return math.sqrt(self.moment + self.epsilon)

    @property
    def is_flat(self) -> bool:
        """Whether ε outweighs the gains themselves: thoughts change nothing, and rewards would be amplified noise."""
        return self.updates > 0 and self.moment <= self.epsilon

    def state_dict(self) -> dict[str, Any]:
        return {"moment": self.moment, "updates": self.updates, "decay": self.decay, "epsilon": self.epsilon}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.moment, self.updates = float(state["moment"]), int(state["updates"])
        self.decay, self.epsilon = float(state["decay"]), float(state["epsilon"])

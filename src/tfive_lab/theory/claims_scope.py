"""The limits of the guarantees: other prefix distributions, and the cost of auxiliary trajectories."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tfive.rl.calibration.mixture import mix
from tfive.rl.roles import auxiliary_rollouts, fewer_than_groups, repeated_rollouts, total_rollouts
from tfive_lab.theory.statement import at_most, equal, examples, exceeds, statement
from tfive_lab.theory.worlds import Draws, World


def _shift(world: World) -> tuple[Tensor, Tensor, Tensor]:
    """Per step j: δ_j and the mean KL under q's prefixes; and μ(c)² of the frozen mixed signal."""
    q, actor = world.log_q_SA, world.log_policy_SA(world.theta_P)
    distance = 0.5 * (q.exp() - actor.exp()).abs().sum(-1)
    divergence = (q.exp() * (q - actor)).sum(-1)
    weight = world.probability_N.unsqueeze(-1) * world.mask_NT
    local = (weight * distance[world.state_NT]).sum(0)
    kl = (weight * divergence[world.state_NT]).sum(0)
    offset = world.mean_given_context(mix(world.gate_weight_NT, *world.pair()))
    return local, kl, torch.where(world.mask_NT, offset.square(), torch.zeros_like(offset))


@statement("prop:prefix-transfer", "risk on new prefixes grows by action changes counted T − j times")
def prefix_transfer(world: World) -> Iterator[float]:
    local, _, risk = _shift(world)
    actor = world.trajectory_probability(world.log_policy_SA(world.theta_P))
    old, new = ((p @ risk.sum(-1)) / world.horizon for p in (world.probability_N, actor))
    steps = torch.arange(world.horizon - 1, -1, -1).double()
    yield at_most(new, old + risk.max() / world.horizon * (steps * local).sum())


@statement("eq:prefix-kl-control", "each local change is at most √(KL/2) (Pinsker)")
def prefix_kl_control(world: World) -> Iterator[float]:
    local, kl, _ = _shift(world)
    yield at_most(local, (kl.clamp(min=0) / 2).sqrt())


@examples("eq:grpo-rollout-threshold", "fewer trajectories than groups of G exactly when n_aux < (G − 1)·N")
def grpo_rollout_threshold() -> Iterator[float]:
    roles = ("critic_fit", "qualify", "pilot", "head_train", "head_validate", "extra")
    for number in range(200):
        draw = Draws(0, number).uniform("counts", len(roles) + 2)
        actor, group = 1 + int(draw[0] * 50), 2 + int(draw[1] * 9)
        counts = {role: int(x * 60) for role, x in zip(roles, draw[2:])} | {"actor": actor}
        whole = total_rollouts(counts)
        yield equal(float(whole), float(sum(counts.values())))
        agrees = (whole < actor * group) == fewer_than_groups(counts, group)
        yield exceeds(float(agrees), 0.5)
    # The boundary is strict, and 7N for the paper's groups of eight.
    for extra, fewer in ((699, True), (700, False)):
        yield exceeds(float(fewer_than_groups({"actor": 100, "extra": extra}, 8) == fewer), 0.5)


@examples("eq:total-rollout-budget", "the default window generates 3.25 trajectories per actor item")
def default_budget() -> Iterator[float]:
    window = {"critic_fit": 64, "qualify": 16, "pilot": 8, "head_train": 32, "head_validate": 16, "scale": 8}
    window["actor"] = 64
    yield equal(auxiliary_rollouts(window) / window["actor"], 2.25)
    yield equal(total_rollouts(window) / window["actor"], 3.25)
    yield exceeds(float(fewer_than_groups(window, 8)), 0.5)


@examples("eq:repeated-rollout-budget", "repeated prefixes need 2M continuations an anchor before acting")
def repeated_budget() -> Iterator[float]:
    for continuations in (2, 4, 8):
        total = repeated_rollouts(10, continuations, continuations, 1, 5)
        yield equal(float(total), float(10 * (2 * continuations + 1) + 5))

"""The paper's constructed examples as worlds, by name."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tfive.rl.gae import PilotNormaliser
from tfive_lab.theory.worlds import Draws, Shape, World, build

_EXACT = PilotNormaliser(0.0, 1.0, 1)


def one_step(
    name: str,
    texts: list[float],
    returns: list[list[float]],
    values: list[list[float]],
    *,
    theta: float = 0.0,
    high: float = 1.28,
    weights: list[float] | None = None,
) -> World:
    """Worlds of one step and two actions: per text its share, the return of either action, and both critics' values.

    The actor is Bernoulli, π_θ(a₊) = sigmoid(θ), and the sampler is even: π_old = q = ½ exactly.
    """
    count = len(texts)
    even = torch.full((count, 2), math.log(0.5), dtype=torch.float64)
    feature = torch.zeros(count, 2, 1, dtype=torch.float64)
    feature[:, 0] = 1.0
    text = torch.arange(count).repeat_interleave(2).unsqueeze(-1)
    gain = torch.tensor(returns, dtype=torch.float64).flatten()
    gate = torch.tensor(weights or [0.5, 0.5], dtype=torch.float64).expand(count, 2)
    return World(
        name=name,
        horizon=1,
        weight_N=torch.tensor(texts, dtype=torch.float64).repeat_interleave(2),
        token_NT=torch.tensor([0, 1]).repeat(count).unsqueeze(-1),
        mask_NT=torch.ones(2 * count, 1, dtype=torch.bool),
        state_NT=text,
        context_NT=text,
        log_q_SA=even,
        log_old_SA=even,
        feature_SAP=feature,
        theta_P=torch.tensor([theta], dtype=torch.float64),
        no_thought_N=torch.full((2 * count,), 2.0, dtype=torch.float64),
        loss_NK=(2.0 - gain).unsqueeze(-1),
        checkpoint_NK=torch.ones(2 * count, 1, dtype=torch.long),
        scored_NK=torch.ones(2 * count, 1, dtype=torch.bool),
        value_S2=torch.tensor(values, dtype=torch.float64),
        gate_weight_SA=gate,
        pilot=_EXACT,
        high=high,
    )


def harmful() -> World:
    """eq:harmful-ppo-example: the minimum of two critics turns a gradient of 0.21 into −0.105."""
    return one_step("harmful", [1.0], [[1.0, 0.0]], [[1.5, -0.5]], theta=math.log(7 / 3), high=1.2)


def rare_state(omega: float) -> World:
    """eq:rare-state-predictive-score: the harmful state is a share ω; elsewhere both critics are exact."""
    rest = (1 - omega) / 2
    return one_step(
        f"rare state {omega:g}",
        [omega, rest, rest],
        [[1.0, 0.0], [1.0, 1.0], [-1.0, -1.0]],
        [[1.5, -0.5], [1.0, 1.0], [-1.0, -1.0]],
        theta=math.log(7 / 3),
        high=1.2,
    )


def centred_mixture() -> World:
    """eq:complementary-toy: Ã₁ = (0.9, −0.1), Ã₂ = (0.3, −0.7); weights ½ and 1/6 centre the mixture at C/Q = 1/13."""
    return one_step("centred mixture", [1.0], [[1.0, 0.0]], [[0.1, 0.7]], weights=[1 / 2, 1 / 6])


def collapse(size: float) -> World:
    """eq:critic-collapse-example: returns ±r, one perfect critic and one that predicts 0 everywhere."""
    return one_step(f"collapse {size:g}", [0.5, 0.5], [[size, size], [-size, -size]], [[size, 0.0], [-size, 0.0]])


def lengths_matter() -> World:
    """A world of variable length whose realised length goes with its rewards: λ(L) cannot be pulled out of E[·|s]."""
    shape = Shape(texts=1, hidden=2, actions=2, horizon=3, variable_length=True, checkpoints=(1, 2, 3), mismatch=0.2)
    return build("lengths matter", shape, Draws(5, 0))


def identical_critics() -> World:
    """Two critics that agree everywhere: a(x) = 0, so no weight can move the signal."""
    world = build("identical critics", Shape(horizon=2, checkpoints=(1, 2)), Draws(5, 1))
    return world.change(value_S2=world.value_S2[:, :1].expand(-1, 2).contiguous())


def wide_open() -> World:
    """Critics that bracket the truth closely around a small offset: full centring is feasible and β* = 0."""
    world = build("wide open", Shape(texts=1, hidden=1, horizon=1, checkpoints=(1,)), Draws(5, 2))
    target = _visible_value(world)
    pilot = PilotNormaliser(0.0, world.pilot.deviation, 1)
    return world.change(value_S2=torch.stack([target - 0.30, target + 0.34], -1), pilot=pilot)


def silent() -> World:
    """Q = 0: no thought changes anything and both critics know it."""
    world = build("silent", Shape(texts=1, hidden=1, horizon=2, checkpoints=(2,)), Draws(5, 3))
    flat = world.no_thought_N.unsqueeze(-1).expand_as(world.loss_NK).contiguous()
    return world.change(loss_NK=flat, value_S2=torch.zeros_like(world.value_S2), pilot=_EXACT)


def _visible_value(world: World) -> Tensor:
    target = torch.zeros(world.value_S2.shape[0], dtype=torch.float64)
    target[world.state_NT[world.mask_NT]] = world.given(world.return_NT, world.state_NT)[world.mask_NT]
    return target


def named() -> dict[str, World]:
    """Every example, by name."""
    worlds = [
        harmful(),
        rare_state(0.2),
        rare_state(0.01),
        centred_mixture(),
        collapse(1.0),
        collapse(1e-3),
        lengths_matter(),
        identical_critics(),
        wide_open(),
    ]
    return {world.name: world for world in worlds}

"""What a statement is: a label of the paper, one line of what it says, and checks that return margins.

A margin is nonnegative when the claim holds: the tolerance minus the error for an equality, the slack plus the
tolerance for an inequality. Checks use the trainer's own functions; a world supplies givens and exact expectations,
nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tfive.rl.losses import clipped_surrogate
from tfive_lab.theory.worlds import World

TOLERANCE = 1e-9

WorldCheck = Callable[[World], Iterator[float]]
ExampleCheck = Callable[[], Iterator[float]]


@dataclass
class Statement:
    """One claim. `on_world` runs on every random and named world, `on_examples` once on what the paper constructs."""

    label: str
    says: str
    on_world: WorldCheck | None = None
    on_examples: ExampleCheck | None = None


REGISTRY: dict[str, Statement] = {}


def statement(label: str, says: str) -> Callable[[WorldCheck], WorldCheck]:
    """Registers a check that any world must pass."""

    def register(check: WorldCheck) -> WorldCheck:
        REGISTRY.setdefault(label, Statement(label, says)).on_world = check
        return check

    return register


def examples(label: str, says: str) -> Callable[[ExampleCheck], ExampleCheck]:
    """Registers a check on constructed examples."""

    def register(check: ExampleCheck) -> ExampleCheck:
        REGISTRY.setdefault(label, Statement(label, says)).on_examples = check
        return check

    return register


def exact(numbers: object) -> Tensor:
    """Written-out numbers in float64."""
    return torch.tensor(numbers, dtype=torch.float64)


def equal(left: Tensor | float, right: Tensor | float, tolerance: float = TOLERANCE) -> float:
    """Margin of left = right, relative to the size of the numbers where that exceeds 1."""
    a, b = torch.as_tensor(left, dtype=torch.float64), torch.as_tensor(right, dtype=torch.float64)
    if a.numel() == 0:
        return tolerance
    return tolerance - float(((a - b).abs() / b.abs().clamp(min=1)).max())


def at_most(left: Tensor | float, right: Tensor | float) -> float:
    """Margin of left ≤ right."""
    a, b = torch.as_tensor(left, dtype=torch.float64), torch.as_tensor(right, dtype=torch.float64)
    return float((b - a).min()) + TOLERANCE


def exceeds(left: float, threshold: float) -> float:
    """Margin of left > threshold: for claims that something *can* happen, shown on an example."""
    return left - threshold


def actor_gradient(world: World, advantage_NT: Tensor, low: float | None = None, high: float | None = None) -> Tensor:
    """∇_θ of the trainer's clipped surrogate under the exact occupation measure, by automatic differentiation."""
    theta = world.theta_P.clone().requires_grad_(True)
    ratio = (world.taken(world.log_policy_SA(theta)) - world.taken(world.log_old_SA)).exp()
    value = clipped_surrogate(
        ratio, advantage_NT, world.low if low is None else low, world.high if high is None else high
    )
    (gradient,) = torch.autograd.grad(world.occupation.mean(value), theta)
    return gradient


def matched(world: World) -> World:
    """The same world with an exact sampler: q = π_old."""
    return world.change(log_q_SA=world.log_old_SA)

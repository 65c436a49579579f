"""The population saddle of a finite world, solved exactly and independently of any gradient descent.

In the variables y(x) = √ν(x)·(w(x) − ½) the problem reads: minimise ‖m + A y‖² subject to ‖y‖² ≤ κQ and |y(x)| ≤ ½√ν(x)
(app:population-saddle). For a fixed multiplier β it is a box-constrained least-squares problem, solved by a primal
active set; ‖y_β‖² falls as β grows, so β* is the root of one monotone function, found by a safeguarded Newton step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tfive_lab.theory.worlds import World

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class SaddleSolution:
    """(w*, h*, β*) on the trajectories of a world, with R*, R(½), C(w*) and Q."""

    weight_NT: Tensor
    mean_NT: Tensor
    multiplier: float
    risk: float
    reference_risk: float
    displacement: float
    signal: float


def box_least_squares(gram: Array, linear: Array, ridge: float, bound: Array, start: Array) -> Array:
    """argmin ½ yᵀ(gram + ridge·I)y + linearᵀy with |y| ≤ bound, by a primal active set started at a feasible point."""
    y = np.clip(start, -bound, bound)
    hessian = gram + ridge * np.eye(len(y))
    free = np.abs(y) < bound
    for _ in range(50 * (len(y) + 1)):
        target = y.copy()
        if free.any():
            fixed = ~free
            rhs = -(linear[free] + hessian[np.ix_(free, fixed)] @ y[fixed])
            target[free] = np.linalg.solve(hessian[np.ix_(free, free)], rhs)
        step = target - y
        with np.errstate(divide="ignore", invalid="ignore"):
            room = np.where(step > 0, (bound - y) / step, np.where(step < 0, (-bound - y) / step, np.inf))
        room[~free] = np.inf
        length = min(1.0, float(room.min(initial=np.inf)))
        y = y + length * step
        if length < 1.0:
            hit = int(np.argmin(room))
            y[hit] = np.sign(step[hit]) * bound[hit]
            free[hit] = False
            continue
        slope = hessian @ y + linear
        wrong = np.where(free, 0.0, np.where(y > 0, slope, -slope))
        # At an upper bound the slope must not be positive, at a lower bound not negative; bound 0 pins a coordinate.
        wrong[bound == 0] = 0.0
        if wrong.max(initial=0.0) <= 1e-13 * (1 + np.abs(linear).max(initial=0.0)):
            return y
        free[int(np.argmax(wrong))] = True
    raise ArithmeticError("the active set did not settle")


def _reduced(world: World, first: Tensor, second: Tensor) -> tuple[Array, Array, Array, npt.NDArray[np.int64]]:
    """m(c)√d(c), the matrix A, ν(x), and the gate number of every valid step."""
    mask = world.mask_NT
    mass, context = world.mass_NT[mask].numpy(), world.context_NT[mask].numpy()
    gate = np.unique(world.gate_NT[mask].numpy(), return_inverse=True)[1]
    gap, average = (first - second)[mask].numpy(), ((first + second) / 2)[mask].numpy()
    contexts, gates = int(context.max()) + 1, int(gate.max()) + 1
    d = np.bincount(context, mass, contexts)
    safe = np.sqrt(np.where(d > 0, d, 1.0))
    offset = np.bincount(context, mass * average, contexts) / safe
    nu: Array = np.bincount(gate, mass * gap**2, gates).astype(np.float64)
    operator = np.zeros((contexts, gates))
    np.add.at(operator, (context, gate), mass * gap)
    root = np.sqrt(np.where(nu > 0, nu, 1.0))
    operator = np.where(nu > 0, operator / safe[:, None] / root, 0.0)
    return offset, operator, nu, gate


def solve(world: World, kappa: float, pair: tuple[Tensor, Tensor] | None = None) -> SaddleSolution:
    """The exact constrained optimum of eq:calibrated-weight over all gates w(s, a) ∈ [0, 1] and all h(c)."""
    first, second = pair or world.pair()
    m, A, nu, gate = _reduced(world, first, second)
    signal = float(world.integral(((first + second) / 2).square()))
    budget = kappa * signal
    bound = 0.5 * np.sqrt(nu)
    gram, linear = A.T @ A, A.T @ m
    scale = max(float(np.trace(gram)), 1e-300)
    # The limit β → 0 picks the least displaced of all unconstrained optima; its multiplier is 0 if it is feasible.
    y = box_least_squares(gram, linear, 1e-13 * scale, bound, np.zeros_like(bound))
    beta = 0.0
    if y @ y > budget:
        beta, y = _multiplier(gram, linear, bound, budget, y, scale)
    w = 0.5 + np.where(nu > 0, y / np.sqrt(np.where(nu > 0, nu, 1.0)), 0.0)
    weight = torch.full_like(first, 0.5)
    weight[world.mask_NT] = torch.from_numpy(w[gate])
    mixed = (first + second) / 2 + (weight - 0.5) * (first - second)
    mean = world.mean_given_context(mixed)
    risk = m + A @ y
    return SaddleSolution(weight, mean, beta, float(risk @ risk), float(m @ m), float(y @ y), signal)


def _multiplier(
    gram: Array, linear: Array, bound: Array, budget: float, start: Array, scale: float
) -> tuple[float, Array]:
    """The β > 0 with ‖y_β‖² = κQ. Newton on 1/‖y‖, kept inside a bracket that always shrinks."""
    if budget == 0.0:
        return float("inf"), np.zeros_like(bound)
    low, high = 0.0, float(np.linalg.norm(linear)) / np.sqrt(budget) + 1e-300
    beta, y = high / 2, start
    for _ in range(200):
        y = box_least_squares(gram, linear, beta, bound, y)
        norm = float(y @ y)
        low, high = (beta, high) if norm > budget else (low, beta)
        if abs(norm - budget) <= 1e-14 * budget or high - low <= 1e-16 * high:
            break
        free = np.abs(y) < bound
        inner = float(y[free] @ np.linalg.solve(gram[np.ix_(free, free)] + beta * np.eye(int(free.sum())), y[free]))
        step = beta + norm / max(inner, 1e-300) * (np.sqrt(norm / budget) - 1)
        beta = step if low < step < high else (low + high) / 2
    return beta, y

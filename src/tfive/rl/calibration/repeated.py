"""Repeated-prefix calibration: the weight from several continuations of each anchor prefix, without a mean head.

The mean of an anchor's *other* continuations (eq:paired-mean-sampling without the one it is paired with) replaces
h(c) in the saddle (eq:calibrated-weight). It is independent of that continuation, so the descent in w follows the
unbiased offset itself; retention, multiplier and early stopping are the same. The price is M trajectories per anchor
(eq:repeated-rollout-budget).
"""

from __future__ import annotations

import copy

from torch import Tensor, nn

from tfive.rl.calibration.early_stop import EarlyStopping
from tfive.rl.calibration.heads import outputs
from tfive.rl.calibration.mixture import FixedWeight, LearnedWeight, mix
from tfive.rl.calibration.moments import CalibrationData
from tfive.rl.calibration.saddle import CalibrationPlan, Candidate, Descent, Split, search
from tfive.rl.drift import offset_products
from tfive.tree.fast.side_by_side import alone


def mean_of_others(value_NM: Tensor) -> Tensor:
    """The mean of each anchor's other continuations, [N, M]: an estimate of the conditional mean that is
    independent of the continuation it is paired with."""
    count = value_NM.shape[-1]
    if count < 2:
        raise ValueError(f"an anchor needs at least 2 continuations, got {count}")
    return (value_NM.sum(-1, keepdim=True) - value_NM) / (count - 1)


def calibrate_repeated(
    weight_head: nn.Module,
    data: CalibrationData,
    plan: CalibrationPlan,
    seed: int,
    window: int = 0,
    *,
    multiplier: float | None = None,
) -> Candidate:
    """Descend in w on the unbiased offset of the anchors and ascend in β; returns a copy frozen at the best evaluation.

    `data` holds N anchors with their M continuations on the axis of steps ([N, M, …], `CalibrationData.anchored`).
    The given head is left at the best evaluation. The candidate has no mean head.
    """
    split = Split.of(data, plan, seed, "repeated", window)
    learner = _RepeatedLearner(Descent(weight_head, split.learn, plan, multiplier), split.learn)
    stopping = EarlyStopping(split.held_out, plan.kappa)
    best, step, trace = alone(search(learner, split, plan, seed, "repeated", window, stopping))
    mixture: LearnedWeight | FixedWeight = FixedWeight()
    if best.change < 0:
        mixture = LearnedWeight(copy.deepcopy(weight_head).requires_grad_(False).eval(), name="repeated")
    data = split.held_out
    risk = offset_products(mixture.mixed(data.weight_inputs, data.first_NT, data.second_NT)).mean()
    updates = int(trace[-1]["step"])
    return Candidate(mixture, None, best.multiplier, float(risk), step, trace, min(0.0, best.change), updates)


class _RepeatedLearner:
    """w descends with the mean of each anchor's other continuations as h; β ascends on the constraint."""

    batches = 1

    def __init__(self, descent: Descent, data: CalibrationData) -> None:
        self.descent, self.data = descent, data
        self.heads, self.optimizers = (descent.weight_head,), (descent.optimizer,)

    def step(self, *rows: Tensor) -> None:
        part = self.data
        if rows[0].numel() < part.occupation.count:
            part = part.rows(rows[0])
        self.descent.weight_head.train()
        weight = self.descent.weight_head(part.weight_inputs)
        self.descent.step(part, weight, mean_of_others(mix(weight.detach(), part.first_NT, part.second_NT)))

    def evaluate(self, stopping: EarlyStopping) -> None:
        data = stopping.data
        weight = outputs(self.descent.weight_head, data.weight_inputs)
        # With this m the estimated change is R(w) − R(½) by products of different continuations, without bias.
        moved = mean_of_others((weight - 0.5) * (data.first_NT - data.second_NT))
        risk = offset_products(mix(weight, data.first_NT, data.second_NT)).mean()
        stopping.look(weight, moved, self.heads, self.descent.multiplier, risk)

"""Repeated-prefix calibration: the same weight from several continuations of each anchor, with no mean head at all."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from tfive.credit.calibrate import CalibrationPlan
from tfive.credit.drift import offset_products
from tfive.credit.mean import batches, forked, seed_dropout
from tfive.credit.mixture import LearnedWeight, WeightInputs, mix
from tfive.credit.moments import displacement, energy


def calibrate_repeated(
    weight_head: nn.Module,
    inputs: WeightInputs,
    first_NM: Tensor,
    second_NM: Tensor,
    plan: CalibrationPlan,
    seed: int,
    window: int = 0,
) -> tuple[LearnedWeight, list[Mapping[str, float]]]:
    """Minimises the unbiased offset of the anchors under the retention constraint (the eq:repeated-rollout-budget
    baseline).

    `inputs` holds the N anchors in order, the M continuations of an anchor along its step dimension ([N, M, …]).
    Sampling costs M trajectories per anchor; what it buys is freedom from a mean head. Returns a frozen copy and the
    trace.
    """
    device = first_NM.device
    optimizer = torch.optim.AdamW(
        weight_head.parameters(), lr=plan.weight_lr, weight_decay=plan.weight_decay, fused=True
    )
    beta = plan.multiplier_start
    trace: list[Mapping[str, float]] = []
    with forked(device):
        seed_dropout(seed, "repeated", window)
        stream = batches(first_NM.shape[0], plan.batch, seed, "repeated", window)
        for step in range(plan.steps):
            rows = next(stream).to(device)
            first, second = first_NM[rows], second_NM[rows]
            weight_head.train()
            weight = weight_head(inputs.rows(rows))
            risk = offset_products(mix(weight, first, second)).mean()
            moved, signal = displacement(weight, first, second).mean(), energy(first, second).mean()
            optimizer.zero_grad(set_to_none=True)
            (risk + beta * moved).backward()
            optimizer.step()
            beta = max(0.0, beta + plan.multiplier_lr * float(moved.detach() / signal.clamp(min=1e-300) - plan.kappa))
            if step % plan.evaluate_every == 0 or step == plan.steps - 1:
                line = {"step": float(step), "risk": float(risk.detach()), "multiplier": beta}
                trace.append(line | {"retention": float(moved.detach()) / max(float(signal), 1e-300)})
    frozen = copy.deepcopy(weight_head).requires_grad_(False).eval()
    return LearnedWeight(frozen, name="repeated"), trace

"""Fitting the mean head h: a regression on single observations that stops early on other texts, and its cross-fitted
form."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tfive.rl.calibration.mixture import MeanInputs
from tfive.rl.calibration.moments import Occupation, moment, split_by_text
from tfive.rl.clusters import Estimate
from tfive.rng import permutation, philox
from tfive.tree.fast.cuda_graph import CudaGraphs, ReplayedStep


@dataclass(frozen=True)
class MeanPlan:
    """How a mean head is fitted: AdamW steps on minibatches of trajectories, early stop on a share of the texts."""

    steps: int = 400
    batch: int = 256
    lr: float = 1e-3
    weight_decay: float = 1e-2
    stop_share: float = 0.25
    evaluate_every: int = 20
    patience: int = 5
    recorder: CudaGraphs | None = None


def batches(count: int, batch: int, seed: int, role: str, window: int) -> Iterator[Tensor]:
    """Endless minibatches of row numbers: each pass is a fresh counter-based order of all rows (none if one batch holds
    them all, since then order changes nothing but rounding)."""
    if count < 1:
        raise ValueError("no trajectories to learn from")
    while batch >= count:
        yield torch.arange(count)
    epoch = 0
    while True:
        order = torch.from_numpy(permutation(seed, f"{role}/{epoch}", window, count))
        epoch += 1
        for start in range(0, count, batch):
            yield order[start : start + batch]


def text_order(text_N: Tensor, seed: int, role: str, window: int) -> Tensor:
    """A counter-based order of the distinct texts."""
    return torch.from_numpy(permutation(seed, role, window, torch.unique(text_N).numel()))


def seed_dropout(seed: int, role: str, window: int) -> None:
    """Seeds torch's generators from the counter; call inside `forked` so that dropout repeats exactly."""
    words = philox(seed, f"{role}/dropout", window, 0)
    torch.manual_seed(int(words[0]) << 31 ^ int(words[1]))


def forked(device: torch.device) -> AbstractContextManager[None]:
    """A context in which torch's random state of this device may be seeded without leaking out."""
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])


def regress_mean(
    head: nn.Module,
    inputs: MeanInputs,
    target_NT: Tensor,
    occupation: Occupation,
    plan: MeanPlan,
    seed: int,
    role: str,
    window: int = 0,
) -> float:
    """Fits h to the mixed advantage by ascent on E[2hÃ − h²] and returns the best held-out value.

    The held-out texts choose the step, and the all-zero function counts as a candidate's floor: a head that predicts
    worse than zero on other texts is reported as such (a negative value), not hidden. With `stop_share` 0 the last step
    stays.
    """
    target_NT = target_NT.detach()
    order = text_order(occupation.text_N, seed, f"{role}/split", window)
    fit, stop = split_by_text(occupation.text_N, [1 - plan.stop_share, plan.stop_share], order)
    optimizer = torch.optim.AdamW(head.parameters(), lr=plan.lr, weight_decay=plan.weight_decay, fused=True)
    best, best_state, bad = -float("inf"), copy.deepcopy(head.state_dict()), 0
    held_out = stop if stop.numel() else fit
    whole = inputs.rows(fit), target_NT[fit], occupation.rows(fit)

    def ascend(rows: Tensor) -> None:
        chosen, target, measure = whole
        if rows.numel() < measure.count:
            chosen, target, measure = chosen.rows(rows), target[rows], measure.rows(rows)
        head.train()
        loss = -measure.mean(moment(head(chosen), target))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    step_on = ReplayedStep(ascend, [optimizer], target_NT.device, plan.recorder)
    with forked(target_NT.device):
        seed_dropout(seed, role, window)
        stream = batches(whole[2].count, plan.batch, seed, role, window)
        for step in range(plan.steps + 1):
            if step % plan.evaluate_every == 0 or step == plan.steps:
                value = mean_value(head, inputs.rows(held_out), target_NT[held_out], occupation.rows(held_out))
                if value > best or not stop.numel():
                    best, best_state, bad = value, copy.deepcopy(head.state_dict()), 0
                else:
                    bad += 1
                    if bad >= plan.patience:
                        break
            if step == plan.steps:
                break
            step_on(next(stream))
    head.load_state_dict(best_state)
    head.eval()
    return best


def mean_value(head: nn.Module, inputs: MeanInputs, target_NT: Tensor, occupation: Occupation) -> float:
    """E[2hÃ − h²] of a fixed head on these trajectories: at most R in expectation when they are fresh
    (lem:moment-duality)."""
    head.eval()
    with torch.no_grad():
        return float(occupation.mean(moment(head(inputs), target_NT)))


@dataclass(frozen=True)
class CrossFit:
    """A cross-fitted lower bound on R: per-trajectory observations, their clustered estimate, and h on every
    trajectory."""

    estimate: Estimate
    value_NT: Tensor
    mean_NT: Tensor


def cross_fit_offset(
    make_head: Callable[[], nn.Module],
    inputs: MeanInputs,
    mixed_NT: Tensor,
    occupation: Occupation,
    plan: MeanPlan,
    folds: int,
    seed: int,
    window: int = 0,
) -> CrossFit:
    """E[2hÃ − h²] with h refitted for this mixture on the other folds of texts: a lower bound on R in expectation.

    Every trajectory is judged by a head that saw no trajectory of its text. Call it with `inputs.visible()` for the
    visible part. Paired differences of two mixtures are differences of `value_NT` on the same trajectories.
    """
    if folds < 2:
        raise ValueError(f"cross-fitting needs at least two folds, got {folds}")
    order = text_order(occupation.text_N, seed, "cross-fit", window)
    parts = split_by_text(occupation.text_N, [1.0] * folds, order)
    mean_NT = torch.zeros_like(mixed_NT)
    for number, part in enumerate(parts):
        others = torch.cat([other for k, other in enumerate(parts) if k != number])
        head = make_head()
        regress_mean(
            head,
            inputs.rows(others),
            mixed_NT[others],
            occupation.rows(others),
            plan,
            seed,
            f"cross-fit/{number}",
            window,
        )
        with torch.no_grad():
            mean_NT[part] = head(inputs.rows(part)).to(mean_NT.dtype)
    value_NT = moment(mean_NT, mixed_NT)
    return CrossFit(occupation.estimate(value_NT), value_NT, mean_NT)


def cross_fit_change(
    make_head: Callable[[], nn.Module],
    inputs: MeanInputs,
    weight_NT: Tensor,
    first_NT: Tensor,
    second_NT: Tensor,
    occupation: Occupation,
    plan: MeanPlan,
    folds: int,
    seed: int,
    window: int = 0,
) -> CrossFit:
    """R(w) − R(½) of a frozen weight with a text-clustered error, far sharper than the difference of two lower bounds.

    On the other folds of texts, h̄ is fitted to the average and g to (w − ½)Δ; the observation is the paired difference
    ``ℓ_mom(h̄ + g; Ã_w) − ℓ_mom(h̄; Ā)``. Errors of h̄ and g enter only as products (its derivative in both vanishes at
    the truth), so the standard error over texts is honest. With `inputs.visible()` it is the change of the visible
    part.
    """
    average_NT, moved_NT = (first_NT + second_NT) / 2, (weight_NT - 0.5) * (first_NT - second_NT)
    shared = occupation, plan, folds, seed, window
    mean = cross_fit_offset(make_head, inputs, average_NT, *shared).mean_NT
    shift = cross_fit_offset(make_head, inputs, moved_NT, *shared).mean_NT
    value_NT = moment(mean + shift, average_NT + moved_NT) - moment(mean, average_NT)
    return CrossFit(occupation.estimate(value_NT), value_NT, mean + shift)

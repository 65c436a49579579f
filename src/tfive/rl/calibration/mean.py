"""The mean response h(c): regression on single observations with early stopping, and cross-fitted offset estimates.

By lem:moment-duality, E[2hÃ − h²] = R − ‖h − μ‖²: its maximum over h is the offset R, and on fresh texts any h gives a
lower bound on R in expectation. Cross-fitting makes every text a fresh one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tfive.rl.calibration.dropout import MaskTape, taped
from tfive.rl.calibration.early_stop import BestStep
from tfive.rl.calibration.heads import ReadyInputs, ready
from tfive.rl.calibration.mixture import MeanInputs, WeightInputs
from tfive.rl.calibration.moments import Occupation, moment, split_by_text
from tfive.rl.clusters import Estimate
from tfive.rng import permutation, philox
from tfive.tree.fast.cuda_graph import CudaGraphs, ReplayedStep
from tfive.tree.fast.side_by_side import Task, by_itself


@dataclass(frozen=True)
class MeanPlan:
    """How a mean head is fitted: AdamW steps on minibatches of trajectories, early stopping on a share of the texts.

    Runs make it by `CalibrationPlan.mean_plan`.
    """

    steps: int
    batch: int
    lr: float
    weight_decay: float
    stop_share: float
    evaluate_every: int
    patience: int
    recorder: CudaGraphs | None = None


def batches(
    count: int, batch: int, seed: int, role: str, window: int, device: torch.device | str = "cpu"
) -> Iterator[Tensor]:
    """Endless minibatches of row numbers, in a fresh counter-based order each epoch (in their own order if one batch
    holds all rows, where shuffling would change nothing but rounding). They lie on the `device`, where an epoch's are
    sent at once: the host waits for no step."""
    if count < 1:
        raise ValueError("no trajectories to learn from")
    whole = torch.arange(count, device=device)
    while batch >= count:
        yield whole
    epoch = 0
    while True:
        order = torch.from_numpy(permutation(seed, f"{role}/{epoch}", window, count)).to(device, non_blocking=True)
        epoch += 1
        for start in range(0, count, batch):
            yield order[start : start + batch]


def text_order(text_N: Tensor, seed: int, role: str, window: int) -> Tensor:
    """A counter-based random order of the distinct texts."""
    return torch.from_numpy(permutation(seed, role, window, torch.unique(text_N).numel()))


def split_texts(occupation: Occupation, shares: list[float], seed: int, role: str, window: int) -> list[Tensor]:
    """Row numbers of each part of a random split by whole texts (`split_by_text`), made on the host and sent to where
    the trajectories are."""
    text_N, device = occupation.host_text_N, occupation.mask_NT.device
    parts = split_by_text(text_N, shares, text_order(text_N, seed, role, window))
    return [rows.to(device, non_blocking=True) for rows in parts]


def seed_dropout(seed: int, role: str, window: int) -> None:
    """Seed torch's global generators by (seed, role, window), inside `forked`, so that dropout is reproducible."""
    words = philox(seed, f"{role}/dropout", window, 0)
    torch.manual_seed(int(words[0]) << 31 ^ int(words[1]))


def forked(device: torch.device) -> AbstractContextManager[None]:
    """A context that restores torch's global random state of this device at its end."""
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])


class Regressed(NamedTuple):
    """What a regression came to."""

    value: Tensor
    """E[2hÃ − h²] on the held-out texts at the step that was kept; whoever asks for the number waits for it."""
    steps: int
    """Optimizer steps taken, those after the kept one included."""


def regressing(
    head: nn.Module,
    inputs: MeanInputs,
    target_NT: Tensor,
    occupation: Occupation,
    plan: MeanPlan,
    seed: int,
    role: str,
    window: int = 0,
    tape: MaskTape | None = None,
) -> Task[Regressed]:
    """Fit h to `target_NT` by ascent on E[2hÃ − h²] (eq:moment-objective); returns the best held-out value and the
    steps taken.

    Held-out texts select the step. The value is negative for a head that predicts those texts worse than zero does.
    With `stop_share` 0 nothing is held out and the last step is kept. `tape`: dropout's masks, where other regressions
    of this seed, role and window on as many trajectories have drawn them.
    """
    target_NT = target_NT.detach()
    fit, stop = split_texts(occupation, [1 - plan.stop_share, plan.stop_share], seed, f"{role}/split", window)
    held_out = _Regression(inputs, target_NT, occupation).rows(stop if stop.numel() else fit).ready(head)
    fitted = _Regression(inputs, target_NT, occupation).rows(fit).ready(head)
    optimizer = torch.optim.AdamW(head.parameters(), lr=plan.lr, weight_decay=plan.weight_decay, fused=True)

    def ascend(rows: Tensor) -> None:
        head.train()
        loss = -(fitted.rows(rows) if rows.numel() < fitted.occupation.count else fitted).value(head)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    step_on = ReplayedStep(ascend, [optimizer], target_NT.device, plan.recorder)
    best = BestStep(head, plan.patience, last=not stop.numel())
    with forked(target_NT.device), taped(head, tape, target_NT.device):
        seed_dropout(seed, role, window)
        stream = batches(fitted.occupation.count, plan.batch, seed, role, window, target_NT.device)
        for step in range(plan.steps + 1):
            if step % plan.evaluate_every == 0 or step == plan.steps:
                best.look(held_out.evaluate(head))
                if best.asks:
                    yield
            if step == plan.steps or best.over():
                break
            step_on(next(stream))
    value = best.take()
    head.eval()
    return Regressed(value, step)


regress_mean = by_itself(regressing)


@dataclass(frozen=True)
class _Regression:
    """Inputs and targets of a mean head, and the measure its errors are averaged over."""

    inputs: MeanInputs | ReadyInputs
    target_NT: Tensor
    occupation: Occupation

    def ready(self, head: nn.Module) -> _Regression:
        """The same for many steps of this head."""
        return replace(self, inputs=ready(head, self.inputs))

    def rows(self, index: Tensor) -> _Regression:
        return _Regression(self.inputs.rows(index), self.target_NT[index], self.occupation.rows(index))

    def value(self, head: nn.Module) -> Tensor:
        """E[2hÃ − h²], differentiable in the head."""
        return self.occupation.mean(moment(head(self.inputs), self.target_NT))

    def evaluate(self, head: nn.Module) -> Tensor:
        """The same without dropout or gradients; on fresh texts at most R in expectation (lem:moment-duality)."""
        if head.training:
            head.eval()
        with torch.no_grad():
            return self.value(head)


class MeanResponse(nn.Module):
    """The mean response h(c) = s·h̄(c) + (w(s, ā) − ½)·Δ̂(c) + g(c), the inner maximiser of eq:calibrated-weight.

    It depends on the weight by construction. h̄ predicts the fixed average and is shrunk by the factor s; Δ̂ predicts
    the critics' disagreement; ā is one fixed average action, so that h sees nothing of the sampled one; g learns the
    rest of E[(w − ½)Δ | c], which comes from the sampled action.
    """

    def __init__(self, average: nn.Module, gap: nn.Module, shift: nn.Module, weight: nn.Module) -> None:
        super().__init__()
        self.average, self.gap, self.shift, self.weight = average, gap, shift, weight
        self.share: float | Tensor = 1.0
        self.still = False
        """Whether the weight is the constant ½, so that h = s·h̄."""
        # Mean heads that are bounded by construction have a sum with the same bound.
        self.bound: float | None = getattr(average, "bound", None)
        self.action_E: Tensor | None = None
        self.log_prob: Tensor | None = None

    def set_action(self, inputs: WeightInputs, mask_NT: Tensor) -> None:
        """Set ā and its log-probability to their means over the valid steps of `inputs`."""
        self.action_E, self.log_prob = inputs.action_NTE[mask_NT].mean(0), inputs.log_prob_NT[mask_NT].mean()

    def on_average(self, inputs: MeanInputs) -> WeightInputs:
        """What w(s, ā) reads: the states of these contexts and the average action."""
        if self.action_E is None or self.log_prob is None:
            raise ValueError("the response needs its average action first")
        shape = inputs.time_NT.shape
        action, log_prob = self.action_E.expand(*shape, -1), self.log_prob.expand(shape)
        return WeightInputs(inputs.prefix_NTD, inputs.value_NT2, inputs.time_NT, action, log_prob)

    def centred_weight(self, inputs: MeanInputs) -> Tensor:
        """w(s, ā) − ½."""
        out: Tensor = self.weight(self.on_average(inputs)) - 0.5
        return out

    def moved(self, inputs: MeanInputs) -> Tensor:
        """The estimate of E[(w − ½)Δ | c]: what the weight adds to the conditional mean of the average."""
        out: Tensor = self.centred_weight(inputs) * self.gap(inputs) + self.shift(inputs)
        return out

    def forward(self, inputs: MeanInputs) -> Tensor:
        out: Tensor = self.share * self.average(inputs)
        if not self.still:
            out = out + self.moved(inputs)
        return out if self.bound is None else out.clamp(-self.bound, self.bound)


@dataclass(frozen=True)
class CrossFit:
    """A cross-fitted estimate: its mean clustered by text, the observations behind it, h on every trajectory, and the
    optimizer steps of all its heads."""

    estimate: Estimate
    value_NT: Tensor
    mean_NT: Tensor
    steps: int


def cross_fit_offset(
    make_head: Callable[[], nn.Module],
    inputs: MeanInputs,
    mixed_NT: Tensor,
    occupation: Occupation,
    plan: MeanPlan,
    folds: int,
    seed: int,
    window: int = 0,
    tapes: Sequence[MaskTape] | None = None,
) -> CrossFit:
    """E[2hÃ − h²] with h fitted to this mixture on the other folds of texts: in expectation a lower bound on R
    (lem:moment-duality).

    Every trajectory is evaluated by a head that saw no trajectory of its text. With `inputs.visible()` the result is
    the visible part of R. Paired differences of two mixtures are differences of `value_NT` on the same trajectories.
    `tapes`: a fold's masks of dropout, which are the same for every mixture and both kinds of inputs.
    """
    if folds < 2:
        raise ValueError(f"cross-fitting needs at least two folds, got {folds}")
    parts = split_texts(occupation, [1.0] * folds, seed, "cross-fit", window)
    mean_NT, steps = torch.zeros_like(mixed_NT), 0
    for number, part in enumerate(parts):
        others = torch.cat([other for k, other in enumerate(parts) if k != number])
        head = make_head()
        steps += regress_mean(
            head,
            inputs.rows(others),
            mixed_NT[others],
            occupation.rows(others),
            plan,
            seed,
            f"cross-fit/{number}",
            window,
            None if tapes is None else tapes[number],
        ).steps
        with torch.no_grad():
            mean_NT[part] = head(inputs.rows(part)).to(mean_NT.dtype)
    value_NT = moment(mean_NT, mixed_NT)
    return CrossFit(occupation.estimate(value_NT), value_NT, mean_NT, steps)


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
    tapes: Sequence[MaskTape] | None = None,
    of_average: CrossFit | None = None,
) -> CrossFit:
    """R(w) − R(½) of a frozen weight with a text-clustered error, far more precise than a difference of two bounds.

    On the other folds of texts, h̄ is fitted to the average and g to (w − ½)Δ; the observation is the paired difference
    ``ℓ_mom(h̄ + g; Ã_w) − ℓ_mom(h̄; Ā)``. Errors of h̄ and g enter only as products (the derivative in each vanishes
    at the truth), so the standard error over texts covers them. With `inputs.visible()` it is the change of the visible
    part. `of_average`: the cross-fit to the average where it has been made; its steps are then not counted again.
    """
    average_NT, moved_NT = (first_NT + second_NT) / 2, (weight_NT - 0.5) * (first_NT - second_NT)
    shared = occupation, plan, folds, seed, window, tapes
    made = of_average or cross_fit_offset(make_head, inputs, average_NT, *shared)
    of_move = cross_fit_offset(make_head, inputs, moved_NT, *shared)
    mean, shift = made.mean_NT, of_move.mean_NT
    value_NT = moment(mean + shift, average_NT + moved_NT) - moment(mean, average_NT)
    steps = of_move.steps + (0 if of_average is not None else made.steps)
    return CrossFit(occupation.estimate(value_NT), value_NT, mean + shift, steps)

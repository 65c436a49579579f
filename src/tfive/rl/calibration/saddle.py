"""Learning the weight w(s, a): the constrained conditional-moment saddle from single rollouts (eq:calibrated-weight).

`calibrate` alternates steps of the mean response h, the weight w and the multiplier β on part of the head-training
texts, evaluates them on the held-out rest every few steps (`early_stop`), and returns a frozen `Candidate`. `search`,
`Split` and `Descent` also serve repeated-prefix calibration (`repeated`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from tfive.rl.calibration.early_stop import EarlyStopping, Evaluation
from tfive.rl.calibration.heads import ReadyInputs, light, outputs, ready
from tfive.rl.calibration.mean import MeanPlan, MeanResponse, batches, forked, regressing, seed_dropout, split_texts
from tfive.rl.calibration.mixture import FixedWeight, LearnedWeight, MeanInputs, WeightInputs, mix
from tfive.rl.calibration.moments import (
    CalibrationData,
    Occupation,
    Paired,
    displacement,
    energy,
    moment,
    saddle_integrand,
    shared,
)
from tfive.tree.fast.cuda_graph import CudaGraphs, ReplayedStep
from tfive.tree.fast.side_by_side import Task, by_itself, together


@dataclass(frozen=True)
class CalibrationPlan:
    """The hyperparameters of head learning: those of `CalibrationSettings`, and below them those that no run varies."""

    kappa: float
    steps: int
    batch: int
    weight_lr: float
    mean_steps: int
    warm_steps: int
    evaluate_every: int
    mean_lr: float = 1e-3
    """Learning rate of the mean heads; h follows w by more steps (`mean_steps`), not by larger ones."""
    multiplier_lr: float = 0.5
    """Step of the projected multiplier β, per unit of violation C/Q − κ."""
    multiplier_start: float = 1.0
    """β before the first step of the first window."""
    multiplier_damping: float = 5.0
    """How much of the present violation is added to β as pressure on the weight; keeps the two from oscillating."""
    weight_decay: float = 1e-2
    """AdamW decay of both heads."""
    stop_share: float = 0.25
    """Share of head-training texts held out to select the step; with 0 the last step is taken."""
    patience: int = 8
    """Evaluations without improvement that end head learning."""
    recorder: CudaGraphs | None = None
    """Captures steps as CUDA graphs; without one they are launched kernel by kernel."""

    @classmethod
    def of(cls, settings: object, recorder: CudaGraphs | None = None) -> CalibrationPlan:
        """The plan of a settings section, read by field name: this file of pure mathematics imports no settings."""
        numbers = {f.name: getattr(settings, f.name) for f in fields(cls) if f.default is MISSING}
        return cls(**numbers, recorder=recorder)

    def mean_plan(self) -> MeanPlan:
        """The same hyperparameters for fitting a mean head alone (warm start, cross-fitted offsets)."""
        shared = {f.name: getattr(self, f.name) for f in fields(MeanPlan) if f.name not in ("steps", "lr")}
        return MeanPlan(steps=self.warm_steps, lr=self.mean_lr, **shared)


@dataclass(frozen=True)
class Candidate:
    """A frozen mixture with its mean response, ready for one independent validation; nothing in it is trained on."""

    mixture: LearnedWeight | FixedWeight
    """The learned weight; the fixed average if no evaluation on held-out texts found a smaller offset."""
    mean_head: nn.Module | None
    """h; None in repeated-prefix calibration, which measures the offset from the continuations themselves."""
    multiplier: float
    risk: float
    """Moment of the mean response on the held-out texts: in expectation a lower bound on the offset R (without a mean
    head, the unbiased estimate of R)."""
    step: int
    trace: list[dict[str, float]] = field(default_factory=list)
    change: float = 0.0
    """R(w) − R(½) on the held-out texts. Optimistic, because the step was selected by it."""
    updates: int = 0
    """Optimizer steps of all heads: regressions before the weight moves, then every step of weight and mean."""

    @property
    def improved(self) -> bool:
        """Whether calibration found a weight that is better than the fixed average; if not, it fell back to that."""
        return isinstance(self.mixture, LearnedWeight)


def calibrating(
    weight_head: nn.Module,
    mean_head: nn.Module,
    data: CalibrationData,
    plan: CalibrationPlan,
    seed: int,
    window: int = 0,
    *,
    state_only: bool = False,
    multiplier: float | None = None,
    fresh: Callable[[], nn.Module] | None = None,
) -> Task[Candidate]:
    """Descend in w and ascend in h and β ≥ 0 on single trajectories (eq:single-rollout-gradients); returns frozen
    copies of the heads at the best evaluation.

    The best response is exactly h* = E[Ā | c] + E[(w − ½)Δ | c]. The first part is noisy and does not depend on w: it
    is regressed once, stopped early on held-out texts and shrunk to what it explains there, so that it cannot memorise
    while w moves. The second has little noise and takes `mean_steps` steps per step of the weight.

    The given heads are left at the best evaluation, as starting points of the next window. `fresh` makes untrained mean
    heads for Δ̂ and g, which must not start from an earlier window's average; without it they are copies of
    `mean_head`, which then must be untrained itself.
    """
    split = Split.of(data, plan, seed, "calibrate", window)
    others = [copy.deepcopy(mean_head) if fresh is None else fresh() for _ in range(2)]
    response = MeanResponse(mean_head, others[0], others[1], weight_head)
    # What must be known on the host comes first: from here to the end of the search it launches and does not wait.
    descent, stopping = Descent(weight_head, split.learn, plan, multiplier), EarlyStopping(split.held_out, plan.kappa)
    before = yield from _fit_response(response, split, plan, seed, window, state_only)
    learner = _SaddleLearner(descent, response, split, plan, state_only)
    best, step, trace = yield from search(learner, split, plan, seed, "calibrate", window, stopping)
    found = _candidate(learner, best, step, trace, split.held_out)
    # Every step of the weight follows `mean_steps` of the mean response's moving part.
    return replace(found, updates=before + int(trace[-1]["step"]) * (1 + plan.mean_steps))


calibrate = by_itself(calibrating)


@dataclass(frozen=True)
class Split:
    """Head-training trajectories to learn from, and those of held-out texts that select the step."""

    learn: CalibrationData
    held_out: CalibrationData
    apart: bool
    """Whether any text was held out; otherwise `held_out` is `learn` and the last step is taken."""

    @classmethod
    def of(cls, data: CalibrationData, plan: CalibrationPlan, seed: int, role: str, window: int) -> Split:
        if not 0 <= plan.kappa < 1:
            raise ValueError(f"kappa must lie in [0, 1), got {plan.kappa}")
        shares = [1 - plan.stop_share, plan.stop_share]
        fit, stop = split_texts(data.occupation, shares, seed, f"{role}/split", window)
        return cls(data.rows(fit), data.rows(stop if stop.numel() else fit), bool(stop.numel()))


class Learner(Protocol):
    """What `search` drives: a step on minibatches of row numbers, and an evaluation on held-out texts."""

    batches: int
    """Minibatches per step."""

    @property
    def heads(self) -> tuple[nn.Module, ...]: ...

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]: ...

    def step(self, *rows: Tensor) -> None: ...

    def evaluate(self, stopping: EarlyStopping) -> None: ...


def search(
    learner: Learner,
    split: Split,
    plan: CalibrationPlan,
    seed: int,
    role: str,
    window: int,
    stopping: EarlyStopping,
) -> Task[tuple[Evaluation, int, list[dict[str, float]]]]:
    """Steps and evaluations until the held-out texts show no improvement; leaves the heads at the best evaluation.

    Returns that evaluation, its step and the trace of all evaluations. `stopping` is of the held-out texts.
    """
    looks = list[int]()
    device = split.learn.first_NT.device
    step_on = ReplayedStep(learner.step, learner.optimizers, device, plan.recorder)
    with forked(device):
        seed_dropout(seed, role, window)
        stream = batches(split.learn.occupation.count, plan.batch, seed, role, window, device)
        for step in range(plan.steps + 1):
            if step % plan.evaluate_every == 0 or step == plan.steps:
                learner.evaluate(stopping)
                looks.append(step)
                if stopping.asks(plan.patience):
                    yield
                if split.apart and stopping.over(plan.patience):
                    break
            if step < plan.steps:
                step_on(*(next(stream) for _ in range(learner.batches)))
    yield
    best_index = stopping.best(only_last=not split.apart)
    trace = [{"step": float(step), **found.line} for step, found in zip(looks, stopping.evaluations, strict=True)]
    best = stopping.evaluations[best_index]
    for head, state in zip(learner.heads, best.states):
        head.load_state_dict(state)
    return best, looks[best_index], trace


class Descent:
    """Gradient descent of w on the Lagrangian and projected ascent of β ≥ 0 on the constraint
    (eq:moment-lagrangian)."""

    def __init__(
        self, weight_head: nn.Module, data: CalibrationData, plan: CalibrationPlan, multiplier: float | None
    ) -> None:
        self.weight_head, self.plan = weight_head, plan
        start = plan.multiplier_start if multiplier is None else multiplier
        # A tensor on the device, so that no step synchronises with the host.
        self.multiplier = torch.tensor(start, dtype=torch.float64, device=data.first_NT.device)
        self.optimizer = torch.optim.AdamW(
            weight_head.parameters(), plan.weight_lr, weight_decay=plan.weight_decay, fused=True
        )
        # The constraint is measured in units of the signal, so that the step of β does not depend on the advantages'
        # scale.
        signal = float(data.occupation.mean(energy(data.first_NT, data.second_NT)))
        self.unit = 1 / signal if signal > 0 else 0.0

    def step(self, data: Paired, weight: Tensor, mean: Tensor) -> None:
        """One step of w on eq:single-rollout-saddle-integrand against the mean response, then one of β.

        The penalty factor on w is β plus `multiplier_damping` times the present violation (an augmented Lagrangian).
        The extra term vanishes where the constraint holds with equality, so the saddle point does not move, and it
        keeps w and β from oscillating around it.
        """
        first, second, kappa = data.first_NT, data.second_NT, self.plan.kappa
        violation = displacement(weight.detach(), first, second) - kappa * energy(first, second)
        excess = self.unit * data.occupation.mean(violation).double()
        penalty = (self.multiplier + self.plan.multiplier_damping * excess).clamp(min=0.0)
        loss = data.occupation.mean(saddle_integrand(weight, mean, first, second, penalty, kappa))
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        self.multiplier.add_(self.plan.multiplier_lr * excess).clamp_(min=0.0)


def _fit_response(
    response: MeanResponse, split: Split, plan: CalibrationPlan, seed: int, window: int, state_only: bool
) -> Task[int]:
    """Fit h before w moves: regressions for h̄ and, beside it where what they read is small, for Δ̂ and then g, and the
    shrinkage s that held-out texts support. Returns the optimizer steps this took."""
    learn, held_out = split.learn, split.held_out
    visible = _inputs(learn, state_only)
    response.set_action(visible, learn.occupation.mask_NT)
    first, second, context = learn.first_NT, learn.second_NT, learn.mean_inputs

    def regress(head: nn.Module, target: Tensor, role: str, recorder: CudaGraphs | None) -> Task[int]:
        plan_ = replace(plan.mean_plan(), recorder=recorder)
        task = regressing(head, context, target, learn.occupation, plan_, seed, f"mean/{role}", window)
        return (yield from task).steps

    def gap_and_shift(recorder: CudaGraphs | None) -> Task[int]:
        steps = yield from regress(response.gap, first - second, "gap", recorder)
        moved = (outputs(response.weight, visible) - 0.5) * (first - second)
        with torch.no_grad():
            known = response.centred_weight(context) * outputs(response.gap, context)
        return steps + (yield from regress(response.shift, moved - known, "shift", recorder))

    average = partial(regress, response.average, (first + second) / 2, "average")
    both: list[Callable[[CudaGraphs | None], Task[int]]] = [average, gap_and_shift]
    steps = sum((yield from together(plan.recorder, both, beside=light(context))))
    found = outputs(response.average, held_out.mean_inputs)
    size = held_out.occupation.mean(found.square()).double()
    match = held_out.occupation.mean(found * (held_out.first_NT + held_out.second_NT) / 2).double()
    response.share = torch.where(size > 0, (match / size).nan_to_num(0.0).clamp(0.0, 1.0), torch.ones_like(size))
    return steps


def _inputs(data: CalibrationData, state_only: bool) -> WeightInputs:
    return data.weight_inputs.state_only() if state_only else data.weight_inputs


@dataclass(frozen=True)
class _Part:
    """Some trajectories: what w reads with the taken and (`on_average`) with the average action, what g reads, and the
    parts of h that do not change while w is learned, s·h̄ and Δ̂."""

    weight_inputs: WeightInputs | ReadyInputs
    on_average: WeightInputs | ReadyInputs
    mean_inputs: MeanInputs | ReadyInputs
    first_NT: Tensor
    second_NT: Tensor
    average_NT: Tensor
    gap_NT: Tensor
    occupation: Occupation

    def rows(self, index: Tensor) -> _Part:
        """The same for some trajectories; a tensor that several read is taken once and stays shared."""
        once = shared(lambda tensor: tensor[index])
        visible, average = self.weight_inputs.map(once), self.on_average.map(once)
        given = once(self.first_NT), once(self.second_NT), once(self.average_NT), once(self.gap_NT)
        return _Part(visible, average, self.mean_inputs.map(once), *given, self.occupation.rows(index))


class _SaddleLearner:
    """Alternating steps: g is regressed on the present w, w descends on the saddle, β ascends on the constraint."""

    def __init__(
        self, descent: Descent, response: MeanResponse, split: Split, plan: CalibrationPlan, state_only: bool
    ) -> None:
        self.descent, self.response, self.plan, self.state_only = descent, response, plan, state_only
        self.weight_head, self.batches = descent.weight_head, plan.mean_steps
        self.whole, self.held_out = self._of(split.learn), self._of(split.held_out)
        self.shift_optimizer = torch.optim.AdamW(
            response.shift.parameters(), plan.mean_lr, weight_decay=plan.weight_decay, fused=True
        )

    def _of(self, data: CalibrationData) -> _Part:
        """What steps or evaluations on these trajectories read again and again."""
        response = self.response
        return _Part(
            weight_inputs=ready(self.weight_head, _inputs(data, self.state_only)),
            on_average=ready(self.weight_head, response.on_average(data.mean_inputs)),
            mean_inputs=ready(response.shift, data.mean_inputs),
            first_NT=data.first_NT,
            second_NT=data.second_NT,
            average_NT=response.share * outputs(response.average, data.mean_inputs),
            gap_NT=outputs(response.gap, data.mean_inputs),
            occupation=data.occupation,
        )

    @property
    def heads(self) -> tuple[nn.Module, ...]:
        """The heads that are trained: w and g."""
        return self.weight_head, self.response.shift

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        return self.descent.optimizer, self.shift_optimizer

    def step(self, *rows: Tensor) -> None:
        """A step of g on every minibatch, and a step of w and of β on the last."""
        for some in rows[:-1]:
            part = self._part(some)
            self._follow(part, outputs(self.weight_head, part.weight_inputs), self._known(part))
        part = self._part(rows[-1])
        known = self._known(part)
        self.weight_head.train()
        weight = self.weight_head(part.weight_inputs)
        self._follow(part, weight.detach(), known)
        mean = part.average_NT + known + outputs(self.response.shift, part.mean_inputs)
        self.descent.step(part, weight, mean)

    def _part(self, rows: Tensor) -> _Part:
        return self.whole if rows.numel() == self.whole.occupation.count else self.whole.rows(rows)

    def _known(self, part: _Part) -> Tensor:
        return (outputs(self.weight_head, part.on_average) - 0.5) * part.gap_NT

    def _follow(self, part: _Part, weight: Tensor, known: Tensor) -> None:
        """One regression step of g on (w − ½)Δ − `known`."""
        target = (weight - 0.5) * (part.first_NT - part.second_NT) - known
        self.response.shift.train()
        loss = -part.occupation.mean(moment(self.response.shift(part.mean_inputs), target))
        self.shift_optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.shift_optimizer.step()

    def evaluate(self, stopping: EarlyStopping) -> None:
        """One evaluation on the held-out texts."""
        part = self.held_out
        weight = outputs(self.weight_head, part.weight_inputs)
        moved = self._known(part) + outputs(self.response.shift, part.mean_inputs)
        mixed = mix(weight, part.first_NT, part.second_NT)
        value = part.occupation.mean(moment(part.average_NT + moved, mixed))
        stopping.look(weight, moved, self.heads, self.descent.multiplier, value)


def _candidate(
    learner: _SaddleLearner, best: Evaluation, step: int, trace: list[dict[str, float]], held_out: CalibrationData
) -> Candidate:
    """Frozen copies of the best evaluation's heads; the fixed average and its mean response if it was no
    improvement."""
    improved = best.change < 0
    response = copy.deepcopy(learner.response).requires_grad_(False).eval()
    response.still = not improved
    mixture: LearnedWeight | FixedWeight = FixedWeight()
    if improved:
        # The response already holds a frozen copy of the weight head in the chosen state.
        mixture = LearnedWeight(response.weight, learner.state_only, "state" if learner.state_only else "learned")
    mixed = mixture.mixed(held_out.weight_inputs, held_out.first_NT, held_out.second_NT)
    risk = float(held_out.occupation.mean(moment(outputs(response, held_out.mean_inputs), mixed)))
    return Candidate(mixture, response, best.multiplier, risk, step, trace, min(0.0, best.change))

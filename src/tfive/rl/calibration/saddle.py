"""Learning the weight: the constrained conditional-moment saddle from single rollouts (eq:calibrated-weight)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Protocol

import torch
from torch import Tensor, nn

from tfive.rl.calibration.early_stop import Judge, Snapshot
from tfive.rl.calibration.mean import MeanPlan, batches, forked, regress_mean, seed_dropout, text_order
from tfive.rl.calibration.mixture import FixedWeight, LearnedWeight, MeanInputs, WeightInputs, mix
from tfive.rl.calibration.moments import CalibrationData, displacement, energy, moment, saddle_integrand, split_by_text
from tfive.tree.fast.cuda_graph import CudaGraphs, ReplayedStep


@dataclass(frozen=True)
class CalibrationPlan:
    """The numbers of head learning; `CalibrationPlan.of(settings)` reads those with the same names from a section."""

    kappa: float = 0.1
    steps: int = 400
    batch: int = 256
    weight_lr: float = 1e-3
    mean_lr: float = 1e-3
    multiplier_lr: float = 0.5
    multiplier_start: float = 1.0
    multiplier_damping: float = 5.0
    mean_steps: int = 1
    warm_steps: int = 400
    weight_decay: float = 1e-2
    stop_share: float = 0.25
    evaluate_every: int = 20
    patience: int = 8
    recorder: CudaGraphs | None = None
    """Records steps on a GPU; without one they are launched kernel by kernel."""

    @classmethod
    def of(cls, settings: object, recorder: CudaGraphs | None = None) -> CalibrationPlan:
        numbers = {f.name: getattr(settings, f.name) for f in fields(cls) if f.name != "recorder"}
        return cls(**numbers, recorder=recorder)

    def mean_plan(self) -> MeanPlan:
        """The same numbers for fitting a mean head alone (warm start, cross-fitted offsets)."""
        return MeanPlan(
            self.warm_steps,
            self.batch,
            self.mean_lr,
            self.weight_decay,
            self.stop_share,
            self.evaluate_every,
            self.patience,
            self.recorder,
        )


class Response(nn.Module):
    """The mean response h(c) = s·h̄(c) + (w(s, ā) − ½)·Δ̂(c) + g(c), which follows the weight by construction.

    h̄ predicts the fixed average and is shrunk by s; Δ̂ predicts the critics' disagreement; ā is one fixed, average
    action, so that nothing of the sampled one is seen; g takes up what the sampled action's weight adds in the mean.
    """

    def __init__(self, average: nn.Module, gap: nn.Module, shift: nn.Module, weight: nn.Module) -> None:
        super().__init__()
        self.average, self.gap, self.shift, self.weight = average, gap, shift, weight
        self.share = 1.0
        self.still = False
        """Whether the weight stays at ½, so that only s·h̄ is left."""
        # A bound that the mean heads are built to keep is kept by their sum as well.
        self.bound: float | None = getattr(average, "bound", None)
        self.action_E: Tensor | None = None
        self.log_prob: Tensor | None = None

    def set_action(self, inputs: WeightInputs, mask_NT: Tensor) -> None:
        """Takes ā and its log-probability from the valid steps of some data."""
        self.action_E, self.log_prob = inputs.action_NTE[mask_NT].mean(0), inputs.log_prob_NT[mask_NT].mean()

    def lean(self, inputs: MeanInputs) -> Tensor:
        """w(s, ā) − ½."""
        if self.action_E is None or self.log_prob is None:
            raise ValueError("the response needs its average action first")
        shape = inputs.time_NT.shape
        action, log_prob = self.action_E.expand(*shape, -1), self.log_prob.expand(shape)
        fixed = WeightInputs(inputs.prefix_NTD, inputs.value_NT2, inputs.time_NT, action, log_prob)
        out: Tensor = self.weight(fixed) - 0.5
        return out

    def moved(self, inputs: MeanInputs) -> Tensor:
        """E[(w − ½)Δ | c]: what the weight adds to the average's conditional mean."""
        out: Tensor = self.lean(inputs) * self.gap(inputs) + self.shift(inputs)
        return out

    def forward(self, inputs: MeanInputs) -> Tensor:
        out: Tensor = self.share * self.average(inputs)
        if not self.still:
            out = out + self.moved(inputs)
        return out if self.bound is None else out.clamp(-self.bound, self.bound)


@dataclass(frozen=True)
class Candidate:
    """A frozen mixture with its mean response, ready for one independent validation. Nothing here trains any more."""

    mixture: LearnedWeight | FixedWeight
    """The learned weight; the fixed average when no look at the kept-back texts saw a smaller offset."""
    mean_head: nn.Module | None
    """h; None where repeated continuations of each prefix observe the offset themselves."""
    multiplier: float
    risk: float
    """Moment of the mean response on the kept-back texts: a lower bound on the offset in expectation (without a mean
    head, the unbiased offset itself)."""
    step: int
    trace: list[dict[str, float]] = field(default_factory=list)
    change: float = 0.0
    """Change of the offset against the fixed average on the kept-back texts, R(w) − R(½) (before selection's
    optimism)."""


def calibrate(
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
) -> Candidate:
    """Descends in w, ascends in h and the projected β on single trajectories; returns copies frozen at the best look.

    The best response splits exactly, h* = E[Ā | c] + E[(w − ½)Δ | c]. The first part is noisy and does not move with w:
    it is regressed once, stopped early on other texts and shrunk to what it explains there, so that it cannot go on
    memorising while w moves. The second has little noise and follows w by `mean_steps` steps per step of the weight.
    The given heads are left at the chosen look as starting points for the next window. `fresh` makes mean heads that
    know nothing yet, for what must not start from an earlier window's average: Δ̂ and g (copies of `mean_head` if it is
    None, which is right while that is new itself).
    """
    split = Split.of(data, plan, seed, "calibrate", window)
    others = [copy.deepcopy(mean_head) if fresh is None else fresh() for _ in range(2)]
    response = Response(mean_head, others[0], others[1], weight_head)
    _respond(response, split, plan, seed, window, state_only)
    descent = Descent(weight_head, split.learn, plan, multiplier)
    loop = _Loop(descent, response, split.learn, plan, state_only)
    best, step, trace = search(loop, split, plan, seed, "calibrate", window)
    return _candidate(loop, best, step, trace, split.kept)


@dataclass(frozen=True)
class Split:
    """Head-training trajectories to learn from, and those of other texts that choose the step."""

    learn: CalibrationData
    kept: CalibrationData
    apart: bool
    """Whether any text was kept back; otherwise `kept` is `learn` and the last step is taken."""

    @classmethod
    def of(cls, data: CalibrationData, plan: CalibrationPlan, seed: int, role: str, window: int) -> Split:
        if not 0 <= plan.kappa < 1:
            raise ValueError(f"kappa must lie in [0, 1), got {plan.kappa}")
        text_N = data.occupation.text_N
        order = text_order(text_N, seed, f"{role}/split", window)
        fit, stop = split_by_text(text_N, [1 - plan.stop_share, plan.stop_share], order)
        return cls(data.rows(fit), data.rows(stop if stop.numel() else fit), bool(stop.numel()))


class Learner(Protocol):
    """Something that moves the weight step by step, on minibatches of row numbers, and can be looked at."""

    batches: int
    """Minibatches a step takes."""

    @property
    def heads(self) -> tuple[nn.Module, ...]: ...

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]: ...

    def step(self, *rows: Tensor) -> None: ...

    def look(self, judge: Judge) -> dict[str, float]: ...


def search(
    learner: Learner, split: Split, plan: CalibrationPlan, seed: int, role: str, window: int
) -> tuple[Snapshot, int, list[dict[str, float]]]:
    """Steps and looks until the kept-back texts see no improvement; leaves the heads at the chosen look.

    Returns that look, its step and the trace of all looks.
    """
    judge, trace = Judge(split.kept, plan.kappa), []
    device = split.learn.first_NT.device
    step_on = ReplayedStep(learner.step, learner.optimizers, device, plan.recorder)
    with forked(device):
        seed_dropout(seed, role, window)
        stream = batches(split.learn.occupation.count, plan.batch, seed, role, window)
        for step in range(plan.steps + 1):
            if step % plan.evaluate_every == 0 or step == plan.steps:
                trace.append({"step": float(step), **learner.look(judge)})
                if split.apart and judge.stale >= plan.patience:
                    break
            if step < plan.steps:
                step_on(*(next(stream) for _ in range(learner.batches)))
    chosen = judge.choose(only_last=not split.apart)
    best = judge.snapshots[chosen]
    for head, state in zip(learner.heads, best.states):
        head.load_state_dict(state)
    return best, int(trace[chosen]["step"]), trace


class Descent:
    """The weight's descent on the saddle and the multiplier's projected ascent on the constraint, β ≥ 0."""

    def __init__(
        self, weight_head: nn.Module, data: CalibrationData, plan: CalibrationPlan, multiplier: float | None
    ) -> None:
        self.weight_head, self.plan = weight_head, plan
        start = plan.multiplier_start if multiplier is None else multiplier
        # On the device, so that no step waits for it.
        self._multiplier = torch.tensor(start, dtype=torch.float64, device=data.first_NT.device)
        self.optimizer = torch.optim.AdamW(
            weight_head.parameters(), plan.weight_lr, weight_decay=plan.weight_decay, fused=True
        )
        # The constraint is measured in units of the signal, so that β's pace does not depend on the advantages' scale.
        signal = float(data.occupation.mean(energy(data.first_NT, data.second_NT)))
        self.unit = 1 / signal if signal > 0 else 0.0

    @property
    def multiplier(self) -> float:
        """β as it stands."""
        return float(self._multiplier)

    def step(self, data: CalibrationData, weight: Tensor, mean: Tensor) -> None:
        """One step of w on eq:single-rollout-saddle-integrand against the mean response, then one of β.

        The pressure on w is β plus a damping share of the present violation (an augmented Lagrangian): it vanishes
        where the constraint is met with equality, so the saddle stays where it is, and keeps w and β from circling it.
        """
        first, second, kappa = data.first_NT, data.second_NT, self.plan.kappa
        violation = displacement(weight.detach(), first, second) - kappa * energy(first, second)
        excess = self.unit * data.occupation.mean(violation).double()
        pressure = (self._multiplier + self.plan.multiplier_damping * excess).clamp(min=0.0)
        loss = data.occupation.mean(saddle_integrand(weight, mean, first, second, pressure, kappa))
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        self._multiplier.add_(self.plan.multiplier_lr * excess).clamp_(min=0.0)


def _respond(response: Response, split: Split, plan: CalibrationPlan, seed: int, window: int, state_only: bool) -> None:
    """h before w moves: three regressions (average, disagreement, rest), and the shrinkage seen on kept-back texts."""
    learn, kept = split.learn, split.kept
    visible = _inputs(learn, state_only)
    response.set_action(visible, learn.occupation.mask_NT)
    first, second, context = learn.first_NT, learn.second_NT, learn.mean_inputs

    def regress(head: nn.Module, target: Tensor, role: str) -> None:
        regress_mean(head, context, target, learn.occupation, plan.mean_plan(), seed, f"mean/{role}", window)

    regress(response.average, (first + second) / 2, "average")
    regress(response.gap, first - second, "gap")
    moved = (outputs(response.weight, visible) - 0.5) * (first - second)
    with torch.no_grad():
        known = response.eval().lean(context) * response.gap(context)
    regress(response.shift, moved - known, "shift")
    found = outputs(response.average, kept.mean_inputs)
    size = float(kept.occupation.mean(found.square()))
    match = float(kept.occupation.mean(found * (kept.first_NT + kept.second_NT) / 2))
    response.share = min(1.0, max(0.0, match / size)) if size > 0 else 1.0


def outputs(head: nn.Module, inputs: WeightInputs | MeanInputs) -> Tensor:
    """A head's output without dropout or gradients."""
    head.eval()
    with torch.no_grad():
        out: Tensor = head(inputs)
    return out


def _inputs(data: CalibrationData, state_only: bool) -> WeightInputs:
    return data.weight_inputs.state_only() if state_only else data.weight_inputs


@dataclass(frozen=True)
class _Part:
    """A minibatch with what stands still on it: s·h̄ and Δ̂."""

    data: CalibrationData
    average_NT: Tensor
    gap_NT: Tensor


class _Loop:
    """The alternating steps: g follows w, w descends on the saddle, β ascends on the constraint."""

    def __init__(
        self, descent: Descent, response: Response, data: CalibrationData, plan: CalibrationPlan, state_only: bool
    ) -> None:
        self.descent, self.response, self.plan, self.state_only = descent, response, plan, state_only
        self.weight_head, self.batches = descent.weight_head, plan.mean_steps
        average = response.share * outputs(response.average, data.mean_inputs)
        self.whole = _Part(data, average, outputs(response.gap, data.mean_inputs))
        self.shift_optimizer = torch.optim.AdamW(
            response.shift.parameters(), plan.mean_lr, weight_decay=plan.weight_decay, fused=True
        )

    @property
    def heads(self) -> tuple[nn.Module, ...]:
        """What moves: w and g."""
        return self.weight_head, self.response.shift

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        return self.descent.optimizer, self.shift_optimizer

    def step(self, *rows: Tensor) -> None:
        """A step of g on every minibatch, one of w and one of β on the last."""
        for some in rows[:-1]:
            part = self._part(some)
            self._follow(part, outputs(self.weight_head, _inputs(part.data, self.state_only)), self._known(part))
        part = self._part(rows[-1])
        known = self._known(part)
        self.weight_head.train()
        weight = self.weight_head(_inputs(part.data, self.state_only))
        self._follow(part, weight.detach(), known)
        mean = part.average_NT + known + outputs(self.response.shift, part.data.mean_inputs)
        self.descent.step(part.data, weight, mean)

    def _part(self, rows: Tensor) -> _Part:
        whole = self.whole
        if rows.numel() == whole.data.occupation.count:
            return whole
        return _Part(whole.data.rows(rows), whole.average_NT[rows], whole.gap_NT[rows])

    def _known(self, part: _Part) -> Tensor:
        self.weight_head.eval()
        with torch.no_grad():
            return self.response.lean(part.data.mean_inputs) * part.gap_NT

    def _follow(self, part: _Part, weight: Tensor, known: Tensor) -> None:
        """One step of g towards the mean of what `known` leaves of (w − ½)Δ."""
        data = part.data
        target = (weight - 0.5) * (data.first_NT - data.second_NT) - known
        self.response.shift.train()
        loss = -data.occupation.mean(moment(self.response.shift(data.mean_inputs), target))
        self.shift_optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.shift_optimizer.step()

    def look(self, judge: Judge) -> dict[str, float]:
        """One look at the kept-back texts, as a line of the trace."""
        kept = judge.data
        weight = outputs(self.weight_head, _inputs(kept, self.state_only))
        with torch.no_grad():
            moved = self.response.eval().moved(kept.mean_inputs)
        mean = self.response.share * outputs(self.response.average, kept.mean_inputs) + moved
        value = float(kept.occupation.mean(moment(mean, mix(weight, kept.first_NT, kept.second_NT))))
        return {"moment": value, **looked(judge, weight, moved, self.heads, self.descent.multiplier)}


def looked(
    judge: Judge, weight: Tensor, moved: Tensor, heads: tuple[nn.Module, ...], multiplier: float
) -> dict[str, float]:
    """Lets the judge look at w and m = E[(w − ½)Δ | c]; returns what it found, for the trace."""
    found = judge.look(weight, moved, heads, multiplier)
    occupation = judge.data.occupation
    return {
        "change": found.change,
        "retention": found.retention,
        "multiplier": multiplier,
        "weight_mean": float(occupation.mean(weight) / occupation.mean(torch.ones_like(weight))),
    }


def _candidate(
    loop: _Loop, best: Snapshot, step: int, trace: list[dict[str, float]], kept: CalibrationData
) -> Candidate:
    """Frozen copies of the chosen look; the fixed average with its own mean response if that was no improvement."""
    improved = best.change < 0
    response = copy.deepcopy(loop.response).requires_grad_(False).eval()
    response.still = not improved
    mixture: LearnedWeight | FixedWeight = FixedWeight()
    if improved:
        # The response holds its own frozen copy of the weight; both stand at the chosen look.
        mixture = LearnedWeight(response.weight, loop.state_only, "state" if loop.state_only else "learned")
    mixed = mixture.mixed(kept.weight_inputs, kept.first_NT, kept.second_NT)
    risk = float(kept.occupation.mean(moment(outputs(response, kept.mean_inputs), mixed)))
    return Candidate(mixture, response, best.multiplier, risk, step, trace, min(0.0, best.change))

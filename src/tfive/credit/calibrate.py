"""Learning the weight: the constrained conditional-moment saddle from single rollouts (eq:calibrated-weight)."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn

from tfive.credit.judge import Judge
from tfive.credit.mean import MeanPlan, batches, forked, regress_mean, seed_dropout, text_order
from tfive.credit.mixture import LearnedWeight, WeightInputs, mix
from tfive.credit.moments import CalibrationData, displacement, energy, moment, saddle_integrand, split_by_text


@dataclass(frozen=True)
class CalibrationPlan:
    """The numbers of head learning; `CalibrationPlan.of(settings)` reads those with the same names from a section."""

    kappa: float = 0.1
    steps: int = 400
    batch: int = 256
    weight_lr: float = 1e-3
    mean_lr: float = 1e-3
    multiplier_lr: float = 0.1
    multiplier_start: float = 1.0
    mean_steps: int = 4
    warm_steps: int = 400
    weight_decay: float = 1e-2
    stop_share: float = 0.25
    evaluate_every: int = 20
    patience: int = 8

    @classmethod
    def of(cls, settings: object) -> CalibrationPlan:
        return cls(**{f.name: getattr(settings, f.name) for f in fields(cls)})

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
        )


@dataclass(frozen=True)
class Candidate:
    """A frozen weight with its mean response, ready for one independent validation. Nothing here trains any more."""

    mixture: LearnedWeight
    mean_head: nn.Module
    multiplier: float
    risk: float
    """Largest held-out moment any snapshot of h found for this weight: what the early stop minimised."""
    step: int
    trace: list[dict[str, float]] = field(default_factory=list)


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
    optimizers: tuple[torch.optim.Optimizer, torch.optim.Optimizer] | None = None,
) -> Candidate:
    """Descends in w, ascends in h and the projected β on single trajectories; returns copies frozen at the best step.

    h starts from a regression on the initial mixture and takes `mean_steps` steps per step of w, since the saddle
    gradient is that of R only while h is near its optimum. Held-out texts choose the step: every snapshot of w is
    judged by the most critical snapshot of h (so a forgetful h cannot flatter a weight) and must respect the retention
    constraint there. The given heads (and optimizers) are left where training ended, as starting points for the next
    window.
    """
    if not 0 <= plan.kappa < 1:
        raise ValueError(f"kappa must lie in [0, 1), got {plan.kappa}")
    text_N = data.occupation.text_N
    order = text_order(text_N, seed, "calibrate/split", window)
    fit, stop = split_by_text(text_N, [1 - plan.stop_share, plan.stop_share], order)
    kept = data.rows(stop if stop.numel() else fit)
    judge = Judge(kept, plan.kappa)
    weight_optimizer, mean_optimizer = optimizers or (
        torch.optim.AdamW(weight_head.parameters(), lr=plan.weight_lr, weight_decay=plan.weight_decay, fused=True),
        torch.optim.AdamW(mean_head.parameters(), lr=plan.mean_lr, weight_decay=plan.weight_decay, fused=True),
    )
    learn = data.rows(fit)
    _warm_start(weight_head, mean_head, learn, plan, seed, window, state_only)
    beta = plan.multiplier_start if multiplier is None else multiplier
    # The constraint is measured in units of the signal, so that β's pace does not depend on the advantages' scale.
    signal = float(learn.occupation.mean(energy(learn.first_NT, learn.second_NT)))
    pace = plan.multiplier_lr / signal if signal > 0 else 0.0
    trace: list[dict[str, float]] = []
    device = data.first_NT.device
    with forked(device):
        seed_dropout(seed, "calibrate", window)
        stream = _stream(learn, plan.batch, seed, window)
        for step in range(plan.steps + 1):
            if step % plan.evaluate_every == 0 or step == plan.steps:
                outputs = _outputs(weight_head, mean_head, kept, state_only)
                trace.append({"step": float(step), **judge.look(*outputs, (weight_head, mean_head), beta)})
                if stop.numel() and judge.stale >= plan.patience:
                    break
            if step < plan.steps:
                _ascend_mean(weight_head, mean_head, mean_optimizer, stream, plan.mean_steps, state_only)
                excess = _descend_weight(
                    weight_head, mean_head, weight_optimizer, next(stream), beta, plan.kappa, state_only
                )
                beta = max(0.0, beta + pace * excess)
    best = judge.choose(only_last=not stop.numel())
    weight_copy = _frozen(weight_head, best.snapshot.weight_state)
    mixture = LearnedWeight(weight_copy, state_only, "state" if state_only else "learned")
    chosen = int(trace[best.number]["step"])
    frozen_mean = _frozen(mean_head, best.mean_state)
    return Candidate(mixture, frozen_mean, best.snapshot.multiplier, best.risk, chosen, trace)


def _outputs(
    weight_head: nn.Module, mean_head: nn.Module, data: CalibrationData, state_only: bool
) -> tuple[Tensor, Tensor]:
    """w and h on some data, without dropout or gradients."""
    weight_head.eval()
    mean_head.eval()
    with torch.no_grad():
        return weight_head(_inputs(data, state_only)), mean_head(data.mean_inputs)


def _stream(data: CalibrationData, batch: int, seed: int, window: int) -> Iterator[CalibrationData]:
    for rows in batches(data.occupation.count, batch, seed, "calibrate", window):
        yield data if rows.numel() == data.occupation.count else data.rows(rows.to(data.first_NT.device))


def _inputs(data: CalibrationData, state_only: bool) -> WeightInputs:
    return data.weight_inputs.state_only() if state_only else data.weight_inputs


def _warm_start(
    weight_head: nn.Module,
    mean_head: nn.Module,
    data: CalibrationData,
    plan: CalibrationPlan,
    seed: int,
    window: int,
    state_only: bool,
) -> None:
    weight_head.eval()
    with torch.no_grad():
        mixed = mix(weight_head(_inputs(data, state_only)), data.first_NT, data.second_NT)
    regress_mean(mean_head, data.mean_inputs, mixed, data.occupation, plan.mean_plan(), seed, "warm-start", window)


def _ascend_mean(
    weight_head: nn.Module,
    mean_head: nn.Module,
    optimizer: torch.optim.Optimizer,
    stream: Iterator[CalibrationData],
    steps: int,
    state_only: bool,
) -> None:
    weight_head.eval()
    mean_head.train()
    seen: CalibrationData | None = None
    for _ in range(steps):
        data = next(stream)
        if data is not seen:
            # The weight stands still here, so a batch that comes again (one that holds everything) keeps its mixture.
            with torch.no_grad():
                mixed = mix(weight_head(_inputs(data, state_only)), data.first_NT, data.second_NT)
            seen = data
        loss = -data.occupation.mean(moment(mean_head(data.mean_inputs), mixed))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()


def _descend_weight(
    weight_head: nn.Module,
    mean_head: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: CalibrationData,
    beta: float,
    kappa: float,
    state_only: bool,
) -> float:
    """One step of w on eq:single-rollout-saddle-integrand; returns C − κQ before it, the ascent direction of β."""
    weight_head.train()
    mean_head.eval()
    with torch.no_grad():
        mean = mean_head(data.mean_inputs)
    weight = weight_head(_inputs(data, state_only))
    loss = data.occupation.mean(saddle_integrand(weight, mean, data.first_NT, data.second_NT, beta, kappa))
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        moved, signal = displacement(weight, data.first_NT, data.second_NT), energy(data.first_NT, data.second_NT)
        return float(data.occupation.mean(moved - kappa * signal))


def _frozen(head: nn.Module, state: dict[str, Any]) -> nn.Module:
    copied = copy.deepcopy(head)
    copied.load_state_dict(state)
    return copied.requires_grad_(False).eval()

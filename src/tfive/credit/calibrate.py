"""Learning the weight: the constrained conditional-moment saddle from single rollouts (eq:calibrated-weight)."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn

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
    judge = _Judge(data.rows(stop if stop.numel() else fit), plan.kappa, state_only)
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
        seed_dropout(device, seed, "calibrate", window)
        stream = _stream(learn, plan.batch, seed, window)
        for step in range(plan.steps + 1):
            if step % plan.evaluate_every == 0 or step == plan.steps:
                trace.append({"step": float(step), **judge.look(weight_head, mean_head, beta)})
                if stop.numel() and judge.stale >= plan.patience:
                    break
            if step < plan.steps:
                _ascend_mean(weight_head, mean_head, mean_optimizer, stream, plan.mean_steps, state_only)
                excess = _descend_weight(
                    weight_head, mean_head, weight_optimizer, next(stream), beta, plan.kappa, state_only
                )
                beta = max(0.0, beta + pace * excess)
    best = judge.best(only_last=not stop.numel())
    weight_copy, mean_copy = _frozen(weight_head, best.weight_state), _frozen(mean_head, best.mean_state)
    name = "state" if state_only else "learned"
    chosen = int(trace[best.number]["step"])
    return Candidate(LearnedWeight(weight_copy, state_only, name), mean_copy, best.multiplier, best.risk, chosen, trace)


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
    for _ in range(steps):
        data = next(stream)
        with torch.no_grad():
            mixed = mix(weight_head(_inputs(data, state_only)), data.first_NT, data.second_NT)
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


@dataclass(frozen=True)
class _Snapshot:
    number: int
    weight_state: dict[str, Any]
    mean_state: dict[str, Any]
    multiplier: float
    mixed: Tensor
    mean: Tensor
    retention: float
    risk: float = 0.0


class _Judge:
    """Held-out texts' view of the saddle: for every snapshot of w, the largest moment any snapshot of h finds."""

    def __init__(self, data: CalibrationData, kappa: float, state_only: bool) -> None:
        self.data, self.kappa, self.state_only = data, kappa, state_only
        self.signal = float(data.occupation.mean(energy(data.first_NT, data.second_NT)))
        self.snapshots: list[_Snapshot] = []
        self.stale = 0
        self._best_risk = float("inf")

    def look(self, weight_head: nn.Module, mean_head: nn.Module, beta: float) -> dict[str, float]:
        """Takes a snapshot and returns one line of the trace."""
        weight_head.eval()
        mean_head.eval()
        first, second, occupation = self.data.first_NT, self.data.second_NT, self.data.occupation
        with torch.no_grad():
            weight = weight_head(_inputs(self.data, self.state_only))
            mean = mean_head(self.data.mean_inputs)
        moved = float(occupation.mean(displacement(weight, first, second)))
        retention = moved / self.signal if self.signal > 0 else float("inf") if moved > 0 else 0.0
        mixed = mix(weight, first, second)
        states = copy.deepcopy(weight_head.state_dict()), copy.deepcopy(mean_head.state_dict())
        self.snapshots.append(_Snapshot(len(self.snapshots), *states, beta, mixed, mean, retention))
        best = self.best()
        improved = best.risk < self._best_risk * (1 - 1e-3) - 1e-12
        self.stale = 0 if improved or best.retention > self.kappa else self.stale + 1
        self._best_risk = min(self._best_risk, best.risk) if best.retention <= self.kappa else self._best_risk
        return {
            "moment": float(occupation.mean(moment(mean, mixed))),
            "risk": self._risks()[-1],
            "retention": retention,
            "multiplier": beta,
            "weight_mean": float(occupation.mean(weight) / occupation.mean(torch.ones_like(weight))),
        }

    def _risks(self) -> list[float]:
        """max(0, max_j L(w_i, h_j)) for every snapshot i, on the held-out texts."""
        occupation = self.data.occupation
        scale = occupation.mask_NT.double() / (occupation.horizon * occupation.count)
        if occupation.importance_N is not None:
            scale = scale * occupation.importance_N.double().unsqueeze(-1)
        mixed = torch.stack([s.mixed.double().flatten() for s in self.snapshots])
        mean = torch.stack([s.mean.double().flatten() for s in self.snapshots])
        weighted = mean * scale.flatten()
        value = 2 * mixed @ weighted.T - (mean * weighted).sum(-1)
        return value.max(dim=1).values.clamp(min=0).tolist()

    def best(self, only_last: bool = False) -> _Snapshot:
        """The feasible snapshot with the smallest risk (the least displaced one if none is feasible), and its harshest
        h."""
        risks = self._risks()
        feasible = [s for s in self.snapshots if s.retention <= self.kappa]
        pool = self.snapshots[-1:] if only_last else feasible or [min(self.snapshots, key=lambda s: s.retention)]
        chosen = min(pool, key=lambda s: risks[s.number])
        means = [float(self.data.occupation.mean(moment(s.mean, chosen.mixed))) for s in self.snapshots]
        critic = self.snapshots[max(range(len(means)), key=means.__getitem__)]
        return _Snapshot(
            chosen.number, chosen.weight_state, critic.mean_state, chosen.multiplier,
            chosen.mixed, critic.mean, chosen.retention, risks[chosen.number],
        )  # fmt: skip

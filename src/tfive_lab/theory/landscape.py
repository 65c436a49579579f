"""A map of when calibration helps: exact worlds, one parameter varied at a time, every rule of mixing compared.

For each setting and world: how much of the fixed average's offset the best feasible weight removes, how far each rule's
clipped update is from the true policy gradient, and what return exact updates by that rule reach.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tfive.rl.calibration.mixture import mix
from tfive.rl.calibration.moments import CalibrationData, Occupation
from tfive.rl.calibration.saddle import CalibrationPlan, calibrate
from tfive.rl.calibration.settings import CalibrationSettings
from tfive.rl.gae import PilotNormaliser
from tfive.rl.losses import active_mask, centering_term, clipped_surrogate
from tfive_lab.theory.claims_policy import true_gradient
from tfive_lab.theory.saddle import solve
from tfive_lab.theory.tables import table_heads
from tfive_lab.theory.worlds import Shape, World, random_world

RULES = ("average", "single", "minimum", "centering", "t5")
"""Fixed average, one critic, the lower of two, score centering of the average, and the calibrated mixture."""


@dataclass(frozen=True)
class Setting:
    """Parameters of the map. `offset` is the critics' shared error, `disagreement` their own, relative to returns."""

    disagreement: float = 0.5
    offset: float = 0.4
    mismatch: float = 0.3
    lag: float = 0.3
    kappa: float = 0.1
    hidden_share: float = 0.5


MATCHED = Setting(mismatch=0.0, lag=0.0)

AXES: dict[str, tuple[float, ...]] = {
    "matched": (0.0,),
    "disagreement": (0.02, 0.1, 0.25, 0.5, 1.0, 2.0),
    "mismatch": (0.0, 0.1, 0.3, 0.6, 1.0),
    "lag": (0.0, 0.1, 0.3, 0.6, 1.0),
    "kappa": (0.0, 0.02, 0.05, 0.1, 0.3, 0.9),
    "hidden_share": (0.0, 0.25, 0.5, 0.75, 1.0),
    "offset": (0.0, 0.1, 0.2, 0.4, 0.8),
    "reuse": (1, 2, 4, 8, 24),
}
UPDATES = 24
"""Updates behind every return of the map; `reuse` of them share a window."""


def make_world(setting: Setting, seed: int, number: int) -> World:
    """World `number` of this setting; random numbers are the same at every setting, only the parameter differs."""
    shape = Shape(
        texts=2, hidden=2, actions=3, horizon=2, checkpoints=(1, 2),
        mismatch=setting.mismatch, lag=setting.lag, disagreement=setting.disagreement,
        offset=setting.offset, hidden_share=setting.hidden_share,
    )  # fmt: skip
    world = random_world(seed, number, shape)
    return normalised(world.change(kappa=setting.kappa))


def normalised(world: World) -> World:
    """The world with its pilot at the population mean and deviation of both critics' GAEs."""
    raw = torch.stack([world.advantage_NT(world.critic_NT(i)) for i in (0, 1)])
    share = world.mass_NT / world.mass_NT.sum()
    mean = float((share * raw.mean(0)).sum())
    variance = float((share * (raw - mean).square().mean(0)).sum())
    return world.change(pilot=PilotNormaliser(mean, math.sqrt(variance + 1e-6), 1))


def advantage(world: World, rule: str) -> Tensor:
    """The normalised advantage that a rule feeds to the actor; `t5` uses the exact optimum of the saddle."""
    first, second = world.pair()
    if rule == "single":
        return first
    if rule == "minimum":
        return torch.minimum(first, second)
    if rule == "t5":
        return mix(solve(world, world.kappa).weight_NT, first, second)
    return (first + second) / 2


def update(world: World, rule: str, signal: Tensor) -> Tensor:
    """The actual clipped update in units of ∇J (undoing the pilot's scale and the 1/T_max of the measure)."""
    theta = world.theta_P.clone().requires_grad_(True)
    log_policy = world.log_policy_SA(theta)
    ratio = (world.taken(log_policy) - world.taken(world.log_old_SA)).exp()
    value = clipped_surrogate(ratio, signal, world.low, world.high)
    if rule == "centering":
        term_S = centering_term(log_policy, world.log_old_SA, world.log_q_SA)
        value = value - signal * term_S[world.state_NT]
    (gradient,) = torch.autograd.grad(world.occupation.mean(value), theta)
    return gradient * world.horizon * world.pilot.deviation


def expected_return(world: World) -> float:
    """J(θ), exactly."""
    probability = world.trajectory_probability(world.log_policy_SA(world.theta_P))
    return float((probability * world.return_NT[:, 0]).sum())


def refresh(world: World, noise_SA: Tensor, error_S2: Tensor) -> World:
    """A new window: π_old becomes π_θ, the sampler's mismatch and the critics' errors stay what they are."""
    old = world.log_policy_SA(world.theta_P)
    moved = world.change(
        log_old_SA=old, log_q_SA=(old + noise_SA).log_softmax(-1), theta_P=torch.zeros_like(world.theta_P)
    )
    target = torch.zeros(error_S2.shape[0], dtype=torch.float64)
    target[moved.state_NT[moved.mask_NT]] = moved.given(moved.return_NT, moved.state_NT)[moved.mask_NT]
    return normalised(moved.change(value_S2=target.unsqueeze(-1) + error_S2))


Direction = Callable[[World], Tensor]
"""A step in θ, in units of ∇J, at the world's present θ."""


def return_after(world: World, rule: str, windows: int, steps: int, rate: float) -> float:
    """J after exact updates: in each window the signal is frozen and θ takes `steps` steps, then all is refreshed."""
    noise = world.log_q_SA - world.log_old_SA
    target = torch.zeros(world.value_S2.shape[0], dtype=torch.float64)
    target[world.state_NT[world.mask_NT]] = world.given(world.return_NT, world.state_NT)[world.mask_NT]
    error = world.value_S2 - target.unsqueeze(-1)
    world = world.change(theta_P=torch.zeros_like(world.theta_P))
    for _ in range(windows):
        direction = _opened(world, rule)
        for _ in range(steps):
            world = world.change(theta_P=world.theta_P + rate * direction(world))
        world = refresh(world, noise, error)
    return expected_return(world)


def _opened(world: World, rule: str) -> Direction:
    """A window's direction: its signal is computed once, at the opening."""
    if rule == "true":
        return true_gradient
    signal = advantage(world, rule)
    return lambda now: update(now, rule, signal)


@dataclass(frozen=True)
class Point:
    """One setting: means over worlds (medians of gradient errors), how often T⁵ beats each other rule, and its mean
    lead in return over each with the standard error of that paired difference."""

    axis: str
    value: float
    worlds: int
    offset_removed: float
    signal_moved: float
    clip_fraction: float
    gradient_error: dict[str, float]
    error_wins: dict[str, float]
    gain: dict[str, float]
    gain_wins: dict[str, float]
    lead: dict[str, float]
    lead_error: dict[str, float]


@dataclass
class _Tally:
    removed: list[float]
    moved: list[float]
    clipped: list[float]
    errors: dict[str, list[float]]
    gains: dict[str, list[float]]


def point(axis: str, value: float, worlds: int, seed: int = 0, updates: int = UPDATES) -> Point:
    """One setting of the map: the default parameters with one of them set to `value`.

    Two axes are no parameters of a world: `matched` sets mismatch and lag to zero, where every offset cancels,
    and `reuse` is the number of updates per window.
    """
    setting = Setting() if axis == "reuse" else replace(Setting(), **{axis: value}) if axis != "matched" else MATCHED
    steps = int(value) if axis == "reuse" else 4
    tally = _Tally([], [], [], {rule: [] for rule in RULES}, {rule: [] for rule in (*RULES, "true")})
    for number in range(worlds):
        world = make_world(setting, seed, number)
        _measure(world, tally)
        start = expected_return(world.change(theta_P=torch.zeros_like(world.theta_P)))
        for rule, gains in tally.gains.items():
            gains.append(return_after(world, rule, max(1, updates // steps), min(steps, updates), rate=0.5) - start)
    leads = {rule: [a - b for a, b in zip(tally.gains["t5"], tally.gains[rule])] for rule in RULES}
    return Point(
        axis, value, worlds, _mean(tally.removed), _mean(tally.moved), _mean(tally.clipped),
        {rule: _median(found) for rule, found in tally.errors.items()},
        {rule: _share(a < b - 1e-9 for a, b in zip(tally.errors["t5"], tally.errors[rule])) for rule in RULES},
        {rule: _mean(found) for rule, found in tally.gains.items()},
        {rule: _share(lead > 1e-9 for lead in found) for rule, found in leads.items()},
        {rule: _mean(found) for rule, found in leads.items()},
        {rule: _error(found) for rule, found in leads.items()},
    )  # fmt: skip


def _measure(world: World, tally: _Tally) -> None:
    """Offset removed, clipping, and each rule's error against the true gradient at the world's own θ."""
    best = solve(world, world.kappa)
    tally.removed.append(1 - best.risk / best.reference_risk if best.reference_risk > 1e-12 else 0.0)
    tally.moved.append(best.displacement / best.signal if best.signal > 0 else 0.0)
    truth = true_gradient(world)
    for rule in RULES:
        signal = advantage(world, rule)
        tally.errors[rule].append(float((update(world, rule, signal) - truth).norm() / truth.norm()))
    active = active_mask(world.ratio_NT, advantage(world, "average"), world.low, world.high)
    tally.clipped.append(float((world.mass_NT * ~active).sum() / world.mass_NT.sum()))


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _error(values: list[float]) -> float:
    """The standard error of the mean."""
    if len(values) < 2:
        return math.inf
    mean = _mean(values)
    return math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values))


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def _share(wins: Iterable[bool]) -> float:
    found = list(wins)
    return sum(found) / len(found)


@dataclass(frozen=True)
class DataPoint:
    """What learned heads make of a finite number of single rollouts, as a share of the attainable reduction."""

    trajectories: int
    worlds: int
    attained: float
    retention: float


def learned_from(trajectories: int, worlds: int, seed: int = 0) -> DataPoint:
    """Tabular heads fitted by the trainer's own loop on sampled trajectories, judged exactly."""
    plan = replace(
        CalibrationPlan.of(CalibrationSettings()),
        kappa=Setting().kappa, steps=150, batch=10**6, weight_lr=0.1, mean_lr=0.1, multiplier_lr=1.0,
        mean_steps=2, warm_steps=100, weight_decay=0.0, stop_share=0.25, evaluate_every=10, patience=15,
    )  # fmt: skip
    attained, retention = [], []
    for number in range(worlds):
        world = make_world(Setting(), seed, number)
        best = solve(world, plan.kappa)
        data = _sampled(world, trajectories)
        candidate = calibrate(*table_heads(world), data, plan, seed, number)
        first, second = world.pair()
        weight = candidate.mixture.weight(world.calibration_data().weight_inputs)
        mean = world.mean_given_context(mix(weight, first, second))
        risk = float(world.integral(mean.square()))
        attained.append((best.reference_risk - risk) / (best.reference_risk - best.risk))
        gap = (weight - 0.5).square() * (first - second).square()
        retention.append(float(world.integral(gap)) / best.signal)
    return DataPoint(trajectories, worlds, _mean(attained), _mean(retention))


def _sampled(world: World, count: int) -> CalibrationData:
    """`count` independent trajectories, each a text of its own."""
    edges = world.probability_N.cumsum(0)
    rows = torch.searchsorted(edges, world.draws().uniform("rollouts", count) * edges[-1]).clamp(max=edges.numel() - 1)
    drawn = world.calibration_data().rows(rows)
    return replace(drawn, occupation=Occupation(drawn.occupation.mask_NT, torch.arange(count), world.horizon))

"""The conditional-moment dual, its saddle points, and the drift bound."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from tfive.rl.calibration.mixture import mix
from tfive.rl.calibration.moments import displacement, energy, moment, saddle_integrand
from tfive.rl.calibration.validation import HoeffdingReport, SignalBounds, Validator, certify, learned
from tfive.rl.drift import update_factor
from tfive_lab.theory.claims_policy import sensitivity
from tfive_lab.theory.examples import identical_critics, one_step, silent, wide_open
from tfive_lab.theory.saddle import SaddleSolution, solve
from tfive_lab.theory.statement import at_most, equal, examples, exceeds, statement
from tfive_lab.theory.tables import table_heads
from tfive_lab.theory.worlds import World


def _signal(world: World) -> tuple[Tensor, Tensor, float]:
    """The mixed advantage, its conditional mean, and R."""
    mixed = mix(world.gate_weight_NT, *world.pair())
    mean = world.mean_given_context(mixed)
    return mixed, mean, float(world.integral(mean.square()))


@statement("lem:moment-duality", "E[2hÃ − h²] = R − ‖h − μ‖², so its supremum is R, at the conditional mean")
def moment_duality(world: World) -> Iterator[float]:
    mixed, mean, risk = _signal(world)
    for name in ("h one", "h two"):
        h = world.on_contexts(name)
        yield equal(world.occupation.mean(moment(h, mixed)), risk - world.integral((h - mean).square()))
    yield equal(world.occupation.mean(moment(mean, mixed)), risk)


@statement("eq:sample-square-is-not-mean-square", "E[Ã²] = R + variation within contexts")
def sample_square(world: World) -> Iterator[float]:
    mixed, mean, risk = _signal(world)
    within = world.mean_given_context((mixed - mean).square())
    yield equal(world.integral(mixed.square()), risk + world.integral(within))


def _restricted(world: World, target: Tensor) -> Tensor:
    """The best response in the span of three fixed random functions of the context (weighted least squares)."""
    basis = torch.stack([world.on_contexts(f"basis {k}") for k in range(3)], -1)
    root = world.mass_NT.sqrt()
    flat = (basis * root.unsqueeze(-1)).flatten(0, 1)
    solution = torch.linalg.pinv(flat) @ (target * root).flatten()
    return basis @ solution


@statement("eq:mean-prediction-residual", "error against the conditional mean = approximation + optimisation error")
def mean_prediction_residual(world: World) -> Iterator[float]:
    mixed, mean, risk = _signal(world)
    best = _restricted(world, mean)
    approximation = world.integral((best - mean).square())
    restricted = world.occupation.mean(moment(best, mixed))
    yield equal(restricted, risk - approximation)
    some = 0.5 * best + 0.3 * world.on_contexts("basis 0")
    gap = restricted - world.occupation.mean(moment(some, mixed))
    yield at_most(0.0, gap)
    yield equal(world.integral((some - mean).square()), approximation + gap)


@statement("eq:auxiliary-information-gap", "an auxiliary misses exactly the variance of μ given what it sees")
def auxiliary_information_gap(world: World) -> Iterator[float]:
    mixed, mean, risk = _signal(world)
    coarse = (world.draws().uniform("coarse", int(world.context_NT.max()) + 1) * 3).long()[world.context_NT]
    for seen in (world.state_NT, coarse):
        best = world.given(mixed, seen)
        missed = world.integral(world.given((mean - world.given(mean, seen)).square(), seen))
        yield equal(risk - world.integral(best.square()), missed)
        yield equal(world.occupation.mean(moment(best, mixed)), risk - missed)


@statement("eq:single-rollout-gradients", "trajectory sums over T_max give unbiased saddle gradients")
def single_rollout_gradients(world: World) -> Iterator[float]:
    data = world.calibration_data()
    first, second = data.first_NT, data.second_NT
    weight_head, mean_head = table_heads(world)
    with torch.no_grad():
        weight_head.logit.copy_(world.draws().normal("logit", weight_head.logit.numel()))
        mean_head.context.copy_(world.draws().normal("table", mean_head.context.numel()))
    beta = 0.7
    weight, mean = weight_head(data.weight_inputs), mean_head(data.mean_inputs)
    each = data.occupation.per_trajectory(saddle_integrand(weight, mean, first, second, beta, world.kappa))
    expected = (world.probability_N * each).sum()
    by_weight, by_mean = torch.autograd.grad(expected, (weight_head.logit, mean_head.context))
    # The same by conditional expectations: 2hΔÃ + 2β(w−½)(ΔÃ)² per gate, 2(μ − h) per context.
    weight, mean, gap = weight.detach(), mean.detach(), first - second
    push = (2 * mean * gap + 2 * beta * (weight - 0.5) * gap.square()) * weight * (1 - weight)
    want_weight = torch.zeros_like(by_weight).index_add_(0, world.gate_NT.flatten(), (world.mass_NT * push).flatten())
    yield equal(by_weight, want_weight)
    target = world.mean_given_context(mix(weight, first, second))
    pull = world.mass_NT * 2 * (target - mean)
    want_mean = torch.zeros_like(by_mean).index_add_(0, world.context_NT.flatten(), pull.flatten())
    yield equal(by_mean, want_mean)
    yield equal(*_envelope(world, weight_head.logit.detach(), first, second))


def _envelope(world: World, logit: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """∇_w of L at h = μ, and ∇_w of R itself: the same, which is why h must stay near its optimum."""
    gradients = []
    for through_mean in (False, True):
        free = logit.clone().requires_grad_(True)
        mixed = mix(torch.sigmoid(free)[world.gate_NT], first, second)
        mean = world.mean_given_context(mixed)
        value = world.integral(mean.square()) if through_mean else world.occupation.mean(moment(mean.detach(), mixed))
        gradients.append(torch.autograd.grad(value, free)[0])
    return gradients[0], gradients[1]


def _value(world: World, weight: Tensor, mean: Tensor, beta: float, kappa: float) -> Tensor:
    return world.occupation.mean(saddle_integrand(weight, mean, *world.pair(), beta, kappa))


@statement("prop:population-saddle", "the constrained problem has a saddle point, and w* has the closed form")
def population_saddle(world: World) -> Iterator[float]:
    for kappa in (world.kappa, 0.5):
        best = solve(world, kappa)
        first, second = world.pair()
        if best.signal <= 1e-12:
            continue
        moved = float(world.occupation.mean(displacement(best.weight_NT, first, second)))
        yield at_most(moved, kappa * best.signal)
        yield equal(best.multiplier * (moved - kappa * best.signal), 0.0)
        yield equal(_value(world, best.weight_NT, best.mean_NT, best.multiplier, kappa), best.risk)
        for k in range(3):
            h, beta = world.on_contexts(f"rival {k}"), float(k)
            yield at_most(_value(world, best.weight_NT, h, beta, kappa), best.risk)
            w = world.draws().uniform(f"rival gate {k}", world.gate_weight_SA.numel())[world.gate_NT]
            yield at_most(best.risk, _value(world, w, best.mean_NT, best.multiplier, kappa))
        yield from _closed_form(world, best, kappa)


def _closed_form(world: World, best: SaddleSolution, kappa: float) -> Iterator[float]:
    """eq:optimal-saddle-weight where β* > 0; the sign rule where β* = 0; and no gap between min-max and max-min."""
    first, second = world.pair()
    gap = first - second
    a = world.given(gap.square(), world.gate_NT)
    b = world.given(best.mean_NT * gap, world.gate_NT)
    live = world.mask_NT & (a > 1e-9)
    if best.multiplier > 0:
        want = (0.5 - b / (best.multiplier * a.clamp(min=1e-300))).clamp(0, 1)
    else:
        want = torch.where(b.abs() > 1e-9, (b < 0).double(), best.weight_NT)
    yield equal(best.weight_NT[live], want[live])
    # The inner minimum at (h*, β*) is attained by that weight, and its value is R*: no gap between min-max and max-min.
    yield equal(_value(world, want.where(live, best.weight_NT), best.mean_NT, best.multiplier, kappa), best.risk)


@examples("prop:population-saddle", "the constrained problem has a saddle point, and w* has the closed form")
def saddle_boundary_cases() -> Iterator[float]:
    same = identical_critics()
    best = solve(same, 0.1)
    yield equal(best.risk, best.reference_risk)
    yield equal(best.weight_NT, torch.full_like(best.weight_NT, 0.5))
    free = solve(wide_open(), 0.9)
    yield equal(free.multiplier, 0.0)
    yield equal(free.risk, 0.0)
    # κ = 0 fixes the mixture to the average, and no finite multiplier need exist.
    pinned = solve(wide_open(), 0.0)
    yield equal(pinned.weight_NT, torch.full_like(pinned.weight_NT, 0.5))
    yield equal(pinned.risk, pinned.reference_risk)
    yield exceeds(float(math.isinf(pinned.multiplier)), 0.5)
    # Q = 0 means that there is no signal: it is reported, and not counted as an offset of zero.
    quiet = silent()
    verdict = Validator(0.1, 0.05).validate(learned(*table_heads(quiet)), quiet.calibration_data(), "silent")
    yield exceeds(float(verdict.reason == "no_signal" and not verdict.accepted), 0.5)


@statement("prop:population-mixture-comparison", "the optimum is no worse than the fixed mean")
def population_mixture_comparison(world: World) -> Iterator[float]:
    best = solve(world, world.kappa)
    yield at_most(best.risk, best.reference_risk)
    first, second = world.pair()
    risks, approximations, restricted = [], [], []
    for w in (best.weight_NT, torch.full_like(first, 0.5)):
        mixed = mix(w, first, second)
        mean = world.mean_given_context(mixed)
        response = _restricted(world, mean)
        risks.append(world.integral(mean.square()))
        approximations.append(world.integral((response - mean).square()))
        restricted.append(world.occupation.mean(moment(response, mixed)))
    outer = (restricted[0] - restricted[1]).clamp(min=0)
    yield at_most(risks[0], risks[1] + approximations[0] - approximations[1] + outer)


def _drift(world: World) -> tuple[float, float, Tensor, Tensor, float]:
    """E‖Δ_μ‖ and B of the mixed clipped update, with the mixed signal, its mean and R."""
    mixed, mean, risk = _signal(world)
    factor = update_factor(world.ratio_NT, mixed, world.score_NTP, world.low, world.high)
    mean_factor = world.mean_given_context(factor)
    drift = world.integral((mean.unsqueeze(-1) * mean_factor).norm(dim=-1))
    size = world.integral(mean_factor.square().sum(-1)).sqrt()
    return float(drift), float(size), mixed, mean, risk


@statement("thm:complementary-drift", "E‖Δ_μ‖ ≤ B√R ≤ B√max{0, L̂ + ε_stat + ε_h}")
def complementary_drift(world: World) -> Iterator[float]:
    drift, size, mixed, mean, risk = _drift(world)
    yield at_most(drift, size * risk**0.5)
    yield at_most(size, float(sensitivity(world).sqrt()))
    h = world.on_contexts("fitted")
    error = float(world.integral((h - mean).square()))
    objective = float(world.occupation.mean(moment(h, mixed)))
    estimate = objective - float(world.draws().uniform("luck", 1))
    slack = objective - estimate
    # Squared, so that rounding near zero is not magnified by a root.
    yield at_most(size**2 * risk, size**2 * max(0.0, estimate + slack + error))


@statement("cor:admission-budget", "with valid error bounds the certificate covers the actual drift")
def admission_budget(world: World) -> Iterator[float]:
    drift, size, mixed, mean, risk = _drift(world)
    best = _restricted(world, mean)
    fitted = 0.8 * best
    approximation = float(world.integral((best - mean).square()))
    objective = world.occupation.mean(moment(fitted, mixed))
    optimisation = max(0.0, float(world.occupation.mean(moment(best, mixed)) - objective))
    report = HoeffdingReport(0.05, 1.0, float(objective), 0.0)
    certificate = certify(report, approximation, optimisation, size)
    yield at_most(risk, certificate.risk_upper)
    yield at_most(drift**2, certificate.drift_upper**2)


def _coverage(world: World, weight: float, mean: float, bounds: SignalBounds, repeats: int, size: int) -> float:
    """How often the trainer's validation report misses the population moment or retention, over fresh samples."""
    data = world.calibration_data()
    weight_head, mean_head = table_heads(world)
    with torch.no_grad():
        weight_head.logit.fill_(math.log(weight / (1 - weight)))
        mean_head.context.fill_(mean)
    candidate = learned(weight_head, mean_head)
    first, second = data.first_NT, data.second_NT
    w = torch.full_like(first, weight)
    truth = float(world.integral(moment(torch.full_like(first, mean), mix(w, first, second))))
    excess = float(world.integral(displacement(w, first, second) - world.kappa * energy(first, second)))
    edges = world.probability_N.cumsum(0)
    rows = torch.searchsorted(edges, world.draws().uniform("validation", repeats, size) * edges[-1])
    failed = 0
    for sample in rows.clamp(max=edges.numel() - 1):
        drawn = data.rows(sample)
        fresh = type(data.occupation)(drawn.occupation.mask_NT, torch.arange(size), world.horizon)
        drawn = type(data)(drawn.weight_inputs, drawn.mean_inputs, drawn.first_NT, drawn.second_NT, fresh)
        report = Validator(world.kappa, 0.2).validate(candidate, drawn, "fresh", bounds).bounds
        failed += report is None or truth > report.moment_upper or excess > report.retention_upper
    return failed / repeats


_VALIDATION = "validation's upper limits on the moment and on C − κQ fail at most a share δ of the time"


@statement("eq:moment-statistical-bound", _VALIDATION)
def moment_statistical_bound(world: World) -> Iterator[float]:
    first, second = world.pair()
    bound = float(torch.maximum(first.abs(), second.abs()).max())
    yield at_most(_coverage(world, 0.8, 0.3, SignalBounds(bound, 0.3), repeats=2, size=10), 0.1)


@examples("eq:moment-statistical-bound", _VALIDATION)
def moment_bound_is_not_vacuous() -> Iterator[float]:
    """Advantages of ±K and a small constant h: the statistic is nearly ±C_L, the hardest case."""
    world = one_step("coin", [1.0], [[3.0, -3.0]], [[0.0, 0.0]])
    yield at_most(_coverage(world, 0.5, 0.1, SignalBounds(3.0, 0.1), repeats=300, size=40), 0.1)

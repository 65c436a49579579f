"""The early stop: the held-out change of the offset is exact in a finite world, and decides among feasible weights."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tfive.rl.calibration.early_stop import BestStep, EarlyStopping
from tfive.rl.calibration.mean import MeanPlan, cross_fit_change, regress_mean
from tfive.rl.calibration.mixture import MeanInputs, WeightInputs, mix
from tfive.rl.calibration.moments import CalibrationData, Occupation, offset_change
from tfive_lab.theory.tables import table_heads
from tfive_lab.theory.worlds import random_world


@pytest.mark.parametrize("number", range(6))
def test_offset_change_is_exact(number: int) -> None:
    world = random_world(2, number)
    first, second = world.pair()
    weight = world.gate_weight_NT
    shift = world.mean_given_context((weight - 0.5) * (first - second))
    risks = [
        float(world.integral(world.mean_given_context(mixed).square()))
        for mixed in (mix(weight, first, second), (first + second) / 2)
    ]
    observed = world.occupation.mean(offset_change(shift, weight, first, second))
    assert float(observed) == pytest.approx(risks[0] - risks[1], abs=1e-12)


def test_cross_fitted_change_finds_it_from_single_rollouts() -> None:
    """Sampled trajectories, shift fitted on the other fold: within three clustered standard errors of the truth."""
    world = random_world(2, 3)
    data = world.calibration_data()
    edges = world.probability_N.cumsum(0)
    rows = torch.searchsorted(edges, world.draws().uniform("sample", 3000) * edges[-1]).clamp(max=edges.numel() - 1)
    some = data.rows(rows)
    occupation = Occupation(some.occupation.mask_NT, torch.arange(3000), world.horizon)
    weight = world.gate_weight_NT[rows]
    plan = MeanPlan(steps=60, batch=10**6, lr=0.1, weight_decay=0.0, stop_share=0.0, evaluate_every=60, patience=5)
    found = cross_fit_change(
        lambda: table_heads(world)[1], some.mean_inputs, weight, some.first_NT, some.second_NT, occupation, plan, 2, 0
    ).estimate
    first, second = world.pair()
    means = [
        world.mean_given_context(m).square() for m in (mix(world.gate_weight_NT, first, second), (first + second) / 2)
    ]
    truth = float(world.integral(means[0] - means[1]))
    assert abs(found.mean - truth) < 3 * found.error
    assert found.error < 0.3 * abs(truth)


def _data() -> CalibrationData:
    """An average of 1 ± 1, critics 1 apart: w = 0 takes half of the offset away, w = 1 adds half."""
    zero, values = torch.zeros(8, 1), torch.zeros(8, 1, 2)
    noise = torch.tensor([1.0, -1.0] * 4).unsqueeze(-1)
    return CalibrationData(
        WeightInputs(zero[..., None], values, zero, zero[..., None], zero),
        MeanInputs(zero[..., None], values, zero, zero, zero, zero[..., None]),
        1.5 + noise,
        0.5 + noise,
        Occupation(torch.ones(8, 1, dtype=torch.bool), torch.arange(8), 1),
    )


def _look(stopping: EarlyStopping, weight: float) -> float:
    centred = torch.full((8, 1), weight - 0.5)
    heads = (nn.Linear(1, 1), nn.Linear(1, 1))
    stopping.look(centred + 0.5, centred, heads, torch.tensor(1.0), torch.tensor(0.0))
    return stopping.evaluations[-1].change


def test_the_lowest_feasible_offset_wins_and_stale_looks_are_counted() -> None:
    stopping = EarlyStopping(_data(), kappa=0.05)
    assert _look(stopping, 0.5) == pytest.approx(0.0)
    assert _look(stopping, 0.3) == pytest.approx(0.8**2 - 1)
    assert stopping.best() == 1
    assert _look(stopping, 0.6) == pytest.approx(1.1**2 - 1)
    assert _look(stopping, 0.4) == pytest.approx(0.9**2 - 1)
    assert (stopping.best(), stopping.stale) == (1, 2)
    # Lower still, but beyond the retention limit: it does not win, nor does it count as standing still.
    assert _look(stopping, 0.0) == pytest.approx(0.5**2 - 1)
    assert stopping.evaluations[-1].retention == pytest.approx(0.25 / 2)
    assert (stopping.best(), stopping.stale) == (1, 0)
    assert stopping.best(only_last=True) == 4


def test_without_any_feasible_look_the_least_displaced_is_taken() -> None:
    stopping = EarlyStopping(_data(), kappa=0.0)
    _look(stopping, 0.1)
    _look(stopping, 0.45)
    assert stopping.best() == 1


def test_no_signal_makes_every_move_infeasible() -> None:
    data = _data()
    flat = dataclasses.replace(data, first_NT=data.first_NT * 0 + 0.5, second_NT=data.second_NT * 0 - 0.5)
    stopping = EarlyStopping(flat, kappa=0.5)
    _look(stopping, 0.9)
    assert stopping.evaluations[0].retention == float("inf")


def _counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with every time that numbers are fetched."""
    fetched, plain = list[int](), Tensor.tolist

    def tolist(tensor: Tensor) -> Any:
        fetched.append(tensor.numel())
        return plain(tensor)

    monkeypatch.setattr(Tensor, "tolist", tolist)
    return fetched


def test_looks_are_fetched_together_and_come_to_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = (0.5, 0.3, 0.6, 0.4, 0.0, 0.45)
    at_once = EarlyStopping(_data(), kappa=0.05)
    for weight in weights:
        _look(at_once, weight)
    fetched = _counted(monkeypatch)
    later = EarlyStopping(_data(), kappa=0.05)
    for weight in weights:
        centred = torch.full((8, 1), weight - 0.5)
        later.look(centred + 0.5, centred, (), torch.tensor(1.0), torch.tensor(0.0))
        assert not later.over(7)
    assert not fetched
    assert (later.best(), later.stale) == (at_once.best(), at_once.stale)
    assert [one.line for one in later.evaluations] == [one.line for one in at_once.evaluations]
    assert fetched == [5 * len(weights)]


@pytest.mark.parametrize("seed", range(20))
def test_the_best_step_is_that_of_a_loop_that_asks_at_once(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(seed).integers(0, 6, 12).astype(float).tolist()
    if seed % 3 == 0:
        values[seed % 5] = math.nan
    head, patience = nn.Linear(1, 1, bias=False), 4
    step, best, kept, stale = 0, -math.inf, 0.0, 0
    for step, value in enumerate(values):
        best, kept, stale = (value, float(step), 0) if value > best else (best, kept, stale + 1)
        if stale >= patience:
            break
    fetched = _counted(monkeypatch)
    found, last = BestStep(head, patience), 0
    with torch.no_grad():
        for last, value in enumerate(values):
            head.weight.fill_(last)
            found.look(torch.tensor(value))
            assert last >= patience - 1 or not fetched
            if found.over():
                break
    assert (last, found.take(), head.weight.item()) == (step, best, kept)


def test_where_nothing_is_held_out_the_last_step_is_taken() -> None:
    head = nn.Linear(1, 1)
    found = BestStep(head, 2, last=True)
    for value in (3.0, 2.0, 1.0, 0.5):
        nn.init.constant_(head.weight, value)
        found.look(torch.tensor(value))
        assert not found.over()
    assert found.take() == head.weight.item() == 0.5


class _Line(nn.Linear):
    """A mean head that reads one number."""

    def forward(self, inputs: MeanInputs) -> Tensor:  # type: ignore[override]
        return super().forward(inputs.prefix_NTD).squeeze(-1)


def test_a_regression_that_cannot_end_early_waits_for_none_of_its_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    data, fetched = _data(), _counted(monkeypatch)
    plan = MeanPlan(steps=20, batch=10**6, lr=0.1, weight_decay=0.0, stop_share=0.25, evaluate_every=4, patience=8)
    regress_mean(_Line(1, 1), data.mean_inputs, data.first_NT, data.occupation, plan, 0, "test")
    # Two shares of the texts are fetched from the host itself.
    assert fetched == [2]

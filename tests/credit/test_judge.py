"""The early stop judges every weight by the harshest mean head it has seen, and only feasible weights count."""

import pytest
import torch
from torch import Tensor, nn

from tfive.credit.judge import Judge
from tfive.credit.mixture import MeanInputs, WeightInputs
from tfive.credit.moments import CalibrationData, Occupation


def _data() -> CalibrationData:
    """Both advantages exceed zero by a constant offset of 1 on average; critics 1 apart."""
    zero, values = torch.zeros(8, 1), torch.zeros(8, 1, 2)
    noise = torch.tensor([1.0, -1.0] * 4).unsqueeze(-1)
    return CalibrationData(
        WeightInputs(zero[..., None], values, zero, zero[..., None], zero),
        MeanInputs(zero[..., None], values, zero, zero, zero, zero[..., None]),
        1.5 + noise,
        0.5 + noise,
        Occupation(torch.ones(8, 1, dtype=torch.bool), torch.arange(8), 1),
    )


def _look(judge: Judge, weight: float, mean: float) -> dict[str, float]:
    heads = nn.Linear(1, 1), nn.Linear(1, 1)
    nn.init.constant_(heads[0].bias, weight)
    nn.init.constant_(heads[1].bias, mean)
    return judge.look(torch.full((8, 1), weight), torch.full((8, 1), mean), heads, 1.0)


def _bias(state: dict[str, Tensor]) -> float:
    return float(state["bias"])


def test_a_forgetful_mean_head_cannot_flatter_a_weight() -> None:
    judge = Judge(_data(), kappa=0.5)
    # w = ½ with a good h (μ = 1), then w = 0.6 (μ = 1.1, worse) with a useless h.
    assert _look(judge, 0.5, 1.0)["risk"] == pytest.approx(1.0)
    line = _look(judge, 0.6, 0.0)
    assert line["moment"] == pytest.approx(0.0)
    assert line["risk"] == pytest.approx(2 * 1.0 * 1.1 - 1.0)
    assert judge.choose().number == 0
    assert judge.stale == 1
    # A weight that truly lowers the mean wins, and its harshest critic comes with it.
    _look(judge, 0.2, 0.7)
    best = judge.choose()
    assert (best.number, judge.stale) == (2, 0)
    assert best.risk == pytest.approx(0.7**2)
    assert _bias(best.mean_state) == pytest.approx(0.7)


def test_progress_is_judged_anew_when_the_mean_head_learns() -> None:
    """An early, blind h makes the first weight look perfect; that must not end learning."""
    judge = Judge(_data(), kappa=0.5)
    _look(judge, 0.5, 0.0)
    assert judge.choose().risk == 0.0
    _look(judge, 0.4, 0.9)
    assert judge.stale == 0
    assert judge.choose().number == 1


def test_infeasible_weights_do_not_count() -> None:
    judge = Judge(_data(), kappa=0.01)
    _look(judge, 0.0, 0.5)
    assert judge.choose().number == 0
    assert judge.stale == 0
    _look(judge, 0.45, 0.95)
    assert judge.choose().number == 1
    assert judge.choose(only_last=True).number == 1
    assert judge.snapshots[0].retention == pytest.approx(0.25 / 2)

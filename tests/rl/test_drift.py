"""Unbiased products: exact averages over every possible sample of continuations, and the bias of the naive product."""

import itertools

import pytest
import torch
from torch import Tensor

from tfive.rl.drift import (
    drift_parts,
    drift_report,
    mean_induced_square,
    offset,
    offset_difference,
    offset_products,
    offset_split,
    update_factor,
)


def _population() -> tuple[Tensor, Tensor]:
    """Three equally likely continuations with advantages and two-dimensional update factors."""
    advantage = torch.tensor([1.0, -0.5, 0.8], dtype=torch.float64)
    factor = torch.tensor([[0.2, 1.0], [-0.4, 0.3], [0.7, -0.1]], dtype=torch.float64)
    return advantage, factor


def _every_sample(count: int) -> tuple[Tensor, Tensor]:
    index = torch.tensor(list(itertools.product(range(3), repeat=count)))
    advantage, factor = _population()
    return advantage[index], factor[index]


def test_parts_are_unbiased_over_all_samples() -> None:
    advantage, factor = _population()
    samples, factors = _every_sample(3)
    parts = drift_parts(samples, factors)
    total = (advantage[:, None] * factor).mean(0)
    induced = advantage.mean() * factor.mean(0)
    torch.testing.assert_close(parts.total_ND.mean(0), total, atol=1e-12, rtol=0)
    torch.testing.assert_close(parts.mean_induced_ND.mean(0), induced, atol=1e-12, rtol=0)
    torch.testing.assert_close(parts.covariance_ND.mean(0), total - induced, atol=1e-12, rtol=0)
    naive = (samples.mean(-1, keepdim=True) * factors.mean(-2)).mean(0)
    assert float((naive - induced).norm()) > 0.05


def test_pairwise_form_is_the_average_over_all_halves() -> None:
    generator = torch.Generator().manual_seed(0)
    advantage = torch.randn(1, 4, generator=generator, dtype=torch.float64)
    factor = torch.randn(1, 4, 3, generator=generator, dtype=torch.float64)
    halves = []
    for left in itertools.combinations(range(4), 2):
        right = [i for i in range(4) if i not in left]
        halves.append(advantage[0, list(left)].mean() * factor[0, right].mean(0))
    torch.testing.assert_close(
        drift_parts(advantage, factor).mean_induced_ND[0], torch.stack(halves).mean(0), atol=1e-12, rtol=0
    )


def test_squares_are_unbiased() -> None:
    advantage, factor = _population()
    samples, factors = _every_sample(4)
    want = float((advantage.mean() * factor.mean(0)).square().sum())
    assert float(mean_induced_square(samples, factors).mean()) == pytest.approx(want, abs=1e-12)
    assert float(offset_products(samples).mean()) == pytest.approx(float(advantage.mean() ** 2), abs=1e-12)
    assert float((samples.mean(-1) ** 2).mean()) > float(advantage.mean() ** 2) + 0.05
    with pytest.raises(ValueError, match="at least 2"):
        offset_products(samples[:, :1])
    with pytest.raises(ValueError, match="at least 4"):
        mean_induced_square(samples[:, :3], factors[:, :3])


def test_offset_and_paired_difference_cluster_by_text() -> None:
    generator = torch.Generator().manual_seed(1)
    left = torch.randn(12, 3, generator=generator, dtype=torch.float64) + 0.5
    right = left - 0.3
    text = torch.arange(4).repeat_interleave(3)
    difference = offset_difference(left, right, text)
    assert difference.mean == pytest.approx(offset(left, text).mean - offset(right, text).mean, abs=1e-12)
    assert difference.units == 4
    assert difference.error < offset(left, text).error + offset(right, text).error
    split = offset_split(left[:, 0], right[:, 0], text)
    assert split.hidden.mean == pytest.approx(split.total.mean - split.visible.mean, abs=1e-12)
    assert split.hidden.error == pytest.approx(0.0, abs=1e-12)


def test_opposite_drifts_do_not_cancel() -> None:
    """Two contexts that drift by 1.1 in opposite directions: E‖Δ_μ‖ = 1.1 and E‖Δ_μ‖² = 1.21, and no net drift."""
    advantage = torch.ones(2, 4, dtype=torch.float64)
    score = torch.tensor([1.1, -1.1], dtype=torch.float64)[:, None, None].expand(2, 4, 1)
    report = drift_report(advantage, torch.ones_like(advantage), score, torch.tensor([0, 1]), 0.8, 1.2)
    assert report.net_norm == pytest.approx(0.0, abs=1e-12)
    assert report.mean_induced is not None
    assert report.mean_induced_square is not None
    assert report.mean_induced.mean == pytest.approx(1.1, abs=1e-12)
    assert report.mean_induced_square.mean == pytest.approx(1.21, abs=1e-12)
    assert report.drift_bound == pytest.approx(1.1, abs=1e-12)
    # A context that no thought reached counts as zero, and not among those that were clipped.
    none = torch.zeros(1, 4, dtype=torch.float64)
    more = drift_report(
        torch.cat([advantage, none]), torch.ones(3, 4, dtype=torch.float64), torch.cat([score, none[..., None]]),
        torch.arange(3), 0.8, 1.2, torch.tensor([True, True, False]),
    )  # fmt: skip
    assert more.mean_induced is not None
    assert more.mean_induced.mean == pytest.approx(2.2 / 3, abs=1e-12)
    fewer = drift_report(advantage[:, :3], torch.ones(2, 3, dtype=torch.float64), score[:, :3], torch.arange(2), 0.8, 1)
    assert fewer.mean_induced is fewer.mean_induced_square is None


def test_noise_around_no_drift_averages_to_none() -> None:
    draw = torch.Generator().manual_seed(0)
    advantage = torch.randn(4000, 4, generator=draw, dtype=torch.float64)
    score = torch.randn(4000, 4, 5, generator=draw, dtype=torch.float64)
    report = drift_report(advantage, torch.ones_like(advantage), score, torch.arange(4000), 0.8, 1.2)
    assert report.mean_induced is not None
    assert abs(report.mean_induced.mean) < 4 * report.mean_induced.error


def test_report_uses_the_actual_clipped_factor() -> None:
    ratio = torch.tensor([[1.4, 0.6, 1.4, 0.6]], dtype=torch.float64)
    advantage = torch.tensor([[-0.5, -1.5, -0.5, -1.5]], dtype=torch.float64)
    score = torch.tensor([[0.3], [-0.7], [0.3], [-0.7]], dtype=torch.float64)[None]
    factor = update_factor(ratio, advantage, score, 0.8, 1.2)
    torch.testing.assert_close(
        factor[0, :, 0], torch.tensor([0.42, 0.0, 0.42, 0.0], dtype=torch.float64), atol=1e-12, rtol=0
    )
    report = drift_report(advantage, ratio, score, torch.tensor([0]), 0.8, 1.2)
    assert report.clip_fraction == 0.5
    parts = drift_parts(advantage, factor)
    assert report.net_norm == pytest.approx(float(parts.mean_induced_ND.norm()), abs=1e-12)
    assert report.alignment == pytest.approx(-1.0)
    assert report.drift_bound == pytest.approx(report.factor_bound * report.offset.mean**0.5, abs=1e-12)

"""Text-clustered standard errors: known cases, invariances, and coverage by simulation."""

import math

import pytest
import torch

from tfive.rl.clusters import clustered_mean


def test_equal_clusters_reduce_to_the_error_of_cluster_means() -> None:
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    cluster = torch.arange(6)[:, None].expand(6, 4)
    got = clustered_mean(value.flatten(), cluster.flatten())
    means = value.mean(-1)
    assert got.mean == pytest.approx(float(value.mean()), abs=1e-12)
    assert got.error == pytest.approx(float(means.std(unbiased=True)) / math.sqrt(6), abs=1e-12)
    assert got.units == 6


def test_copies_of_a_row_inside_its_cluster_add_no_certainty() -> None:
    value, cluster = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 1, 2])
    once = clustered_mean(value, cluster)
    thrice = clustered_mean(value.repeat(3), cluster.repeat(3))
    assert thrice.error == pytest.approx(once.error, rel=1e-12)


def test_weights_and_single_cluster() -> None:
    got = clustered_mean(torch.tensor([1.0, 5.0, 9.0]), torch.tensor([0, 1, 1]), torch.tensor([1.0, 1.0, 0.0]))
    assert got.mean == 3.0
    assert clustered_mean(torch.tensor([1.0, 2.0]), torch.tensor([0, 0])).error == math.inf
    with pytest.raises(ValueError, match="positive weight"):
        clustered_mean(torch.tensor([1.0]), torch.tensor([0]), torch.tensor([0.0]))


def test_interval_covers_with_correlated_rows_where_a_plain_error_would_not() -> None:
    generator = torch.Generator().manual_seed(5)
    covered = plain_covered = 0
    for _ in range(300):
        shared = torch.randn(60, 1, generator=generator, dtype=torch.float64)
        value = (shared + 0.3 * torch.randn(60, 8, generator=generator, dtype=torch.float64)).flatten()
        estimate = clustered_mean(value, torch.arange(60).repeat_interleave(8))
        low, high = estimate.interval()
        covered += low <= 0 <= high
        plain = float(value.std()) / math.sqrt(value.numel())
        plain_covered += abs(estimate.mean) <= 1.96 * plain
    assert covered / 300 > 0.9
    assert plain_covered / 300 < 0.75

"""The prediction gate: its mixture, its loss, and what it is measured against."""

import math

import pytest
import torch
from torch import Tensor

from tfive.rl.gate import (
    best_constant_gate,
    correlation,
    gate_terms,
    mixed_log_prob,
    oracle_gate_gain,
)


def _case() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logit = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    log_with, log_without = (-torch.rand(3, 5, generator=generator, dtype=torch.float64) * 4 for _ in range(2))
    mask = torch.rand(3, 5, generator=generator) < 0.7
    return logit.requires_grad_(True), log_with.requires_grad_(True), log_without.requires_grad_(True), mask


def test_gate_mixes_probabilities_and_its_loss_matches_a_loop() -> None:
    logit, log_with, log_without, mask = _case()
    terms = gate_terms(logit, log_with, log_without, mask, no_harm=0.7, utility=0.3)
    want = 0.0
    for i in range(3):
        for j in range(5):
            if not mask[i, j]:
                continue
            beta = 1 / (1 + math.exp(-float(logit[i, j].detach())))
            a, b = float(log_with[i, j].detach()), float(log_without[i, j].detach())
            mixed = math.log(beta * math.exp(a) + (1 - beta) * math.exp(b))
            assert float(mixed_log_prob(logit, log_with, log_without)[i, j].detach()) == pytest.approx(mixed, abs=1e-12)
            want += -mixed + 0.7 * max(0.0, b - mixed) - 0.3 * beta * (a - b)
    assert float(terms.loss_sum.detach()) == pytest.approx(want, abs=1e-12)
    terms.loss_sum.backward()
    assert logit.grad is not None
    assert logit.grad[~mask].abs().sum() == 0
    assert log_with.grad is None
    assert log_without.grad is None


def test_gate_opens_where_thoughts_help_and_shuts_where_they_hurt() -> None:
    logit = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    with_thought, without = torch.tensor([-1.0, -3.0]), torch.tensor([-3.0, -1.0])
    gate_terms(logit, with_thought, without, torch.ones(2, dtype=torch.bool)).loss_sum.backward()
    assert logit.grad is not None
    assert logit.grad[0] < 0 < logit.grad[1]


def test_best_constant_gate_beats_a_grid() -> None:
    generator = torch.Generator().manual_seed(1)
    a, b = (-torch.rand(200, generator=generator, dtype=torch.float64) * 3 for _ in range(2))
    mask = torch.ones(200, dtype=torch.bool)

    def loss(beta: float) -> float:
        return -float((beta * a.exp() + (1 - beta) * b.exp()).log().mean())

    best = best_constant_gate(a, b, mask)
    assert loss(best) <= min(loss(k / 100) for k in range(101)) + 1e-12
    assert best_constant_gate(b - 1, b, mask) == pytest.approx(0.0, abs=1e-9)
    assert best_constant_gate(b + 1, b, mask) == pytest.approx(1.0, abs=1e-9)
    assert float(oracle_gate_gain(a, b, mask).mean()) >= -loss(best) - float(b.mean())


def test_correlation() -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 50.0])
    mask = torch.tensor([True, True, True, False])
    assert correlation(x, -2 * x, mask) == pytest.approx(-1.0)
    assert correlation(x, torch.ones(4), mask) is None

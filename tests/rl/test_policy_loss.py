"""Clipped PPO, its gradient and mask, corrections, divergences and group baselines against loops and finite cases."""

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tfive.rl.losses import (
    Aggregate,
    Correction,
    Denominator,
    active_mask,
    centering_term,
    clipped_surrogate,
    group_advantages,
    kl_k3,
    policy_terms,
)

LOW, HIGH = 0.8, 1.28


def _plain(rho: float, advantage: float) -> tuple[float, float]:
    """Value and derivative in ρ of the clipped surrogate, case by case, with the strict indicator at the bounds."""
    value = min(rho * advantage, max(LOW, min(HIGH, rho)) * advantage)
    if advantage > 0:
        slope = advantage if rho < HIGH else 0.0
    elif advantage < 0:
        slope = advantage if rho > LOW else 0.0
    else:
        slope = 0.0
    return value, slope


def test_value_and_gradient_on_a_grid_including_the_boundaries() -> None:
    ratios = [0.3, 0.79, LOW, 0.81, 1.0, 1.27, HIGH, 1.3, 5.0]
    advantages = [-2.0, -1e-3, 0.0, 1e-3, 0.7]
    for rho, advantage in itertools.product(ratios, advantages):
        ratio = torch.tensor(rho, dtype=torch.float64, requires_grad=True)
        got = clipped_surrogate(ratio, torch.tensor(advantage, dtype=torch.float64), LOW, HIGH)
        (slope,) = torch.autograd.grad(got, ratio)
        value, want = _plain(rho, advantage)
        assert float(got.detach()) == pytest.approx(value, abs=1e-15)
        assert float(slope) == pytest.approx(want, abs=1e-15)


def test_mask_conventions() -> None:
    ratio = torch.tensor([HIGH, HIGH, LOW, LOW, 9.0, 0.1])
    advantage = torch.tensor([1.0, -1.0, -1.0, 1.0, 0.0, 0.0])
    assert active_mask(ratio, advantage, LOW, HIGH).tolist() == [False, True, False, True, True, True]


def _batch(seed: int = 0, rows: int = 8, steps: int = 5) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(rows, steps, generator=generator, dtype=torch.float64)
    log_prob = -base.abs() - 0.1
    log_old = log_prob + 0.4 * torch.randn(rows, steps, generator=generator, dtype=torch.float64)
    log_q = log_old + 0.3 * torch.randn(rows, steps, generator=generator, dtype=torch.float64)
    advantage = torch.randn(rows, steps, generator=generator, dtype=torch.float64)
    length = torch.randint(0, steps + 1, (rows,), generator=generator)
    length[0] = steps
    mask = torch.arange(steps) < length[:, None]
    return log_prob, log_old, log_q, advantage, mask


@pytest.mark.parametrize("denominator", ["recomputed", "sampler"])
@pytest.mark.parametrize("correction", ["none", "truncated", "mask"])
@pytest.mark.parametrize("aggregate", ["token", "thought"])
def test_loss_and_statistics_match_a_loop(
    denominator: Denominator, correction: Correction, aggregate: Aggregate
) -> None:
    log_prob, log_old, log_q, advantage, mask = _batch()
    options: dict[str, Any] = {
        "low": LOW,
        "high": HIGH,
        "denominator": denominator,
        "correction": correction,
        "cap": 1.2,
    }
    if denominator == "sampler" and correction != "none":
        with pytest.raises(ValueError, match="already exact"):
            policy_terms(log_prob, log_old, log_q, advantage, mask, aggregate=aggregate, **options)
        return
    log_prob.requires_grad_(True)
    terms = policy_terms(log_prob, log_old, log_q, advantage, mask, aggregate=aggregate, **options)
    (gradient,) = torch.autograd.grad(terms.loss_sum, log_prob)
    loss = clipped = kl = k3 = mismatch = mismatch_k3 = 0.0
    want_gradient = torch.zeros_like(gradient)
    for i in range(mask.shape[0]):
        length = int(mask[i].sum())
        for t in range(length):
            p, old, q, a = (float(x[i, t].detach()) for x in (log_prob, log_old, log_q, advantage))
            rho = math.exp(p - (q if denominator == "sampler" else old))
            omega = math.exp(old - q)
            weight = {"none": 1.0, "truncated": min(omega, 1.2), "mask": float(1 / 1.2 <= omega <= 1.2)}[correction]
            weight /= length if aggregate == "thought" else 1
            value, slope = _plain(rho, a)
            loss -= weight * value
            want_gradient[i, t] = -weight * slope * rho
            clipped += not active_mask(torch.tensor(rho), torch.tensor(a), LOW, HIGH)
            kl += -math.log(rho)
            k3 += rho - 1 - math.log(rho)
            mismatch += q - old
            mismatch_k3 += math.exp(old - q) - 1 - (old - q)
    assert float(terms.loss_sum.detach()) == pytest.approx(loss, abs=1e-12)
    torch.testing.assert_close(gradient, want_gradient, atol=1e-12, rtol=0)
    assert int(terms.clipped) == clipped
    assert clipped > 0
    assert float(terms.kl) == pytest.approx(kl, abs=1e-12)
    assert float(terms.kl_positive) == pytest.approx(k3, abs=1e-12)
    assert float(terms.mismatch) == pytest.approx(mismatch, abs=1e-12)
    assert float(terms.mismatch_positive) == pytest.approx(mismatch_k3, abs=1e-12)
    assert int(terms.tokens) == int(mask.sum())
    assert int(terms.count) == (int(mask.any(-1).sum()) if aggregate == "thought" else int(mask.sum()))


@pytest.mark.parametrize("aggregate", ["token", "thought"])
def test_one_batch_of_eight_equals_eight_of_one(aggregate: Aggregate) -> None:
    log_prob, log_old, log_q, advantage, mask = _batch(4)
    parts = []
    for rows in ([slice(None)], [slice(i, i + 1) for i in range(8)]):
        weights = log_prob.clone().requires_grad_(True)
        pieces = [
            policy_terms(weights[r], log_old[r], log_q[r], advantage[r], mask[r], aggregate=aggregate) for r in rows
        ]
        count = sum(int(piece.count) for piece in pieces)
        for piece in pieces:
            (piece.loss_sum / count).backward()
        parts.append(weights.grad)
    torch.testing.assert_close(parts[0], parts[1], atol=1e-15, rtol=0)


def test_masked_positions_are_inert() -> None:
    log_prob, log_old, log_q, advantage, mask = _batch(5)
    before = policy_terms(log_prob, log_old, log_q, advantage, mask)
    log_prob, log_old, log_q, advantage = (
        torch.where(mask, x, torch.full_like(x, 50.0)) for x in (log_prob, log_old, log_q, advantage)
    )
    after = policy_terms(log_prob, log_old, log_q, advantage, mask)
    for name in vars(before):
        assert torch.equal(getattr(before, name), getattr(after, name)), name


def test_advantage_and_old_probabilities_carry_no_gradient() -> None:
    tensors = [x.requires_grad_(True) if x.dtype != torch.bool else x for x in _batch(6)]
    policy_terms(*tensors).loss_sum.backward()
    assert tensors[0].grad is not None
    assert all(x.grad is None for x in tensors[1:4])


def test_k3_is_unbiased_and_nonnegative() -> None:
    generator = torch.Generator().manual_seed(0)
    q, p = (torch.rand(6, generator=generator, dtype=torch.float64).softmax(0) for _ in range(2))
    per_sample = kl_k3(p.log() - q.log())
    assert (per_sample >= 0).all()
    assert float((q * per_sample).sum()) == pytest.approx(float((q * (q / p).log()).sum()), abs=1e-14)


def test_centering_removes_the_mean_update_factor() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(4, 7, generator=generator, dtype=torch.float64, requires_grad=True)
    log_pi = logits.log_softmax(-1)
    log_old, log_q = (torch.randn(4, 7, generator=generator, dtype=torch.float64).log_softmax(-1) for _ in range(2))
    (got,) = torch.autograd.grad(centering_term(log_pi, log_old, log_q).sum(), logits)
    pi = log_pi.exp().detach()
    for n in range(4):
        want = torch.zeros(7, dtype=torch.float64)
        for a in range(7):
            score = torch.nn.functional.one_hot(torch.tensor(a), 7).double() - pi[n]
            want += log_q[n, a].exp() * pi[n, a] / log_old[n, a].exp() * score
        torch.testing.assert_close(got[n], want, atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("denominator", "correction"),
    [("recomputed", "none"), ("recomputed", "truncated"), ("recomputed", "mask"), ("sampler", "none")],
)
def test_centering_makes_the_mean_of_the_actual_update_zero(denominator: str, correction: str) -> None:
    """Every action enumerated with its probability under q: updates of one advantage add up to nothing."""
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(9, generator=generator, dtype=torch.float64, requires_grad=True)
    log_old, log_q = (torch.randn(9, generator=generator, dtype=torch.float64) for _ in range(2))
    log_q[[2, 5]] = -math.inf
    log_old, log_q = log_old.log_softmax(-1), log_q.log_softmax(-1)
    ratios: dict[str, Any] = {"denominator": denominator, "correction": correction, "cap": 1.3}
    term = centering_term(logits.log_softmax(-1), log_old, log_q, **ratios)
    (centre,) = torch.autograd.grad(term, logits)
    total = torch.zeros(9, dtype=torch.float64)
    for action in torch.isfinite(log_q).nonzero().flatten().tolist():
        new, old, sampler = (law[action].view(1, 1) for law in (logits.log_softmax(-1), log_old, log_q))
        one = torch.ones(1, 1, dtype=torch.float64)
        # Limits far apart: nothing is clipped.
        terms = policy_terms(new, old, sampler, one, one.bool(), low=1e-9, high=1e9, **ratios)
        (slope,) = torch.autograd.grad(terms.loss_sum, logits)
        total += log_q[action].exp() * slope
    assert total.abs().max() > 1e-3
    torch.testing.assert_close(total, -centre, atol=1e-14, rtol=0)


def test_centering_ignores_forbidden_tokens() -> None:
    logits = torch.tensor([[0.3, -0.2, -math.inf]], dtype=torch.float64, requires_grad=True)
    term = centering_term(logits.log_softmax(-1), logits.detach().log_softmax(-1), logits.detach().log_softmax(-1))
    (gradient,) = torch.autograd.grad(term.sum(), logits)
    assert torch.isfinite(gradient).all()
    # Matched laws: the mean score is zero already.
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), atol=1e-15, rtol=0)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(-5, 5), min_size=2, max_size=9))
def test_leave_one_out_is_rlp_and_the_mean_of_the_others(returns: list[float]) -> None:
    value = torch.tensor(returns, dtype=torch.float64)
    size = len(returns)
    got = group_advantages(value, "leave_one_out")
    mean = sum(returns) / size
    for i, r in enumerate(returns):
        others = [x for j, x in enumerate(returns) if j != i]
        assert float(got[i]) == pytest.approx(r - sum(others) / (size - 1), abs=1e-9)
        assert float(got[i]) == pytest.approx(size / (size - 1) * (r - mean), abs=1e-9)


def test_group_baselines_with_masked_members_and_lonely_groups() -> None:
    returns = torch.tensor([[1.0, 3.0, 99.0], [2.0, 99.0, 99.0], [5.0, 5.0, 5.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, False], [True, False, False], [True, True, True]])
    assert group_advantages(returns, "none", mask).tolist() == [[-1, 1, 0], [0, 0, 0], [0, 0, 0]]
    assert group_advantages(returns, "leave_one_out", mask).tolist() == [[-2, 2, 0], [0, 0, 0], [0, 0, 0]]
    std = group_advantages(returns, "std", mask, epsilon=0.0 + 1e-9)
    assert float(std[0, 1]) == pytest.approx(1 / math.sqrt(2), rel=1e-6)
    assert torch.isfinite(std).all()


@pytest.mark.parametrize("members", [5, 7, 8])
def test_a_group_of_equal_returns_has_no_advantage_in_any_precision(members: int) -> None:
    value = torch.linspace(-2.9, 2.9, 301)[:, None]
    mask = (torch.arange(8) < members).expand(301, 8)
    assert not group_advantages(value.expand(301, 8), "std", mask).any()
    # What the order of a sum changes is no difference either; a real one of a ten-thousandth is.
    last = torch.nextafter(value, torch.full_like(value, 9.0))
    rounded = torch.where(torch.arange(8) % 2 == 0, value, last)
    assert not group_advantages(rounded, "std", mask).any()
    real = torch.where(torch.arange(8) % 2 == 0, value, value + 1e-4)
    assert group_advantages(real, "std", mask)[:, :members].abs().amin() > 0.5


def test_bad_bounds_are_refused() -> None:
    log_prob, log_old, log_q, advantage, mask = _batch()
    with pytest.raises(ValueError, match="low ≤ 1 ≤ high"):
        policy_terms(log_prob, log_old, log_q, advantage, mask, low=1.1)

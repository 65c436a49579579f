"""The gate sees both predictions, teaches nothing to the model, and learns where thoughts help."""

import torch
from torch import Tensor

from tfive.rl.gate import PredictionGate, gate_terms, mixed_log_prob

B, R, H, D = 3, 4, 5, 8


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_starts_near_a_half_and_every_layer_gets_gradients() -> None:
    gate = PredictionGate(D, width=16, seed=1)
    logits = gate(draw(B, R, H, D), draw(B, R, H, D, seed=1))
    assert logits.shape == (B, R, H)
    assert (torch.sigmoid(logits) - 0.5).abs().max() < 0.05
    assert logits.std() > 0
    logits.square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in gate.parameters())


def test_features_are_detached_and_both_are_read() -> None:
    gate = PredictionGate(D, width=16, seed=1)
    with_thought = draw(B, R, H, D).requires_grad_()
    without = draw(B, R, H, D, seed=1).requires_grad_()
    logits = gate(with_thought, without)
    logits.sum().backward()
    assert with_thought.grad is without.grad is None
    assert not logits.equal(gate(with_thought + draw(D, seed=3), without))
    assert not logits.equal(gate(with_thought, without + draw(D, seed=3)))


def test_bfloat16_features_are_read_in_float32() -> None:
    gate = PredictionGate(D, width=16, seed=1)
    features = draw(B, R, H, D).bfloat16(), draw(B, R, H, D, seed=1).bfloat16()
    assert gate(*features).dtype == torch.float32
    assert gate(*features).equal(gate(*(f.float() for f in features)))


def test_learns_where_thoughts_help_and_mixes_probabilities() -> None:
    with_thought, without = draw(200, H, D), draw(200, H, D, seed=1)
    helpful = torch.nn.functional.layer_norm(with_thought, (D,))[..., 0] > 0.5
    log_without = torch.full((200, H), -2.0)
    log_with = torch.where(helpful, -1.0, -6.0)
    mask = torch.ones(200, H, dtype=torch.bool)
    gate = PredictionGate(D, width=16, seed=1)
    optimizer = torch.optim.Adam(gate.parameters(), lr=1e-2)
    for _ in range(200):
        terms = gate_terms(gate(with_thought, without), log_with, log_without, mask, no_harm=0.5, utility=0.1)
        optimizer.zero_grad()
        (terms.loss_sum / terms.count).backward()
        optimizer.step()
    logits = gate(with_thought, without)
    beta = torch.sigmoid(logits)
    assert beta[helpful].mean() > 0.8
    assert beta[~helpful].mean() < 0.2
    mixed = mixed_log_prob(logits, log_with, log_without)
    torch.testing.assert_close(mixed.exp(), beta * log_with.exp() + (1 - beta) * log_without.exp())
    assert (mixed - log_without).mean() > 0.1


def test_state_round_trip_and_seed() -> None:
    first, second = PredictionGate(D, seed=1), PredictionGate(D, seed=2)
    features = draw(H, D), draw(H, D, seed=1)
    assert not first(*features).equal(second(*features))
    second.load_state_dict(first.state_dict())
    assert first(*features).equal(second(*features))

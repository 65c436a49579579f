"""The chunked gated delta rule against a literal token-by-token recurrence and against transformers' own functions, and
the choice of the rule with that recurrence standing in for a kernel."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5 as stock

from tfive.errors import UserError
from tfive.tree.fast.delta_kernel import KernelRule, choose_rule, distrust
from tfive.tree.recurrent.delta_rule import BranchMemory, DeltaTrace, UnitLowerInverse, read_paths, unit_rows

E, F, HEADS = 4, 6, 2


Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def random_inputs(
    paths: int, length: int, seed: int, dtype: torch.dtype = torch.float64, learning: bool = False
) -> Inputs:
    """Query, key, value, decay and write strength of random paths, ready for the rule."""
    g = torch.Generator().manual_seed(seed)
    query, key = (torch.randn(paths, length, HEADS, E, generator=g, dtype=torch.float64) for _ in range(2))
    value = torch.randn(paths, length, HEADS, F, generator=g, dtype=torch.float64)
    decay = -3 * torch.rand(paths, length, HEADS, generator=g, dtype=torch.float64) ** 3
    beta = torch.rand(paths, length, HEADS, generator=g, dtype=torch.float64)
    query, key, value, decay, beta = (
        x.to(dtype).requires_grad_(learning) for x in (unit_rows(query) * E**-0.5, unit_rows(key), value, decay, beta)
    )
    return query, key, value, decay, beta


def literal(
    inputs: Sequence[Tensor], state: Tensor | None = None, starts: Tensor | None = None
) -> tuple[Tensor, list[Tensor]]:
    """The recurrence as it is written down, one token at a time; all states, the initial one first."""
    query, key, value, decay, beta = inputs
    paths, length = query.shape[:2]
    S = query.new_zeros(paths, HEADS, E, F) if state is None else state
    states, outputs = [S], []
    for t in range(length):
        if starts is not None:
            S = torch.where(starts[:, t, None, None, None], torch.zeros_like(S), S)
        S = S * decay[:, t, :, None, None].exp()
        predicted = torch.einsum("qief,qie->qif", S, key[:, t])
        S = S + torch.einsum("qie,qif->qief", key[:, t], beta[:, t, :, None] * (value[:, t] - predicted))
        outputs.append(torch.einsum("qief,qie->qif", S, query[:, t]))
        states.append(S)
    return torch.stack(outputs, 1), states


def gradient(of: Tensor) -> Tensor:
    assert of.grad is not None
    return of.grad


def relative(got: Tensor, want: Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max().clamp(min=1e-300))


@given(
    paths=st.integers(1, 3),
    length=st.integers(1, 150),
    seed=st.integers(0, 99),
    packed=st.booleans(),
    begun=st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_outputs_and_every_state_equal_the_recurrence(
    paths: int, length: int, seed: int, packed: bool, begun: bool
) -> None:
    inputs = random_inputs(paths, length, seed)
    state = torch.randn(paths, HEADS, E, F, dtype=torch.float64) if begun else None
    starts = torch.rand(paths, length) < 0.1 if packed else None
    got, trace = read_paths(*inputs, state, starts)
    want, states = literal(inputs, state, starts)
    assert relative(got, want) < 1e-10
    for count in {0, 1, length // 2, length - 1, length}:
        after = trace.state_after(torch.arange(paths), torch.full((paths,), count))
        torch.testing.assert_close(after, states[count], rtol=1e-10, atol=1e-10)


def test_gradients_reach_every_input_through_outputs_and_forks() -> None:
    inputs = random_inputs(2, 150, 3, learning=True)
    state = torch.randn(2, HEADS, E, F, dtype=torch.float64, requires_grad=True)
    path, count = torch.tensor([0, 1, 1, 0]), torch.tensor([64, 37, 149, 0])
    weight = torch.randn(4, HEADS, E, F, dtype=torch.float64)

    output, trace = read_paths(*inputs, state)
    (output.square().sum() + (trace.state_after(path, count) * weight).sum()).backward()
    got = [gradient(x).clone() for x in (*inputs, state)]
    for x in (*inputs, state):
        x.grad = None
    output, states = literal(inputs, state)
    forked = torch.stack([states[c][p] for p, c in zip(path.tolist(), count.tolist())])
    (output.square().sum() + (forked * weight).sum()).backward()
    for mine, x in zip(got, (*inputs, state)):
        assert relative(mine, gradient(x)) < 1e-10


@pytest.mark.parametrize("length", [13, 100])
def test_paths_of_a_group_share_one_initial_state(length: int) -> None:
    inputs = random_inputs(6, length, 5, learning=True)
    shared = torch.randn(2, HEADS, E, F, dtype=torch.float64, requires_grad=True)
    index, count = torch.arange(6), torch.arange(6) * 2
    results = []
    for state in (shared, shared.repeat_interleave(3, 0)):
        output, trace = read_paths(*inputs, state)
        forks = trace.state_after(index, count)
        grads = torch.autograd.grad(output.sum() + forks.square().sum(), (*inputs, shared))
        results.append((output, forks, *grads))
    for one, other in zip(*results):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_padding_changes_nothing() -> None:
    inputs = random_inputs(2, 20, 7)
    real = torch.ones(2, 20, dtype=torch.float64)
    real[0, 5:9], real[1, 15:] = 0, 0
    padded = [*inputs[:3], inputs[3] * real[..., None], inputs[4] * real[..., None]]
    _, trace = read_paths(*padded)
    kept = [x[:1, real[0].bool()] for x in inputs]
    torch.testing.assert_close(
        trace.state_after(torch.tensor([0]), torch.tensor([20])), literal(kept)[1][-1], rtol=1e-10, atol=1e-12
    )


def test_a_fork_one_token_early_is_far_off() -> None:
    inputs = random_inputs(1, 80, 9)
    _, trace = read_paths(*inputs)
    early = trace.state_after(torch.tensor([0]), torch.tensor([69]))
    assert relative(early, literal(inputs)[1][70]) > 1e-8


@pytest.mark.parametrize("size", [16, 32, 64])
def test_inverse_stays_accurate_when_keys_repeat(size: int) -> None:
    system = torch.ones(2, size, size, dtype=torch.float32).tril(-1)
    want = torch.linalg.inv(torch.eye(size, dtype=torch.float64) + system.double())
    assert relative(UnitLowerInverse.apply(system).double(), want) < 1e-6


def test_gradient_of_the_inverse() -> None:
    system, weight = torch.randn(2, 3, 32, 32, dtype=torch.float64) / 8
    system.requires_grad_()
    (got,) = torch.autograd.grad((UnitLowerInverse.apply(system) * weight).sum(), system)
    inverse = torch.linalg.inv(torch.eye(32, dtype=torch.float64) + system.tril(-1))
    (want,) = torch.autograd.grad((inverse * weight).sum(), system)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(("shared", "window"), [(2, 9), (6, 4)])
def test_steps_equal_the_recurrence(shared: int, window: int) -> None:
    inputs = random_inputs(6, 9, 11)
    state = torch.randn(shared, HEADS, E, F, dtype=torch.float64)
    memory = BranchMemory(torch.zeros_like(state), 6, window)
    for _ in range(2):
        memory.begin(state)
        got = []
        for t in range(9):
            if t and t % window == 0:
                memory.fold()
            query, key, value, decay, beta = (x[:, t] for x in inputs)
            got.append(memory.step(query, key, value, decay, beta, torch.tensor([t % window])))
        want, _ = literal(inputs, state.repeat_interleave(6 // shared, 0))
        torch.testing.assert_close(torch.stack(got, 1), want, rtol=1e-10, atol=1e-12)


def test_folding_refuses_shared_states() -> None:
    with pytest.raises(ValueError, match="give each its own"):
        BranchMemory(torch.zeros(1, HEADS, E, F), 2, 4).fold()
    with pytest.raises(ValueError, match="evenly"):
        BranchMemory(torch.zeros(2, HEADS, E, F), 3, 4)


@pytest.mark.model
def test_equals_the_stock_functions_in_float32() -> None:
    query, key, value, decay, beta = random_inputs(2, 130, 13, torch.float32)
    state = torch.randn(2, HEADS, E, F)
    got, trace = read_paths(query, key, value, decay, beta, state)
    for rule in (stock.torch_chunk_gated_delta_rule, stock.torch_recurrent_gated_delta_rule):
        want, last = rule(query * E**0.5, key, value, decay, beta, initial_state=state, output_final_state=True)
        assert relative(got, want) < 1e-5
        assert relative(trace.state_after(torch.arange(2), torch.full((2,), 130)), last) < 1e-5


def test_low_precision_inputs_are_computed_in_float32() -> None:
    inputs = random_inputs(1, 30, 15, torch.bfloat16)
    output, trace = read_paths(*inputs)
    want, _ = literal([x.double() for x in inputs])
    assert output.dtype == torch.float32
    assert isinstance(trace, DeltaTrace)
    assert relative(output.double(), want) < 1e-5


def sound(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    output, trace = read_paths(query, key, value, decay, beta, state)
    paths, length = query.shape[:2]
    return output, trace.state_after(torch.arange(paths), torch.full((paths,), length))


def wrong_gradient(*inputs: Tensor) -> tuple[Tensor, Tensor]:
    query, key, value, decay, beta, state = inputs
    return sound(query, key, value, decay, 0.5 * beta + 0.5 * beta.detach(), state)


def refusing(*inputs: Tensor) -> tuple[Tensor, Tensor]:
    raise RuntimeError("not on this device\nsecond line")


@pytest.mark.parametrize("packed", [False, True])
def test_adapter_equals_the_recurrence(packed: bool) -> None:
    inputs = random_inputs(3, 140, 1, learning=True)
    starts = torch.rand(3, 140, generator=torch.Generator().manual_seed(2)) < 0.05 if packed else None
    path, count = torch.tensor([0, 2, 1, 0]), torch.tensor([140, 77, 1, 0])
    output, trace = KernelRule(sound)(*inputs, None, starts)
    forks = trace.state_after(path, count)
    got = torch.autograd.grad(output.square().sum() + forks.square().sum(), inputs)
    want_output, states = literal(inputs, None, starts)
    want_forks = torch.stack([states[c][p] for p, c in zip(path.tolist(), count.tolist())])
    want = torch.autograd.grad(want_output.square().sum() + want_forks.square().sum(), inputs)
    for one, other in zip((output, forks, *got), (want_output, want_forks, *want)):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


def test_adapter_shares_initial_states() -> None:
    inputs, state = random_inputs(4, 9, 3), torch.randn(2, 2, 4, 6, dtype=torch.float64)
    output, _ = KernelRule(sound)(*inputs, state)
    torch.testing.assert_close(output, literal(inputs, state.repeat_interleave(2, 0))[0], rtol=1e-10, atol=1e-12)


def test_trouble_is_found_and_told() -> None:
    device = torch.device("cpu")
    assert distrust(sound, device, torch.bfloat16) is None
    assert "gradients of beta" in str(distrust(wrong_gradient, device, torch.bfloat16))
    told = str(distrust(refusing, device, torch.bfloat16))
    assert "not on this device" in told
    assert "\n" not in told


def test_choice_says_why() -> None:
    device = torch.device("cpu")
    assert choose_rule("torch", device, torch.float32).name == "torch"
    auto = choose_rule("auto", device, torch.float32)
    assert auto.rule is read_paths
    assert "cpu" in auto.reason
    with pytest.raises(UserError, match="delta_rule = fla"):
        choose_rule("fla", device, torch.float32)

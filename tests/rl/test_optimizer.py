"""Weights, averages and gradients move as far as the arithmetic says, in every precision setting offered."""

import copy
import gc
import math
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tfive.rl.optimizer import Bf16Update, MasterOptimizer, learning_rate
from tfive.rl.rounding import noise16, round_stochastically
from tfive.rl.settings import OptimizerSettings
from tfive.rl.teacher import Ema

PRECISIONS = [
    pytest.param(torch.float32, "master", id="float32"),
    pytest.param(torch.float64, "master", id="float64"),
    pytest.param(torch.bfloat16, "master", id="bfloat16-master"),
    pytest.param(torch.bfloat16, "stochastic", id="bfloat16-stochastic"),
]


def weights(dtype: torch.dtype, count: int = 20_000, scale: float = 0.02) -> nn.Parameter:
    values = torch.randn(count // 10, 10, generator=torch.Generator().manual_seed(3)) * scale
    return nn.Parameter(values.to(dtype))


def constant_pull(parameter: nn.Parameter, signs: torch.Tensor) -> torch.Tensor:
    """A loss whose gradient has the same sign at every step, so that each Adam step is `lr` long."""
    return (parameter.float() * signs).sum()


@pytest.mark.parametrize(("dtype", "bf16_update"), PRECISIONS)
def test_hundred_small_steps_move_the_expected_distance(dtype: torch.dtype, bf16_update: Bf16Update) -> None:
    parameter = weights(dtype)
    signs = torch.where(torch.rand(parameter.shape, generator=torch.Generator().manual_seed(5)) < 0.5, -1.0, 1.0)
    optimizer = MasterOptimizer([("w", parameter)], lr=1e-6, clip_norm=None, bf16_update=bf16_update, seed=1)
    start = optimizer.masters()["w"].double().clone()
    for _ in range(100):
        constant_pull(parameter, signs).backward()
        optimizer.step()
    moved = -(optimizer.masters()["w"].double() - start) * signs
    assert moved.mean().item() == pytest.approx(1e-4, rel=0.02)
    compute = -(parameter.detach().double() - start) * signs
    assert compute.mean().item() == pytest.approx(1e-4, rel=0.05)
    if bf16_update == "master":
        assert moved.min().item() == pytest.approx(1e-4, rel=0.02)
        assert moved.max().item() == pytest.approx(1e-4, rel=0.02)
        assert parameter.detach().equal(optimizer.masters()["w"].to(dtype))


def test_plain_bfloat16_adamw_fails_the_same_check() -> None:
    parameter = weights(torch.bfloat16)
    start = parameter.detach().double().clone()
    optimizer = torch.optim.AdamW([parameter], lr=1e-6, weight_decay=0.0)
    for _ in range(100):
        optimizer.zero_grad()
        constant_pull(parameter, torch.ones(parameter.shape)).backward()
        optimizer.step()
    assert (start - parameter.detach().double()).mean().item() < 0.2e-4


@pytest.mark.parametrize(("dtype", "bf16_update"), PRECISIONS)
def test_an_average_at_0_999_moves_as_it_should(dtype: torch.dtype, bf16_update: Bf16Update) -> None:
    parameter = weights(dtype)
    optimizer = MasterOptimizer([("w", parameter)], lr=1e-6, clip_norm=None, bf16_update=bf16_update, seed=1)
    ema = Ema(0.999)
    ema.update(optimizer.masters())
    start = ema.average["w"].double().clone()
    for _ in range(100):
        constant_pull(parameter, torch.ones(parameter.shape)).backward()
        optimizer.step()
        ema.update(optimizer.masters())
    # with w_k = w_0 − k·lr the average lags: e_n = w_0 − lr · Σ_k k (1−d) d^(n−k), where weight d^n stays on w_0
    expected = 1e-6 * sum(k * 0.001 * 0.999 ** (100 - k) for k in range(1, 101))
    assert (start - ema.average["w"].double()).mean().item() == pytest.approx(expected, rel=0.03)
    assert ema.average["w"].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_first_update_sets_the_average_and_copies_are_rounded() -> None:
    ema = Ema(0.9)
    ema.update({"w": torch.tensor([1.001])})
    assert ema.average["w"].item() == pytest.approx(1.001)
    target = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    ema.copy_to([("w", target)])
    assert target.item() == 1.0
    ema.update({"w": torch.tensor([2.001])})
    assert ema.average["w"].item() == pytest.approx(0.9 * 1.001 + 0.1 * 2.001)
    twin = Ema(0.5)
    twin.load_state_dict(ema.state_dict())
    assert twin.decay == 0.9
    assert twin.updates == 2
    assert twin.average["w"].equal(ema.average["w"])
    with pytest.raises(ValueError, match="other weights"):
        ema.update({"v": torch.zeros(1)})


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_float32_agrees_with_torch_adamw(weight_decay: float) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 1))
    twin = copy.deepcopy(net)
    mine = MasterOptimizer(net.named_parameters(), lr=3e-3, weight_decay=weight_decay, clip_norm=0.5)
    matrices = [p for p in twin.parameters() if p.ndim >= 2]
    vectors = [p for p in twin.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), eps=1e-8)
    for step in range(20):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        (net(x) ** 2).mean().backward()
        report = mine.step()
        reference.zero_grad()
        (twin(x) ** 2).mean().backward()
        norm = nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        reference.step()
        assert report.gradient_norm == pytest.approx(norm.item(), rel=1e-5)
    for ours, theirs in zip(net.parameters(), twin.parameters()):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("dtype", "bf16_update"), PRECISIONS)
def test_micro_batches_accumulate_in_float32(dtype: torch.dtype, bf16_update: Bf16Update) -> None:
    """A large gradient followed by many small ones: a bfloat16 sum would swallow the small ones."""
    parameter = nn.Parameter(torch.zeros(4, dtype=dtype))
    optimizer = MasterOptimizer([("w", parameter)], lr=1e-3, bf16_update=bf16_update)
    (parameter.float() * 256.0).sum().backward()
    for _ in range(512):
        (parameter.float() * 0.5).sum().backward()
    (_, gradient), *rest = optimizer.gradients()
    assert not rest
    assert gradient.tolist() == [512.0] * 4
    assert parameter.grad is None


def test_divide_by_makes_eight_batches_of_one_equal_one_of_eight() -> None:
    torch.manual_seed(1)
    one, eight = nn.Linear(5, 1, dtype=torch.float64), nn.Linear(5, 1, dtype=torch.float64)
    eight.load_state_dict(one.state_dict())
    x = torch.randn(8, 5, dtype=torch.float64)
    whole = MasterOptimizer(one.named_parameters(), lr=1e-2, clip_norm=0.1)
    parts = MasterOptimizer(eight.named_parameters(), lr=1e-2, clip_norm=0.1)
    (one(x) ** 2).sum().backward()
    for row in x:
        (eight(row) ** 2).sum().backward()
    first, second = whole.step(divide_by=8), parts.step(divide_by=8)
    assert first.gradient_norm == pytest.approx(second.gradient_norm, rel=1e-12)
    for ours, theirs in zip(one.parameters(), eight.parameters()):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("dtype", "bf16_update"), PRECISIONS)
def test_state_goes_on_bit_exactly_even_between_micro_batches(dtype: torch.dtype, bf16_update: Bf16Update) -> None:
    def build() -> tuple[nn.Module, MasterOptimizer]:
        torch.manual_seed(2)
        net = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 1)).to(dtype)
        options: dict[str, Any] = {
            "schedule": "cosine",
            "warmup_steps": 2,
            "total_steps": 9,
            "bf16_update": bf16_update,
            "seed": 4,
        }
        return net, MasterOptimizer(net.named_parameters(), lr=1e-2, weight_decay=0.1, **options)

    def micro_step(net: nn.Module, optimizer: MasterOptimizer, number: int) -> None:
        x = torch.randn(3, 7, generator=torch.Generator().manual_seed(number)).to(dtype)
        (net(x).float() ** 2).sum().backward()
        if number % 4 == 3:
            optimizer.step(divide_by=12)

    net, optimizer = build()
    for number in range(24):
        micro_step(net, optimizer, number)
    for cut in (3, 9, 14):
        stopped, before = build()
        for number in range(cut):
            micro_step(stopped, before, number)
        saved = copy.deepcopy((stopped.state_dict(), before.state_dict()))
        resumed, after = build()
        resumed.load_state_dict(saved[0])
        after.load_state_dict(saved[1])
        for number in range(cut, 24):
            micro_step(resumed, after, number)
        for ours, theirs in zip(net.parameters(), resumed.parameters()):
            assert ours.equal(theirs)
        assert after.steps == optimizer.steps == 6


def test_non_finite_gradient_changes_nothing_and_is_counted() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = MasterOptimizer([("w", parameter)], lr=0.1)
    (parameter * float("inf")).sum().backward()
    report = optimizer.step()
    assert not report.applied
    assert optimizer.skipped == 1
    assert optimizer.steps == 0
    assert parameter.tolist() == [1.0] * 3
    parameter.sum().backward()
    assert optimizer.step().applied
    assert parameter.tolist() == pytest.approx([0.9] * 3)


def test_frozen_part_holds_no_moments_and_stays() -> None:
    net = nn.ModuleDict({"body": nn.Linear(3, 3).to(torch.bfloat16), "head": nn.Linear(3, 1)})
    optimizer = MasterOptimizer(net.named_parameters(), lr=0.1, weight_decay=0.5, lr_multipliers={"head": 2.0})
    body = net.get_parameter("body.weight").detach().clone()
    net["body"].requires_grad_(False)
    net["head"](net["body"](torch.ones(2, 3, dtype=torch.bfloat16)).float()).sum().backward()
    bias = net.get_parameter("head.bias").detach().clone()
    optimizer.step()
    assert net.get_parameter("body.weight").equal(body)
    assert (bias - net.get_parameter("head.bias")).item() == pytest.approx(0.2, rel=1e-4)
    assert "first" not in optimizer.state_dict()["parameters"]["body.weight"]
    net["body"].requires_grad_(True)
    net["head"](net["body"](torch.ones(2, 3, dtype=torch.bfloat16)).float()).sum().backward()
    optimizer.step()
    assert not net.get_parameter("body.weight").equal(body)
    assert optimizer.state_dict()["parameters"]["body.weight"]["steps"] == 1


def test_release_lets_another_optimiser_take_over() -> None:
    parameter = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    first = MasterOptimizer([("w", parameter)], lr=0.1)
    first.release()
    second = MasterOptimizer([("w", parameter)], lr=0.1)
    parameter.sum().backward()
    second.step()
    assert second.masters()["w"].tolist() == pytest.approx([0.9, 0.9])
    with pytest.raises(ValueError, match="without a gradient"):
        first.step()


def test_an_optimiser_that_is_dropped_frees_its_memory() -> None:
    parameter = weights(torch.bfloat16)
    optimizer = MasterOptimizer([("w", parameter)], lr=1e-3)
    constant_pull(parameter, torch.ones(parameter.shape)).backward()
    optimizer.step()
    master, weight = weakref.ref(optimizer.masters()["w"]), weakref.ref(parameter)
    del optimizer, parameter
    gc.collect()
    assert master() is None
    assert weight() is None


def test_bad_arguments_are_refused() -> None:
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    with pytest.raises(ValueError, match="frozen"):
        MasterOptimizer([("w", frozen)], lr=0.1)
    with pytest.raises(ValueError, match="nothing to train"):
        MasterOptimizer([], lr=0.1)
    with pytest.raises(ValueError, match="total_steps"):
        MasterOptimizer([("w", nn.Parameter(torch.ones(2)))], lr=0.1, schedule="cosine", warmup_steps=5)
    half = nn.Parameter(torch.ones(2, dtype=torch.float16))
    with pytest.raises(ValueError, match="bfloat16"):
        MasterOptimizer([("w", half)], lr=0.1, bf16_update="stochastic")


def test_state_of_other_parameters_or_precision_is_refused() -> None:
    one = MasterOptimizer([("w", nn.Parameter(torch.ones(2)))], lr=0.1)
    other = MasterOptimizer([("v", nn.Parameter(torch.ones(2)))], lr=0.1)
    narrow = MasterOptimizer([("w", nn.Parameter(torch.ones(2, dtype=torch.bfloat16)))], lr=0.1)
    with pytest.raises(ValueError, match="other parameters"):
        other.load_state_dict(one.state_dict())
    with pytest.raises(ValueError, match="precision"):
        narrow.load_state_dict(one.state_dict())
    state = MasterOptimizer([("w", nn.Parameter(torch.ones(1, dtype=torch.bfloat16)))], lr=0.1).state_dict()
    with pytest.raises(ValueError, match="shape"):
        narrow.load_state_dict(state)


def test_schedules() -> None:
    options: dict[str, Any] = {"lr": 2.0, "warmup_steps": 4, "total_steps": 14, "final_fraction": 0.1}
    assert [learning_rate(k, schedule="constant", **options) for k in (0, 3, 4, 99)] == [0.5, 2.0, 2.0, 2.0]
    assert learning_rate(9, schedule="linear", **options) == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))
    assert learning_rate(9, schedule="cosine", **options) == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))
    quarter = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 0.2))
    assert learning_rate(6, schedule="cosine", **options) == pytest.approx(2.0 * quarter)
    for schedule in ("linear", "cosine"):
        assert learning_rate(14, schedule=schedule, **options) == pytest.approx(0.2)
        assert learning_rate(99, schedule=schedule, **options) == pytest.approx(0.2)


def test_settings_are_the_optimisers_keywords() -> None:
    keywords = OptimizerSettings(lr=0.5, clip_norm=None).model_dump(exclude={"gate_lr"})
    optimizer = MasterOptimizer([("w", nn.Parameter(torch.ones(2)))], **keywords)
    assert optimizer.current_lr() == 0.5
    assert optimizer.clip_norm is None
    for bad in ({"lr": 0}, {"betas": (0.9, 1.0)}, {"schedule": "step"}, {"learning_rate": 1.0}):
        with pytest.raises(ValueError):
            OptimizerSettings(**bad)


@settings(max_examples=50, deadline=None)
@given(st.floats(min_value=-(2.0**99), max_value=2.0**99, width=32, allow_subnormal=False), st.integers(0, 1000))
def test_stochastic_rounding_picks_a_neighbour_and_is_unbiased(value: float, seed: int) -> None:
    source = torch.full((4096,), value)
    target = torch.empty(4096, dtype=torch.bfloat16)
    round_stochastically(source, target, seed=seed, step=3, number=1)
    low = np.float32(value).view(np.int32) & np.int32(-65536)
    below, above = float(low.view(np.float32)), float((low + np.int32(65536)).view(np.float32))
    assert set(target.float().tolist()) <= {below, above}
    share = (value - below) / (above - below)
    hits = (target.float() == above).double().mean().item() if share else 0.0
    assert abs(hits - share) <= 5 * math.sqrt(max(share * (1 - share), 1e-4) / 4096)


def test_rounding_noise_is_a_function_of_its_counters() -> None:
    first, second = torch.empty(100, dtype=torch.bfloat16), torch.empty(100, dtype=torch.bfloat16)
    source = torch.rand(100, generator=torch.Generator().manual_seed(1))
    for differing in ({}, {"step": 1}, {"number": 1}, {"seed": 1}):
        round_stochastically(source, first, seed=0, step=0, number=0)
        round_stochastically(source, second, **({"seed": 0, "step": 0, "number": 0} | differing))
        assert first.equal(second) == (not differing)
    numbers = noise16(1 << 16, (123, 456), "cpu")
    counts = torch.bincount(numbers >> 8, minlength=256).double()
    assert numbers.min() >= 0
    assert numbers.max() <= 0xFFFF
    # chi-square with 255 degrees of freedom: mean 255, standard deviation 22.6
    assert ((counts - 256) ** 2 / 256).sum().item() == pytest.approx(255, abs=5 * 22.6)
    centred = numbers.double() - numbers.double().mean()
    assert abs((centred[1:] * centred[:-1]).mean() / centred.var()) < 5 / 256


def test_rounding_keeps_infinities_and_nan() -> None:
    target = torch.empty(3, dtype=torch.bfloat16)
    round_stochastically(torch.tensor([math.inf, -math.inf, math.nan]), target, seed=0, step=0, number=0)
    assert target[0] == math.inf
    assert target[1] == -math.inf
    assert target[2].isnan()

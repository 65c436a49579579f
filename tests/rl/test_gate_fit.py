"""The prediction gate as a part: mixed gain on two tokens by hand, what it may move, and its comparators."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from stage import PLAN, Item, PlainModel, gpt2, items_of, texts, thoughts_for
from tfive.rl.gains import foreign, measure
from tfive.rl.gate import Experts, Gate, MixedGains, experts, mixed_gains
from tfive.rl.settings import GateSettings
from tfive.tree.forward import TreeModel
from tfive.tree.layout import TextBatch, Thoughts
from tfive.tree.settings import SamplingSettings

pytestmark = pytest.mark.model
SHORT = replace(PLAN, horizon=2)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def engine() -> TreeModel:
    return TreeModel(gpt2().requires_grad_(False), SHORT)


@pytest.fixture(scope="module")
def batch() -> TextBatch:
    return texts(rows=5, horizon=2)


@pytest.fixture(scope="module")
def thoughts(batch: TextBatch) -> Thoughts:
    return thoughts_for(batch, SHORT)


def gate_of(bias: float | None = None, batch: int = 4, **changes: float) -> Gate:
    """A gate; with `bias` it is constant."""
    gate = Gate(16, GateSettings(**({"lr": 3e-2} | changes)), seed=1, device=CPU, width=8, batch=batch)
    if bias is not None:
        with torch.no_grad():
            gate.gate.last.weight.zero_()
            gate.gate.last.bias.fill_(bias)
    return gate


def two_predictions(
    engine: TreeModel, batch: TextBatch, thoughts: Thoughts
) -> list[tuple[Item, list[float], list[float]]]:
    """p of each of the two continuation tokens with the thought and without it, from plain rows."""
    plain = PlainModel(engine.model, SHORT)
    return [
        (item, plain.after(item).exp().tolist(), plain.without(item).exp().tolist())
        for item in items_of(batch, thoughts, SHORT)
    ]


def mixed(gate: Gate, engine: TreeModel, batch: TextBatch, thoughts: Thoughts, *, rows: int) -> MixedGains:
    own, lent = (experts(engine, batch, some, rows=rows) for some in (thoughts, foreign(thoughts)))
    return mixed_gains(gate, own, lent)


def mean_gain(rows: list[tuple[Item, list[float], list[float]]], beta: float) -> float:
    """Mean over items of the mean over two tokens of log(β p₁ + (1 − β) p₀) − log p₀."""
    gains = [
        sum(math.log(beta * p + (1 - beta) * q) - math.log(q) for p, q in zip(after, before)) / 2
        for _, after, before in rows
    ]
    return sum(gains) / len(gains)


def test_mixed_gain_and_comparators_by_hand(engine: TreeModel, batch: TextBatch, thoughts: Thoughts) -> None:
    gate = gate_of(bias=0.4)
    gate.constant = 0.15
    beta = 1 / (1 + math.exp(-0.4))
    found = mixed(gate, engine, batch, thoughts, rows=2).summary()
    own = two_predictions(engine, batch, thoughts)
    other = two_predictions(engine, batch, foreign(thoughts))
    assert all(len(item.continuation) == 2 for item, _, _ in own)
    assert found["mixed_gain"] == pytest.approx(mean_gain(own, beta), abs=1e-5)
    assert found["mixed_gain_constant"] == pytest.approx(mean_gain(own, 0.15), abs=1e-5)
    assert found["mixed_gain_other"] == pytest.approx(mean_gain(other, beta), abs=1e-5)
    oracle = [sum(max(math.log(p / q), 0) for p, q in zip(after, before)) / 2 for _, after, before in own]
    assert found["mixed_gain_oracle"] == pytest.approx(sum(oracle) / len(oracle), abs=1e-5)
    assert found["mean_gate"] == pytest.approx(beta)
    assert found["gate_deviation"] == pytest.approx(0, abs=1e-6)
    for name in ("mixed_gain", "mixed_gain_constant", "mixed_gain_oracle", "mixed_gain_other"):
        low, high = found[f"{name}_interval"]
        assert low < found[name] < high


def test_a_shut_gate_gains_nothing_and_an_open_one_the_thoughts_gain(
    engine: TreeModel, batch: TextBatch, thoughts: Thoughts
) -> None:
    shut = mixed(gate_of(bias=-60.0), engine, batch, thoughts, rows=5).summary()
    assert shut["mixed_gain"] == pytest.approx(0, abs=1e-9)
    assert shut["mixed_gain_constant"] == pytest.approx(0, abs=1e-5)
    rows = two_predictions(engine, batch, thoughts)
    whole = [sum(math.log(p / q) for p, q in zip(after, before)) / 2 for _, after, before in rows]
    assert mixed(gate_of(bias=60.0), engine, batch, thoughts, rows=5).summary()["mixed_gain"] == pytest.approx(
        sum(whole) / len(whole), abs=1e-5
    )


def test_experts_are_the_plain_predictions(engine: TreeModel, batch: TextBatch, thoughts: Thoughts) -> None:
    found = experts(engine, batch, thoughts, rows=2)
    rows = two_predictions(engine, batch, thoughts)
    torch.testing.assert_close(found.log_with_IH, torch.tensor([row[1] for row in rows]).log(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.log_without_IH, torch.tensor([row[2] for row in rows]).log(), rtol=1e-5, atol=1e-5)
    assert found.mask_IH.all()
    owner = torch.tensor([item.row for item, _, _ in rows])
    assert (found.text_I[:, None] == found.text_I).equal(owner[:, None] == owner)
    # The states really are those the two predictions are made from.
    head = engine.head
    targets = torch.tensor([item.continuation for item, _, _ in rows])
    for states, logs in ((found.with_IHD, found.log_with_IH), (found.without_IHD, found.log_without_IH)):
        log_p = head.logits(states.double().flatten(0, 1)).log_softmax(-1).view(*targets.shape, -1)
        torch.testing.assert_close(log_p.gather(-1, targets[..., None])[..., 0].float(), logs, rtol=1e-4, atol=1e-4)


def test_a_continuation_cut_by_its_document_counts_what_is_there() -> None:
    plan = replace(PLAN, horizon=6)
    engine, batch = TreeModel(gpt2().requires_grad_(False), plan), texts(rows=5)
    thoughts = thoughts_for(batch, plan)
    found = experts(engine, batch, thoughts, rows=5)
    items = list(items_of(batch, thoughts, plan))
    assert found.mask_IH.sum(1).tolist() == [len(item.continuation) for item in items]
    assert min(len(item.continuation) for item in items) < 6
    gains = torch.arange(6.0).expand(len(items), 6)
    expected = [sum(range(len(item.continuation))) / len(item.continuation) for item in items]
    assert found.per_item(gains).tolist() == pytest.approx(expected)


def told(count: int = 64) -> Experts:
    """Predictions whose first hidden feature says whether the thought helps; texts of four items."""
    draw = torch.Generator().manual_seed(3)
    helps_IH = torch.rand(count, 2, generator=draw) < 0.5
    with_IHD = torch.randn(count, 2, 16, generator=draw)
    with_IHD[..., 0] = torch.where(helps_IH, 4.0, -4.0)
    log_without = torch.full((count, 2), -2.0)
    return Experts(
        torch.where(helps_IH, -0.5, -4.0), log_without, with_IHD, torch.zeros(count, 2, 16),
        torch.ones(count, 2, dtype=torch.bool), torch.arange(count) // 4,
    )  # fmt: skip


def test_fitting_opens_the_gate_where_thoughts_help() -> None:
    gate, predictions = gate_of(passes=6, batch=16), told()
    before = gate.logits(predictions)
    first = gate.fit(predictions, 1)
    second = gate.fit(predictions, 2)
    assert second < first
    helps = predictions.log_with_IH > predictions.log_without_IH
    after = gate.logits(predictions)
    assert after[helps].mean() - before[helps].mean() > 1
    assert after[~helps].mean() - before[~helps].mean() < -1


def test_fitting_moves_the_gate_and_nothing_else(batch: TextBatch, thoughts: Thoughts) -> None:
    model = gpt2()
    engine = TreeModel(model, SHORT)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    predictions = experts(engine, batch, thoughts, rows=2)
    kept = {name: getattr(predictions, name).clone() for name in predictions.__dataclass_fields__}
    gate = gate_of()
    start = {name: tensor.clone() for name, tensor in gate.gate.state_dict().items()}
    gate.fit(predictions, 1)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(tensor.equal(before[name]) for name, tensor in model.state_dict().items())
    assert all(getattr(predictions, name).equal(tensor) for name, tensor in kept.items())
    assert not any(getattr(predictions, name).requires_grad for name in kept)
    moved = {name for name, tensor in gate.gate.state_dict().items() if not tensor.equal(start[name])}
    assert moved == set(start)


def test_the_constant_comparator_is_the_best_constant_of_the_training_texts() -> None:
    gate, predictions = gate_of(), told()
    gate.fit(predictions, 1)

    def loss(beta: float) -> float:
        with_, without = predictions.log_with_IH.double().exp(), predictions.log_without_IH.double().exp()
        return float(-(beta * with_ + (1 - beta) * without).log().mean())

    grid = [i / 1000 for i in range(1001)]
    assert gate.constant == pytest.approx(min(grid, key=loss), abs=2e-3)


def test_judging_leaves_the_gate_alone(engine: TreeModel, batch: TextBatch, thoughts: Thoughts) -> None:
    gate = gate_of()
    state = {name: tensor.clone() for name, tensor in gate.gate.state_dict().items()}
    first = mixed(gate, engine, batch, thoughts, rows=2).summary()
    assert mixed(gate, engine, batch, thoughts, rows=2).summary() == first
    assert all(tensor.equal(state[name]) for name, tensor in gate.gate.state_dict().items())
    assert gate.optimizer.steps == 0


def test_a_saved_gate_goes_on_bit_for_bit() -> None:
    predictions = told()
    first, second = gate_of(), gate_of(bias=3.0)
    first.fit(predictions, 1)
    second.load_state_dict(first.state_dict())
    assert second.constant == first.constant
    assert first.fit(predictions, 2) == second.fit(predictions, 2)
    logits: list[Tensor] = [one.logits(predictions) for one in (first, second)]
    assert logits[0].equal(logits[1])


def test_a_measurement_hands_over_the_predictions_it_made(engine: TreeModel, batch: TextBatch) -> None:
    kept: dict[str, list[Experts]] = {"own": [], "other": []}
    base_BR = torch.zeros(batch.positions_BP.shape)
    _, thoughts = measure(
        engine, batch, SamplingSettings(), base_no_thought_BR=base_BR, seed=1, rows=2,
        on_scores=lambda name, texts, some, scores: kept[name].append(Experts.of(scores, texts, some)),
    )  # fmt: skip
    for name, given in (("own", thoughts), ("other", foreign(thoughts))):
        wanted, found = experts(engine, batch, given, rows=5), Experts.joined(kept[name])
        for part in Experts.__dataclass_fields__:
            torch.testing.assert_close(getattr(found, part), getattr(wanted, part), rtol=1e-5, atol=1e-5, msg=part)

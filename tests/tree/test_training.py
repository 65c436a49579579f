"""Trained blocks: values and all gradients are those of the blocks they replace, and they are refused where not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import lifted, random_case
from families import tiny
from torch import Tensor, nn

from tfive.rl.critic import Critic, FrozenBase
from tfive.rl.initial import InitialWeights
from tfive.rl.settings import CriticSettings
from tfive.tree.fast import vocabulary
from tfive.tree.fast.fused import Heads
from tfive.tree.fast.trained import gated, neighbours, normed, onto, products, rotated
from tfive.tree.fast.training_ops import BlockShape, TorchTraining, differences, training_trouble
from tfive.tree.forward import TreeModel
from tfive.tree.head import VocabularyHead, target_log_prob
from tfive.tree.settings import EngineOptions

TRAINED = EngineOptions(fused_blocks="on", fused_training="on")
LEAN = EngineOptions(fused_blocks="on", fused_training="on", activation_checkpointing=True)
CPU = torch.device("cpu")
OPS = TorchTraining()


def random(*sizes: int) -> Tensor:
    return torch.randn(
        *sizes, generator=torch.Generator().manual_seed(sum(sizes)), dtype=torch.float64
    ).requires_grad_()


def found_by(engine: EngineOptions, model: Any, case: Any) -> list[Tensor]:
    """Log-probabilities of a policy pass with anchors, and the gradients of all parameters."""
    tree = TreeModel(model, case.plan, engine)
    model.zero_grad()
    out = tree.policy(case.texts, case.thoughts, text=True, continuations=True)
    parts = [out.need(name) for name in ("log_prob_BRT", "text_log_prob_BS", "continuation_log_prob_BRH")]
    sum((i + 1) * part.square().sum() for i, part in enumerate(parts)).backward()  # type: ignore[union-attr]
    assert (tree.training.forwards is not None) == (engine is not STOCK)
    return [*(part.detach() for part in parts), *(p.grad.clone() for p in model.parameters())]


STOCK = EngineOptions()


@pytest.mark.model
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_5"])
def test_values_and_gradients_are_the_models_own(family: str) -> None:
    case, model = random_case(1, "text2", group=2), tiny(family)
    with lifted():
        wanted = found_by(STOCK, model, case)
        for engine in (TRAINED, LEAN):
            for mine, other in zip(found_by(engine, model, case), wanted, strict=True):
                torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-9)


@pytest.mark.model
def test_biases_and_frozen_weights() -> None:
    case, model = random_case(2, "text"), tiny("llama", attention_bias=True, mlp_bias=True)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.0" not in name)
    with lifted():
        slopes = []
        for engine in (STOCK, TRAINED):
            model.zero_grad()
            TreeModel(model, case.plan, engine).policy(case.texts, case.thoughts).need("log_prob_BRT").sum().backward()
            slopes.append([p.grad for p in model.parameters()])
    assert [g is None for g in slopes[1]] == [g is None for g in slopes[0]]
    for mine, other in zip(slopes[1], slopes[0]):
        if mine is not None:
            torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-9)


@pytest.mark.model
def test_blocks_with_other_gradients_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("qwen3")
    kind: Any = type(model.model.layers[0].mlp)
    stock = kind.forward
    # The same values, so that fused blocks are admitted; another gradient.
    monkeypatch.setattr(kind, "forward", lambda self, x: stock(self, x) + 0.1 * (x - x.detach()))
    tree = TreeModel(model, random_case(3, "text").plan, TRAINED)
    assert tree.fusion.fusion is not None
    assert tree.training.forwards is None
    assert "other gradients" in tree.training.reason


@pytest.mark.model
@pytest.mark.parametrize("adapt", ["top", "lora", "full"])
def test_critics_run_whether_their_blocks_can_be_trained_so_or_not(adapt: str) -> None:
    case, base = random_case(4, "text"), tiny("qwen3", torch.float32).requires_grad_(False)
    settings = CriticSettings(adapt=adapt, blocks=1, lora_rank=2)
    values = []
    for engine in (STOCK, TRAINED):
        below = FrozenBase(base, case.plan, settings, engine).read(case.texts, case.thoughts, features=False)
        critic = Critic(base, case.plan, settings, engine=engine, initial=InitialWeights(0, "critic"))
        found = critic.values(case.texts, case.thoughts, below)
        found.sum().backward()
        values.append(found.detach())
        assert critic.tree is not None
        assert (critic.tree.training.forwards is not None) == (engine is TRAINED and adapt == "full")
    torch.testing.assert_close(values[1], values[0], rtol=1e-4, atol=1e-5)


def test_a_norm_hands_the_residual_stream_through() -> None:
    hidden, weight = random(6, 8), random(8)

    room = torch.full_like(hidden, torch.nan, requires_grad=False)

    def both(hidden: Tensor, weight: Tensor) -> Tensor:
        through, inside = normed(OPS, hidden, weight, 1e-6, room)
        return through.square().sum() + (inside * torch.arange(8.0)).sum()

    assert torch.autograd.gradcheck(both, (hidden, weight))
    both(hidden, weight)
    assert torch.equal(room, hidden)
    assert torch.autograd.gradcheck(lambda h: normed(OPS, h, weight, 1e-6)[0], hidden)


@pytest.mark.parametrize("join", [False, True])
def test_products_of_one_input_and_onto_the_residual_stream(join: bool) -> None:
    layers = [nn.Linear(5, width, bias=True).double() for width in (4, 3)]
    inputs, residual = random(6, 5), random(6, 4)
    wanted = [layer(inputs) for layer in layers] + [residual + layers[0](inputs)]
    found = [*products(inputs, layers, join), onto(residual, inputs, residual.detach().clone(), layers[0])]
    leaves = [inputs, residual, *(p for layer in layers for p in layer.parameters())]
    slopes = [torch.randn_like(part) for part in wanted]
    mine, other = (torch.autograd.grad(some, leaves, slopes) for some in (found, wanted))
    for a, b in zip((*found, *mine), (*wanted, *other), strict=True):
        torch.testing.assert_close(a, b)


def test_neighbours_are_not_copied() -> None:
    whole = torch.arange(12.0).view(3, 4)
    assert neighbours(whole.split([1, 3], 1)).data_ptr() == whole.data_ptr()
    for parts in ([whole[:, 1:], whole[:, :1]], [whole[:, :2].clone(), whole[:, 2:]]):
        assert torch.equal(neighbours(parts), torch.cat(parts, 1))


@pytest.mark.parametrize(
    "heads", [Heads(4, 2, 6, 6, True, False), Heads(2, 2, 4, 4, False, False), Heads(4, 2, 8, 4, True, True)]
)
def test_gradients_through_rotation_and_norms(heads: Heads) -> None:
    rows, nodes = 2, 1
    three = [random(rows * nodes, heads.queries * heads.features * (1 + heads.gated))]
    three += [random(rows * nodes, heads.keys * heads.features) + i for i in range(2)]
    weights = [random(heads.features), random(heads.features) + 1] if heads.normed else []
    angle = torch.rand(rows * nodes, heads.turned // 2, dtype=torch.float64).repeat(1, 2)

    def turned(query: Tensor, key: Tensor, value: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        norms = (weights[0], weights[1], 1e-6) if weights else None
        return rotated(OPS, (query, key, value), norms, (angle.cos(), angle.sin()), heads, rows)

    assert torch.autograd.gradcheck(turned, [*(t.detach().requires_grad_() for t in three), *weights])


def test_gradients_of_gated_products() -> None:
    assert torch.autograd.gradcheck(lambda gate, up: gated(OPS, gate, up), (random(3, 5), random(5, 3).t()))


@pytest.mark.parametrize("held", [1 << 30, 400])
def test_log_probabilities_through_the_head(held: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "SLOPE_BYTES", held)
    layer = nn.Linear(4, 11, bias=False).double()
    head, hidden = VocabularyHead(layer), random(9, 4)
    target = torch.arange(9)
    forbidden = torch.zeros(11, dtype=torch.bool)
    forbidden[[2, 10]] = True
    assert vocabulary.serves(head, hidden)
    found = vocabulary.log_prob(OPS, head, hidden, target, forbidden, 100)
    wanted = target_log_prob([head.logits(hidden, forbidden)], {"target": target})["log_prob"]
    torch.testing.assert_close(found, wanted)
    leaves, slope = (hidden, layer.weight), torch.arange(9.0, dtype=torch.float64)
    for mine, other in zip(torch.autograd.grad(found, leaves, slope), torch.autograd.grad(wanted, leaves, slope)):
        torch.testing.assert_close(mine, other)


def test_heads_that_do_more_than_a_product_are_not_served() -> None:
    hidden, layer = random(2, 4), nn.Linear(4, 11, bias=False).double()
    assert not vocabulary.serves(VocabularyHead(layer, cap=3.0), hidden)
    assert not vocabulary.serves(VocabularyHead(layer, factor=2.0), hidden)
    assert not vocabulary.serves(VocabularyHead(nn.Linear(4, 11).double()), hidden)
    assert not vocabulary.serves(VocabularyHead(layer), hidden.float())


def test_kernels_that_disagree_are_told_apart() -> None:
    class Wrong(TorchTraining):
        def gate_back(self, slope_xI: Tensor, gate_xI: Tensor, up_xI: Tensor) -> tuple[Tensor, Tensor]:
            of_gate, of_up = super().gate_back(slope_xI, gate_xI, up_xI)
            return of_gate, 1.1 * of_up

    shape = BlockShape(Heads(4, 2, 8, 8, True, False), 12, 20)
    apart = differences(Wrong(), shape, CPU, torch.float32)
    assert apart.pop("the rest's gradient") == pytest.approx(0.1, rel=1e-3)
    assert max(apart.values()) == 0.0
    assert max(differences(OPS, shape, CPU, torch.bfloat16).values()) < 0.02
    assert training_trouble(shape, CPU, torch.float32) == "there are no kernels for cpu"

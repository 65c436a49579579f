"""The chunked head against whole logits: every kind of head, every reducer, values and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tfive.tree.head import (
    Reduced,
    Source,
    VocabularyHead,
    divergence,
    gate_mixture,
    reduce_vocabulary,
    target_log_prob,
    target_log_prob_and_entropy,
)

ROWS, FEATURES, VOCABULARY = 11, 6, 17
ROW = 4 * VOCABULARY
"""Bytes of one row of float32 logits."""


class LowRank(nn.Module):
    """A head with an adapter: frozen base, two small factors."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(FEATURES, 2, bias=False, dtype=torch.float64)
        self.up = nn.Linear(2, VOCABULARY, bias=False, dtype=torch.float64)
        self.out_features = VOCABULARY

    def forward(self, hidden: Tensor) -> Tensor:
        return self.base(hidden) + 0.5 * self.up(self.down(hidden))


def heads(kind: str) -> VocabularyHead:
    torch.manual_seed(3)
    linear = nn.Linear(FEATURES, VOCABULARY, bias=kind == "biased", dtype=torch.float64)
    if kind == "adapted":
        return VocabularyHead(LowRank(linear))
    if kind == "capped":
        return VocabularyHead(linear, cap=1.5, factor=3.0)
    return VocabularyHead(linear)


def whole_logits(head: VocabularyHead, hidden: Tensor, forbidden: Tensor | None = None) -> Tensor:
    logits = head.module(hidden) * head.factor
    if head.cap:
        logits = head.cap * torch.tanh(logits / head.cap)
    return logits if forbidden is None else logits.masked_fill(forbidden, float("-inf"))


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    hidden = torch.randn(ROWS, FEATURES, generator=draw, dtype=torch.float64, requires_grad=True)
    forbidden = torch.zeros(VOCABULARY, dtype=torch.bool)
    forbidden[[0, 5]] = True
    return hidden, torch.randint(6, VOCABULARY, (ROWS,), generator=draw), forbidden


def check(found: Reduced, wanted: Reduced, leaves: list[Tensor]) -> None:
    weights = torch.arange(1, ROWS + 1, dtype=torch.float64).cos()
    for name, value in wanted.items():
        assert torch.allclose(found[name], value, rtol=1e-12, atol=1e-12), name
    totals = [
        torch.stack([(side[name] * weights).sum() * (i + 1) for i, name in enumerate(wanted)]).sum()
        for side in (found, wanted)
    ]
    mine, theirs = (torch.autograd.grad(t, leaves, allow_unused=True) for t in totals)
    for some, other in zip(mine, theirs):
        assert (some is None) == (other is None)
        assert some is None or torch.allclose(some, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", ["untied", "biased", "adapted", "capped"])
@pytest.mark.parametrize("chunk", [1, 4, 11, 100])
def test_log_prob_and_entropy_of_every_head(kind: str, chunk: int) -> None:
    head, (hidden, target, forbidden) = heads(kind), inputs()
    found = reduce_vocabulary(
        [Source(head, hidden, forbidden)], target_log_prob_and_entropy, {"target": target}, chunk * ROW
    )
    log_p = whole_logits(head, hidden, forbidden).log_softmax(-1)
    legal = log_p[:, ~forbidden]
    entropy = -(legal.exp() * legal).sum(-1)
    wanted = {"log_prob": log_p[torch.arange(ROWS), target], "entropy": entropy}
    check(found, wanted, [hidden, *(p for p in head.module.parameters() if p.requires_grad)])


def test_a_tied_head_shares_its_gradient_with_the_embedding() -> None:
    embedding = nn.Embedding(VOCABULARY, FEATURES, dtype=torch.float64)
    linear = nn.Linear(FEATURES, VOCABULARY, bias=False)
    linear.weight = embedding.weight
    target = torch.arange(ROWS)
    found = reduce_vocabulary(
        [Source(VocabularyHead(linear), embedding(target).sin())], target_log_prob, {"target": target}, 3 * ROW
    )
    hidden = embedding(target).sin()
    log_p = (hidden @ embedding.weight.t()).log_softmax(-1)
    check({"log_prob": found["log_prob"]}, {"log_prob": log_p[torch.arange(ROWS), target]}, [embedding.weight])


def test_log_normaliser_and_no_rows() -> None:
    head, (hidden, target, _) = heads("biased"), inputs()
    found = reduce_vocabulary([Source(head, hidden)], target_log_prob, {"target": target}, 4 * ROW)
    wanted = {"log_normaliser": whole_logits(head, hidden).logsumexp(-1)}
    check({"log_normaliser": found["log_normaliser"]}, wanted, [hidden, head.module.get_parameter("bias")])
    none = reduce_vocabulary([Source(head, hidden[:0])], target_log_prob, {"target": target[:0]})
    assert none["log_prob"].shape == (0,)


def test_divergence_of_two_models() -> None:
    (hidden, _, forbidden), one, two = inputs(), heads("untied"), heads("biased")
    other = hidden.detach().cos().requires_grad_()
    found = reduce_vocabulary(
        [Source(one, hidden, forbidden), Source(two, other, forbidden)], divergence, None, 8 * ROW
    )
    p, r = (whole_logits(h, x)[:, ~forbidden].log_softmax(-1) for h, x in ((one, hidden), (two, other)))
    wanted = {"kl": F.kl_div(r, p, log_target=True, reduction="none").sum(-1)}
    weights = [one.module.get_parameter("weight"), *(two.module.get_parameter(name) for name in ("weight", "bias"))]
    check(found, wanted, [hidden, other, *weights])


def test_a_gate_mixes_probabilities() -> None:
    (hidden, target, _), head = inputs(), heads("untied")
    other = hidden.detach().cos()
    gate = torch.linspace(0, 1, ROWS, dtype=torch.float64).requires_grad_()
    sources = [Source(head, hidden.detach()), Source(head, other)]
    found = reduce_vocabulary(sources, gate_mixture, {"target": target, "gate": gate}, 8 * ROW)
    p, r = (whole_logits(head, x).detach().softmax(-1)[torch.arange(ROWS), target] for x in (hidden, other))
    check({"log_prob": found["log_prob"]}, {"log_prob": ((1 - gate) * p + gate * r).log()}, [gate])
    assert torch.allclose(found["plain_log_prob"], p.log())
    assert torch.allclose(found["thoughtful_log_prob"], r.log())


def test_logits_are_never_held_beyond_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    head, (hidden, target, _) = heads("untied"), inputs()
    sizes: list[int] = []
    project = VocabularyHead.project

    def watched(self: VocabularyHead, rows: Tensor) -> Tensor:
        sizes.append(len(rows))
        return project(self, rows)

    monkeypatch.setattr(VocabularyHead, "project", watched)
    budget = 3 * ROW
    found = reduce_vocabulary([Source(head, hidden)], target_log_prob, {"target": target}, budget=budget)
    node: Any = found["log_prob"].grad_fn
    kept = node.saved_tensors
    found["log_prob"].sum().backward()
    assert sizes == [3, 3, 3, 2] * 2
    assert max(t.numel() for t in kept) < ROWS * VOCABULARY


def test_the_weight_gradient_is_summed_in_float32() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(FEATURES, VOCABULARY, bias=False, dtype=torch.bfloat16)
    hidden, target = torch.randn(600, FEATURES).bfloat16(), torch.zeros(600, dtype=torch.int64)

    def slope(chunk: int) -> Tensor:
        linear.zero_grad()
        found = reduce_vocabulary(
            [Source(VocabularyHead(linear), hidden)], target_log_prob, {"target": target}, chunk * ROW
        )
        assert found["log_prob"].dtype == torch.float32
        found["log_prob"].sum().backward()
        assert linear.weight.grad is not None
        return linear.weight.grad.float()

    exact = torch.zeros(VOCABULARY, FEATURES)
    p = torch.softmax((hidden @ linear.weight.t()).float(), -1)
    exact -= (p - F.one_hot(target, VOCABULARY)).t().detach() @ hidden.float()
    error = (slope(2) - exact).abs().max() / exact.abs().max()
    running = torch.zeros_like(linear.weight)
    for at in range(0, 600, 2):
        part = -(p - F.one_hot(target, VOCABULARY))[at : at + 2].t().detach().bfloat16() @ hidden[at : at + 2]
        running += part
    in_bf16 = (running.float() - exact).abs().max() / exact.abs().max()
    assert error < 0.01 < in_bf16


def test_autocast_is_the_same_forward_and_backward() -> None:
    head, (_, target, _) = VocabularyHead(nn.Linear(FEATURES, VOCABULARY)), inputs()
    hidden = torch.randn(ROWS, FEATURES, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        found = reduce_vocabulary([Source(head, hidden)], target_log_prob, {"target": target}, 4 * ROW)["log_prob"]
    (mine,) = torch.autograd.grad(found.sum(), hidden)
    rounded = hidden.detach().bfloat16().requires_grad_()
    weight = head.module.get_parameter("weight").detach().bfloat16()
    logits = (rounded @ weight.t()).float() + head.module.get_parameter("bias").detach()
    log_p = logits.log_softmax(-1)[torch.arange(ROWS), target]
    assert torch.allclose(found, log_p)
    (theirs,) = torch.autograd.grad(log_p.sum(), rounded)
    assert torch.allclose(mine, theirs.float(), rtol=0.02, atol=0.01)

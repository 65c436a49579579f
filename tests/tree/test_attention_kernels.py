"""Gradients stay numbers whatever kernel computes masked attention: cuDNN's backward pass has a fault at some sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from tfive.rl.actor import Actor
from tfive.rl.groups import with_group_advantages
from tfive.rl.optimizer import MasterOptimizer
from tfive.rl.sampling import sample
from tfive.rl.settings import ActorSettings, AnchorSettings, RatioSettings
from tfive.rl.trajectory import Trajectories
from tfive.tree.forward import TreeModel
from tfive.tree.grow import grow
from tfive.tree.layout import TextBatch, ThoughtPlan
from tfive.tree.settings import EngineOptions, SamplingSettings

pytestmark = pytest.mark.model
TILE = 128
PLAN = ThoughtPlan(
    length=9, checkpoints=(4, 9), horizon=4, open_ids=(5,), close_ids=(6,), variable_length=True, group=8
)
WIDTH = 32
"""Tokens of a text: with 2 positions, groups of 8 and thoughts of 1 + 9 nodes a row has 192 nodes, 1½ tiles."""
attention = F.scaled_dot_product_attention


class CudnnAttention(torch.autograd.Function):
    """cuDNN's masked attention as torch 2.11 to 2.13 have it on Hopper: backward gives the keys that fill up the last
    tile the score 0 instead of −∞, which overflows where every real score is far below 0."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(query, key, value, bias)
        ctx.scale = scale
        return attention(query, key, value, attn_mask=bias, scale=scale)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, bias = ctx.saved_tensors
        with torch.enable_grad():
            q, k, v = (x.detach().requires_grad_() for x in (query, key, value))
            output = attention(q, k, v, attn_mask=bias, scale=ctx.scale)
            found = list(torch.autograd.grad(output, (q, k, v), slope))
        scores = query.float() @ key.float().transpose(-1, -2) * ctx.scale + bias
        left_over = key.new_zeros(key.shape[-1]).float()
        weight = torch.exp(0 - scores.logsumexp(-1, keepdim=True))
        if key.shape[-2] % TILE == TILE // 2:
            found[0] = found[0] + (weight * left_over).to(query.dtype)
        return (*found, None, None)


def choose(query: Tensor, key: Tensor, value: Tensor, *, attn_mask: Tensor, scale: float) -> Tensor:
    """What torch does on Hopper: cuDNN unless that is switched off."""
    if not torch.backends.cuda.cudnn_sdp_enabled():
        return attention(query, key, value, attn_mask=attn_mask, scale=scale)
    if attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, float("-inf"))
    return CudnnAttention.apply(query, key, value, attn_mask, scale)


def model(dtype: torch.dtype) -> Qwen2ForCausalLM:
    """A small Qwen2 whose scores in the second block all lie near −200, as they do in one head of the 0.5B model."""
    torch.manual_seed(0)
    shape = Qwen2Config(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
    )
    made = Qwen2ForCausalLM(shape).eval()
    slowest = 7  # of the 8 frequencies of 16 features: positions hardly turn it
    with torch.no_grad():
        made.model.layers[1].self_attn.q_proj.bias[slowest] += 30.0
        made.model.layers[1].self_attn.k_proj.bias[slowest] -= 30.0
    return made.to(dtype)


def batch(rows: int = 5) -> TextBatch:
    draw = torch.Generator().manual_seed(1)
    tokens_BS = torch.randint(7, 40, (rows, WIDTH), generator=draw)
    positions_BP = torch.tensor([[8, 20]]).expand(rows, -1).clone()
    positions_BP[1, 1] = -1  # a text with one item: the branches of the other do not exist
    items_BP = torch.where(positions_BP >= 0, torch.arange(2 * rows).view(rows, 2), -1)
    return TextBatch(tokens_BS, torch.zeros_like(tokens_BS), positions_BP, items_BP)


def group_step(dtype: torch.dtype, kernel: str) -> tuple[Actor, Trajectories]:
    engine = TreeModel(model(dtype), PLAN, EngineOptions(attention=kernel))  # type: ignore[arg-type]
    optimizer = MasterOptimizer(list(engine.model.named_parameters()), lr=0.0)
    anchor = AnchorSettings(next_token=0.1, conditioned=0.0)
    actor = Actor(engine, optimizer, ActorSettings(), RatioSettings(), anchor, seed=0, rows=3)
    law = SamplingSettings(temperature=0.7)
    drawn = sample(engine, batch(), law, seed=0, role="actor", window=1, rows=5)
    reward_BR = torch.randn(drawn.thoughts.length_BR.shape, generator=torch.Generator().manual_seed(2))
    return actor, with_group_advantages(drawn, reward_BR, PLAN.group, "std")


@pytest.mark.parametrize("kernel", ["folded", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_group_step_without_continuations_has_finite_gradients_beside_a_faulty_kernel(
    dtype: torch.dtype, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor, acting = group_step(dtype, kernel)
    lengths = acting.thoughts.length_BR
    assert len(lengths.unique()) > 2, "thoughts of several lengths, so that there are padding nodes"
    layout = grow(acting.texts, PLAN, acting.thoughts)
    assert layout.node_count % TILE == TILE // 2
    usual = actor.step(acting)
    monkeypatch.setattr(F, "scaled_dot_product_attention", choose)
    stats = actor.step(acting)
    assert not stats.skipped
    assert stats.gradient_norm == usual.gradient_norm > 0
    assert torch.backends.cuda.cudnn_sdp_enabled(), "the process's own choice is back"


def test_the_stand_in_is_faulty_where_cudnn_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: the same rows through the kernel that torch would choose have no finite gradient."""
    monkeypatch.setattr(F, "scaled_dot_product_attention", choose)
    draw = torch.Generator().manual_seed(0)
    for keys, low, faulty in ((192, True, True), (192, False, False), (256, True, False), (208, True, False)):
        query, key, value = (0.1 * torch.randn(1, 1, keys, 16, generator=draw) for _ in range(3))
        if low:
            query[..., 0], key[..., 0] = 30.0, -30.0
        query.requires_grad_()
        seen = torch.ones(1, 1, keys, keys, dtype=torch.bool).tril()
        F.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=0.25).sum().backward()
        assert query.grad is not None
        assert bool(query.grad.isnan().any()) == faulty, (keys, low)


def test_every_node_sees_one_at_least() -> None:
    """No softmax over nothing: padding behind a thought that ended early, branches without an item, texts' ends."""
    _, acting = group_step(torch.float32, "folded")
    for segments in ("none", "first", "last", "all"):
        layout = grow(acting.texts, PLAN, acting.thoughts, segments)
        assert (layout.kind_BN < 0).any()
        assert layout.mask().any(-1).all()
        assert layout.mask(layout.trunk_width).any(-1).all()
        assert layout.mask(window=2).any(-1).all()

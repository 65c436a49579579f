"""Random layouts: packed and padded texts, unequal positions, groups, every kind of delimiter, varying lengths."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from families import VOCABULARY
from hypothesis import strategies as st
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt2 import modeling_gpt2
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3_5 import modeling_qwen3_5

from tfive.tree.layout import TextBatch, ThoughtPlan, Thoughts

STOCK = (
    modeling_gemma2,
    modeling_gpt2,
    modeling_gpt_neox,
    modeling_llama,
    modeling_mistral,
    modeling_qwen3,
    modeling_qwen3_5,
)
STOP = 9


class _InFloat64:
    """`torch` as a stock module sees it, with its float32 meaning float64."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def lifted() -> Iterator[None]:
    """The float32 casts inside stock norms, rotary embeddings and softmax lifted to float64, for both sides."""
    with pytest.MonkeyPatch.context() as patch:
        for module in STOCK:
            patch.setattr(module, "torch", _InFloat64())
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield


@dataclass(frozen=True)
class Case:
    texts: TextBatch
    plan: ThoughtPlan
    thoughts: Thoughts


def delimited(kind: str) -> dict[str, Any]:
    """Plan options of a kind of delimiter."""
    if kind == "none":
        return {}
    if kind == "learned":
        return {"open_ids": (7, 8), "close_ids": (STOP,), "learned": True}
    return {"open_ids": (7, 8) if kind == "text2" else (7,), "close_ids": (STOP,)}


def random_case(
    seed: int,
    kind: str = "text2",
    variable: bool = False,
    rows: int = 2,
    width: int = 18,
    count: int = 3,
    group: int = 1,
    length: int = 4,
    horizon: int = 3,
) -> Case:
    """Packed rows with padding at the end of the first; the last row lacks an item where there are several."""
    draw = torch.Generator().manual_seed(seed)
    steps = sorted({max(1, length // 2), length})
    plan = ThoughtPlan(
        length, tuple(steps), horizon, variable_length=variable, group=group, special_ids=(0, 1), **delimited(kind)
    )
    if kind == "text3":
        plan = ThoughtPlan(length, tuple(steps), horizon, (7,), (STOP, 5), group=group, special_ids=(0, 1))
    document_BS = torch.zeros(rows, width, dtype=torch.int64)
    document_BS[0, width // 2 :] = 1
    document_BS[0, -1:] = -1
    tokens_BS = torch.randint(10, VOCABULARY, (rows, width), generator=draw)
    positions_BP = torch.full((rows, count), -1)
    for row in range(rows):
        legal = [
            p
            for p in range(width - horizon)
            if document_BS[row, p] >= 0 and document_BS[row, p] == document_BS[row, p + horizon]
        ]
        chosen = torch.tensor(legal)[torch.randperm(len(legal), generator=draw)[:count]].sort().values
        positions_BP[row, : len(chosen)] = chosen
    if rows > 1 and count > 1:
        positions_BP[-1, -1] = -1
    items_BP = torch.arange(rows * count).view(rows, count)
    texts = TextBatch(tokens_BS, document_BS, positions_BP, items_BP)
    return Case(texts, plan, random_thoughts(texts, plan, draw))


def random_thoughts(texts: TextBatch, plan: ThoughtPlan, draw: torch.Generator, empty: bool = True) -> Thoughts:
    """Thoughts of legal tokens; where lengths may vary some end by a sampled close, some are forced, some are empty."""
    valid_BR = (texts.positions_BP >= 0).repeat_interleave(plan.group, 1)
    shape = valid_BR.shape
    tokens_BRT = torch.randint(10, VOCABULARY, (*shape, plan.length), generator=draw)
    length_BR = torch.full(shape, plan.length)
    closed_BR = torch.zeros(shape, dtype=torch.bool)
    if plan.variable_length:
        length_BR = torch.randint(0 if empty else 1, plan.length + 1, shape, generator=draw)
        closed_BR = (length_BR > 0) & (length_BR < plan.length)
        closed_BR |= (length_BR == plan.length) & (torch.rand(shape, generator=draw) < 0.5)
        last = (length_BR - 1).clamp(min=0)[..., None]
        tokens_BRT = torch.where(
            closed_BR[..., None] & (torch.arange(plan.length) == last), plan.close_ids[0], tokens_BRT
        )
    length_BR = torch.where(valid_BR, length_BR, 0)
    return Thoughts(tokens_BRT, length_BR, valid_BR, closed_BR & valid_BR, torch.zeros(tokens_BRT.shape))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any layout of a few branches."""
    kind = draw(st.sampled_from(["none", "text", "text2", "text3", "learned"]))
    variable = draw(st.booleans()) if kind in ("text", "text2", "learned") else False
    length = draw(st.integers(1, 5))
    horizon = draw(st.integers(1, 4))
    return random_case(
        draw(st.integers(0, 10_000)),
        kind,
        variable,
        rows=draw(st.integers(1, 2)),
        width=draw(st.integers(14, 20)),
        count=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 2)),
        length=length,
        horizon=horizon,
    )

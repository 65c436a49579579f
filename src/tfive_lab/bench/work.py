"""The workload of `tfive bench`: random models by the name of their shape, random texts, and how much of both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tfive import rng
from tfive.errors import UserError
from tfive.models.load import load_model
from tfive.models.shape import known_shapes
from tfive.tree.hf import Backbone
from tfive.tree.layout import TextBatch, ThoughtPlan

SHAPES = {
    "qwen3-1.7b": "Qwen3-1.7B",
    "qwen3-4b": "Qwen3-4B",
    "qwen3.5-2b": "Qwen3.5-2B",
    "qwen3.5-9b": "Qwen3.5-9B",
    "smollm2-135m": "SmolLM2-135M",
    "qwen2.5-0.5b": "Qwen2.5-Coder-0.5B",
}
"""Names of the random models, and how the shape facts beside the presets begin."""
NANO = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
    "tie_word_embeddings": True,
    "max_position_embeddings": 1024,
}


@dataclass(frozen=True)
class Work:
    """How many texts of which length, how many positions in each, and the shape of a thought."""

    texts: int = 8
    tokens: int = 512
    positions: int = 16
    length: int = 12
    checkpoints: tuple[int, ...] = (4, 8, 12)
    horizon: int = 16
    group: int = 1

    @property
    def branches(self) -> int:
        """Thoughts of all texts."""
        return self.texts * self.positions * self.group


SMALL = Work(texts=2, tokens=128, positions=6)
"""The default without a GPU, which ends within a minute."""


def random_model(config: dict[str, Any], device: torch.device, dtype: torch.dtype, seed: int = 0) -> PreTrainedModel:
    """A model of the given shape with random weights: right for speed and memory, never for quality."""
    facts = dict(config)
    built = AutoConfig.for_model(facts.pop("model_type"), **facts)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.device(device):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(built, dtype=dtype, attn_implementation="sdpa")
    return model.eval()


def find_model(shape: str | None, device: torch.device, dtype: torch.dtype) -> tuple[PreTrainedModel, str]:
    """The embedded model (no shape named and it is there), else a random one of the shape, with what to call it."""
    if shape is None:
        try:
            loaded = load_model("nano", dtype=dtype, device=device)
        except UserError:
            return random_model(NANO, device, dtype), "nano shape (random weights)"
        return loaded.model.eval(), loaded.name
    if shape == "nano":
        return random_model(NANO, device, dtype), "nano shape (random weights)"
    if shape not in SHAPES:
        raise UserError(f"shape {shape!r} is not known; use one of nano, {', '.join(SHAPES)}")
    facts = known_shapes()
    stored = next(key for key in facts if key.startswith(SHAPES[shape]))
    return random_model(facts[stored], device, dtype), f"{stored} shape (random weights)"


def blocks_of(shape: str | None) -> int:
    """Blocks of a shape; of the embedded model where none is named."""
    if shape is None or shape not in SHAPES:
        return len(Backbone(load_model("nano", device="cpu", dtype=torch.float32).model).blocks)
    facts = known_shapes()
    return int(facts[next(key for key in facts if key.startswith(SHAPES[shape]))]["num_hidden_layers"])


def make_texts(work: Work, vocabulary: int, seed: int = 0) -> TextBatch:
    """Random texts; positions are spread evenly, at least H tokens before the end."""
    g = torch.Generator().manual_seed(seed)
    tokens_BS = torch.randint(vocabulary, (work.texts, work.tokens), generator=g)
    last = work.tokens - work.horizon - 2
    stride = last / work.positions
    jitter_BP = torch.rand(work.texts, work.positions, generator=g)
    position_BP = ((torch.arange(work.positions) + jitter_BP) * stride).long().clamp(0, last)
    items_BP = torch.arange(work.texts * work.positions).view_as(position_BP)
    return TextBatch(tokens_BS, torch.zeros_like(tokens_BS), position_BP, items_BP)


def make_plan(work: Work, vocabulary: int) -> ThoughtPlan:
    """One-token delimiters from the vocabulary."""
    return ThoughtPlan(
        length=work.length,
        checkpoints=work.checkpoints,
        horizon=work.horizon,
        open_ids=(vocabulary - 1,),
        close_ids=(vocabulary - 2,),
        group=work.group,
    )


def make_uniforms(texts: TextBatch, plan: ThoughtPlan, seed: int = 0) -> Tensor:
    """One number per branch and step, `[B, R, T]`."""
    item_BR = texts.items_BP.repeat_interleave(plan.group, 1).numpy()
    sample_R = torch.arange(item_BR.shape[1]).remainder(plan.group).numpy()
    steps_T = torch.arange(plan.length).numpy()
    return torch.from_numpy(rng.uniforms(seed, "bench", 0, item_BR[..., None], sample_R[:, None], steps_T))


def value_head(features: Tensor, step_T: Tensor) -> Tensor:
    """A fixed linear critic head in float32."""
    weight_D = torch.linspace(-1, 1, features.shape[-1], device=features.device) / features.shape[-1] ** 0.5
    return features.float() @ weight_D + 0.01 * step_T

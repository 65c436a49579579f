"""Tiny randomly initialised models of every family the engine drives."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

VOCABULARY = 41

_SHARED: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_ROTARY: dict[str, Any] = {
    **_SHARED,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 64,
}
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {**_ROTARY, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {**_ROTARY, "tie_word_embeddings": False}),
    "gpt_neox": (
        "GPTNeoXConfig",
        {
            **_SHARED,
            "hidden_size": 24,
            "intermediate_size": 40,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
        },
    ),
    "gpt2": ("GPT2Config", {**_SHARED, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "mistral": ("MistralConfig", {**_ROTARY, "sliding_window": 5}),
    "gemma2": (
        "Gemma2Config",
        {
            **_ROTARY,
            "sliding_window": 5,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 1.5,
            "query_pre_attn_scalar": 6,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "qwen3_5": (
        "Qwen3_5TextConfig",
        {
            **_ROTARY,
            "head_dim": 8,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 6,
            "linear_value_head_dim": 6,
            "tie_word_embeddings": True,
        },
    ),
    "dynamic": (
        "LlamaConfig",
        {
            **_ROTARY,
            "max_position_embeddings": 16,
            "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
        },
    ),
}
DENSE = ("llama", "qwen3", "gpt_neox", "gpt2")
WINDOWED = ("mistral", "gemma2")
HYBRID = ("qwen3_5",)


def tiny(family: str, dtype: torch.dtype = torch.float64, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A model of `family` whose weights are large enough that every mistake shows."""
    name, options = _CONFIGS[family]
    config = getattr(transformers, name)(**{**options, **changes})
    config._attn_implementation = "eager" if family == "gemma2" else "sdpa"
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config).to(dtype)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.data.normal_(std=0.5)
            else:
                parameter.data.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()

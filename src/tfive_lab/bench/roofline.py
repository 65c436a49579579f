"""The roofline of the benchmark's work: seconds it takes at a device's peak arithmetic and memory bandwidth."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tfive.tree.layout import ThoughtPlan
from tfive_lab.bench.work import Work

PEAKS = {
    "H200": (989e12, 4.8e12),
    "H100": (989e12, 3.35e12),
    "A100": (312e12, 2.04e12),
}
"""Dense bf16 operations and bytes of memory traffic per second (vendor's data sheets), by a part of the name."""


def peaks(device: torch.device) -> tuple[float, float] | None:
    """Operations and bytes per second of `device`, None where they are not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((value for key, value in PEAKS.items() if key in name), None)


def floors(model: Any, work: Work, plan: ThoughtPlan, device: torch.device) -> dict[str, float] | None:
    """Seconds per phase at the device's peak, one step's weight traffic included; None where peaks are not known.

    Blocks cost 2 operations per weight and node, attention 4 per feature and pair of nodes, the head 2 per weight and
    row; a backward pass costs twice its forward, and the chunked head makes its logits once more. A sampling step reads
    every weight; the last thought token is not read any more. Attention to the branches and the delta rule itself are
    left out.
    """
    known = peaks(device)
    if known is None:
        return None
    operations, bandwidth = known
    embedding = model.get_input_embeddings().weight.numel()
    head = model.get_output_embeddings().weight
    blocks = sum(p.numel() for p in model.parameters()) - embedding - (head.numel() if _untied(model) else 0)
    thought, segment = plan.open_width + plan.length, plan.close_width + plan.horizon - 1
    trunk = work.texts * work.tokens
    pairs = work.texts * work.tokens**2 / 2
    attention = 4 * _attention_features(model) * pairs
    step = max(
        (blocks + head.numel()) * head.element_size() / bandwidth,
        2 * (blocks + head.numel()) * work.branches / operations,
    )
    scored = work.branches * (thought + len(plan.checkpoints) * segment)
    losses = work.branches * plan.horizon * (1 + len(plan.checkpoints))
    nodes = trunk + work.branches * thought
    actions = work.branches * plan.length
    return {
        "sampling": (2 * blocks * trunk + attention) / operations + (thought - 1) * step,
        "scoring": (2 * blocks * scored + 2 * head.numel() * losses) / operations,
        "actor": (3 * (2 * blocks * nodes + attention) + 4 * 2 * head.numel() * actions) / operations,
        "values": (2 * blocks * nodes + attention) / operations,
        "sampling_step": step,
    }


def _untied(model: Any) -> bool:
    return model.get_output_embeddings().weight.data_ptr() != model.get_input_embeddings().weight.data_ptr()


def _attention_features(model: Any) -> int:
    """Query features of all attention layers together."""
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    layers = sum("linear" not in kind for kind in kinds)
    per_head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return layers * config.num_attention_heads * per_head


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all parameters, tied ones once."""
    return sum(p.numel() * p.element_size() for p in model.parameters())

"""Which layers of a model get low-rank updates (`tree/low_rank.py`), and what these begin with."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from tfive.errors import UserError
from tfive.rl.initial import InitialWeights
from tfive.rl.settings import ActorSettings
from tfive.tree.hf import Backbone
from tfive.tree.low_rank import LoraLinear, low_rank_parts

LORA_ALPHA = 32.0
"""Low-rank updates are scaled by this over their rank: twice the update at the default rank of 16, the usual choice."""


def with_lora(module: nn.Module, rank: int, alpha: float, initial: InitialWeights) -> int:
    """Freeze `module` and update every linear layer inside it; returns how many there were."""
    module.requires_grad_(False)
    return _wrapped(module, rank, alpha, initial)


def _wrapped(module: nn.Module, rank: int, alpha: float, initial: InitialWeights) -> int:
    count = 0
    for name, child in list(module.named_children()):
        if isinstance(child, nn.Linear):
            down = initial.of(name).normal(rank, child.in_features, deviation=child.in_features**-0.5)
            setattr(module, name, LoraLinear(child, down, alpha / rank))
            count += 1
        else:
            count += _wrapped(child, rank, alpha, initial.of(name))
    return count


def adapt_actor(model: PreTrainedModel, settings: ActorSettings, seed: int) -> None:
    """Freeze the actor's model and give low-rank updates to the layers that `actor.lora_targets` names.

    Embeddings, norms and the vocabulary head stay as they are.
    """
    if any(True for _ in low_rank_parts(model)):
        raise UserError("actor.adapt = lora: the model already has low-rank updates; load it anew")
    model.requires_grad_(False)
    backbone, initial, count = Backbone(model), InitialWeights(seed, "actor"), 0
    for number, block in enumerate(backbone.blocks):
        for name, part in block.named_children():
            # Layers that mix positions know which layer they are, and no others do.
            mixes = hasattr(part, "layer_idx")
            if settings.lora_targets == "all" or mixes == (settings.lora_targets == "attention"):
                count += _wrapped(part, settings.lora_rank, LORA_ALPHA, initial.of(f"{number}/{name}"))
    if not count:
        raise UserError(
            f"actor.lora_targets = {settings.lora_targets}: {backbone.name} has no linear layers there; use "
            "actor.adapt = full"
        )

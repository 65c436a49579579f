"""Low-rank updates of a run on disk: put into the base model's weights, or as an adapter folder that peft loads."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from tfive.config.config import Config
from tfive.errors import UserError
from tfive.rl.adapters import LORA_ALPHA, adapt_actor
from tfive.tree.low_rank import load_trained_state, low_rank_parts

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def with_updates(model: PreTrainedModel, config: Config, weights: dict[str, Tensor]) -> None:
    """Give a base model the low-rank updates that a run has learned; RuntimeError where they do not fit."""
    adapt_actor(model, config.actor, config.run.seed)
    load_trained_state(model, weights)


def require_adapter(config: Config) -> None:
    """Refuse an adapter of a run that has none, or whose actor is more than one."""
    if config.actor.adapt != "lora":
        raise UserError("--adapter: the run has actor.adapt = full, no adapter; leave --adapter out")
    more = {"thought.delimiters = learned": config.thought.delimiters == "learned"}
    more["thought.reading = gated"] = config.thought.reading == "gated"
    for key, there in more.items():
        if there:
            raise UserError(f"--adapter: {key} trains weights that an adapter has no place for; leave --adapter out")


def save_adapter(model: PreTrainedModel, config: Config, folder: Path, card: str) -> None:
    """Write the updates as peft's files, and the model card; the folder appears whole or not at all."""
    parts = dict(low_rank_parts(model))
    tensors = {}
    for name, part in parts.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = part.down.detach().to("cpu", torch.float32).contiguous()
        tensors[f"base_model.model.{name}.lora_B.weight"] = part.up.detach().to("cpu", torch.float32).contiguous()
    described: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": config.model.name,
        "revision": config.model.revision,
        "r": config.actor.lora_rank,
        "lora_alpha": LORA_ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted({name.rpartition(".")[2] for name in parts}),
    }
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as unfinished:
            whole = Path(unfinished) / "adapter"
            whole.mkdir()
            (whole / CONFIG).write_text(json.dumps(described, indent=1) + "\n", "utf-8")
            (whole / "README.md").write_text(card, "utf-8")
            save_file(tensors, whole / WEIGHTS, metadata={"format": "pt"})
            (whole / WEIGHTS).chmod((whole / CONFIG).stat().st_mode & 0o777)
            os.replace(whole, folder)
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror or error}; choose another folder") from error

"""A model with thoughts on disk: a plain Hugging Face folder, and in its subfolder `thoughts/` all that they need."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tfive import __version__
from tfive.errors import UserError
from tfive.models.load import load_model, save_model, tokenizer_fingerprint
from tfive.rl.gate import PredictionGate
from tfive.tree.forward import Delimiters
from tfive.tree.gated import ReadingGates
from tfive.tree.settings import SamplingSettings, ThoughtSettings

FOLDER, DESCRIPTION, GATE, DELIMITERS = "thoughts", "thought.json", "gate.safetensors", "delimiters.safetensors"
READING_GATES = "reading_gates.safetensors"
FORMAT = 1


@dataclass(frozen=True)
class ThoughtModelParts:
    """Everything a `ThoughtModel` is made of."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    thought: ThoughtSettings
    sampling: SamplingSettings
    gate: PredictionGate | None = None
    delimiters: Delimiters | None = None
    origin: dict[str, Any] = field(default_factory=dict)
    """Where it came from (base model, method, window, …), as plain values for a reader."""
    gates: ReadingGates | None = None
    """Of gated reading, with it alone."""


def save_parts(parts: ThoughtModelParts, folder: str | os.PathLike[str]) -> None:
    """Write the folder, whole or not at all; plain `transformers` loads it as the actor alone."""
    target = Path(folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} already exists and is not empty; choose another folder")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as unfinished:
            whole = Path(unfinished) / "model"
            save_model(parts.model, parts.tokenizer, whole)
            _write_thoughts(parts, whole / FOLDER)
            os.replace(whole, target)
    except OSError as error:
        raise UserError(f"{target} cannot be written: {error.strerror or error}; choose another folder") from error


def _write_thoughts(parts: ThoughtModelParts, folder: Path) -> None:
    folder.mkdir()
    gate = parts.gate
    description = {
        "format": FORMAT,
        "thought": parts.thought.model_dump(mode="json"),
        "sampling": parts.sampling.model_dump(mode="json"),
        "gate": None if gate is None else {"features": gate.features, "width": gate.last.in_features},
        "tokenizer": tokenizer_fingerprint(parts.tokenizer),
        "versions": {"tfive": __version__} | {name: version(name) for name in ("transformers", "torch")},
        "origin": parts.origin,
    }
    (folder / DESCRIPTION).write_text(json.dumps(description, indent=1, ensure_ascii=False) + "\n", "utf-8")
    if gate is not None:
        _save(gate, folder / GATE)
    if parts.delimiters is not None:
        _save(parts.delimiters, folder / DELIMITERS)
    if parts.gates is not None:
        _save(parts.gates, folder / READING_GATES)


def _save(module: torch.nn.Module, path: Path) -> None:
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in module.state_dict().items()}, path)
    path.chmod((path.parent / DESCRIPTION).stat().st_mode & 0o777)  # safetensors leaves files to their owner alone


def load_parts(
    folder: str | os.PathLike[str],
    *,
    thought: ThoughtSettings | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> ThoughtModelParts:
    """Read what `save_parts` wrote, or any other model with untrained thoughts shaped by `thought`; `device` and
    `dtype` are the model's, the gate stays in float32."""
    source = Path(folder)
    if not (source / FOLDER).exists():
        return _untrained(folder, thought or ThoughtSettings(), device, dtype)
    if thought is not None:
        raise UserError(f"{source}: has thoughts of its own; leave out thought")
    return _trained(source, device, dtype)


def _untrained(
    source: str | os.PathLike[str],
    thought: ThoughtSettings,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> ThoughtModelParts:
    if thought.delimiters == "learned":
        raise UserError("thought.delimiters = 'learned': an untrained model has none; take text")
    loaded = load_model(source, device=device, dtype=dtype)
    gates = ReadingGates.of(loaded.model) if thought.reading == "gated" else None
    return ThoughtModelParts(
        loaded.model, loaded.tokenizer, thought, SamplingSettings(), origin={"base": loaded.name}, gates=gates
    )


def _trained(source: Path, device: torch.device | str | None, dtype: torch.dtype | None) -> ThoughtModelParts:
    content = _description(source)
    try:
        thought = ThoughtSettings.model_validate_json(json.dumps(content["thought"]), strict=True)
        sampling = SamplingSettings.model_validate_json(json.dumps(content["sampling"]), strict=True)
        shape = content["gate"]
        size = None if shape is None else (int(shape["features"]), int(shape["width"]))
        origin = dict(content.get("origin") or {})
    except (ValidationError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise _damaged(source / FOLDER / DESCRIPTION, error) from error
    gate = None if size is None else _gate(source / FOLDER / GATE, size)
    delimiters = None
    loaded = load_model(source, device=device, dtype=dtype)
    if content.get("tokenizer") != loaded.fingerprint:
        raise UserError(f"{source}: its tokenizer is not the one the thoughts were trained with; export the run again")
    if thought.delimiters == "learned":
        embedding: Any = loaded.model.get_input_embeddings()
        delimiters = Delimiters(torch.zeros(2, embedding.embedding_dim))
        _fill(delimiters, source / FOLDER / DELIMITERS)
    gates = None
    if thought.reading == "gated":
        gates = ReadingGates.of(loaded.model)
        _fill(gates, source / FOLDER / READING_GATES)
    return ThoughtModelParts(loaded.model, loaded.tokenizer, thought, sampling, gate, delimiters, origin, gates)


def _description(source: Path) -> dict[str, Any]:
    path = source / FOLDER / DESCRIPTION
    if not path.is_file():
        raise UserError(f"{source}: no {FOLDER}/{DESCRIPTION} in it; give a folder written by tfive export")
    try:
        content: Any = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(path, error) from error
    found = content.get("format") if isinstance(content, dict) else None
    if found != FORMAT:
        raise UserError(f"{path}: format {found}, this version of tfive reads {FORMAT}; export the run again")
    return content


def _gate(path: Path, size: tuple[int, int]) -> PredictionGate:
    """The gate in a file, which alone says how large it is: a description that says otherwise asks for no memory."""
    try:
        with safe_open(path, framework="pt") as stored:
            width, features = stored.get_slice("project.weight").get_shape()
    except (OSError, SafetensorError, ValueError) as error:
        raise _damaged(path, error) from error
    if (features, width) != size:
        said = ValueError(
            f"a gate of {features} features and {width} units, {DESCRIPTION} says {size[0]} and {size[1]}"
        )
        raise _damaged(path, said)
    gate = PredictionGate(features, width=width)
    _fill(gate, path)
    return gate


def _fill(module: torch.nn.Module, path: Path) -> None:
    """Load weights into a module of known shape; anything else is one line."""
    try:
        state: dict[str, Tensor] = load_file(path)
        module.load_state_dict(state)
    except (OSError, SafetensorError, RuntimeError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> UserError:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return UserError(f"{path} cannot be read: {reason[:200]}; export the run again")

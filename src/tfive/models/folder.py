"""The folder of a model before anything is loaded from it: where it lies, which files it has, sizes that can be."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from tfive.errors import UserError

EMBEDDED = ("nano",)
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
MOST = {"num_hidden_layers": 1_000, "num_attention_heads": 10_000, "hidden_size": 1_000_000, "vocab_size": 100_000_000}
"""Sizes beyond those of any model: a configuration that asks for more is damaged, and building it would never end."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.\-]*(/[A-Za-z0-9][\w.\-]*)?")


def folder_of(source: str) -> Path | None:
    """The local folder `source` means, None for a hub id; a path that is not there is an error, never a download."""
    if source in EMBEDDED:
        folder = Path(str(files("tfive").joinpath("data", source)))
        if not (folder / "config.json").is_file():
            raise UserError(
                f"model.name = {source!r}: the embedded model is missing from this installation; reinstall tfive"
            )
        return folder
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise UserError(f"model.name = {source!r} is a file; give a model folder, a hub id or a .gguf file")
    if source.startswith((".", "~", "/")) or not _HUB_ID.fullmatch(source):
        raise UserError(
            f"model.name = {source!r}: there is no such folder; give a model folder, a hub id or a .gguf file"
        )
    return None


def check_folder(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder}: no config.json in it; give the folder of a saved transformers model")
    if not any(folder.glob("*.safetensors")):
        raise UserError(
            f"{folder}: no .safetensors file in it; only safetensors weights are read, convert the model first"
        )
    if (folder / INDEX).is_file():
        shards(folder / INDEX)
    try:
        config: Any = json.loads((folder / CONFIG).read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{folder / CONFIG}: no readable JSON ({error!r:.80}); fetch the model again") from error
    if not isinstance(config, dict):
        raise UserError(f"{folder / CONFIG}: holds no JSON object; fetch the model again")
    check_sizes(config, str(folder), folder)


def check_sizes(config: Mapping[str, Any], source: str, folder: Path | None) -> None:
    """Refuse a configuration with sizes that no model has, or with more layers than the weights have tensors."""
    text = config.get("text_config") or config
    if not isinstance(text, Mapping):
        raise UserError(f"{source}: text_config in {CONFIG} is no object; fetch the model again")
    for key, most in MOST.items():
        size = text.get(key)
        if isinstance(size, int) and not 1 <= size <= most:
            raise UserError(f"{source}: {key} = {size} in {CONFIG}, a model has 1 to {most}; fetch the model again")
    layers = text.get("num_hidden_layers")
    if folder is not None and isinstance(layers, int) and layers > (stored := _tensors(folder)):
        raise UserError(
            f"{source}: num_hidden_layers = {layers} in {CONFIG}, but the weights are {stored} tensors; fetch the "
            "model again"
        )


def weight_files(folder: Path) -> list[str]:
    """The files that transformers reads the weights from: one, or an index and those that it names."""
    if (folder / WEIGHTS).is_file():
        return [WEIGHTS]
    if not (folder / INDEX).is_file():
        return sorted(path.name for path in folder.glob("*.safetensors"))
    return [INDEX, *shards(folder / INDEX)]


def shards(index: Path) -> list[str]:
    """The weight files that an index names; anything but an index of files beside it is one line."""
    try:
        named = json.loads(index.read_text("utf-8"))["weight_map"].values()
        found = sorted({os.fspath(name) for name in named})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{index}: no index of weight files ({error!r:.80}); fetch the model again") from error
    outside = next((name for name in found if Path(name).name != name or not name.endswith(".safetensors")), None)
    if outside is not None or not found:
        named_ = repr(outside)[:80] if found else "no file"
        raise UserError(f"{index}: names {named_}, where .safetensors files beside it belong; fetch the model again")
    return found


def _tensors(folder: Path) -> int:
    """How many tensors the weight files hold, by their headers alone."""
    count = 0
    for name in weight_files(folder):
        if name.endswith(".safetensors"):
            try:
                with safe_open(folder / name, framework="pt") as stored:
                    count += len(stored.keys())
            except (OSError, SafetensorError) as error:
                raise UserError(f"{folder / name}: no readable weights ({error}); fetch the model again") from error
    return count

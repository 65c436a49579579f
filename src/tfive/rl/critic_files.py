"""Saving a pair of critics and starting a later run from it: safetensors files and a description that is checked."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tfive.errors import UserError
from tfive.rl.adapters import LORA_ALPHA
from tfive.rl.critic import Critic

_DESCRIPTION = "critics.json"
_VERSION = 1
_LEFT_OUT = {"stands_on": "base", "sees": "prefix"}


def description(critic: Critic) -> dict[str, Any]:
    """What must agree between a saved critic and the one it is loaded into."""
    settings = critic.settings
    shape: dict[str, Any] = {"adapt": settings.adapt, "width": settings.width, "bound": critic.head.bound}
    shape |= {"steps": critic.plan.length, "features": critic.head.features, "first_block": critic.first_block}
    if settings.adapt == "lora":
        shape |= {"lora_rank": settings.lora_rank, "lora_alpha": LORA_ALPHA}
    if settings.features != "base":
        shape["stands_on"] = settings.features
    if settings.sees != "prefix":
        shape |= {"sees": settings.sees, "horizon": critic.plan.horizon}
    if settings.sees == "group":
        shape["group"] = critic.plan.group
    return shape


def save_critics(
    folder: str | os.PathLike[str], critics: Sequence[Critic], weights: Sequence[Mapping[str, Tensor]] | None = None
) -> None:
    """Write a pair into a new folder, atomically.

    `weights` are each critic's float32 masters (`MasterOptimizer.masters()`); without them the compute copies are
    written.
    """
    target = Path(folder)
    if target.exists():
        raise UserError(f"{target} already exists; choose another folder for the critics")
    states = [dict(critic.state_dict()) for critic in critics]
    for state, exact in zip(states, weights or []):
        if set(exact) != set(state):
            raise ValueError("the exact weights are of another critic")
        state.update(exact)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as unfinished:
            whole = Path(unfinished) / "critics"
            whole.mkdir()
            for number, state in enumerate(states, 1):
                save_file(
                    {name: tensor.detach().contiguous() for name, tensor in state.items()}, _weights(whole, number)
                )
            content = {"version": _VERSION, "critics": [description(critic) for critic in critics]}
            (whole / _DESCRIPTION).write_text(json.dumps(content, indent=1) + "\n", "utf-8")
            os.replace(whole, target)
    except OSError as error:
        raise UserError(f"{target} cannot be written: {error.strerror or error}; choose another folder") from error


def load_critics(folder: str | os.PathLike[str], critics: Sequence[Critic]) -> None:
    """Load a saved pair into freshly built critics of the same kind; if anything differs, an error and no change."""
    source = Path(folder)
    try:
        content = json.loads((source / _DESCRIPTION).read_text("utf-8"))
        saved: list[dict[str, Any]] = [dict(content["critics"][number]) for number in range(len(critics))]
        states = [load_file(_weights(source, number)) for number in range(1, len(critics) + 1)]
    except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError, SafetensorError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"critic.start = {str(source)!r} cannot be loaded: {reason}; give a folder of saved critics"
        ) from error
    for critic, shape, state in zip(critics, saved, states):
        wanted = description(critic)
        differing = [key for key in {**wanted, **shape} if shape.get(key) != wanted.get(key)]
        if differing:
            key = differing[0]
            raise UserError(
                f"critic.start = {str(source)!r}: saved with {_told(key, shape)}, this run has {_told(key, wanted)}; "
                "use the settings the critics were saved with"
            )
        own = critic.state_dict()
        if set(own) != set(state) or any(own[name].shape != state[name].shape for name in own):
            raise UserError(
                f"critic.start = {str(source)!r}: weights of another base model; use the one it was saved with"
            )
    for critic, state in zip(critics, states):
        critic.load_state_dict(state)


def _told(key: str, shape: Mapping[str, Any]) -> str:
    """An entry of a description in words; what a description leaves out has its default."""
    return f"{key} = {shape.get(key, _LEFT_OUT.get(key))}"


def _weights(folder: Path, number: int) -> Path:
    return folder / f"critic-{number}.safetensors"

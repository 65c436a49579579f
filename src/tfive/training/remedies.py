"""What a configuration can be changed to so that a run needs less memory; never what it has already."""

from __future__ import annotations

from collections.abc import Mapping

from tfive.config.config import Config
from tfive.training.communication import FUSED
from tfive.training.memory import BASE

WITH_GRADIENTS = ("build", "fit", "collect", "update", "close")
"""Phases with passes that keep activations for a backward pass: also a warm start, which a run is built with, and the
probes of `collect` and `close`."""

WITHOUT_READING = ("update", "save", "restore")
"""Phases in which nothing is sampled, scored or read."""


def smaller_weights(config: Config) -> list[str]:
    """What lessens weights, moments and gradients, best first."""
    found = []
    if config.spec.trains and config.actor.adapt == "full":
        if config.warmstart.source == "off":
            found.append("use actor.adapt = lora")
        if config.optimizer.moments == "float32":
            found.append("use optimizer.moments = bfloat16")
    if config.spec.critics and config.critic.adapt in ("full", "top"):
        found.append("use critic.adapt = lora")
    if config.spec.critics and config.critic.adapt == "lora":
        found.append("use critic.adapt = head")
    return [*found, "use a smaller model.name"]


def fewer_copies(config: Config, processes: int, copies: Mapping[str, int], there: int) -> list[str]:
    """What lessens the whole `copies` of weights that a process holds, best first; `there`: bytes that it has."""
    if copies[BASE] > there:
        return ["use a smaller model.name", "devices with more memory"]
    found = []
    if config.critic.adapt in ("full", "top") and processes > config.spec.critics > 0:
        found += ["use distributed.profile = cluster"] if config.distributed.profile == "single" else []
    if FUSED in copies:
        found.append("set engine.fast = off")
    return [*found, *(remedy for remedy in smaller_weights(config) if "moments" not in remedy)]


def smaller_passes(config: Config) -> list[str]:
    """What lessens activations and the buffers of sampling, best first."""
    found = _fewer_texts(config, gradients=True, reading=True)
    return [*found, "lower text.sequence_length, text.positions.per_text, thought.length or thought.group"]


def lower_and_resume(phase: str, config: Config) -> str:
    """What a run that ran out of memory in `phase` may be resumed with."""
    found = _fewer_texts(config, gradients=phase in WITH_GRADIENTS, reading=phase not in WITHOUT_READING)
    if not found:
        return "passes are as small as they can be: go on with tfive resume where there is more memory"
    return f"{' or '.join(found)} in the run's config.toml and go on with tfive resume"


def _fewer_texts(config: Config, *, gradients: bool, reading: bool) -> list[str]:
    run, found = config.run, []
    if gradients and run.texts_per_pass > 1:
        found.append(f"lower run.texts_per_pass (now {run.texts_per_pass})")
    if reading and run.rollout_texts > 1 and (run.texts_per_rollout or not gradients):
        found.append(f"lower run.texts_per_rollout (now {run.rollout_texts})")
    if gradients and not config.engine.activation_checkpointing:
        found.append("set engine.activation_checkpointing = true")
    return found

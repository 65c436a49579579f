"""What must be as it was when a run began, before a checkpoint of it is used: the same configuration, model and text.

Every checkpoint holds the whole configuration, the digests of the model's files and the corpus's, and where the run
computed. A few keys may change; everything else is refused by name, because the run would go on as another one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tfive.config.config import Config
from tfive.errors import RunFailed, UserError
from tfive.models.weights import IN_MEMORY, changed_model

MAY_CHANGE = (
    "window.windows",
    "run.seconds",
    "run.checkpoint_every",
    "run.checkpoint_phases",
    "run.keep",
    "run.trackers",
    "run.project",
    "run.texts_per_pass",
    "run.texts_per_rollout",
    "run.threads",
    "engine.fast",
    "engine.activation_checkpointing",
    "model.name",
    "model.device",
    "text.sources",
    "text.cache",
    "text.workers",
    "distributed.profile",
    "distributed.shard",
    "distributed.timeout",
)
"""Keys that a run may be resumed with another value of: how long it goes, what it writes, how and where it computes.
The model and the sources may have moved; their digests say whether they are the same."""

BITS = (
    "run.texts_per_pass", "run.texts_per_rollout", "engine.fast", "engine.activation_checkpointing",
    "distributed.profile", "distributed.shard",
)  # fmt: skip
"""Those that change the order of summation, and so the last bits of the numbers."""


def record(config: Config, model: Mapping[str, str], corpus: str) -> dict[str, Any]:
    """What a checkpoint keeps for `check`."""
    return {"config": config.leaves(), "model": dict(model), "corpus": corpus}


def check(began: Any, config: Config, model: Mapping[str, str] | None, corpus: str | None, folder: Path) -> list[str]:
    """Refuse to go on with other settings, weights or text than the run began with.

    Returns one line for every key that may change and did. `model` and `corpus` are None where nothing is taken from
    them: an export reads no text, and replaces the weights of a model that the caller gives.
    """
    try:
        leaves, files, text = dict(began["config"]), dict(began["model"]), str(began["corpus"])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{folder}: its checkpoint does not say what the run began with ({error!r:.80})") from error
    now = config.leaves()
    # A key that came since the run began had the effect of its default.
    leaves = Config().leaves() | leaves
    changed = [key for key in (*now, *(leaves.keys() - now.keys())) if leaves.get(key) != now.get(key)]
    for key in changed:
        if key not in MAY_CHANGE:
            raise UserError(
                f"{folder}: {key} = {now.get(key)!r:.80}, the run began with {leaves.get(key)!r:.80}; restore it in "
                "config.toml, or start another run"
            )
    if "window.windows" in changed and config.optimizer.schedule != "constant":
        raise UserError(
            f"{folder}: window.windows = {config.window.windows}, the run began with {leaves['window.windows']}, and "
            f"optimizer.schedule = {config.optimizer.schedule} depends on it; restore it in config.toml"
        )
    if model is not None:
        _require_model(files, model, config, folder)
    if corpus is not None and corpus != text:
        raise UserError(f"{folder}: the prepared corpus has changed since the run began; restore its sources")
    return [
        f"{key} = {now[key]!r:.80}, before {leaves.get(key)!r:.80}"
        + ("; numbers may differ in their last bits from here on" if key in BITS else "")
        for key in changed
    ]


def _require_model(then: Mapping[str, str], now: Mapping[str, str], config: Config, folder: Path) -> None:
    if IN_MEMORY in then:
        raise UserError(
            f"{folder}: the run began with a model of the caller's own, which the command line cannot find; in Python "
            "give it to export(…, model=…)"
        )
    name = changed_model(dict(then), dict(now))
    if name is not None:
        raise UserError(
            f"{folder}: model.name = {config.model.name}: {name} is not what the run began with; restore the base model"
        )


@contextmanager
def fits(folder: Path, name: str) -> Iterator[None]:
    """Turns whatever a checkpoint of another shape raises, once its checksums hold, into one line."""
    try:
        yield
    except (UserError, RunFailed):
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UserError(
            f"{folder}: {name} is no checkpoint of this run ({reason}); use the tfive that wrote it, or restore it"
        ) from error


def moved(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """One line for everything about where a run computes (device, threads, versions) that changed at a resume."""
    return [
        f"{name}: {before.get(name)} → {now.get(name)}; numbers may differ in their last bits from here on"
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name)
    ]

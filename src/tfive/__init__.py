"""tfive: reinforcement mid-training with short hidden thoughts (T⁵: Twin-critic Training for Token-level Thoughts)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfive.config.config import Config as Config
    from tfive.errors import RunFailed as RunFailed
    from tfive.errors import UserError as UserError
    from tfive.inference.thought_model import ThoughtModel as ThoughtModel
    from tfive.models.load import load_model as load_model
    from tfive.training.start import train as train

__version__ = "0.1.0"

_HOME = {
    "Config": "tfive.config.config",
    "RunFailed": "tfive.errors",
    "ThoughtModel": "tfive.inference.thought_model",
    "UserError": "tfive.errors",
    "load_model": "tfive.models.load",
    "train": "tfive.training.start",
}
"""Public name → module it lives in; imported when first used, so that `import tfive` costs nothing."""

__all__ = ["Config", "RunFailed", "ThoughtModel", "UserError", "load_model", "train"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'tfive' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]

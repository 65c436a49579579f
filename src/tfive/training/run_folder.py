"""A run's configuration in its folder, and the names of its larger parts; light enough for a launcher that trains
nothing itself."""

from __future__ import annotations

from pathlib import Path

from tfive.config.config import Config
from tfive.errors import UserError

CONFIG, CHECKPOINTS, CRITICS = "config.toml", "checkpoints", "critics"


def read_config(folder: Path) -> Config:
    """The configuration of the run in `folder`; one that this version does not take is refused in one line."""
    if not (folder / CONFIG).is_file():
        raise UserError(f"{folder}: no run here ({CONFIG} is missing); name the folder that tfive train wrote")
    try:
        return Config.load(folder / CONFIG)
    except UserError as error:
        raise UserError(f"{folder}: not a configuration of this version of tfive: {error}") from error


def save_config(config: Config, folder: Path) -> None:
    """The resolved configuration beside everything else the run writes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(config.to_toml(), "utf-8")

"""What `tfive compare` runs: the methods and seeds of a study as cells, planned and checked before libraries load."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfive.config.config import DEFAULT, Config, variants
from tfive.errors import UserError
from tfive.methods.registry import methods
from tfive.report.runs import STUDY

CELLS = "cells"


@dataclass(frozen=True)
class Cell:
    """One run of a study."""

    label: str
    seed: int
    config: Config
    folder: Path

    @property
    def record(self) -> Path:
        """What became of it, beside its folder."""
        return self.folder.with_name(f"{self.folder.name}.json")

    @property
    def log(self) -> Path:
        """What it said."""
        return self.folder.with_name(f"{self.folder.name}.log")

    @property
    def settings(self) -> Path:
        """The whole configuration it is started with."""
        return self.folder.with_name(f"{self.folder.name}.toml")

    def known(self) -> dict[str, Any]:
        """What was recorded of it so far."""
        if not self.record.is_file():
            return {}
        try:
            found = json.loads(self.record.read_text("utf-8"))
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise UserError(f"{self.record}: holds no record of a run; remove it, and the same command goes on")
        return found

    def note(self, **changes: Any) -> None:
        """Record something of it."""
        self.record.parent.mkdir(parents=True, exist_ok=True)
        self.record.write_text(json.dumps({**self.known(), **changes}, ensure_ascii=False) + "\n", "utf-8")


def cells_of(
    sources: Sequence[str], methods: Sequence[str], seeds: Sequence[int], overrides: Sequence[str], out: Path
) -> list[Cell]:
    """All cells, seeds outermost so that an interrupted study has every method; every configuration is checked."""
    if not methods or not seeds:
        raise UserError("--methods and --seeds: name at least one method and one seed")
    if len({_slug(label) for label in methods}) < len(methods):
        raise UserError(f"--methods {','.join(methods)}: one is named twice")
    if len(set(seeds)) < len(seeds):
        raise UserError(f"--seeds {','.join(map(str, seeds))}: one is named twice, and would count as two")
    return [
        Cell(label, seed, configured(sources, label, seed, overrides), out / CELLS / f"{_slug(label)}-seed{seed}")
        for seed in seeds
        for label in methods
    ]


def configured(sources: Sequence[str], label: str, seed: int, overrides: Sequence[str]) -> Config:
    """The configuration a label stands for: a method, then presets, files or `key=value`, joined by `+`.

    Without a method in front (`rlp-native`), the presets say which it is.
    """
    first, *others = label.split("+")
    known = methods()
    named = first in known
    if not named and first not in variants() and not first.endswith(".toml"):
        raise UserError(
            f"--methods {label}: no method, variant or .toml file is called {first}; methods: "
            f"{', '.join(known)}; variants: tfive config presets"
        )
    layers = others if named else [first, *others]
    presets = [part for part in layers if "=" not in part]
    method = [f"method={first}"] if named else []
    variant = [part for part in layers if "=" in part]
    return Config.load(*(sources or [DEFAULT]), *presets, overrides=[*overrides, *method, *variant, f"run.seed={seed}"])


def seeds_of(text: str) -> list[int]:
    """`3` is seeds 0, 1, 2; `0,4` (with a comma) are those seeds."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdigit() for part in parts):
        raise UserError(f"--seeds {text!r}: give how many (3), or which: 0,4 (one alone: 4,)")
    numbers = [int(part) for part in parts]
    if numbers == [0] and "," not in text:
        raise UserError("--seeds 0: none would run; give how many (3), or which: 0,4 (seed 0 alone: 0,)")
    return list(range(numbers[0])) if "," not in text else numbers


def _slug(label: str) -> str:
    return re.sub(r"[^\w.+=-]+", "_", label)


@dataclass(frozen=True)
class Study:
    """Where a study stands, what it was asked for, and its cells."""

    folder: Path
    command: dict[str, list[Any]]
    cells: list[Cell]

    @classmethod
    def planned(
        cls,
        sources: Sequence[str],
        methods: Sequence[str],
        seeds: Sequence[int],
        overrides: Sequence[str] = (),
        out: Path | None = None,
    ) -> Study:
        """The study these words ask for; its folder is new, empty or holds a study."""
        folder = out or Path("runs") / f"compare-{'-'.join(Path(source).stem for source in sources) or DEFAULT}"
        if folder.exists() and not (folder / STUDY).is_file() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(f"{folder}: holds something else than a study ({STUDY} is missing); use another --out")
        asked: dict[str, list[Any]] = {
            "sources": list(sources),
            "methods": list(methods),
            "seeds": list(seeds),
            "overrides": list(overrides),
        }
        return cls(folder, asked, cells_of(sources, methods, seeds, overrides, folder))

"""What a run's folder keeps of its warm start: while it lasts all of its state after every round, and in the end the
model and the report.

So a warm start that is stopped goes on behind its last whole round, and one that is over is not done again. What it has
cost goes on counting either way.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tfive.config.config import Config
from tfive.distributed.world import World
from tfive.models.load import Loaded
from tfive.telemetry import Accounting, Telemetry
from tfive.training import continuity
from tfive.training.checkpoint import CheckpointStore

WEIGHTS, REPORT = "warmstart.safetensors", "warmstart.json"
ROUNDS = "warmstart-rounds"
"""Folder of the state after the last whole round, until the warm start is over."""
SPENT = "spent"
"""What the report's file holds beside the report: the account as it was when the warm start ended."""


@dataclass(frozen=True)
class WarmStart:
    """What a run begins with beside the weights of its model, and what it took to get there."""

    report: dict[str, Any]
    delimiters: dict[str, Tensor] | None
    gates: dict[str, Tensor] | None


class Rounds:
    """The rounds of one warm start in its run's folder."""

    def __init__(
        self, folder: Path, config: Config, digests: Mapping[str, str], corpus: str, world: World, *, saves: bool
    ) -> None:
        """`saves`: whether rounds are kept at all. `digests` are of the base model's files, `corpus` the text's."""
        self.folder, self.world, self.saves = folder, world, saves
        self.began = continuity.record(config, digests, corpus)
        self.store = CheckpointStore(folder / ROUNDS, keep=1, world=world)
        self._require = lambda began: continuity.check(began, config, digests, corpus, folder)

    def newest(self, telemetry: Telemetry) -> dict[str, Any] | None:
        """The state after the last whole round, None where there is none. One that was damaged is told; one of other
        settings, weights or text is refused."""
        found = self.store.newest(skip_damaged=True)
        for path, why in found.damaged:
            telemetry.event(
                "warm start", f"{path.name} of its rounds cannot be used ({why}); it begins again", window=0
            )
        if found.checkpoint is None:
            return None
        for line in self._require(found.checkpoint.tree["began"]):
            telemetry.event("resumed", line, window=0)
        tree: dict[str, Any] = found.checkpoint.tree
        return tree

    def save(self, loaded: Loaded, state: dict[str, Any]) -> None:
        """Keep the model and this state instead of those after the round before."""
        if self.saves:
            self.store.save({**state, "began": self.began, "model": weights(loaded)})

    def end(self, found: WarmStart, loaded: Loaded, spent: dict[str, Any] | None) -> None:
        """The warm start is over: the first process writes what came of it, and what the rounds left goes."""
        if not self.world.leads:
            return
        _keep(found, loaded, self.folder, spent)
        shutil.rmtree(self.folder / ROUNDS, ignore_errors=True)


def rounds_kept(folder: Path) -> int:
    """After how many whole rounds a warm start that was stopped goes on."""
    return int(CheckpointStore(folder / ROUNDS).entry("done") or 0)


def counts_on(folder: Path) -> bool:
    """Whether what the folder's warm start has cost goes on counting: metrics up to there stay."""
    return bool(rounds_kept(folder)) or (_report(folder) or {}).get(SPENT) is not None


def weights(loaded: Loaded) -> dict[str, Tensor]:
    """The model's weights by name."""
    return {name: parameter.data for name, parameter in loaded.model.named_parameters()}


@torch.no_grad()
def put(loaded: Loaded, state: Mapping[str, Tensor]) -> None:
    """Write weights into the model."""
    for name, value in weights(loaded).items():
        value.copy_(state[name])


def kept(loaded: Loaded, folder: Path, telemetry: Accounting | None) -> WarmStart | None:
    """The warm start that `folder` holds, its weights in the model and its cost in the account of `telemetry`; None
    without one."""
    report = _report(folder)
    if report is None:
        return None
    spent = report.pop(SPENT, None)
    if telemetry is not None and spent is not None:
        telemetry.load_state_dict(spent)
    state = load_file(folder / WEIGHTS)
    parts = {
        part: {name.removeprefix(f"{part}."): value for name, value in state.items() if name.startswith(f"{part}.")}
        for part in ("model", "delimiters", "gates")
    }
    put(loaded, parts["model"])
    return WarmStart(report, parts["delimiters"] or None, parts["gates"] or None)


def _report(folder: Path) -> dict[str, Any] | None:
    if not (folder / REPORT).is_file():
        return None
    found: dict[str, Any] = json.loads((folder / REPORT).read_text("utf-8"))
    return found


def _keep(found: WarmStart, loaded: Loaded, folder: Path, spent: dict[str, Any] | None) -> None:
    """Write weights and report; the report comes last, and where it is, everything is."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {f"model.{name}": value for name, value in weights(loaded).items()}
    state |= {f"delimiters.{name}": value for name, value in (found.delimiters or {}).items()}
    state |= {f"gates.{name}": value for name, value in (found.gates or {}).items()}
    save_file({name: value.detach().cpu().contiguous() for name, value in state.items()}, folder / WEIGHTS)
    beside = folder / f".{REPORT}"
    beside.write_text(json.dumps(found.report | ({} if spent is None else {SPENT: spent})) + "\n", "utf-8")
    os.replace(beside, folder / REPORT)

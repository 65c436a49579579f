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
from tfive.errors import UserError
from tfive.models.load import Loaded
from tfive.telemetry import Accounting
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
        self,
        folder: Path,
        config: Config,
        digests: Mapping[str, str],
        corpus: str,
        loaded: Loaded,
        world: World,
        *,
        saves: bool,
    ) -> None:
        """`saves`: whether rounds are kept at all. `digests` are of the base model's files, `corpus` the text's."""
        self.folder, self.loaded, self.world, self.saves = folder, loaded, world, saves
        self.config, self.digests, self.corpus = config, digests, corpus
        self.store = CheckpointStore(folder / ROUNDS, keep=1, world=world)

    def newest(self) -> tuple[dict[str, Any] | None, list[str]]:
        """The state after the last whole round, None where there is none to go on from, and what is to be said of it:
        rounds that are damaged, or of other settings, weights, text or precision, are left, and it begins again."""
        found = self.store.newest(skip_damaged=True)
        lines = [f"{path.name} of its rounds cannot be used ({why}); it begins again" for path, why in found.damaged]
        if found.checkpoint is None:
            return None, lines
        tree: dict[str, Any] = found.checkpoint.tree
        with continuity.fits(self.folder, f"{ROUNDS}/{found.checkpoint.path.name}"):
            try:
                if tree["compute"] != self._compute:
                    raise UserError(f"{tree['compute']} then, {self._compute} now")
                return tree, [
                    *lines,
                    *continuity.check(tree["began"], self.config, self.digests, self.corpus, self.folder),
                ]
            except UserError as error:
                return None, [*lines, f"its rounds so far were learned otherwise ({error}); it begins again"]

    def save(self, state: dict[str, Any]) -> None:
        """Keep the model and this state instead of those after the round before."""
        began = continuity.record(self.config, self.digests, self.corpus)
        self.store.save({**state, "began": began, "compute": self._compute, "model": weights(self.loaded)})

    def end(self, found: WarmStart, spent: dict[str, Any]) -> None:
        """The warm start is over: the first process writes what came of it, and what the rounds left goes."""
        if self.world.leads:
            _keep(found, self.loaded, self.folder, spent)
            shutil.rmtree(self.folder / ROUNDS, ignore_errors=True)

    @property
    def _compute(self) -> str:
        return str(next(iter(weights(self.loaded).values())).dtype)


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


def kept(loaded: Loaded, folder: Path, telemetry: Accounting | None, world: World) -> WarmStart | None:
    """The warm start that `folder` holds, its weights in the model and its cost in the account of `telemetry`; None
    without one."""
    report = _report(folder)
    if report is None:
        return None
    if world.leads:
        shutil.rmtree(folder / ROUNDS, ignore_errors=True)  # it may have been stopped while these went
    spent = report.pop(SPENT, None)
    if telemetry is not None and spent is not None:
        telemetry.load_state_dict(spent, strict=False)
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


def _keep(found: WarmStart, loaded: Loaded, folder: Path, spent: dict[str, Any]) -> None:
    """Write weights and report; the report comes last, and where it is, everything is."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {f"model.{name}": value for name, value in weights(loaded).items()}
    state |= {f"delimiters.{name}": value for name, value in (found.delimiters or {}).items()}
    state |= {f"gates.{name}": value for name, value in (found.gates or {}).items()}
    save_file({name: value.detach().cpu().contiguous() for name, value in state.items()}, folder / WEIGHTS)
    beside = folder / f".{REPORT}"
    beside.write_text(json.dumps({**found.report, SPENT: spent}) + "\n", "utf-8")
    os.replace(beside, folder / REPORT)

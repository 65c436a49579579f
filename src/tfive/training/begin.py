"""How the processes of a run begin together: one folder, one that writes there, and one answer to where to go on.

A launcher that starts its processes again runs the same command. What this launch began is then gone on with: its
name stands in the run's folder, so that a folder which another launch began is refused as ever.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tfive.config.config import Config
from tfive.distributed.meeting import Meeting
from tfive.errors import UserError
from tfive.training import positions
from tfive.training.agreement import of_configuration, require_same
from tfive.training.checkpoint import CheckpointStore
from tfive.training.console import Console
from tfive.training.lock import LOCK, FolderLock
from tfive.training.processes import require_possible
from tfive.training.recorder import METRICS
from tfive.training.run_folder import CHECKPOINTS, CONFIG, save_config
from tfive.training.status_files import COSTS
from tfive.training.summary import SUMMARY
from tfive.training.warmstart_kept import REPORT, ROUNDS, counts_on

LAUNCH = ".launch"
"""File with the name of the launch that began the run."""

OWN = ".own"
"""File of a run that began with a model or texts of the caller's own, which nobody else can begin again with."""

PREPARED = (REPORT, ROUNDS, positions.REPORT)
"""What comes before the first window and is kept: a warm start, or its rounds so far, and a pilot that moves
positions."""

NEW, AGAIN, RESUMED = "new", "again", "resumed"
"""A new run; one that was begun, has no checkpoint yet and comes out the same again; one that goes on from its last."""


@dataclass(frozen=True)
class Begun:
    """A folder that the first process holds, and how all processes begin in it."""

    folder: Path
    how: str
    launch: str | None

    def prepare(self, config: Config, *, own: bool) -> None:
        """Write what a run writes before anything else, once everything was agreed on; the first process does. `own`:
        whether model or texts are the caller's."""
        if own:
            (self.folder / OWN).touch()
        if self.how == AGAIN:
            for name in (COSTS,) if counts_on(self.folder) else (METRICS, COSTS):
                (self.folder / name).unlink(missing_ok=True)
        if self.launch is not None:
            (self.folder / LAUNCH).write_text(self.launch, "utf-8")
        if self.how == NEW or not (self.folder / CONFIG).is_file():
            save_config(config, self.folder)

    @contextmanager
    def unwritten_if_refused(self) -> Iterator[None]:
        """What a new run has written is removed where building finds its input unusable (a model that the probe does
        not admit, say), so that the corrected command can be given with the same folder. Work that is kept stays."""
        try:
            yield
        except UserError:
            if self.how == NEW and not any((self.folder / name).exists() for name in (CHECKPOINTS, *PREPARED)):
                for name in (CONFIG, METRICS, COSTS, OWN, LAUNCH):
                    (self.folder / name).unlink(missing_ok=True)
            raise


def agreed(met: Meeting, load: Callable[[], Config]) -> Config:
    """The configuration, loaded by every process and the same on all, as are code and libraries."""
    with met.refusals("configuration"):
        config = load()
        require_possible(config, met.place.size)
    if met.place.size > 1:
        require_same(met, "configuration", of_configuration(config), "give all ranks the same files and versions")
    return config


@contextmanager
def new_folder(met: Meeting, folder: Path, require: Callable[[], None], quiet: bool) -> Iterator[Begun]:
    """A folder for a new run, or the one that this launch began before it started its processes again.

    `require` refuses a run whose inputs are missing, on any of the processes.
    """
    with ExitStack() as stack:
        how, first, launch = NEW, met.place.first, met.place.launch
        with met.refusals("folder"):
            if first:
                _require_writable(folder)
                how = _began_by(folder, launch)
                _require_empty(folder, how)
            require()
            if first:
                _say_left(stack.enter_context(FolderLock(folder, launch)), quiet or how == NEW)
                _require_empty(folder, how)  # again: another process may have come and gone before the lock was ours
        yield Begun(folder, met.exchange("how to begin", how)[0], launch)


@contextmanager
def stopped_folder(
    met: Meeting, folder: Path, check: Callable[[], None], *, prepares: bool, quiet: bool
) -> Iterator[Begun]:
    """The folder of a run to go on with; `check` refuses one that would go on as another run. A run that ended before
    its first checkpoint begins again, unless windows of it would be lost unasked; with `prepares` a warm start or a
    pilot comes before the first window, which the folder keeps."""
    with ExitStack() as stack:
        how = RESUMED
        with met.refusals("folder"):
            if met.place.first:
                _say_left(stack.enter_context(FolderLock(folder, met.place.launch)), quiet)
                check()
                lost = _checkpoints(folder) or (folder / OWN).exists() or (_trained(folder) and not prepares)
                how = RESUMED if lost else AGAIN
        yield Begun(folder, met.exchange("how to begin", how)[0], met.place.launch)


def _began_by(folder: Path, launch: str | None) -> str:
    """Whether this launch has begun the run in `folder` already."""
    named = folder / LAUNCH
    if launch is None or not named.is_file() or named.read_text("utf-8") != launch:
        return NEW
    return RESUMED if _checkpoints(folder) else AGAIN


def _checkpoints(folder: Path) -> bool:
    return bool(CheckpointStore(folder / CHECKPOINTS).paths())


def _trained(folder: Path) -> bool:
    """Whether a window of the run was closed: its costs have a line for the first measurement and one for each."""
    costs = folder / COSTS
    return costs.is_file() and len(costs.read_bytes().splitlines()) > 1


def _require_writable(folder: Path) -> None:
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise UserError(f"{folder}: {nearest} is no folder that can be written to; name another with --out")


def _require_empty(folder: Path, how: str) -> None:
    """A new run begins in a folder without files; the lock of a process that was killed at once is none."""
    if how != NEW or not folder.exists() or all(path.name in (LOCK, LAUNCH) for path in folder.iterdir()):
        return
    if (folder / SUMMARY).is_file():
        raise UserError(f"{folder}: already holds a finished run; name another folder with --out")
    kept = any((folder / name).exists() for name in (CHECKPOINTS, *PREPARED))
    kept = kept or ((folder / CONFIG).is_file() and not _trained(folder))
    begun = f"go on with tfive resume {folder}, or " if kept else ""
    raise UserError(f"{folder}: already holds files; {begun}name another folder with --out")


def _say_left(lock: FolderLock, quiet: bool) -> None:
    if lock.left_by is not None:
        Console(quiet=quiet).say(f"{lock.folder}: {lock.left_by} ended without giving its lock back")

"""One checkpoint on its way to disk: every process writes its files, the first one the manifest; then it is renamed.

What is written was copied before, so this runs beside training, in a thread of each process. The threads exchange
nothing but files: each process leaves a report in the unfinished folder, and the first one waits for them. So no
collective runs outside of the main thread, and a process that dies leaves an unfinished folder and nothing else.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from tfive.errors import RunFailed, out_of_memory
from tfive.training.manifest import MANIFEST, TREE, Manifest
from tfive.training.placement import StoredTensor
from tfive.training.tensor_files import Fingerprint, sync_folder, tensor_blocks, write_file

WRITING = ".writing-"
"""Unfinished folders begin with this."""

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_POLL = 0.02
"""Seconds between two looks for reports at first; later ones are further apart."""


@dataclass(frozen=True)
class Attempt:
    """A checkpoint that is being written by process `rank` of `size`."""

    root: Path
    serial: int
    rank: int
    size: int
    files: dict[str, dict[str, Tensor]]
    """This process's files: contiguous host tensors that nobody else changes."""
    document: Any
    tensors: tuple[StoredTensor, ...]
    fault: Callable[[str], None]
    problem: BaseException | None = None
    """What kept this process from copying its part, so that there is nothing to write."""
    hurry: threading.Event = field(default_factory=threading.Event)
    """Set when someone is known not to report any more."""

    @property
    def unfinished(self) -> Path:
        return self.root / f"{WRITING}{self.serial:08d}"

    @property
    def final(self) -> Path:
        return self.root / f"checkpoint-{self.serial:08d}"

    def run(self) -> None:
        """Write this process's part; the first one makes the whole a checkpoint."""
        try:
            if self.problem is not None:
                raise self.problem
            written = {}
            for name in list(self.files):
                # Taken out, so that its memory is free again as soon as it is written.
                written[name] = write_file(self.unfinished / name, tensor_blocks(self.files.pop(name)), self.fault)
        except BaseException as error:
            if self.rank:
                self._report({"error": reason_of(error)})
            raise
        if self.rank:
            self._report({"files": written})
        else:
            self._complete(written)

    def _complete(self, written: dict[str, Fingerprint]) -> None:
        for rank in range(1, self.size):
            written |= self._reported(rank)
        folder = self.unfinished
        written[TREE] = self._write(TREE, json.dumps(self.document, separators=(",", ":")).encode())
        self._write(MANIFEST, Manifest(self.serial, self.size, written, self.tensors).written())
        for report in folder.glob("report-*"):
            report.unlink()
        sync_folder(folder)
        self.fault("before-rename")
        os.rename(folder, self.final)
        sync_folder(self.root)
        self.fault("after-rename")

    def _write(self, name: str, content: bytes) -> Fingerprint:
        return write_file(self.unfinished / name, iter((memoryview(content),)), self.fault)

    def _report(self, content: dict[str, Any]) -> None:
        """Tell the first process, whole or not at all."""
        draft = self.unfinished / f"draft-{self.rank:05d}"
        draft.write_text(json.dumps(content), "utf-8")
        os.rename(draft, self._report_path(self.rank))

    def _report_path(self, rank: int) -> Path:
        return self.unfinished / f"report-{rank:05d}.json"

    def _reported(self, rank: int) -> dict[str, Fingerprint]:
        for _ in self._looks():
            try:
                report = json.loads(self._report_path(rank).read_bytes())
            except FileNotFoundError:
                continue
            if "error" in report:
                raise not_written(self.root, f"rank {rank}: {report['error']}")
            files: dict[str, Fingerprint] = report["files"]
            return files
        raise not_written(
            self.root, f"rank {rank} did not write its part; see whether it runs and sees the same folder, and resume"
        )

    def _looks(self) -> Iterator[None]:
        """One turn for every look, the last one when nothing more will come."""
        pause = _POLL
        while not self.hurry.is_set():
            yield
            self.hurry.wait(pause)
            pause = min(2 * pause, 0.5)
        yield


def not_written(root: Path, reason: str) -> RunFailed:
    """What ends a run whose checkpoint could not be written."""
    return RunFailed(f"no checkpoint could be written in {root}: {reason}")


def reason_of(error: BaseException) -> str:
    """Why something could not be written and what to do, in one line."""
    if isinstance(error, OSError):
        remedy = "free space" if error.errno in FULL else "see that it can be written to"
        return f"{error.strerror or error}; {remedy} and resume"
    if out_of_memory(error):
        kind = "device" if type(error).__name__ == "OutOfMemoryError" else "host"
        return f"not enough {kind} memory for a copy of the state; free some and resume"
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def clear_unfinished(root: Path, *prefixes: str) -> None:
    """Remove what a crash left half-written or half-removed; such folders were never checkpoints."""
    for path in root.glob(".*") if root.is_dir() else ():
        if path.name.startswith(prefixes):
            shutil.rmtree(path, ignore_errors=True)

"""One process at a time in a run's folder: two would overwrite each other's checkpoints and metrics.

The lock is a file that the kernel locks for as long as its process lives (`flock`), so a killed process leaves a file
but no lock. The file also says who holds it, because another machine that shares the folder may see no kernel lock:
there, a file of a machine that is not this one counts as held until it is removed.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from tfive.errors import UserError

LOCK = ".lock"


class FolderLock:
    """Holds the lock of a folder while it is entered; folders that it had to make and that stayed empty are removed."""

    def __init__(self, folder: Path, launch: str | None = None) -> None:
        """`launch` names what started this process; a lock of the same launch was left by a process of it that died,
        perhaps on another machine."""
        self.folder, self.path, self.launch = folder, folder / LOCK, launch
        self.left_by: str | None = None
        """Who held the lock before and ended without giving it back; None where nobody did."""
        self._handle = -1
        self._made: list[Path] = []

    def __enter__(self) -> FolderLock:
        self._made = [path for path in (self.folder, *self.folder.absolute().parents) if not path.exists()]
        self.folder.mkdir(parents=True, exist_ok=True)
        while not self._taken():
            pass
        os.ftruncate(self._handle, 0)
        os.pwrite(self._handle, json.dumps({**_this_process(), "launch": self.launch}).encode(), 0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.path.unlink(missing_ok=True)
        os.close(self._handle)
        for folder in self._made:
            try:
                folder.rmdir()
            except OSError:
                break  # something was written there, and so it stays

    def _taken(self) -> bool:
        """Whether the lock is ours now; False when its file was removed meanwhile. A `UserError` if another has it."""
        self._handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            holder = _read(self._handle)
            if not _locked(self._handle):
                raise UserError(f"{self.folder}: in use by {_named(holder)}; wait until it ends, or stop it")
            if not _same_file(self.path, self._handle):
                os.close(self._handle)
                return False
            holder = _read(self._handle)
            ours = holder is not None and self.launch is not None and holder.get("launch") == self.launch
            if holder is not None and not ours and _elsewhere(holder):
                raise UserError(
                    f"{self.folder}: locked by {_named(holder)}, another machine, and from here nobody can see whether "
                    f"it still runs (files were last written {_age(self.folder)} ago); wait until it ends, or if it "
                    f"has, remove {self.path}"
                )
        except UserError:
            os.close(self._handle)
            raise
        self.left_by = None if holder is None else _named(holder)
        return True


def held(folder: Path) -> str | None:
    """Who works in the folder now (`process 12 on host since …`), None where nobody does."""
    path = folder / LOCK
    if not path.is_file():
        return None
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        holder = _read(handle)
        free = _locked(handle) and not (holder is not None and _elsewhere(holder))
        return None if free else _named(holder)
    finally:
        os.close(handle)


def _locked(handle: int) -> bool:
    """Take the kernel's lock without waiting; where the file system has none, the file's content alone decides."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        holder = _read(handle)
        return holder is None or not _runs(holder)
    return True


def _same_file(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(handle))
    except FileNotFoundError:
        return False


def _read(handle: int) -> dict[str, Any] | None:
    """Who wrote the lock file; None where it is empty or holds something else."""
    try:
        found = json.loads(os.pread(handle, 4096, 0))
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _this_process() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "process": os.getpid(),
        "boot": _boot(),
        "began": _began(os.getpid()),
        "since": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()) + " UTC",
    }


def _named(holder: dict[str, Any] | None) -> str:
    if holder is None:
        return "another process"
    return f"process {holder.get('process')} on {holder.get('host')} since {holder.get('since')}"


def _age(folder: Path) -> str:
    """How long ago anything in the folder was written, its lock aside: a run that works writes every few minutes."""
    written = [path.stat().st_mtime for path in folder.iterdir() if path.name != LOCK]
    minutes = max(0, int(time.time() - max(written, default=folder.stat().st_mtime))) // 60
    return f"{minutes} minutes" if minutes < 120 else f"{minutes // 60} hours"


def _elsewhere(holder: dict[str, Any]) -> bool:
    """Whether another machine holds the lock, of which this one cannot see whether it still runs.

    Containers of one machine share its boot id; a machine that was started again shares its name.
    """
    return holder.get("host") != socket.gethostname() and holder.get("boot") != _boot()


def _runs(holder: dict[str, Any]) -> bool:
    """Whether that process of this machine still runs; a later one with its number began at another time."""
    number = holder.get("process")
    if holder.get("boot") != _boot() or not isinstance(number, int):
        return False
    return _began(number) is not None and _began(number) == holder.get("began")


def _boot() -> str:
    """What tells one start of a machine from another; empty where the system does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return ""


def _began(process: int) -> str | None:
    """When a process began, in ticks since the machine started; None if there is no such process."""
    try:
        return Path(f"/proc/{process}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None

"""Atomic writes: files and folders are built beside their target and renamed into place when complete."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from tfive.errors import UserError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def write_errors(folder: Path) -> Iterator[None]:
    """Turn a full disk or a folder that cannot be written into one line for the user."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in _FULL:
            raise UserError(
                f"{folder}: no disk space left ({reason}); free some or set text.cache to another disk"
            ) from error
        raise UserError(
            f"{folder}: cannot write here ({reason}); set text.cache to a folder you may write to"
        ) from error


class Staging:
    """A locked folder beside `target` in which it is built; removed on exit unless it was published as the target.

    Processes that want the same target take turns: the second one finds the target made and need not build it. A folder
    left by a killed process is emptied and reused. Disk errors become one line for the user.
    """

    def __init__(self, target: Path) -> None:
        self.target = target
        self.path = target.parent / f".{target.name}.partial"
        self._lock = -1

    def __enter__(self) -> Staging:
        with write_errors(self.target.parent):
            while True:
                self.target.parent.mkdir(parents=True, exist_ok=True)
                if self._locked():
                    break
            try:
                for left_over in self.path.iterdir():
                    _remove(left_over)
            except BaseException:
                os.close(self._lock)
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._ours():
            _remove(self.path)
        os.close(self._lock)
        if isinstance(error, OSError):
            with write_errors(self.target.parent):
                raise error

    def publish(self, name: str | None = None) -> None:
        """Sync everything to disk, then rename it to the target: the whole folder, or the one file `name` of it."""
        source = self.path if name is None else self.path / name
        inside = sorted(source.rglob("*")) if name is None else []
        for path in (*inside, source):
            sync(path)
        os.replace(source, self.target)
        sync(self.target.parent)

    def _locked(self) -> bool:
        """Wait for the folder's lock; False when the folder we waited for was published or removed meanwhile."""
        try:
            with suppress(FileExistsError):
                os.mkdir(self.path)
            self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            if self.path.is_symlink():
                raise
            return False
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        if not self._ours():
            os.close(self._lock)
            return False
        return True

    def _ours(self) -> bool:
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._lock))
        except FileNotFoundError:
            return False


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def sync(path: Path) -> None:
    """Force a file or folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class ArrayWriter:
    """A .npy file written row by row (never through a memory map, which cannot report a full disk)."""

    def __init__(self, path: Path, shape: tuple[int, ...], dtype: npt.DTypeLike) -> None:
        self.dtype = np.dtype(dtype)
        self._expected = shape[0]
        self._written = 0
        self._file = path.open("wb")
        header = {"descr": np.lib.format.dtype_to_descr(self.dtype), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self._file, header)

    def write(self, rows: npt.NDArray[np.generic]) -> None:
        """Append rows."""
        self._file.write(np.ascontiguousarray(rows, dtype=self.dtype).tobytes())
        self._written += len(rows)

    def close(self) -> None:
        """Finish; a wrong number of rows is a mistake of the caller."""
        self._file.close()
        if self._written != self._expected:
            raise ValueError(f"{self._file.name}: {self._written} rows written, {self._expected} announced")

    def __enter__(self) -> ArrayWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._file.close()


def sha256(path: Path) -> str:
    """Digest of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

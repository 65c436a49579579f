"""Checkpoints that are whole or absent: any tree of state, written by any number of processes, read by any other.

A checkpoint is a folder `checkpoint-00000017`: safetensors files of every process that wrote it, the tree as JSON, and
a manifest with the sha256 of every other file and the place of every part of every tensor. It is written under another
name, synced to disk, and renamed; so a crash at any moment leaves either the previous checkpoints or those and a
complete new one. Writing goes on beside training, which stops for a copy to host memory alone. Loading verifies every
byte before use. A run of one process writes the same format.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from tfive.distributed.pieces import Box, Piece
from tfive.distributed.world import SINGLE, World
from tfive.errors import RunFailed, UserError, out_of_memory
from tfive.training.background import Background
from tfive.training.checkpoint_write import WRITING, Attempt, clear_unfinished, not_written, reason_of
from tfive.training.manifest import TREE, DamagedCheckpointError, checked, is_checkpoint, read_manifest, serial_of
from tfive.training.placement import Reassembly, Wanted, dealt, filed, stored
from tfive.training.state_tree import Encoded, decode, encode, entries, named
from tfive.training.tensor_files import tensors_in

POINTS = ("before-write", "mid-write", "before-rename", "after-rename", "mid-prune")
"""Where a save calls its fault hook; `mid-write` comes once for every file, a part of it written."""

PATIENCE = 60.0
"""Seconds within which the first process must see what the others have written."""

_HEARTBEAT = 1.0

_MALFORMED = (OSError, ValueError, RecursionError)
"""What reading a file of another content raises: everything that is read is looked at before it is used, so that any
other error is one of this code and shown as it is."""

_PRUNED = ".pruned-"
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint and the state it holds (tensors on the CPU)."""

    path: Path
    tree: Any


@dataclass(frozen=True)
class Found:
    """The newest checkpoint, or the newest valid one, if there is one; and those that could not be used, with the
    reason."""

    checkpoint: Checkpoint | None
    damaged: tuple[tuple[Path, str], ...] = ()


class CheckpointStore:
    """The checkpoints of one run; the newest `keep` are kept. Several processes use one folder together: each has a
    store of its own, and all call the same methods in the same order."""

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        keep: int = 2,
        faults: Callable[[str], None] | None = None,
        world: World = SINGLE,
        patience: float = PATIENCE,
    ) -> None:
        """`faults` is called with each of `POINTS` during a save, for tests that crash there."""
        if keep < 1:
            raise ValueError(f"at least one checkpoint must be kept, not {keep}")
        self.root, self.keep, self.patience, self.world = Path(root), keep, patience, world
        self._fault = faults or (lambda point: None)
        self._background = Background("checkpoint")
        self._attempt: Attempt | None = None

    def paths(self) -> list[Path]:
        """Folders of complete checkpoints, oldest first (not verified)."""
        if not self.root.is_dir():
            return []
        return sorted(filter(is_checkpoint, self.root.iterdir()), key=serial_of)

    def save(self, tree: Any) -> Path:
        """Store `tree` as the newest checkpoint; returns its folder. A failure leaves the older ones as they were."""
        self.begin(tree)
        path = self.wait()
        assert path is not None
        return path

    def begin(self, tree: Any) -> None:
        """Copy `tree` to host memory and store it in the background. What went wrong is raised by `wait`, or by the
        next `begin`, which waits for this one."""
        self.wait()
        encoded, problem = _attempted(lambda: encode(tree))
        serial: int | None = None
        if problem is None:
            self._fault("before-write")
            serial, problem = _attempted(self._opened)
        paths = [] if encoded is None or self.world.rank else encoded.paths
        first = self._exchanged({"problem": problem, "serial": serial, "paths": paths})[0]
        assert encoded is not None
        attempt = self._planned(encoded, [tuple(path) for path in first["paths"]], first["serial"])
        self._attempt = attempt
        self._background.start(lambda: self._written(attempt))

    @property
    def failed(self) -> bool:
        """Whether this process's last save is known to have failed: `wait` says why."""
        return self._background.failed

    def wait(self) -> Path | None:
        """Wait until what was begun is on disk, and return its folder; None where nothing was begun. What kept any
        process from writing its part is raised by all of them."""
        attempt, self._attempt = self._attempt, None
        if attempt is None:
            return None
        self._until_all_are_done(attempt)
        error = self._background.join()
        problems = [message["problem"] for message in self._messages({"problem": self._line(error)})]
        if not any(problems):
            return attempt.final
        if attempt.rank == 0:
            clear_unfinished(self.root, WRITING, _PRUNED)
        # The first process may only know that another one left no report; that one knows why.
        raise RunFailed(next(filter(None, (*problems[1:], problems[0])))) from error

    def _until_all_are_done(self, attempt: Attempt) -> None:
        """Wait for the slowest process, telling one another every second, so that none seems to be lost. The first one
        stops waiting for reports when another has failed, or when all others are done and it still sees none."""
        waited = 0.0
        while True:
            pause = min(_HEARTBEAT, self.patience)
            done = self._background.done(pause)
            told = self._messages({"done": done, "failed": self._background.failed})
            if all(message["done"] for message in told):
                return
            waited += pause if all(message["done"] for message in told[1:]) else 0.0
            if waited > self.patience or any(message["failed"] for message in told):
                attempt.hurry.set()

    def settle(self, seconds: float = 30.0) -> str | None:
        """Let the write that was begun come to its end without the other processes, which may be gone: for a run that
        fails for another reason. Returns what went wrong, in one line."""
        attempt, self._attempt = self._attempt, None
        if attempt is None:
            return None
        if attempt.size > 1 and not self._background.done(seconds):
            attempt.hurry.set()
        return self._line(self._background.join())

    def _line(self, error: BaseException | None) -> str | None:
        """What ended this process's write, in one line."""
        if error is None or isinstance(error, RunFailed):
            return None if error is None else str(error)
        where = f"rank {self.world.rank}: " if self.world.size > 1 else ""
        return str(not_written(self.root, f"{where}{reason_of(error)}"))

    def load(self, path: Path, wanted: Wanted | None = None) -> Any:
        """The verified tree of one checkpoint; `DamagedCheckpointError` when any byte of it is not as written.

        Tensors are whole, whoever wrote which part of them; with `wanted`, those parts of them that it asks for.
        """
        try:
            return self._verified(path, wanted)
        except (*_MALFORMED, MemoryError, RuntimeError) as error:
            if out_of_memory(error):
                raise RunFailed(
                    f"{path}: not enough memory to read it; free some and go on with tfive resume"
                ) from error
            if not isinstance(error, _MALFORMED):
                raise
            raise DamagedCheckpointError(f"unreadable: {' '.join(str(error).split())[:200]}") from error

    def entry(self, key: str) -> Any:
        """One entry without tensors of the newest tree whose checksum holds, None where there is none: a small read."""
        for path in reversed(self.paths()):
            try:
                found = dict(entries(json.loads(checked(path, TREE, read_manifest(path)))))
                if key in found:
                    return decode(found[key], [])
            except (DamagedCheckpointError, *_MALFORMED):
                continue
        return None

    def newest(self, *, skip_damaged: bool = False, wanted: Wanted | None = None) -> Found:
        """The newest checkpoint, if every process could verify what it reads of it; a damaged one is named, never used.
        With `skip_damaged` older ones are tried after it."""
        damaged: list[tuple[Path, str]] = []
        gone: set[str] = set()
        while True:
            skipped = {path.name for path, _ in damaged} | gone
            left = [path.name for path in self.paths() if path.name not in skipped]
            name = self._messages(left[-1] if left else None)[0]
            if name is None:
                return Found(None, tuple(damaged))
            path = self.root / name
            tree, problem = self._tried(path, wanted)
            problems = self._messages({"problem": problem, "there": path.exists()})
            found = next((message["problem"] for message in problems if message["problem"]), None)
            if found is None:
                return Found(Checkpoint(path, tree), tuple(damaged))
            if not problems[0]["there"]:
                gone.add(name)  # pruned while it was read, so there is a newer one
                continue
            damaged.append((path, found))
            if not skip_damaged:
                return Found(None, tuple(damaged))

    def usable(self, *, skip_damaged: bool = False, wanted: Wanted | None = None) -> tuple[Checkpoint, list[str]]:
        """The checkpoint to go on from, and a line for each one that was skipped. A damaged newest one is refused by
        name unless `skip_damaged` asks for the one before it."""
        found = self.newest(skip_damaged=skip_damaged, wanted=wanted)
        run = self.root.parent
        if found.checkpoint is not None:
            return found.checkpoint, [f"{path.name} cannot be used ({why}); skipped" for path, why in found.damaged]
        if not found.damaged:
            raise UserError(f"{run}: no usable checkpoint (there is none); start again with tfive train")
        reasons = "; ".join(f"{path.name}: {why}" for path, why in found.damaged)
        older = len(self.paths()) > len(found.damaged)
        other = "go on from an older one with --skip-damaged" if older else "start again with tfive train"
        raise UserError(
            f"{run}: no usable checkpoint ({reasons}); restore its files, use the tfive that wrote it, or {other}"
        )

    def _opened(self) -> int:
        """Make the folder of the next checkpoint, which is the first process's work; the number of it."""
        if self.world.rank:
            return 0
        self.root.mkdir(parents=True, exist_ok=True)
        clear_unfinished(self.root, WRITING, _PRUNED)
        paths = self.paths()
        serial = serial_of(paths[-1]) + 1 if paths else 1
        (self.root / f"{WRITING}{serial:08d}").mkdir()
        return serial

    def _planned(self, encoded: Encoded, paths: list[Any], serial: int) -> Attempt:
        """Who writes what, and copies of what this process writes."""
        rank, size = self.world.rank, self.world.size
        found, problem = _attempted(lambda: _pieces_at(encoded, paths))
        pieces = found or []
        boxes = [[piece.box.offset, piece.box.shape] if piece.partial else None for piece in pieces]
        every = self._exchanged({"problem": problem, "boxes": boxes, "layout": _layout(pieces)})
        other = next((rank for rank in range(size) if every[rank]["layout"] != every[0]["layout"]), None)
        if other is not None:
            raise not_written(self.root, f"rank {other} has tensors of other shapes or dtypes than rank 0")
        held = [[_held(piece, box) for piece, box in zip(pieces, one["boxes"])] for one in every]
        widths = [piece.local.element_size() for piece in pieces]
        shares = dealt(held, widths)
        whole = [all(boxes[number] == Box.whole(piece.shape) for boxes in held) for number, piece in enumerate(pieces)]
        plan = filed(shares, whole, widths)
        dtypes, shapes = [piece.local.dtype for piece in pieces], [piece.shape for piece in pieces]
        try:
            tensors = tuple(stored(plan, paths, dtypes, shapes))
        except ValueError as error:
            raise not_written(self.root, f"the parts of the processes are not the whole: {error}") from error
        own = {name: some for name, some in plan.items() if some[0].rank == rank}
        copies, problem = _attempted(
            lambda: {
                name: {str(share.number): _host_copy(pieces[share.number].local) for share in some}
                for name, some in own.items()
            }
        )
        return Attempt(
            self.root,
            serial,
            rank,
            size,
            copies or {},
            encoded.document if rank == 0 else None,
            tensors,
            self._fault,
            problem,
        )

    def _written(self, attempt: Attempt) -> None:
        attempt.run()
        if attempt.rank:
            return
        for path in self.paths()[: -self.keep]:
            doomed = self.root / f"{_PRUNED}{path.name}"
            os.rename(path, doomed)
            self._fault("mid-prune")
            shutil.rmtree(doomed)

    def _tried(self, path: Path, wanted: Wanted | None) -> tuple[Any, str | None]:
        try:
            return self.load(path, wanted), None
        except DamagedCheckpointError as error:
            return None, str(error)

    def _verified(self, path: Path, wanted: Wanted | None) -> Any:
        manifest = read_manifest(path)
        document = json.loads(checked(path, TREE, manifest))
        assembly = Reassembly(manifest.tensors, wanted)
        for number, name in self.world.beating(enumerate(sorted(manifest.files))):
            # A file that no process needs is verified by one of them.
            if name != TREE and (assembly.needs(name) or number % self.world.size == self.world.rank):
                content = checked(path, name, manifest)
                if assembly.needs(name):
                    assembly.take(name, tensors_in(content))
        return decode(document, list(assembly.finished()))

    def _messages(self, message: Any) -> list[Any]:
        """What every process says, by rank."""
        if self.world.size == 1:
            return [message]
        line = json.dumps(message).encode() + b"\n"
        (every,) = self.world.gather_ragged([torch.frombuffer(bytearray(line), dtype=torch.uint8)])
        return [json.loads(one) for one in every.numpy().tobytes().splitlines()]

    def _exchanged(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """The same; a `problem` of any process is raised by all of them."""
        own = message["problem"]
        shown = None if own is None else reason_of(own)
        every = self._messages({**message, "problem": shown})
        if isinstance(own, TypeError):
            raise own
        for rank, one in enumerate(every):
            if one["problem"] is not None:
                where = f"rank {rank}: " if self.world.size > 1 else ""
                raise not_written(self.root, f"{where}{one['problem']}") from own
        return every


def _attempted(work: Callable[[], _Result]) -> tuple[_Result | None, BaseException | None]:
    """What `work` returns, or what it raises because of the state, the disk or memory: the other processes must hear of
    it."""
    try:
        return work(), None
    except (TypeError, ValueError, OSError, MemoryError, RuntimeError) as error:
        return None, error


def _pieces_at(encoded: Encoded, paths: Sequence[Any]) -> list[Piece]:
    """This process's pieces of the tensors that the first one has numbered."""
    missing = [path for path in paths if path not in encoded.everywhere]
    if missing:
        raise ValueError(f"{named(missing[0])} is not there; all processes must save the same state")
    return [encoded.everywhere[path] for path in paths]


def _layout(pieces: Sequence[Piece]) -> str:
    """A digest of shapes and dtypes."""
    described = [[list(piece.shape), str(piece.local.dtype)] for piece in pieces]
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()


def _held(piece: Piece, box: Any) -> Box:
    """What another process holds of the tensor of `piece`, as it said: the whole, or a block of it."""
    return Box.whole(piece.shape) if box is None else Box(tuple(box[0]), tuple(box[1]))


def _host_copy(tensor: Tensor) -> Tensor:
    """A contiguous copy that the next step does not change."""
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)

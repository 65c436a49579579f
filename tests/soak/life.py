"""One life of a run in a process of its own: started or resumed, perhaps killed, and what it left behind compared."""

from __future__ import annotations

import json
import mmap
import os
import random
import select
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from tfive.config.config import Config
from tfive.errors import RunFailed, UserError
from tfive.rl.roles import MEASURED
from tfive.training import loop as loop_module
from tfive.training import start
from tfive.training.checkpoint import POINTS, CheckpointStore
from tfive.training.loop import Loop
from tfive.training.run_folder import CHECKPOINTS
from tfive.training.summary import SUMMARY
from training.test_resume import final_state, lines, same

FINE, FAILED, REFUSED, UNCLEAN = 0, 1, 2, 70
"""How a life ends by itself: at its end, with status 1, with status 2, or as nothing may end."""

BEGUN = "start"
"""Where a process is before it trains: it loads the model and reads the checkpoint."""

CLOCKS = ("seconds", "wall_seconds", "places", "processes")


class Label:
    """Where a process is, in memory that its parent reads after its death."""

    def __init__(self) -> None:
        self._shared = mmap.mmap(-1, 64)

    def __call__(self, where: str) -> None:
        self._shared[:64] = where.encode()[:64].ljust(64, b"\0")

    def read(self) -> str:
        return bytes(self._shared[:64]).rstrip(b"\0").decode()


@dataclass(frozen=True)
class Death:
    """When a process is to be killed: after so many seconds of its life or of its training, or at a point of a save."""

    seconds: float | None = None
    training: bool = False
    point: str = ""
    count: int = 0

    @classmethod
    def drawn(cls, rng: random.Random, span: float) -> Death:
        """Two of three at any moment of the next `span` seconds, one of three inside a save."""
        if rng.random() < 2 / 3:
            return cls(seconds=rng.uniform(0, span), training=rng.random() < 0.8)
        return cls(point=rng.choice(POINTS), count=rng.randrange(1, 5))


def live(
    folder: Path,
    config: Config,
    *,
    death: Death | None = None,
    before: Callable[[], None] | None = None,
    hook: Callable[[str], None] | None = None,
) -> tuple[int | None, str]:
    """Start or go on in a forked process; its status (None when it was killed) and the last place it was at.

    `before` is called in the process first, `hook` at every point of the loop and of every save.
    """
    label = Label()
    label(BEGUN)
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os._exit(_life(folder, config, label, death, before, hook))
    if death is not None and death.seconds is not None:
        handle = os.pidfd_open(child)
        while death.training and label.read() == BEGUN and not select.select([handle], [], [], 0.005)[0]:
            pass
        if not select.select([handle], [], [], death.seconds)[0]:
            os.kill(child, signal.SIGKILL)
        os.close(handle)
    status = os.waitpid(child, 0)[1]
    return (None if os.WIFSIGNALED(status) else os.waitstatus_to_exitcode(status)), label.read()


def _life(
    folder: Path,
    config: Config,
    label: Label,
    death: Death | None,
    before: Callable[[], None] | None,
    hook: Callable[[str], None] | None,
) -> int:
    passed = 0

    def point(where: str) -> None:
        nonlocal passed
        label(f"save: {where}" if where in POINTS else where.removeprefix("phase:"))
        if hook is not None:
            hook(where)
        if death is not None and where == death.point:
            passed += 1
            if passed == death.count:
                os.kill(os.getpid(), signal.SIGKILL)

    try:
        _watch(label, point)
        if before is not None:
            before()
        if (folder / SUMMARY).is_file() or CheckpointStore(folder / CHECKPOINTS).paths():
            start.resume(folder, quiet=True)
        else:
            # Killed before anything was saved: a run begins anew.
            shutil.rmtree(folder, ignore_errors=True)
            start.train(config, folder, quiet=True)
    except RunFailed:
        return FAILED
    except (UserError, OSError) as error:
        return REFUSED if str(error).strip() else UNCLEAN
    except BaseException:  # noqa: BLE001 - the parent hears of it by the status
        traceback.print_exc()
        return UNCLEAN
    return FINE


def _watch(label: Label, point: Callable[[str], None]) -> None:
    """Give every loop of this process the hook, and name what it does between points."""
    made = Loop.__init__

    def with_faults(self: Loop, *arguments: Any, **options: Any) -> None:
        made(self, *arguments, **{**options, "faults": point})

    Loop.__init__ = with_faults  # type: ignore[method-assign]
    for owner, name, where in (
        (Loop, "_measure", "measure"),
        (loop_module, "save_critics", "critics"),
        (loop_module, "save_summary", "summary"),
    ):
        setattr(owner, name, _labelled(getattr(owner, name), label, where))


def _labelled(function: Callable[..., Any], label: Label, where: str) -> Callable[..., Any]:
    def called(*arguments: Any, **options: Any) -> Any:
        label(where)
        return function(*arguments, **options)

    return called


def compare(left: Path, right: Path) -> None:
    """Two finished runs left the same: last checkpoint, metrics, gains item by item and summary, but for clocks."""
    same(final_state(left), final_state(right))
    assert lines(left) == lines(right), "metrics.jsonl"
    names = sorted(f"{split}/{path.name}" for split in MEASURED.values() for path in (left / split).iterdir())
    found = sorted(f"{split}/{path.name}" for split in MEASURED.values() for path in (right / split).iterdir())
    assert names == found, "items"
    for name in names:
        same(load_file(left / name), load_file(right / name), name)
    mine, other = (_timeless(json.loads((folder / SUMMARY).read_bytes())) for folder in (left, right))
    assert mine == other, SUMMARY


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _timeless(entry) for key, entry in value.items() if key not in CLOCKS}
    return [_timeless(entry) for entry in value] if isinstance(value, list) else value

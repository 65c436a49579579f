"""The `tfive` command with faults in it: what a launcher starts instead of it in tests of what may happen to a rank.

`FAULTS` is a list of [attempt, rank, point, deed]: at the first such point of that attempt (a phase, or a point inside
a save) the rank does the deed to itself or to its launcher. `DIFFERS` gives rank 1 something else than the others.
"""

from __future__ import annotations

import errno
import faulthandler
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from tfive.cli.app import main
from tfive.training import start
from tfive.training.loop import Loop

faulthandler.register(signal.SIGUSR1)


def deed(name: str) -> None:
    if name == "full":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if name == "terminate":
        os.kill(os.getppid(), signal.SIGTERM)
    else:
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[name])


def faults() -> Callable[[str], None]:
    place = [int(os.environ.get(name, "0")) for name in ("TORCHELASTIC_RESTART_COUNT", "RANK")]
    listed = json.loads(os.environ["FAULTS"])
    planned = {point: what for attempt, rank, point, what in listed if [attempt, rank] == place}

    def hook(point: str) -> None:
        what = planned.pop(point, None)
        if what is not None:
            deed(what)

    return hook


def differ(what: str) -> None:
    if what == "configuration":
        sys.argv += ["--set", "run.seed=1"]
    elif what == "data":
        digests = start.model_digests
        start.model_digests = lambda *a: {**digests(*a), "model.safetensors": "another"}


if __name__ == "__main__":
    made, hook = Loop.__init__, faults()

    def with_faults(self: Loop, *arguments: Any, **options: Any) -> None:
        made(self, *arguments, **{**options, "faults": hook})

    Loop.__init__ = with_faults  # type: ignore[method-assign]
    if os.environ["RANK"] == "1":
        differ(os.environ.get("DIFFERS", ""))
    main()

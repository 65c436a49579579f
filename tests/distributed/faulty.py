"""The `tfive` command with faults in it: what a launcher starts instead of it in tests of what may happen to a rank.

`FAULTS` is a list of [attempt, rank, point, deed]: at the first such point of that attempt (a phase, a point inside a
save, `at:` and what its pulse enters, `meets:` and what the ranks refuse together) the rank does the deed to itself or
to its launcher. `DIFFERS` gives rank 1 something else than the others.
"""

from __future__ import annotations

import errno
import faulthandler
import json
import os
import signal
import time
from collections.abc import Callable
from typing import Any

from forked import forked
from tfive.cli import launch
from tfive.cli.app import main
from tfive.distributed.meeting import StoreMeeting
from tfive.distributed.pulse import Pulse
from tfive.training import start
from tfive.training.loop import Loop

LAUNCHER = "TFIVE_TEST_LAUNCHER"
"""Environment variable with the number of the launcher's process."""

STACKS_AT = "TFIVE_TEST_STACKS_AT"
"""Environment variable with the time at which ranks show where they are."""


def deed(name: str) -> None:
    if name == "full":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    asked = {"terminate": signal.SIGTERM, "interrupt": signal.SIGINT}.get(name)
    if asked is not None:
        os.kill(int(os.environ[LAUNCHER]), asked)
    else:
        if name == "stop":
            time.sleep(1.0)  # so that the others have heard of the phase
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


def differ(what: str) -> list[str]:
    """Give this rank something else than the others have; more words for its command."""
    if what == "configuration":
        return ["--set", "run.seed=1"]
    if what == "data":
        digests = start.model_digests
        start.model_digests = lambda *a: {**digests(*a), "model.safetensors": "another"}
    return []


def show_stacks() -> None:
    """Every thread's stack on standard error when asked to, and at `STACKS_AT`, shortly before a test gives up."""
    faulthandler.register(signal.SIGUSR1)
    faulthandler.dump_traceback_later(max(1.0, float(os.environ[STACKS_AT]) - time.time()))


def plain(*words: str) -> None:
    """The command without faults."""
    show_stacks()
    main(words)


def torchrun(*words: str) -> None:
    """Torch's own launcher."""
    from torch.distributed.run import main as run

    run(words)


def rank(*words: str) -> None:
    """One rank of a launch."""
    show_stacks()
    made, hook = Loop.__init__, faults()

    def with_faults(self: Loop, *arguments: Any, **options: Any) -> None:
        made(self, *arguments, **{**options, "faults": hook})

    Loop.__init__ = with_faults  # type: ignore[method-assign]
    enter, refusals = Pulse.at, StoreMeeting.refusals

    def at(self: Pulse, phase: str) -> None:
        enter(self, phase)
        hook(f"at:{phase}")

    def refused(self: StoreMeeting, name: str) -> Any:
        hook(f"meets:{name}")
        return refusals(self, name)

    Pulse.at, StoreMeeting.refusals = at, refused  # type: ignore[method-assign]
    main([*words, *(differ(os.environ.get("DIFFERS", "")) if os.environ["RANK"] == "1" else [])])


def launcher(*words: str) -> None:
    """The `tfive` command, which starts such ranks."""
    os.environ[LAUNCHER] = str(os.getpid())
    defaults: dict[str, Any] | None = launch.launch.__kwdefaults__
    assert defaults is not None
    defaults["program"] = forked("faulty:rank")[1:]  # Python itself comes first anyway
    main(words)

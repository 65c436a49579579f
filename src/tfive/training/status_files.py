"""Where a run is, in files that a page can read while it goes on: `status.json` and `costs.jsonl`.

`status.json` says whether the run works, was stopped or has failed, its window and phase, and the account so far; it is
written anew at every change of phase. `costs.jsonl` has a line for the first measurement and for every closed window:
what had been spent by then. A finished run's summary holds all of it; these files are for runs that have none yet.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tfive.errors import RunFailed

STATUS, COSTS = "status.json", "costs.jsonl"
RUNNING, STOPPED, FAILED, DONE = "running", "stopped", "failed", "done"


class Stopped(RunFailed):
    """The run was asked to stop; its state is saved."""


class StatusFiles:
    """Keeps both files of one run's folder."""

    def __init__(self, folder: Path, *, writes: bool = True) -> None:
        """Of several processes one `writes`."""
        self.folder, self.writes = folder, writes
        self._said: dict[str, Any] = {}

    def write(self, **changes: Any) -> None:
        """Change what `status.json` says; it appears whole or not at all."""
        self._said |= changes
        if not self.writes:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        beside = self.folder / f".{STATUS}"
        beside.write_text(json.dumps(self._said, ensure_ascii=False) + "\n", "utf-8")
        os.replace(beside, self.folder / STATUS)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Work during which the file says `running`, and afterwards how it ended."""
        # Process and machine let a page tell a run that works from one that was killed.
        self.write(state=RUNNING, failure=None, process=os.getpid(), machine=platform.node())
        try:
            yield
        except (Stopped, KeyboardInterrupt) as error:
            self.write(state=STOPPED, failure=str(error) or "interrupted")
            raise
        except Exception as error:
            self.write(state=FAILED, failure=" ".join(str(error).split()) or type(error).__name__)
            raise
        self.write(state=DONE)

    def spent(self, cost: dict[str, Any]) -> None:
        """Add a line of costs."""
        if not self.writes:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / COSTS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(cost, ensure_ascii=False) + "\n")

    def restore(self, costs: Iterable[dict[str, Any]]) -> None:
        """Write the costs anew as a checkpoint has them: lines after it will be written again."""
        if not self.writes:
            return
        (self.folder / COSTS).unlink(missing_ok=True)
        for cost in costs:
            self.spent(cost)

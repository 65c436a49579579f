"""What a call may come to: fine, refused in one line (status 2), failed cleanly (status 1). All else is a finding."""

from __future__ import annotations

import signal
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from tfive.cli.options import LONGEST
from tfive.errors import RunFailed, UserError

SECONDS = 20
"""After this long an input counts as one that hangs the command."""


class Hangs(BaseException):
    """An input that keeps a loader busy without end; no `except Exception` on the way can take it for an error."""


@dataclass
class Tally:
    """How often each outcome came, and the smallest input of every distinct finding."""

    counts: Counter[str] = field(default_factory=Counter)
    findings: dict[str, tuple[int, str, str]] = field(default_factory=dict)
    """Kind and place of the error → how often, the smallest input, the traceback of that one."""

    def judge(self, call: Callable[[], Any], shown: object) -> None:
        """Call, count what came of it, and keep what may not be."""
        try:
            with _at_most(SECONDS):
                call()
        except (UserError, OSError) as error:  # the command prints both in one line and ends with status 2
            self.counts["refused"] += 1
            if not str(error).strip():
                self._keep("an empty line", shown, error)
        except RunFailed:
            self.counts["failed"] += 1
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is what we look for
            self.counts["found"] += 1
            self._keep(f"{type(error).__name__} at {_place(error)}", shown, error)
        else:
            self.counts["fine"] += 1

    def _keep(self, kind: str, shown: object, error: BaseException) -> None:
        often, smallest, trace = self.findings.get(kind, (0, "", ""))
        written = repr(shown)[: 4 * LONGEST]
        if not often or len(written) < len(smallest):
            smallest, trace = written, "".join(traceback.format_exception(error)[-12:])
        self.findings[kind] = (often + 1, smallest, trace)


def _place(error: BaseException) -> str:
    """Our innermost line in a traceback, and the innermost of all."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/src/tfive" in frame.filename]
    named = (f"{Path(frame.filename).name}:{frame.lineno}" for frame in (*ours[-1:], *frames[-1:]))
    return " < ".join(dict.fromkeys(named))


@contextmanager
def _at_most(seconds: int) -> Iterator[None]:
    def ring(number: int, frame: FrameType | None) -> None:
        raise Hangs(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)

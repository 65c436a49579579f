"""Whether two answers are the same mathematical object, by math-verify in a process of its own.

Computer algebra on text that a model wrote can run for ever, fill the memory or overflow the stack, and a time limit
inside the process does not reach a long computation in C. So the work happens in a worker process with limited memory
that is queried over a pipe: when no reply comes in time the worker is killed, the answer counts as undecided, and the
next query starts a new worker. The worker also sets itself an alarm for every query, so that none outlives its parent.
"""

from __future__ import annotations

import importlib.util
import json
import select
import subprocess
import sys
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn

from tfive.errors import RunFailed, UserError
from tfive.extras import install_hint

LONGEST = 400
"""Characters of an answer that are looked at; longer ones are undecided."""

START_SECONDS = 120.0
"""How long a worker may take to import its libraries, also on a busy machine."""

MEMORY = 4 << 30
"""Bytes of address space of a worker."""


@dataclass(frozen=True)
class Equivalence:
    """Whether an answer equals the gold one (None: undecided), and why."""

    equal: bool | None
    reason: str


class Verifier:
    """Compares answers; a context manager that owns one worker process. Not for use by several threads at once."""

    def __init__(self, seconds: float = 5.0) -> None:
        if not installed():
            raise UserError(f"equivalence needs math-verify: {install_hint('eval')}")
        self.seconds = seconds
        self._worker: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Verifier:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the worker."""
        if self._worker is not None:
            self._worker.kill()
            self._worker.communicate()
            self._worker = None

    def __call__(self, gold: str, answer: str) -> Equivalence:
        """Whether two normal forms are equal; never raises on account of their content, and always returns in time."""
        if max(len(gold), len(answer)) > LONGEST:
            return Equivalence(None, f"longer than {LONGEST} characters")
        if ("=" in gold) != ("=" in answer):
            # math-verify would compare a value with the equation's right side and call 0 equal to 5x − 7y = 0.
            return Equivalence(False, "one is an equation and the other is not")
        worker = self._started()
        question = json.dumps({"gold": gold, "answer": answer, "seconds": self.seconds}).encode() + b"\n"
        try:
            _pipe(worker.stdin).write(question)
            _pipe(worker.stdin).flush()
        except BrokenPipeError:
            self.close()
            return Equivalence(None, "the worker had ended")
        reply = self._reply(worker, self.seconds)
        if reply is None:
            self.close()
            return Equivalence(None, f"no result within {self.seconds:g} seconds, or the worker crashed")
        return Equivalence(**json.loads(reply))

    def _started(self) -> subprocess.Popen[bytes]:
        if self._worker is None:
            command = [sys.executable, "-c", "from tfive.evaluate.equivalence import serve; serve()"]
            self._worker = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
            )
            if self._reply(self._worker, START_SECONDS) is None:
                self.close()
                raise RunFailed("the worker of math-verify does not start; try python -c 'import math_verify'")
        return self._worker

    @staticmethod
    def _reply(worker: subprocess.Popen[bytes], seconds: float) -> bytes | None:
        """One line of the worker, None when it takes too long or the worker is gone. Replies are shorter than a pipe
        holds, so a line arrives whole."""
        ready, _, _ = select.select([_pipe(worker.stdout)], [], [], seconds)
        line = _pipe(worker.stdout).readline() if ready else b""
        return line if line.endswith(b"\n") else None


def installed() -> bool:
    """Whether math-verify is installed."""
    return importlib.util.find_spec("math_verify") is not None


def _pipe(stream: Any) -> Any:
    assert stream is not None
    return stream


def serve() -> NoReturn:
    """The worker: reads questions as JSON lines, replies to each, ends when there are no more."""
    import os
    import resource
    import signal

    # What libraries print must not mix with the replies.
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    import math_verify

    # The first comparison builds the parser's tables, which should not count against a question.
    _compare(math_verify, "1", "2")
    replies.write(b"ready\n")
    for line in sys.stdin.buffer:
        question = json.loads(line)
        # Left to its default action the alarm ends the process even inside a long computation in C.
        signal.setitimer(signal.ITIMER_REAL, question["seconds"] + 1)
        found = _compare(math_verify, question["gold"], question["answer"])
        signal.setitimer(signal.ITIMER_REAL, 0)
        replies.write(json.dumps({"equal": found.equal, "reason": found.reason}).encode() + b"\n")
    sys.exit(0)


def _compare(library: Any, gold: str, answer: str) -> Equivalence:
    """math-verify's comparison of two answers. Its own time limits are off: the worker's alarm replaces them."""
    try:
        parsed = [library.parse(f"${text}$", parsing_timeout=None) for text in (gold, answer)]
        if not all(parsed):
            return Equivalence(
                None, f"math-verify finds nothing to parse in {'the answer' if parsed[0] else 'the gold'}"
            )
        equal = bool(library.verify(*parsed, timeout_seconds=None))
    except (Exception, RecursionError) as error:  # noqa: BLE001 - whatever a hostile answer raises makes it undecided
        return Equivalence(None, f"math-verify fails with {type(error).__name__}")
    return Equivalence(equal, f"math-verify calls them {'equal' if equal else 'different'}")

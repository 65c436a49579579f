"""One piece of work at a time beside the main thread; what goes wrong in it is kept until somebody asks."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Background:
    """A thread that does one piece of work; the next one can begin when it is done."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Begin `work`; the one before must have been joined."""
        if self._thread is not None:
            raise ValueError(f"{self.name}: the work before has not been joined")

        def run() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - kept for the main thread, which raises it
                self._error = error

        # A daemon: a process that is told twice to stop ends at once, and leaves an unfinished folder.
        self._thread = threading.Thread(target=run, name=self.name, daemon=True)
        self._thread.start()

    @property
    def failed(self) -> bool:
        """Whether the work has ended with an error that has not been collected yet."""
        return self._error is not None

    def done(self, seconds: float) -> bool:
        """Whether the work ends within so many seconds."""
        if self._thread is not None:
            self._thread.join(seconds)
        return self._thread is None or not self._thread.is_alive()

    def join(self) -> BaseException | None:
        """Wait until the work is done; the error that ended it, once."""
        if self._thread is not None:
            self._thread.join()
        self._thread, error, self._error = None, self._error, None
        return error

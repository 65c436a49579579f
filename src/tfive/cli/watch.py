"""Serving the page of a run while it goes on: `tfive watch` and `tfive train --page`.

The server (`local_server.py`) only reads.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

from tfive.cli.local_server import HTML, JSON, LOOPBACK, NOT_FOUND, PLAIN, Answer, LocalHandler, LocalServer
from tfive.errors import UserError
from tfive.report.assembly import LIVE, packed, page_html, policy
from tfive.report.page_data import PageData, page_data

NOT_WATCHED = ("checkpoints", "critics", "develop", "report")
"""Folders of a run that its page does not read, or that change with what it does read."""

OPEN_TO_OTHERS = (
    "--host {host}: whoever can reach this machine and learns the address can read this run's texts and thoughts; the "
    "connection is not encrypted. Stop it with Ctrl-C when you are done."
)


class LivePage:
    """The data of some folders as they are now; read anew only when a file has changed, and never in a hurry."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = list(folders)
        self._lock = threading.Lock()
        self._data: PageData | None = None
        self._seen: tuple[Any, ...] = ()
        self._not_before = 0.0

    def data(self) -> PageData:
        """The newest data; while a file is being replaced, the data before."""
        with self._lock:
            began = time.monotonic()
            if self._data is not None and began < self._not_before:
                return self._data
            seen = tuple(_files(self.folders))
            if self._data is None or seen != self._seen:
                self._data, self._seen = self._read(), seen
            # Reading may take a tenth of the time at most, so that a run beside it is not slowed down.
            self._not_before = began + 10 * (time.monotonic() - began)
            return self._data

    def _read(self) -> PageData:
        try:
            return page_data(self.folders)
        except (UserError, OSError, ValueError):
            if self._data is None:
                raise
            return self._data


def _files(folders: Sequence[Path]) -> Iterator[tuple[str, int, int]]:
    """Name, time and size of every file that a page is made of."""
    for folder in folders:
        for place, inside, names in os.walk(folder):
            inside[:] = sorted(name for name in inside if name not in NOT_WATCHED)
            for name in sorted(names):
                try:
                    found = os.stat(os.path.join(place, name))
                except FileNotFoundError:
                    continue
                yield os.path.join(place, name), found.st_mtime_ns, found.st_size


class PageServer(LocalServer):
    """Serves one page, its version and its data."""

    def __init__(self, folders: Sequence[Path], host: str = LOOPBACK, port: int = 0) -> None:
        self.page, self.policy = LivePage(folders), policy(live=True)
        super().__init__(host, port, LocalHandler)

    def answer(self, wanted: str) -> Answer:
        if wanted not in ("", "version", "data"):
            return NOT_FOUND
        try:
            data = self.page.data()
        except (UserError, OSError, ValueError) as error:
            # A browser asks again by itself: the run may only just begin.
            said = f"no page yet: {error}\n".encode()
            return Answer(HTTPStatus.SERVICE_UNAVAILABLE, said, PLAIN | {"Refresh": "2"})
        if wanted == "version":
            version = {key: data[key] for key in ("version", "state")}
            return Answer(HTTPStatus.OK, json.dumps(version).encode(), JSON)
        if wanted == "data":
            return Answer(HTTPStatus.OK, packed(data | {"live": LIVE}), JSON | {"Content-Encoding": "gzip"})
        return Answer(HTTPStatus.OK, page_html(data, live=True).encode("utf-8", "replace"), HTML)


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a run's page on this machine while something else works; gives its address."""
    with PageServer([folder]) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server.address
        finally:
            server.shutdown()
            thread.join()


def watch_command(folders: Sequence[str], host: str, port: int) -> None:
    """What `tfive watch` does, until Ctrl-C."""
    paths = [Path(folder) for folder in folders]
    page_data(paths)  # what cannot be shown is said now
    with PageServer(paths, host, port) as server:
        server.until_interrupted("refreshed as windows close; Ctrl-C ends", OPEN_TO_OTHERS)

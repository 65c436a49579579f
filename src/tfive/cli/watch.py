"""Serving the page of a run while it goes on: `tfive watch` and `tfive train --page`.

The server listens on this machine alone unless it is told otherwise, answers only under an address with a random token
and only to requests that name it as their host, and changes nothing.
"""

from __future__ import annotations

import ipaddress
import json
import os
import secrets
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tfive.errors import UserError
from tfive.report.assembly import LIVE, packed, page_html, policy
from tfive.report.page_data import PageData, page_data

LOOPBACK = "127.0.0.1"
NOT_WATCHED = ("checkpoints", "critics", "develop", "report")
"""Folders of a run that its page does not read, or that change with what it does read."""

HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
PLAIN = {"Content-Type": "text/plain; charset=utf-8"}
JSON = {"Content-Type": "application/json; charset=utf-8"}
HTML = {"Content-Type": "text/html; charset=utf-8"}

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


class PageServer(ThreadingHTTPServer):
    """Serves one page below a random path."""

    daemon_threads = True

    def __init__(self, folders: Sequence[Path], host: str = LOOPBACK, port: int = 0) -> None:
        self.page, self.token, self.host = LivePage(folders), secrets.token_urlsafe(18), host
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError) as error:
            raise UserError(f"--host {host} --port {port}: cannot listen there ({error}); choose another") from error

    @property
    def address(self) -> str:
        """What to open."""
        return f"http://{self.host}:{self.server_port}/{self.token}/"

    def named(self, host: str) -> bool:
        """Whether a request's Host is this server: other names would let a foreign site reach it by its visitors."""
        if self.host in ("0.0.0.0", ""):
            return True  # listening for everybody: any name may be ours
        return host in {f"{name}:{self.server_port}" for name in (self.host, LOOPBACK, "localhost")}


class _Handler(BaseHTTPRequestHandler):
    """Answers GET for the page, its version and its data; knows nothing else."""

    server: PageServer
    server_version, sys_version = "tfive", ""

    def do_GET(self) -> None:
        self._send(*self._answer())

    def _answer(self) -> tuple[HTTPStatus, bytes, dict[str, str]]:
        """Status, content and further headers."""
        token, _, wanted = self.path.split("?")[0].removeprefix("/").partition("/")
        if not self.server.named(self.headers.get("Host", "")):
            return HTTPStatus.FORBIDDEN, b"this server answers under its own address alone\n", PLAIN
        right = secrets.compare_digest(token.encode("utf-8", "replace"), self.server.token.encode())
        if not right or wanted not in ("", "version", "data"):
            return HTTPStatus.NOT_FOUND, b"not found\n", PLAIN
        try:
            data = self.server.page.data()
        except (UserError, OSError, ValueError) as error:
            # A browser asks again by itself: the run may only just begin.
            return HTTPStatus.SERVICE_UNAVAILABLE, f"no page yet: {error}\n".encode(), PLAIN | {"Refresh": "2"}
        if wanted == "version":
            return HTTPStatus.OK, json.dumps({key: data[key] for key in ("version", "state")}).encode(), JSON
        if wanted == "data":
            return HTTPStatus.OK, packed(data | {"live": LIVE}), JSON | {"Content-Encoding": "gzip"}
        return HTTPStatus.OK, page_html(data, live=True).encode("utf-8", "replace"), HTML

    def _send(self, status: HTTPStatus, content: bytes, further: dict[str, str]) -> None:
        self.send_response(status)
        policies = {"Content-Security-Policy": f"{policy(live=True)}; frame-ancestors 'none'"}
        for name, value in (policies | HEADERS | further | {"Content-Length": str(len(content))}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged: the address holds the token."""


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
        if not _only_here(host):
            print(OPEN_TO_OTHERS.format(host=host), file=sys.stderr)
        print(server.address, flush=True)
        print("refreshed as windows close; Ctrl-C ends", file=sys.stderr, flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("ended", file=sys.stderr)


def _only_here(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

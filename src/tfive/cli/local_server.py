"""A page served to this machine: what `tfive watch` and `tfive play` have in common.

The server listens on this machine alone unless it is told otherwise, and answers only under an address with a random
token and only to requests that name it as their host.
"""

from __future__ import annotations

import ipaddress
import secrets
import sys
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tfive.errors import UserError

LOOPBACK = "127.0.0.1"
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
PLAIN = {"Content-Type": "text/plain; charset=utf-8"}
JSON = {"Content-Type": "application/json; charset=utf-8"}
HTML = {"Content-Type": "text/html; charset=utf-8"}


@dataclass(frozen=True)
class Answer:
    """Status, content and further headers."""

    status: HTTPStatus
    content: bytes
    headers: dict[str, str] = field(default_factory=lambda: PLAIN)


NOT_FOUND = Answer(HTTPStatus.NOT_FOUND, b"not found\n")
FOREIGN = Answer(HTTPStatus.FORBIDDEN, b"this server answers under its own address alone\n")


class LocalServer(ThreadingHTTPServer):
    """Answers below a random path; `policy` is the content security policy of all it sends."""

    daemon_threads = True
    policy: str

    def __init__(self, host: str, port: int, handler: type[LocalHandler]) -> None:
        self.token, self.host = secrets.token_urlsafe(18), host
        try:
            super().__init__((host, port), handler)
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

    def answer(self, wanted: str) -> Answer:
        """What is sent for a GET of `wanted` below the token."""
        raise NotImplementedError

    def until_interrupted(self, hint: str, warning: str) -> None:
        """Print the address and serve until Ctrl-C; `warning` is said first where others can listen in."""
        if not only_here(self.host):
            print(warning.format(host=self.host), file=sys.stderr)
        try:
            print(self.address, flush=True)
            print(hint, file=sys.stderr, flush=True)
            self.serve_forever()
        except KeyboardInterrupt:
            print("ended", file=sys.stderr)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that went away is no error; anything else is shown."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class LocalHandler(BaseHTTPRequestHandler):
    """Answers GET as the server says; knows nothing else."""

    server: LocalServer
    server_version, sys_version = "tfive", ""
    timeout = 30  # seconds that a request may take to arrive

    def do_GET(self) -> None:
        wanted = self.wanted()
        self.send(wanted if isinstance(wanted, Answer) else self.server.answer(wanted))

    def wanted(self) -> str | Answer:
        """The path below the token; the refusal of a request that does not know the token or names another host."""
        token, _, wanted = self.path.split("?")[0].removeprefix("/").partition("/")
        if not self.server.named(self.headers.get("Host", "")):
            return FOREIGN
        right = secrets.compare_digest(token.encode("utf-8", "replace"), self.server.token.encode())
        return wanted if right else NOT_FOUND

    def send(self, answer: Answer) -> None:
        """Send an answer with the headers that all have."""
        self.send_response(answer.status)
        policies = {"Content-Security-Policy": f"{self.server.policy}; frame-ancestors 'none'"}
        length = {"Content-Length": str(len(answer.content))}
        for name, value in (policies | HEADERS | answer.headers | length).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(answer.content)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged: the address holds the token."""


def only_here(host: str) -> bool:
    """Whether an address can be reached from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

"""What `tfive play` does: a page on this machine, or the terminal."""

from __future__ import annotations

import json
import os
import sys
import threading
import webbrowser
from http import HTTPStatus
from typing import Any

from tfive.cli.local_server import HTML, JSON, LOOPBACK, NOT_FOUND, Answer, LocalHandler, LocalServer, only_here
from tfive.cli.play_terminal import Terminal
from tfive.errors import UserError
from tfive.inference.look import described, goes_on, look, question_from
from tfive.inference.thought_model import ThoughtModel
from tfive.report.assembly import PLAY, play_html, policy

MAX_BYTES = 65536
"""Of a question."""
QUESTIONS = {"look": look, "go-on": goes_on}
OPEN_TO_OTHERS = (
    "--host {host}: whoever can reach this machine and learns the address can have this model work for them; the "
    "connection is not encrypted. Stop it with Ctrl-C when you are done."
)


class PlayServer(LocalServer):
    """Serves the page, and answers one question about a text at a time."""

    def __init__(self, model: ThoughtModel, host: str = LOOPBACK, port: int = 0) -> None:
        self.model, self.policy = model, policy(live=True, template=PLAY)
        self.html = play_html(described(model)).encode()
        self.working = threading.Lock()
        super().__init__(host, port, _Handler)

    def answer(self, wanted: str) -> Answer:
        return Answer(HTTPStatus.OK, self.html, HTML) if wanted == "" else NOT_FOUND

    def asked(self, wanted: str, body: bytes) -> Answer:
        """The answer to a question; while another is worked on, a refusal."""
        if not self.working.acquire(blocking=False):
            return _refused(HTTPStatus.SERVICE_UNAVAILABLE, "it is still thinking about another text; try again")
        try:
            found = QUESTIONS[wanted](self.model, question_from(_parsed(body)))
        except UserError as error:
            return _refused(HTTPStatus.BAD_REQUEST, str(error))
        except (MemoryError, RuntimeError) as error:
            # torch says so when memory runs out; a shorter text may do.
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            return _refused(HTTPStatus.INTERNAL_SERVER_ERROR, f"it could not work this out: {reason[:200]}")
        finally:
            self.working.release()
        return Answer(HTTPStatus.OK, json.dumps(found, allow_nan=False).encode(), JSON)


class _Handler(LocalHandler):
    """Also takes questions: JSON of this page alone, of a stated and bounded size."""

    server: PlayServer

    def do_POST(self) -> None:
        self.close_connection = True
        wanted = self.wanted()
        self.send(wanted if isinstance(wanted, Answer) else self._asked(wanted))

    def _asked(self, wanted: str) -> Answer:
        if wanted not in QUESTIONS:
            return NOT_FOUND
        origin = self.headers.get("Origin")
        foreign = origin is not None and not self.server.named(origin.removeprefix("http://"))
        # A form of another site can send no JSON without being asked first, and this server answers no such question.
        if foreign or self.headers.get_content_type() != "application/json":
            return _refused(HTTPStatus.FORBIDDEN, "this server takes JSON of its own page alone")
        size = self.headers.get("Content-Length", "")
        if not size.isascii() or not size.isdigit() or not 0 < int(size[:9]) <= MAX_BYTES:
            return _refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a question has 1 … {MAX_BYTES} bytes")
        return self.server.asked(wanted, self.rfile.read(int(size)))


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise UserError("the question is no JSON") from error


def _refused(status: HTTPStatus, reason: str) -> Answer:
    return Answer(status, json.dumps({"error": reason}).encode(), JSON)


def play_command(
    source: str, *, text: str | None, terminal: bool, host: str | None, port: int | None, seed: int
) -> None:
    """What `tfive play` does: one text, a terminal, or a page until Ctrl-C."""
    on_page = not terminal and text is None and (host is not None or port is not None or _has_display())
    model = ThoughtModel.from_pretrained(source)
    if not on_page:
        Terminal(model, seed=seed).run([text] if text is not None else None)
        return
    with PlayServer(model, host or LOOPBACK, port or 0) as server:
        if _has_display() and only_here(server.host):
            webbrowser.open(server.address)
        server.until_interrupted("Ctrl-C ends; --terminal plays here instead", OPEN_TO_OTHERS)


def _has_display() -> bool:
    """Whether a browser can be opened for the person at the keyboard."""
    graphical = sys.platform in ("darwin", "win32") or any(os.environ.get(x) for x in ("DISPLAY", "WAYLAND_DISPLAY"))
    return sys.stdin.isatty() and graphical and not os.environ.get("SSH_CONNECTION")

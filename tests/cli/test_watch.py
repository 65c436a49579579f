"""The page of a run that goes on: served to this machine alone, under a secret address, and only to be read."""

from __future__ import annotations

import gzip
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tfive.cli import live
from tfive.cli.app import _call
from tfive.cli.watch import LivePage, PageServer, served
from tfive.errors import RunFailed, UserError

CONFIG = 'method = "t5"\n[model]\nname = "mine"\n'


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.toml").write_text(CONFIG, "utf-8")
    return folder


@pytest.fixture
def server(run: Path) -> Iterator[PageServer]:
    with PageServer([run]) as made:
        thread = threading.Thread(target=made.serve_forever, daemon=True)
        thread.start()
        yield made
        made.shutdown()


def ask(server: PageServer, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, content, answer.headers


def test_the_page_its_version_and_its_data(server: PageServer, run: Path) -> None:
    assert server.server_address[0] == "127.0.0.1"
    status, page, headers = ask(server, f"/{server.token}/")
    assert status == 200
    assert b"tfive-data" in page
    assert "connect-src 'self'" in headers["Content-Security-Policy"]
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    _, version, _ = ask(server, f"/{server.token}/version")
    _, content, headers = ask(server, f"/{server.token}/data")
    data = json.loads(gzip.decompress(content))
    assert json.loads(version) == {"version": data["version"], "state": "unfinished"}
    assert data["live"] == {"every": 2}
    assert headers["Cache-Control"] == "no-store"


def test_without_the_token_there_is_nothing(server: PageServer) -> None:
    for path in ("/", "/version", f"/{server.token[:-1]}/", f"/{server.token}x/data", "//", f"/{server.token}/../x"):
        assert ask(server, path)[0] == 404, path
    assert len(server.token) >= 20
    with PageServer([Path()]) as other:
        assert other.token != server.token


def test_another_host_is_refused(server: PageServer) -> None:
    path, port = f"/{server.token}/version", server.server_port
    assert ask(server, path, Host="evil.example")[0] == 403
    assert ask(server, path, Host=f"evil.example:{port}")[0] == 403
    assert ask(server, path, Host=f"localhost:{port}")[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_nothing_can_be_changed(server: PageServer, method: str) -> None:
    assert ask(server, f"/{server.token}/data", method)[0] == 501


def test_what_changes_is_read_anew(run: Path) -> None:
    page = LivePage([run])
    first = page.data()
    page._not_before = 0.0
    assert page.data() is first
    (run / "metrics.jsonl").write_text('{"step": 0, "seconds": 1.0, "development.thought_gain": 0.5}\n', "utf-8")
    page._not_before = 0.0
    second = page.data()
    assert second["version"] != first["version"]
    assert second["story"]["numbers"][0]["value"] == 0.5
    # A file that is being replaced leaves the page as it was.
    (run / "metrics.jsonl").write_text("{\n", "utf-8")
    page._not_before = 0.0
    assert page.data() is second


def test_a_run_that_has_not_begun_is_waited_for(tmp_path: Path) -> None:
    with PageServer([tmp_path / "soon"]) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        status, content, headers = ask(server, f"/{server.token}/")
        assert (status, headers["Refresh"]) == (503, "2")
        assert b"no page yet" in content
        server.shutdown()


def test_training_with_a_page(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The page is served while the run works, and written however it ends."""

    def work(sources: list[str], overrides: list[str], out: str | None, **options: bool) -> str:
        said = capsys.readouterr().err
        address = said.split("page: ")[1].strip()
        host, _, path = address.removeprefix("http://").partition("/")
        connection = http.client.HTTPConnection(host, timeout=20)
        connection.request("GET", f"/{path}version")
        assert connection.getresponse().status == 200
        if sources:
            raise RunFailed("it broke")
        return "done"

    monkeypatch.setattr(live, "run_command", work)
    assert live.train_with_page([], [], str(run), as_json=False, quiet=True) == "done"
    assert f"page written to {run / 'report' / 'report.html'}" in capsys.readouterr().err
    (run / "report" / "report.html").unlink()
    with pytest.raises(RunFailed, match="it broke"):
        live.train_with_page(["nano"], [], str(run), as_json=False, quiet=True)
    assert (run / "report" / "report.html").is_file()


def test_a_refused_run_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> str:
        raise UserError("already holds files")

    (tmp_path / "config.toml").write_text(CONFIG, "utf-8")
    monkeypatch.setattr(live, "run_command", refuse)
    with pytest.raises(UserError, match="already holds files"):
        live.train_with_page([], [], str(tmp_path), as_json=False, quiet=True)
    assert [path.name for path in tmp_path.iterdir()] == ["config.toml"]


def test_the_server_ends_with_its_work(run: Path) -> None:
    with served(run) as address:
        port = int(address.split(":")[2].split("/")[0])
    with pytest.raises(ConnectionRefusedError):
        http.client.HTTPConnection("127.0.0.1", port, timeout=5).request("GET", "/")


def test_watch_says_where_and_what_a_host_means_and_ends_with_ctrl_c(run: Path) -> None:
    words = [sys.executable, "-m", "tfive", "watch", str(run), "--host", "0.0.0.0"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
    assert process.stdout is not None
    assert process.stdout.readline().startswith("http://0.0.0.0:")
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "can read this run's texts and thoughts" in said


def test_what_cannot_be_watched_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _call(["watch", str(tmp_path)]) == 2
    assert "name the folder of a run" in capsys.readouterr().err
    (tmp_path / "config.toml").write_text(CONFIG, "utf-8")
    assert _call(["watch", str(tmp_path), "--host", "no.such.host.invalid"]) == 2
    assert "cannot listen there" in capsys.readouterr().err

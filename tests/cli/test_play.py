"""Playing with a model: one bounded question at a time, to this machine alone, and the same in a terminal."""

from __future__ import annotations

import base64
import http.client
import io
import json
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from rich.console import Console

import tiny
from tfive.cli import play_server
from tfive.cli.app import _call
from tfive.cli.play_server import PlayServer
from tfive.cli.play_terminal import Terminal
from tfive.errors import UserError
from tfive.inference.look import MAX_CHARACTERS, Question, goes_on, look, question_from
from tfive.inference.thought_model import ThoughtModel
from tfive.rl.gate import PredictionGate
from tfive.tree.settings import ThoughtSettings

pytestmark = pytest.mark.model

TEXT = "7 river mill farm ( boat grain"
SHAPE = ThoughtSettings(length=4, checkpoints=(2, 4), horizon=3, variable_length=True)


@pytest.fixture(scope="module")
def model() -> ThoughtModel:
    torch.manual_seed(0)
    gate = PredictionGate(16)
    return ThoughtModel(tiny.model(), tiny.tokenizer(), SHAPE, gate=gate, origin={"method": "t5", "base": "tiny"})


@pytest.fixture
def server(model: ThoughtModel) -> Iterator[PlayServer]:
    with PlayServer(model) as made:
        thread = threading.Thread(target=made.serve_forever, daemon=True)
        thread.start()
        yield made
        made.shutdown()


def send(server: PlayServer, path: str, body: bytes | None = None, **headers: str) -> tuple[int, Any]:
    """Status and answer; `body` makes it a POST."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    given = {"Content-Type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request("GET" if body is None else "POST", path, body, given)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    is_json = answer.headers.get_content_type() == "application/json"
    return answer.status, json.loads(content) if is_json else content


def ask(server: PlayServer, what: str = "look", **question: Any) -> tuple[int, Any]:
    return send(server, f"/{server.token}/{what}", json.dumps({"text": TEXT} | question).encode())


# ── the model's answers ────────────────────────────────────────────────────────────────────────────────────────────


def test_numbers_are_those_of_predict(model: ThoughtModel) -> None:
    found = look(model, Question(text=TEXT, places="chosen", positions=[1, 5], seed=3))
    reference = model.predict(TEXT, positions=[1, 5], seed=3)
    assert found["tokens"] == list(reference.tokens)
    assert [one["text"] for one in found["thoughts"]] == [thought.text for thought in reference.thoughts]
    for name in ("plain", "mixed"):
        mine = torch.tensor([one[name] for one in found["predictions"][:-1]])
        torch.testing.assert_close(mine, getattr(reference, name).float())
    assert found["mean_gain"] == pytest.approx(reference.mixed_gain, abs=1e-6)
    assert found["predictions"][-1]["plain"] is None


def test_likeliest_tokens_are_those_of_the_stock_model_reading_the_thought(model: ThoughtModel) -> None:
    """At the end of the text: without a thought, with it between its delimiters, and as the gate mixes them."""
    found = look(model, Question(text=TEXT, places="end", seed=1))
    (thought,), last = found["thoughts"], found["predictions"][-1]
    tokenizer: Any = model.tokenizer
    ids = tokenizer.encode(TEXT)
    assert thought["position"] == len(ids) - 1
    (scores,) = model.score([[*ids, 0]], [[len(ids) - 1]], seed=1)
    said = scores.thoughts[0].ids[:-1] if scores.thoughts[0].closed else scores.thoughts[0].ids
    row = [*ids, *model.plan.open_ids, *said, *model.plan.close_ids]
    with torch.no_grad():
        without, given = (model.model(torch.tensor([one])).logits[0, -1].softmax(-1) for one in (ids, row))
    mixed = (1 - last["gate"]) * without + last["gate"] * given
    best = sorted({*without.topk(5).indices.tolist(), *mixed.topk(5).indices.tolist()}, key=lambda i: -mixed[i])
    assert [entry[0] for entry in last["top"]] == [tokenizer.decode([i]) for i in best]
    for column, reference in enumerate((without, given, mixed), 1):
        found_here = torch.tensor([entry[column] for entry in last["top"]])
        torch.testing.assert_close(found_here, reference[best], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("way", "wanted"),
    [("none", []), ("end", "end"), ("every", "end"), ("chosen", [2]), ("unsure", None), ("gate", None)],
)
def test_ways_to_choose_places(model: ThoughtModel, way: Any, wanted: Any) -> None:
    found = look(model, Question(text=TEXT, places=way, positions=[2]))
    end = len(found["tokens"]) - 1
    if wanted == "end":
        assert found["places"][-1] == end
    elif wanted is not None:
        assert found["places"] == wanted
    served = [n for n, one in enumerate(found["predictions"]) if one["served"]]
    reached = {at + step for at in found["places"] for step in range(SHAPE.horizon)}
    assert served == sorted(n for n in reached if n <= end)


def test_another_seed_another_thought(model: ThoughtModel) -> None:
    told = {json.dumps(look(model, Question(text=TEXT, seed=seed))["thoughts"]) for seed in range(4)}
    assert len(told) == 4


def test_it_goes_on_with_and_without(model: ThoughtModel) -> None:
    found = goes_on(model, Question(text=TEXT))
    assert found["without"] == model.generate(TEXT, every=0, temperature=0.0, max_new_tokens=24).text
    assert "⟨" in found["with"]


@pytest.mark.parametrize(
    ("question", "part"),
    [
        ({"text": "a" * (MAX_CHARACTERS + 1)}, "text: string should have at most 8000 characters"),
        ({"text": "river " * 60}, "the model has 64; give less text"),
        ({"text": ""}, "at least 1 are needed"),
        ({"text": "\ud800"}, "text: "),
        ({"text": TEXT, "places": "everywhere"}, "places: "),
        ({"text": TEXT, "places": "chosen", "positions": [99]}, "stand after tokens 0 … "),
        ({"text": TEXT, "positions": list(range(129))}, "positions: list should have at most 128 items"),
        ({"text": TEXT, "seed": -1}, "seed: "),
        ({"text": TEXT, "file": "/etc/passwd"}, "file: extra inputs are not permitted"),
        ([], "question: "),
    ],
)
def test_what_may_be_asked_is_bounded(model: ThoughtModel, question: Any, part: str) -> None:
    with pytest.raises(UserError, match=re.escape(part)) as error:
        look(model, question_from(question))
    assert "\n" not in str(error.value)


# ── the server ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_page_and_a_question(server: PlayServer, model: ThoughtModel) -> None:
    status, page = send(server, f"/{server.token}/")
    assert status == 200
    (packed,) = re.findall(rb'id="tfive-data">([^<]*)<', page)
    assert json.loads(base64.b64decode(packed))["gate"] is True
    assert b"connect-src 'self'" in page
    assert b"unsafe" not in page[: page.index(b"<style>")]
    status, found = ask(server, places="end", seed=1)
    assert (status, found) == (200, look(model, Question(text=TEXT, places="end", seed=1)))
    assert ask(server, "go-on")[1] == goes_on(model, Question(text=TEXT))


def test_only_its_own_page_may_ask(server: PlayServer) -> None:
    body, path = json.dumps({"text": TEXT}).encode(), f"/{server.token}/look"
    assert send(server, "/look", body)[0] == 404
    assert send(server, f"/{server.token}/data", body)[0] == 404
    assert send(server, path, body, Host="evil.example")[0] == 403
    assert send(server, path, body, Origin="http://evil.example")[0] == 403
    assert send(server, path, body, Content_Type="text/plain")[0] == 403
    assert send(server, path, body, Origin=f"http://127.0.0.1:{server.server_port}")[0] == 200
    assert send(server, path)[0] == 404


def test_bad_questions_are_answered_in_one_line(server: PlayServer) -> None:
    path = f"/{server.token}/look"
    assert send(server, path, b"{")[1] == {"error": "the question is no JSON"}
    assert send(server, path, b"[" * 50_000)[0] == 400
    assert send(server, path, b" " * 70_000)[0] == 413
    assert send(server, path, b"")[0] == 413
    status, found = ask(server, text="")
    assert status == 400
    assert "at least 1" in found["error"]


def test_one_question_at_a_time(server: PlayServer) -> None:
    with server.working:
        status, found = ask(server)
    assert (status, "still thinking" in found["error"]) == (503, True)
    assert ask(server)[0] == 200


def test_running_out_of_memory_is_said_and_survived(server: PlayServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("out of memory\ndetails")

    monkeypatch.setitem(play_server.QUESTIONS, "look", full)
    assert ask(server) == (500, {"error": "it could not work this out: out of memory"})
    monkeypatch.undo()
    assert ask(server)[0] == 200


# ── the terminal and the command ───────────────────────────────────────────────────────────────────────────────────


def talk(model: ThoughtModel, *lines: str) -> str:
    out = io.StringIO()
    Terminal(model, console=Console(file=out, width=100)).run(lines)
    return out.getvalue()


def test_a_conversation(model: ThoughtModel) -> None:
    said = talk(model, TEXT, ":again", ":off", ":think 1 3", ":at 2", ":write", "", ":help", ":quit", "never read")
    parts = said.split("after token")
    assert "seed 0" in parts[0]
    assert "seed 1" in parts[1]
    assert "no thoughts" in parts[2]
    assert "2 thoughts" in parts[3]
    assert "⟨" in said.split("with thoughts:")[1]
    assert "mixed (gate " in said
    assert "never read" not in said
    with pytest.raises(UserError, match="type a text first"):
        talk(model, ":again")
    with pytest.raises(UserError, match="not a command"):
        talk(model, TEXT, ":nope")
    with pytest.raises(UserError, match=r"this text has tokens 0 … "):
        talk(model, TEXT, ":at 999")


def test_chosen_places_belong_to_one_text(model: ThoughtModel) -> None:
    said = talk(model, TEXT, ":think 1", "river mill")
    assert "1 thought, seed 0" in said
    assert said.count("⟨") >= 3


def test_a_terminal_is_sent_no_control_characters(model: ThoughtModel) -> None:
    said = talk(model, "river \x1b[31m\x07 mill\x9b", ":off")
    assert not set(said) & {"\x1b", "\x07", "\x9b"}


def test_the_command_without_a_screen(
    model: ThoughtModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def loaded(source: str) -> ThoughtModel:
        asked.append(source)
        return model

    monkeypatch.setattr(ThoughtModel, "from_pretrained", loaded)
    assert _call(["play", "mine", "--text", TEXT]) == 0
    assert "after token" in capsys.readouterr().out
    # Lines of standard input are texts; a bad one does not end it.
    monkeypatch.setattr("sys.stdin", io.StringIO(f":at 3\n{TEXT}\n:at x\n"))
    assert _call(["play", "mine"]) == 0
    shown = capsys.readouterr()
    assert shown.out.count("after token") == 1
    assert "type a text first" in shown.err
    assert "x: give the number of a token" in shown.err
    assert asked == ["mine", "mine"]


def test_a_port_asks_for_the_page(model: ThoughtModel, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[str] = []
    monkeypatch.setattr(ThoughtModel, "from_pretrained", lambda source: model)
    monkeypatch.setattr(PlayServer, "serve_forever", lambda self: served.append(self.address))
    assert _call(["play", "mine", "--port", "0"]) == 0
    assert served[0].startswith("http://127.0.0.1:")
    assert _call(["play", "mine", "--port", "0", "--host", "192.0.2.1"]) == 2


def test_a_model_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert _call(["play", "./nowhere", "--text", "x"]) == 2
    assert capsys.readouterr().err.count("\n") == 1

"""Bare answers after a hidden thought: the prompts, the controls, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tfive.cli.evaluate_suite import Wanted, load_subject
from tfive.errors import UserError
from tfive.evaluate.answers import grade
from tfive.evaluate.compare import explained
from tfive.evaluate.evaluated import parse_thoughts
from tfive.evaluate.generate import Decoding, GenerationRequest, generate
from tfive.evaluate.prompts import demonstrations, prompt
from tfive.evaluate.suite import judged, plan_task, run_task
from tfive.evaluate.tasks import Item, Items, find_tasks
from tfive.inference.requests import When
from tfive.inference.thought_model import ThoughtModel

pytestmark = pytest.mark.model


@pytest.mark.parametrize("name", ["gsm8k", "math500", "csqa"])
def test_a_bare_prompt_shows_answers_without_working(name: str) -> None:
    (task,) = find_tasks([name], None)
    item = Item("x", "Why?", "A", ("so", "or")) if task.kind == "choice" else Item("x", "How many?", "7")
    asked = prompt(task, item, bare=True)
    shown = demonstrations(task.demonstrations or "")
    assert asked.text.count("\nAnswer:\n") == len(shown) + 1
    assert asked.text.endswith("\nAnswer:\n")
    assert asked.version == f"{task.prompt}-bare"
    for one in shown:
        assert f"\nAnswer:\n{one.item.answer}\n\n" in asked.text
        assert one.solution not in asked.text
        assert grade(task, one.item, judged(task, f" {one.item.answer}.", True)).correct
    with pytest.raises(UserError, match="--bare-answers"):
        prompt(task, item, chat=True, bare=True)


def test_controls_take_the_place_of_the_own_thought(thinker: ThoughtModel) -> None:
    requests = [GenerationRequest(f"q{n}", f"{n} river mill", 5, n) for n in range(3)]

    def written(kind: str) -> dict[str, tuple[tuple[int, ...], int]]:
        decoding = Decoding(when=parse_thoughts(kind, 4))
        return {r.id: (o.ids, o.thought_tokens) for r, _, o in generate(thinker, requests, (), decoding)}

    own, other, empty = written("answer"), written("answer=other"), written("answer=empty")
    assert [tokens for _, tokens in own.values()] == [3, 3, 3]
    assert [tokens for _, tokens in empty.values()] == [0, 0, 0]
    assert own != other
    # An item that goes on later gets the same other's thought as among all.
    decoding = Decoding(when=When(at_answer="other"))
    done = frozenset({("q0", 0), ("q2", 0)})
    ((request, _, output),) = generate(thinker, requests, (), decoding, done=done)
    assert other[request.id] == (output.ids, output.thought_tokens)
    with pytest.raises(UserError, match="one item has no other"):
        list(generate(thinker, requests[:1], (), decoding))


def test_a_task_is_asked_for_one_line(thinker: ThoughtModel, sums: Items, riddles: Items, tmp_path: Path) -> None:
    plan = plan_task(sums, bare=True, when=When(at_answer="own"), limit=2)
    assert (plan.max_new_tokens, plan.decoding.samples) == (32, 1)
    run_task(thinker, plan, tmp_path)
    records = [json.loads(line) for line in (tmp_path / "sums.generated.jsonl").read_text("utf-8").splitlines()]
    assert [[one["before"] for one in record["thoughts"]] for record in records] == [[0], [0]]
    assert all(isinstance(one["text"], str) for record in records for one in record["thoughts"])
    shown = explained({"task": "sums", "generated": records, "options": []})
    assert all(f"thought before token 1: {record['thoughts'][0]['text']!r}" in shown for record in records)
    assert not any("\n" in record["output"] for record in records)
    run_task(thinker, plan_task(riddles, ways=("likelihood",), when=When(at_answer="own")), tmp_path)
    compared = json.loads((tmp_path / "riddles.options.jsonl").read_text("utf-8").splitlines()[0])
    assert compared["thoughts"] == len(compared["choices"])
    with pytest.raises(UserError, match="--ways generated"):
        plan_task(riddles, when=When(at_answer="empty"))


def test_a_model_without_thoughts_gets_those_of_a_configuration(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plain = tmp_path / "plain"
    plain.mkdir()
    for path in exported.iterdir():
        if path.is_file():
            (plain / path.name).write_bytes(path.read_bytes())
    with pytest.raises(UserError, match="--config"):
        load_subject(Wanted(str(plain), thoughts="answer", device="cpu"))
    (tmp_path / "t.toml").write_text("[thought]\nlength = 2\ncheckpoints = [2]\n[sampling]\ntop_k = 1\n", "utf-8")
    model, when, facts = load_subject(Wanted(str(plain), thoughts="answer", config=tmp_path / "t.toml", device="cpu"))
    assert (model.plan.length, model.sampling.top_k, when.at_answer) == (2, 1, "own")
    assert facts["thought"]["length"] == 2
